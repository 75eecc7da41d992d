//! Hollow nodes: a Node object, a Lease that keeps it ready, and a ResourceSlice, without a
//! kubelet. Pods bound to them never start, so hundreds of pods load only the control plane.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use anyhow::Context;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::{Value, json};
use tessera_api::gpu::{ComputeCapability, CudaVersion, Gpu, Health, Inventory, Link, LinkKind};
use tessera_api::names::{GpuUuid, NodeName, PciBusId};
use tessera_api::slice::{self, Fence, NodeOwner, SliceOptions};

use crate::inventory::DRIVER;
use crate::wait::{self, CheckResult};

/// User that publishes the slices. Only the driver may publish GPUs, each instance those of its own
/// node, so it is impersonated.
const PUBLISHER: &str = "system:serviceaccount:tessera-system:tessera-driver";

/// Header for the node to which a service account's token is bound.
const NODE_OF_TOKEN: &str = "impersonate-extra-authentication.kubernetes.io%2Fnode-name";

/// Namespace of the Leases of nodes.
const LEASES: &str = "kube-node-lease";

/// Interval between Lease renewals, as a kubelet renews. kube-controller-manager marks a node
/// unreachable after 50 s (`--node-monitor-grace-period`).
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Label of all hollow nodes; its value names the owner.
pub const LABEL: &str = "e2e.tessera.dev/hollow";

/// NVLinks between each pair of GPUs of a node: all links of one H100 behind NVSwitches.
const NVLINKS: u32 = 18;

/// Maximum number of nodes created or deleted concurrently.
const MAX_CONCURRENT: usize = 16;

/// Prefix of the names of hollow nodes.
const PREFIX: &str = "hollow-";

/// Time limit for the garbage collector to delete the slices of deleted nodes.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Number and kind of hollow nodes.
#[derive(Clone, Copy, Debug)]
pub struct HollowNodesSpec {
    /// Number of nodes.
    pub nodes: u32,
    /// GPUs per node, of 80 GiB each; at most 16.
    pub gpus: u32,
    /// Allocator that may allocate the GPUs.
    pub fence: Fence,
}

/// A set of hollow nodes.
pub struct HollowNodes {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    leases: Api<Lease>,
    names: Vec<String>,
    owner: String,
}

impl HollowNodes {
    /// Creates nodes. All hollow nodes of earlier runs and their slices are deleted first, because
    /// their GPUs would be counted.
    ///
    /// # Errors
    /// Returns an error of the API server, or one if slices of an earlier run are not deleted in
    /// time.
    pub async fn create(
        client: &Client,
        owner: &str,
        spec: HollowNodesSpec,
    ) -> anyhow::Result<Self> {
        let hollow = Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            leases: leases(client),
            names: (1..=spec.nodes).map(|number| format!("{PREFIX}{number}")).collect(),
            owner: owner.to_owned(),
        };
        let earlier = hollow.nodes.list(&ListParams::default().labels(LABEL)).await?;
        let mut earlier: BTreeSet<_> = earlier.iter().map(ResourceExt::name_any).collect();
        // Nodes of a run that was interrupted while it created or deleted them.
        earlier.extend(hollow.names.iter().cloned());
        hollow.remove(&earlier).await?;
        let creating = (1..=spec.nodes).map(|number| hollow.create_one(client, number, spec));
        stream::iter(creating).buffer_unordered(MAX_CONCURRENT).try_collect::<()>().await?;
        Ok(hollow)
    }

    async fn create_one(
        &self,
        client: &Client,
        number: u32,
        spec: HollowNodesSpec,
    ) -> anyhow::Result<()> {
        let name = self.add(number).await?;
        self.publish_gpus(client, &name, number, spec).await
    }

    /// Creates a further Node, of a number that no other has, without a Lease and without GPUs.
    ///
    /// # Errors
    /// Returns an error of the API server.
    pub async fn add(&self, number: u32) -> anyhow::Result<String> {
        let name = format!("{PREFIX}{number}");
        let node = serde_json::from_value(self.node(&name))?;
        self.nodes.create(&PostParams::default(), &node).await?;
        Ok(name)
    }

    /// Creates the Lease of an [added](Self::add) node and publishes its GPUs.
    ///
    /// # Errors
    /// Returns an error of the API server.
    pub async fn publish_gpus(
        &self,
        client: &Client,
        name: &str,
        number: u32,
        spec: HollowNodesSpec,
    ) -> anyhow::Result<()> {
        let uid = self.nodes.get(name).await?.uid().unwrap_or_default();
        let gpus = inventory(number, spec.gpus)?;
        start_node(client, &NodeOwner { uid }, name, &gpus, spec.fence).await
    }

    /// Returns the node selector and the tolerations that bind a pod to these nodes.
    pub fn placement(&self) -> (Value, Value) {
        (json!({LABEL: self.owner}), json!([{"operator": "Exists"}]))
    }

    /// Returns a pod for these nodes with such entries in `spec.resourceClaims`. It never starts.
    pub fn pod(&self, name: &str, claims: &Value) -> Value {
        let (node_selector, tolerations) = self.placement();
        json!({
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": node_selector,
                "tolerations": tolerations,
                "containers": [{"name": "never-started", "image": "tessera/none"}],
                "resourceClaims": claims,
            },
        })
    }

    /// Keeps the nodes ready until an error occurs. Renewals are spread over time, as those of
    /// kubelets are.
    ///
    /// # Errors
    /// Returns an error if the API server refuses a renewal.
    pub async fn keep_ready(&self) -> anyhow::Result<Infallible> {
        let nodes = u32::try_from(self.names.len()).unwrap_or(u32::MAX).max(1);
        let mut beats = tokio::time::interval(HEARTBEAT / nodes);
        for name in self.names.iter().cycle() {
            beats.tick().await;
            renew(&self.leases, name).await?;
        }
        anyhow::bail!("no hollow nodes to keep ready")
    }

    /// Deletes the nodes and their Leases, and waits until their slices are deleted.
    ///
    /// # Errors
    /// Returns an error of the API server, or one if slices are not deleted in time.
    pub async fn delete(&self) -> anyhow::Result<()> {
        let own = ListParams::default().labels(&format!("{LABEL}={}", self.owner));
        let own = self.nodes.list(&own).await?;
        let mut names: BTreeSet<_> = own.iter().map(ResourceExt::name_any).collect();
        names.extend(self.names.iter().cloned());
        self.remove(&names).await
    }

    async fn remove(&self, names: &BTreeSet<String>) -> anyhow::Result<()> {
        stream::iter(names)
            .map(|name| self.delete_one(name))
            .buffer_unordered(MAX_CONCURRENT)
            .try_collect::<()>()
            .await?;
        let check = |slices: &[ResourceSlice]| {
            let nodes = slices.iter().filter_map(|slice| slice.spec.node_name.as_deref());
            let left = nodes.filter(|node| node.starts_with(PREFIX)).count();
            CheckResult::done_if(left == 0, || format!("{left} are left"))
        };
        let selector = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
        let what = "slices of deleted nodes to be deleted";
        Ok(wait::until(self.slices.clone(), selector, what, TIMEOUT, check).await?)
    }

    async fn delete_one(&self, name: &str) -> anyhow::Result<()> {
        let params = DeleteParams::default();
        for error in [
            self.nodes.delete(name, &params).await.err(),
            self.leases.delete(name, &params).await.err(),
        ] {
            match error {
                None => {}
                Some(kube::Error::Api(status)) if status.is_not_found() => {}
                Some(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn node(&self, name: &str) -> Value {
        let amounts = json!({"cpu": "1000", "memory": "1000Gi", "pods": "1000"});
        json!({
            "metadata": {"name": name, "labels": {LABEL: self.owner, "kubernetes.io/hostname": name}},
            "spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]},
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready()]},
        })
    }
}

/// Creates the Lease of a node and publishes its GPUs, as its kubelet and its driver do.
pub(crate) async fn start_node(
    client: &Client,
    owner: &NodeOwner,
    name: &str,
    gpus: &Inventory,
    fence: Fence,
) -> anyhow::Result<()> {
    let lease = serde_json::from_value(lease(name, &owner.uid))?;
    leases(client).create(&PostParams::default(), &lease).await?;
    let options = SliceOptions {
        owner: Some(owner.clone()),
        fence,
        ..SliceOptions::new(NodeName::new(name)?)
    };
    for slice in slice::build(gpus, &options) {
        publish(client, name, &slice).await?;
    }
    Ok(())
}

/// Returns the API of the Leases of nodes.
pub(crate) fn leases(client: &Client) -> Api<Lease> {
    Api::namespaced(client.clone(), LEASES)
}

/// Renews the Lease of a node.
pub(crate) async fn renew(leases: &Api<Lease>, node: &str) -> kube::Result<()> {
    let beat = json!({"spec": {"renewTime": now_in_microseconds()}});
    leases.patch(node, &PatchParams::default(), &Patch::Merge(beat)).await.map(drop)
}

/// Creates a slice as the driver of that node. One client serves all nodes, to avoid hundreds of
/// connections.
async fn publish(client: &Client, node: &str, slice: &ResourceSlice) -> anyhow::Result<()> {
    let request = Request::new(ResourceSlice::url_path(&(), None));
    let mut request = request.create(&PostParams::default(), serde_json::to_vec(slice)?)?;
    request.headers_mut().insert("Impersonate-User", PUBLISHER.parse()?);
    request.headers_mut().insert(NODE_OF_TOKEN, node.parse()?);
    client
        .request::<ResourceSlice>(request)
        .await
        .with_context(|| format!("cannot publish the GPUs of node {node}"))?;
    Ok(())
}

fn lease(node: &str, uid: &str) -> Value {
    json!({
        "metadata": {"name": node, "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}]},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now_in_microseconds()},
    })
}

pub(crate) fn ready() -> Value {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({"type": "Ready", "status": "True", "reason": "Hollow", "message": "hollow node: no pods are started",
        "lastHeartbeatTime": now, "lastTransitionTime": now})
}

fn now_in_microseconds() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// Returns the GPUs of one node. Each pair is linked by NVLink, as on a server with eight H100 and
/// NVSwitches.
pub(crate) fn inventory(node: u32, gpus: u32) -> anyhow::Result<Inventory> {
    let links = (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| (a, b)));
    let link = |(a, b)| Ok(Link::new(uuid(node, a)?, uuid(node, b)?, LinkKind::NvLink(NVLINKS)));
    let links = links.map(link).collect::<anyhow::Result<Vec<Link>>>()?;
    let gpus = (0..gpus).map(|index| gpu(node, index)).collect::<anyhow::Result<Vec<Gpu>>>()?;
    Ok(Inventory::new(gpus, links, Vec::new()))
}

fn gpu(node: u32, index: u32) -> anyhow::Result<Gpu> {
    Ok(Gpu {
        uuid: uuid(node, index)?,
        index,
        minor: index,
        // Matches no trial: trials select GPUs of nodes with containers by product name.
        product_name: "Hollow".to_owned(),
        architecture: "Hopper".to_owned(),
        memory_bytes: 80 << 30,
        cuda_compute_capability: ComputeCapability { major: 9, minor: 0 },
        driver_version: "580.95.05".to_owned(),
        cuda_driver_version: CudaVersion::from_number(13000),
        pci_bus_id: PciBusId::new(format!("0000:{:02x}:00.0", 0x10 * index + 9))?,
        pcie_root: Some(format!("pci0000:{:02x}", 0x10 * index + 6)),
        numa_node: Some(i32::from(index >= 4)),
        mig: None,
        health: Health::Healthy,
    })
}

fn uuid(node: u32, index: u32) -> anyhow::Result<GpuUuid> {
    Ok(GpuUuid::new(format!("GPU-{node:08x}-0000-4000-8000-{index:012x}"))?)
}

#[cfg(test)]
mod tests {
    use tessera_simcluster::cluster::{ClusterOptions, SimCluster};

    use super::*;
    use crate::inventory::{GpuInventory, GpuNodes};

    async fn slices(client: &Client) -> usize {
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        slices.list(&Default::default()).await.unwrap().items.len()
    }

    #[tokio::test]
    async fn creation_deletes_slices_of_earlier_nodes() {
        let cluster = SimCluster::start(ClusterOptions::default()).await.unwrap();
        let (client, fence) = (cluster.client(), Fence::Taint);
        let earlier =
            HollowNodes::create(&client, "earlier", HollowNodesSpec { nodes: 20, gpus: 8, fence })
                .await
                .unwrap();
        assert_eq!(slices(&client).await, 20);
        // An interrupted run leaves its nodes; the next run has fewer.
        drop(earlier);
        let later =
            HollowNodes::create(&client, "later", HollowNodesSpec { nodes: 2, gpus: 4, fence })
                .await
                .unwrap();
        assert_eq!(slices(&client).await, 2);
        assert_eq!(GpuInventory::read(&client).await.unwrap().len(), 8);
        later.delete().await.unwrap();
        assert_eq!(slices(&client).await, 0);
        cluster.stop().await;
    }

    #[tokio::test]
    async fn gpus_are_those_of_all_nodes_after_slice_was_gone() {
        let cluster = SimCluster::start(ClusterOptions::default()).await.unwrap();
        let (client, fence) = (cluster.client(), Fence::Taint);
        let spec = HollowNodesSpec { nodes: 2, gpus: 4, fence };
        let nodes = HollowNodes::create(&client, "gap", spec).await.unwrap();
        let publishing = GpuNodes::default();
        assert_eq!(publishing.inventory(&client).await.unwrap().len(), 8);
        let api: Api<ResourceSlice> = Api::all(client.clone());
        let mut slice = api.list(&Default::default()).await.unwrap().items.remove(0);
        let name = slice.metadata.name.clone().unwrap();
        api.delete(&name, &Default::default()).await.unwrap();
        slice.metadata.resource_version = None;
        let as_created = Default::default();
        let (read, created) =
            tokio::join!(publishing.inventory(&client), api.create(&as_created, &slice));
        created.unwrap();
        assert_eq!(read.unwrap().len(), 8);
        nodes.delete().await.unwrap();
        cluster.stop().await;
    }

    #[test]
    fn gpu_uuids_are_unique_across_nodes() {
        let mut seen = BTreeSet::new();
        for node in 1..=300 {
            let inventory = inventory(node, 8).unwrap();
            assert_eq!(inventory.gpus.len(), 8);
            assert_eq!(inventory.links.len(), 28);
            assert!(
                inventory.gpus.into_iter().all(|gpu| seen.insert(gpu.uuid)),
                "a GPU of node {node} twice"
            );
        }
    }
}
