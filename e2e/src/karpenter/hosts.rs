//! The driver and the kubelet of each node that Karpenter has created.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tessera_api::names::NodeName;
use tessera_api::slice::{self, Fence, NodeOwner, SliceOptions};

use crate::hollow;

/// GPUs of each node, of 80 GiB.
const GPUS: u32 = 2;

/// Label of the nodes of the kwok provider.
const KWOK: &str = "kwok.x-k8s.io/node";

/// Time between two looks at the nodes and their pods.
const INTERVAL: Duration = Duration::from_millis(300);

/// Looks between two renewals of Leases: 9 s.
const LOOKS_PER_RENEWAL: u64 = 30;

/// Returns the slices of a new node, as they are published there.
///
/// # Errors
/// An inventory cannot be made.
pub fn template_slices(fence: Fence) -> anyhow::Result<Vec<ResourceSlice>> {
    let options = SliceOptions { fence, ..SliceOptions::new(NodeName::new("template")?) };
    Ok(slice::build(&hollow::inventory(0, GPUS)?, &options))
}

/// The nodes that Karpenter has created.
pub(super) struct Hosts {
    client: Client,
    fence: Fence,
    /// The nodes that are ready.
    known: BTreeSet<String>,
    /// The number of all nodes so far.
    created: Arc<AtomicU32>,
}

impl Hosts {
    pub(super) fn new(client: &Client, fence: Fence) -> Self {
        let (known, created) = (BTreeSet::new(), Arc::default());
        Self { client: client.clone(), fence, known, created }
    }

    /// Returns the number of all nodes that Karpenter has created so far.
    pub(super) fn created(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.created)
    }

    /// Makes new nodes ready and runs the pods that are bound to them, until an error occurs.
    ///
    /// # Errors
    /// The API server refuses a write.
    pub(super) async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut looks = tokio::time::interval(INTERVAL);
        for look in 0_u64.. {
            looks.tick().await;
            self.look_at_nodes(look % LOOKS_PER_RENEWAL == 0).await?;
            self.look_at_pods().await?;
        }
        anyhow::bail!("invariant: there is always another look")
    }

    async fn look_at_nodes(&mut self, renews: bool) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let nodes = nodes.list(&ListParams::default().labels(KWOK)).await?;
        let names: Vec<String> = nodes.iter().map(ResourceExt::name_any).collect();
        self.known.retain(|name| names.contains(name));
        for node in &nodes.items {
            if !self.known.contains(&node.name_any()) {
                self.begin(node).await?;
            } else if renews {
                let leases = hollow::leases(&self.client);
                ignore_gone(hollow::renew(&leases, &node.name_any()).await)?;
            }
        }
        Ok(())
    }

    /// Starts the kubelet and the driver of a new node.
    async fn begin(&mut self, node: &Node) -> anyhow::Result<()> {
        let (name, uid) = (node.name_any(), node.uid().unwrap_or_default());
        let number = self.created.fetch_add(1, Ordering::Relaxed) + 1;
        let (owner, gpus) = (NodeOwner { uid }, hollow::inventory(number, GPUS)?);
        hollow::start_node(&self.client, &owner, &name, &gpus, self.fence).await?;
        let nodes: Api<Node> = Api::all(self.client.clone());
        let ready = Patch::Strategic(json!({"status": {"conditions": [hollow::ready()]}}));
        ignore_gone(nodes.patch_status(&name, &PatchParams::default(), &ready).await)?;
        self.known.insert(name);
        Ok(())
    }

    /// Starts bound pods, and ends those that are being deleted.
    async fn look_at_pods(&self) -> anyhow::Result<()> {
        let all: Api<Pod> = Api::all(self.client.clone());
        for pod in all.list(&ListParams::default()).await?.items {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
            if !node.is_some_and(|node| self.known.contains(node)) {
                continue;
            }
            let namespace = pod.namespace().unwrap_or_default();
            let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            if pod.metadata.deletion_timestamp.is_some() {
                let at_once = DeleteParams::default().grace_period(0);
                ignore_gone(pods.delete(&pod.name_any(), &at_once).await)?;
            } else if phase != Some("Running") {
                let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
                let params = PatchParams::default();
                ignore_gone(pods.patch_status(&pod.name_any(), &params, &running).await)?;
            }
        }
        Ok(())
    }
}

/// Karpenter may delete a node, and a user a pod, at any time.
fn ignore_gone<T>(result: kube::Result<T>) -> kube::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        result => result.map(drop),
    }
}
