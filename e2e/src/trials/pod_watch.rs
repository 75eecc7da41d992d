//! Watch of a namespace's pods that reports gaps.

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};

/// An event of the watch.
pub(super) enum PodEvent {
    /// A pod was created or changed.
    Changed(Pod),
    /// A pod was deleted; its last state.
    Deleted(Pod),
    /// All existing pods, at the start and after a gap. Deletions during the gap are not reported.
    Listed(Vec<Pod>),
}

/// A watch that resumes after errors.
pub(super) struct PodWatch {
    events: BoxStream<'static, watcher::Result<watcher::Event<Pod>>>,
    listed: Vec<Pod>,
}

impl PodWatch {
    /// Starts to watch these pods.
    pub(super) fn new(pods: Api<Pod>) -> Self {
        Self {
            events: watcher(pods, watcher::Config::default()).default_backoff().boxed(),
            listed: Vec::new(),
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// Returns an error if the watch has ended.
    pub(super) async fn next(&mut self) -> anyhow::Result<PodEvent> {
        loop {
            match self.events.next().await {
                Some(Ok(watcher::Event::Apply(pod))) => return Ok(PodEvent::Changed(pod)),
                Some(Ok(watcher::Event::Delete(pod))) => return Ok(PodEvent::Deleted(pod)),
                Some(Ok(watcher::Event::Init)) => self.listed.clear(),
                Some(Ok(watcher::Event::InitApply(pod))) => self.listed.push(pod),
                Some(Ok(watcher::Event::InitDone)) => {
                    return Ok(PodEvent::Listed(std::mem::take(&mut self.listed)));
                }
                Some(Err(error)) => println!("    pod watch was interrupted: {error}"),
                None => anyhow::bail!("pod watch ended"),
            }
        }
    }
}
