//! Nodes without a kubelet: a Node object, a Lease that keeps it ready, and a slice of GPUs. What
//! is bound there never starts, so that hundreds of pods cost what the control plane costs, and
//! nothing else.

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
use crate::wait::{self, Verdict};

/// Only it publishes GPUs, each instance those of its own node; so it is impersonated.
const PUBLISHER: &str = "system:serviceaccount:tessera-system:tessera-driver";

/// In which the API server takes the node that a service account's token is bound to.
const NODE_OF_TOKEN: &str = "impersonate-extra-authentication.kubernetes.io%2Fnode-name";

/// Where the leases of nodes are.
const LEASES: &str = "kube-node-lease";

/// As a kubelet renews. kube-controller-manager gives a node up that was silent for 50 s
/// (`--node-monitor-grace-period`).
const HEARTBEAT: Duration = Duration::from_secs(10);

/// The label of all of them; its value says whose they are.
const LABEL: &str = "e2e.tessera.dev/hollow";

/// NVLinks between each pair of GPUs of a node, all of one H100 behind NVSwitches.
const NVLINKS: u32 = 18;

/// Nodes that join or leave at once.
const AT_ONCE: usize = 16;

/// Begins the name of each.
const PREFIX: &str = "hollow-";

/// Time for the garbage collector to delete the slices of nodes that have left.
const PATIENCE: Duration = Duration::from_secs(300);

/// Which nodes without a kubelet.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// How many.
    pub nodes: u32,
    /// GPUs of each, of 80 GiB; at most 16.
    pub gpus: u32,
    /// Whom the GPUs are for.
    pub fence: Fence,
}

/// Some nodes without a kubelet.
pub struct HollowNodes {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    leases: Api<Lease>,
    names: Vec<String>,
    whose: String,
}

impl HollowNodes {
    /// Adds nodes. All that an earlier run has left go first, and their slices, whose GPUs would be
    /// counted.
    ///
    /// # Errors
    /// What the API server says; slices of an earlier run stay.
    pub async fn join(client: &Client, whose: &str, shape: Shape) -> anyhow::Result<Self> {
        let hollow = Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            leases: Api::namespaced(client.clone(), LEASES),
            names: (1..=shape.nodes).map(|number| format!("{PREFIX}{number}")).collect(),
            whose: whose.to_owned(),
        };
        let earlier = hollow.nodes.list(&ListParams::default().labels(LABEL)).await?;
        let mut earlier: BTreeSet<_> = earlier.iter().map(ResourceExt::name_any).collect();
        // Of an interrupted join or leave.
        earlier.extend(hollow.names.iter().cloned());
        hollow.remove(&earlier).await?;
        let joining = (1..=shape.nodes).map(|number| hollow.join_one(client, number, shape));
        stream::iter(joining).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        Ok(hollow)
    }

    async fn join_one(&self, client: &Client, number: u32, shape: Shape) -> anyhow::Result<()> {
        let name = format!("{PREFIX}{number}");
        let node = serde_json::from_value(self.node(&name))?;
        let uid = self.nodes.create(&PostParams::default(), &node).await?.uid().unwrap_or_default();
        let lease = serde_json::from_value(lease(&name, &uid))?;
        self.leases.create(&PostParams::default(), &lease).await?;
        let options = SliceOptions {
            owner: Some(NodeOwner { uid }),
            fence: shape.fence,
            ..SliceOptions::new(NodeName::new(&name)?)
        };
        for slice in slice::build(&inventory(number, shape.gpus)?, &options) {
            publish(client, &name, &slice).await?;
        }
        Ok(())
    }

    /// What a pod needs in its spec to go there, and nowhere else.
    pub fn placement(&self) -> (Value, Value) {
        (json!({LABEL: self.whose}), json!([{"operator": "Exists"}]))
    }

    /// Keeps them ready; ends only with an error. The renewals are spread over time, as those of
    /// kubelets are.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn keep_ready(&self) -> anyhow::Result<Infallible> {
        let nodes = u32::try_from(self.names.len()).unwrap_or(u32::MAX).max(1);
        let mut beats = tokio::time::interval(HEARTBEAT / nodes);
        for name in self.names.iter().cycle() {
            beats.tick().await;
            let beat = json!({"spec": {"renewTime": now_in_microseconds()}});
            self.leases.patch(name, &PatchParams::default(), &Patch::Merge(beat)).await?;
        }
        anyhow::bail!("there are no nodes to keep ready")
    }

    /// Removes them, with their leases, and waits until their slices are gone.
    ///
    /// # Errors
    /// What the API server says; slices stay.
    pub async fn leave(&self) -> anyhow::Result<()> {
        self.remove(&self.names.iter().cloned().collect()).await
    }

    async fn remove(&self, names: &BTreeSet<String>) -> anyhow::Result<()> {
        stream::iter(names)
            .map(|name| self.leave_one(name))
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await?;
        let judge = |slices: &[ResourceSlice]| {
            let nodes = slices.iter().filter_map(|slice| slice.spec.node_name.as_deref());
            match nodes.filter(|node| node.starts_with(PREFIX)).count() {
                0 => Verdict::Done(()),
                left => Verdict::NotYet(format!("{left} are left")),
            }
        };
        let selector = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
        let what = "the slices of nodes that have left to go";
        Ok(wait::until(self.slices.clone(), selector, what, PATIENCE, judge).await?)
    }

    async fn leave_one(&self, name: &str) -> anyhow::Result<()> {
        let params = DeleteParams::default();
        for gone in [
            self.nodes.delete(name, &params).await.err(),
            self.leases.delete(name, &params).await.err(),
        ] {
            match gone {
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
            "metadata": {"name": name, "labels": {LABEL: self.whose, "kubernetes.io/hostname": name}},
            "spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]},
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready()]},
        })
    }
}

/// Writes a slice as the driver of that node. Its client serves all nodes: hundreds of them would
/// be as many connections.
async fn publish(client: &Client, node: &str, slice: &ResourceSlice) -> anyhow::Result<()> {
    let request = Request::new(ResourceSlice::url_path(&(), None));
    let mut request = request.create(&PostParams::default(), serde_json::to_vec(slice)?)?;
    request.headers_mut().insert("Impersonate-User", PUBLISHER.parse()?);
    request.headers_mut().insert(NODE_OF_TOKEN, node.parse()?);
    client
        .request::<ResourceSlice>(request)
        .await
        .with_context(|| format!("publishing the GPUs of {node}"))?;
    Ok(())
}

fn lease(node: &str, uid: &str) -> Value {
    json!({
        "metadata": {"name": node, "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}]},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now_in_microseconds()},
    })
}

fn ready() -> Value {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({"type": "Ready", "status": "True", "reason": "Hollow", "message": "nothing runs here",
        "lastHeartbeatTime": now, "lastTransitionTime": now})
}

fn now_in_microseconds() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// GPUs of one node, every pair joined by NVLinks, as on a server with eight H100 behind
/// NVSwitches.
fn inventory(node: u32, gpus: u32) -> anyhow::Result<Inventory> {
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
        // Nobody looks for it: trials ask for the GPUs of nodes that have containers by their
        // product.
        product_name: "Hollow".to_owned(),
        architecture: "Hopper".to_owned(),
        memory_bytes: 80 << 30,
        cuda_compute_capability: ComputeCapability { major: 9, minor: 0 },
        driver_version: "580.95.05".to_owned(),
        cuda_driver_version: CudaVersion::from_number(13000),
        pci_bus_id: PciBusId::new(format!("0000:{:02x}:00.0", 0x10 * index + 9))?,
        pcie_root: Some(format!("pci0000:{:02x}", 0x10 * index + 6)),
        numa_node: Some(i32::from(index >= 4)),
        mig_enabled: false,
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
    use crate::inventory::GpuInventory;

    async fn slices(client: &Client) -> usize {
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        slices.list(&Default::default()).await.unwrap().items.len()
    }

    #[tokio::test]
    async fn slices_of_earlier_nodes_are_gone_when_others_join() {
        let cluster = SimCluster::start(ClusterOptions::default()).await.unwrap();
        let (client, fence) = (cluster.client(), Fence::Managed);
        let earlier = HollowNodes::join(&client, "earlier", Shape { nodes: 20, gpus: 8, fence })
            .await
            .unwrap();
        assert_eq!(slices(&client).await, 20);
        // As an interrupted run leaves its nodes; the next has fewer.
        drop(earlier);
        let later =
            HollowNodes::join(&client, "later", Shape { nodes: 2, gpus: 4, fence }).await.unwrap();
        assert_eq!(slices(&client).await, 2);
        assert_eq!(GpuInventory::read(&client).await.unwrap().len(), 8);
        later.leave().await.unwrap();
        assert_eq!(slices(&client).await, 0);
        cluster.stop().await;
    }

    #[test]
    fn no_two_nodes_publish_the_same_gpu() {
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
