//! The pods of a namespace as they come, change and go, gaps in the watch included.

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};

/// What is seen.
pub(super) enum Seen {
    /// A pod that is there.
    There(Pod),
    /// A pod that is gone, as it was last.
    Gone(Pod),
    /// All that are there, at the beginning and after a gap: others that were may have gone unseen.
    All(Vec<Pod>),
}

/// A watch that goes on after errors.
pub(super) struct PodWatch {
    events: BoxStream<'static, watcher::Result<watcher::Event<Pod>>>,
    listed: Vec<Pod>,
}

impl PodWatch {
    /// Watches these, from now on.
    pub(super) fn of(pods: Api<Pod>) -> Self {
        Self {
            events: watcher(pods, watcher::Config::default()).default_backoff().boxed(),
            listed: Vec::new(),
        }
    }

    /// Waits for what is seen next.
    ///
    /// # Errors
    /// The watch has ended.
    pub(super) async fn next(&mut self) -> anyhow::Result<Seen> {
        loop {
            match self.events.next().await {
                Some(Ok(watcher::Event::Apply(pod))) => return Ok(Seen::There(pod)),
                Some(Ok(watcher::Event::Delete(pod))) => return Ok(Seen::Gone(pod)),
                Some(Ok(watcher::Event::Init)) => self.listed.clear(),
                Some(Ok(watcher::Event::InitApply(pod))) => self.listed.push(pod),
                Some(Ok(watcher::Event::InitDone)) => {
                    return Ok(Seen::All(std::mem::take(&mut self.listed)));
                }
                Some(Err(error)) => println!("    the watch of the pods was interrupted: {error}"),
                None => anyhow::bail!("the watch of the pods ended"),
            }
        }
    }
}
