//! Other allocators of this node's GPUs. Two of them on one GPU give it to two pods, and nothing in
//! Kubernetes notices.
//!
//! ```text
//! watch of the Node (capacity) ------\
//!                                     OtherAllocators -> watch channel -> inventory: such GPUs are not published
//! watch of the node's slices --------/
//! ```
//!
//! Device plugins (NVIDIA's, HAMi's, vgpu-manager's, ...) show as extended resources of the Node,
//! which do not say which GPUs they are: all of them are concerned. DRA drivers (NVIDIA's, ...)
//! publish devices with the GPU's UUID or PCI address: only those GPUs are.

mod found;

use std::{collections::BTreeMap, sync::Arc};

use clap::ValueEnum;
use futures::{Stream, StreamExt};
use k8s_openapi::api::{core::v1::Node, resource::v1::ResourceSlice};
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, DefaultBackoff, watcher},
};
use tessera_api::names::{DRIVER_NAME, NodeName};
use tessera_runtime::cluster::patiently;
use tessera_runtime::error_chain::chain;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use found::OtherAllocators;

/// What to do with GPUs that another allocator hands out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnOtherAllocator {
    /// They are not published as long as it does.
    #[default]
    Refuse,
    /// Nobody looks. Whoever sets this keeps the two apart.
    Ignore,
}

/// What is known; `None` until both watches have listed.
pub type Known = Option<Arc<OtherAllocators>>;

/// Looks for other allocators on `node` until `stop`.
#[must_use]
pub fn watch(
    client: Client,
    node: &NodeName,
    on: OnOtherAllocator,
    stop: CancellationToken,
) -> watch::Receiver<Known> {
    if on == OnOtherAllocator::Ignore {
        // Never changes; who waits for a change does not find the channel closed.
        let (sender, known) = watch::channel(Some(Arc::default()));
        tokio::spawn(async move {
            stop.cancelled().await;
            drop(sender);
        });
        return known;
    }
    let (sender, known) = watch::channel(None);
    let nodes = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let nodes =
        patiently(watcher(Api::<Node>::all(client.clone()), nodes), DefaultBackoff::default());
    let slices = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let slices =
        patiently(watcher(Api::<ResourceSlice>::all(client), slices), DefaultBackoff::default());
    tokio::spawn(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = follow(nodes, slices, &sender) => {}
        }
    });
    known
}

async fn follow(
    nodes: impl Stream<Item = Result<watcher::Event<Node>, watcher::Error>> + Send,
    slices: impl Stream<Item = Result<watcher::Event<ResourceSlice>, watcher::Error>> + Send,
    sender: &watch::Sender<Known>,
) {
    let (mut nodes, mut slices) = (std::pin::pin!(nodes), std::pin::pin!(slices));
    let (mut node_view, mut slice_view) = (View::default(), View::default());
    loop {
        tokio::select! {
            event = nodes.next() => match event {
                Some(Ok(event)) => node_view.observe(event, found::resources),
                Some(Err(error)) => complain("the Node", &error),
                None => return,
            },
            event = slices.next() => match event {
                Some(Ok(event)) => slice_view.observe(event, others_devices),
                Some(Err(error)) => complain("ResourceSlices", &error),
                None => return,
            },
        }
        let (Some(resources), Some(devices)) = (node_view.complete(), slice_view.complete()) else {
            continue;
        };
        let found = OtherAllocators::new(
            resources.values().flatten().cloned(),
            devices.values().flatten().map(|(identity, driver)| (identity.clone(), driver.clone())),
        );
        sender.send_if_modified(|known| {
            let news = known.as_deref() != Some(&found);
            if news {
                *known = Some(Arc::new(found));
            }
            news
        });
    }
}

fn others_devices(slice: &ResourceSlice) -> Vec<(found::Identity, String)> {
    if slice.spec.driver == DRIVER_NAME { Vec::new() } else { found::devices(slice) }
}

fn complain(what: &str, error: &watcher::Error) {
    tracing::warn!(error = %chain(error), "the watch of {what} for other allocators broke; it begins again");
}

/// What a watch has shown so far, by object, reduced to what counts. A new list replaces the old
/// one when it is complete.
struct View<T> {
    now: Option<BTreeMap<String, T>>,
    next: BTreeMap<String, T>,
}

impl<T> Default for View<T> {
    fn default() -> Self {
        Self { now: None, next: BTreeMap::new() }
    }
}

impl<T> View<T> {
    fn observe<K: kube::Resource>(&mut self, event: watcher::Event<K>, reduce: impl Fn(&K) -> T) {
        match event {
            watcher::Event::Init => self.next.clear(),
            watcher::Event::InitApply(object) => {
                self.next.insert(object.name_any(), reduce(&object));
            }
            watcher::Event::InitDone => self.now = Some(std::mem::take(&mut self.next)),
            watcher::Event::Apply(object) => {
                self.now.get_or_insert_default().insert(object.name_any(), reduce(&object));
            }
            watcher::Event::Delete(object) => {
                self.now.get_or_insert_default().remove(&object.name_any());
            }
        }
    }

    fn complete(&self) -> Option<&BTreeMap<String, T>> {
        self.now.as_ref()
    }
}
