//! Detects other allocators of this node's GPUs. Two allocators would allocate a GPU twice, and
//! nothing in Kubernetes prevents it.
//!
//! ```text
//! watch of the Node (capacity) --\
//!                                 OtherAllocators -> watch channel -> inventory withholds GPUs
//! watch of the node's slices ----/
//! ```
//!
//! Device plugins (NVIDIA's, HAMi's, vgpu-manager's, ...) appear as extended resources of the Node,
//! which do not identify GPUs: all GPUs of the node are withheld. DRA drivers (NVIDIA's, ...)
//! publish devices with the GPU's UUID or PCI address: only those GPUs are withheld.

mod found;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clap::ValueEnum;
use futures::{Stream, StreamExt};
use k8s_openapi::api::{core::v1::Node, resource::v1::ResourceSlice};
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, DefaultBackoff, watcher},
};
use tessera_api::names::{DRIVER_NAME, ExtendedResourceName, NodeName};
use tessera_runtime::cluster::with_backoff;
use tessera_runtime::{error_chain::chain, supervisor::Supervisor};
use tokio::sync::watch;

pub use found::OtherAllocators;

/// Policy for GPUs that another allocator publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OtherAllocatorPolicy {
    /// Such GPUs are not published.
    #[default]
    Refuse,
    /// Other allocators are not looked for. The operator keeps them apart.
    Ignore,
}

const TASK: &str = "other-allocators";

/// The other allocators, or `None` until both watches have listed their objects.
pub type KnownAllocators = Option<Arc<OtherAllocators>>;

/// Starts the task that looks for other allocators on `node`. `resources`: extended resources of
/// GPUs besides those of common device plugins.
#[must_use]
pub fn watch(
    client: Client,
    node: &NodeName,
    policy: OtherAllocatorPolicy,
    resources: BTreeSet<ExtendedResourceName>,
    tasks: &mut Supervisor,
) -> watch::Receiver<KnownAllocators> {
    let stop = tasks.stop_token();
    if policy == OtherAllocatorPolicy::Ignore {
        // The value never changes, and the channel must stay open.
        let (sender, known) = watch::channel(Some(Arc::default()));
        tasks.spawn(TASK, async move {
            stop.cancelled().await;
            drop(sender);
        });
        return known;
    }
    let (sender, known) = watch::channel(None);
    let nodes = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let nodes =
        with_backoff(watcher(Api::<Node>::all(client.clone()), nodes), DefaultBackoff::default());
    let slices = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let slices =
        with_backoff(watcher(Api::<ResourceSlice>::all(client), slices), DefaultBackoff::default());
    tasks.spawn(TASK, async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = follow(nodes, slices, &resources, &sender) => {}
        }
    });
    known
}

async fn follow(
    nodes: impl Stream<Item = Result<watcher::Event<Node>, watcher::Error>> + Send,
    slices: impl Stream<Item = Result<watcher::Event<ResourceSlice>, watcher::Error>> + Send,
    named: &BTreeSet<ExtendedResourceName>,
    sender: &watch::Sender<KnownAllocators>,
) {
    let (mut nodes, mut slices) = (std::pin::pin!(nodes), std::pin::pin!(slices));
    let (mut node_view, mut slice_view) = (View::default(), View::default());
    loop {
        tokio::select! {
            event = nodes.next() => match event {
                Some(Ok(event)) => node_view.observe(event, |node| found::resources(node, named)),
                Some(Err(error)) => log_error("Node", &error),
                None => return,
            },
            event = slices.next() => match event {
                Some(Ok(event)) => slice_view.observe(event, foreign_devices),
                Some(Err(error)) => log_error("ResourceSlice", &error),
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
            let is_changed = known.as_deref() != Some(&found);
            if is_changed {
                *known = Some(Arc::new(found));
            }
            is_changed
        });
    }
}

fn foreign_devices(slice: &ResourceSlice) -> Vec<(found::Identity, String)> {
    if slice.spec.driver == DRIVER_NAME { Vec::new() } else { found::devices(slice) }
}

fn log_error(kind: &str, error: &watcher::Error) {
    tracing::warn!(kind, error = %chain(error), "watch for other allocators failed; restarting it");
}

/// The objects of a watch, each reduced to the relevant part. A new list replaces the old one when
/// it is complete.
struct View<T> {
    current: Option<BTreeMap<String, T>>,
    next: BTreeMap<String, T>,
}

impl<T> Default for View<T> {
    fn default() -> Self {
        Self { current: None, next: BTreeMap::new() }
    }
}

impl<T> View<T> {
    fn observe<K: kube::Resource>(&mut self, event: watcher::Event<K>, reduce: impl Fn(&K) -> T) {
        match event {
            watcher::Event::Init => self.next.clear(),
            watcher::Event::InitApply(object) => {
                self.next.insert(object.name_any(), reduce(&object));
            }
            watcher::Event::InitDone => self.current = Some(std::mem::take(&mut self.next)),
            watcher::Event::Apply(object) => {
                self.current.get_or_insert_default().insert(object.name_any(), reduce(&object));
            }
            watcher::Event::Delete(object) => {
                self.current.get_or_insert_default().remove(&object.name_any());
            }
        }
    }

    fn complete(&self) -> Option<&BTreeMap<String, T>> {
        self.current.as_ref()
    }
}
