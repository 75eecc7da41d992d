//! `kubectl tessera tree`: nodes, their GPUs, and the allocations of each GPU.

mod mig;
mod render;

pub use render::{claims_text, tree_text};
pub(crate) use render::{gib, percent};

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;
use tessera_allocator::model::{
    Attribute, Device, DeviceId, DeviceUsage, Node, NodeChoice, PoolId, Slice,
};
use tessera_api::names::{
    CORDONED_TAINT_KEY, DRIVER_NAME, Namespace, UNHEALTHY_TAINT_KEY, attribute, capacity,
};
use tessera_api::quantity::Quantity;
use tessera_index::{Holding, Index};

use crate::devices::sharing_mode;
use crate::usage::ShareUse;

/// Selection of the nodes and allocations to show.
#[derive(Debug, Clone, Default)]
pub struct TreeFilter {
    /// Names of the nodes; empty for all nodes with GPUs.
    pub nodes: BTreeSet<String>,
    /// Namespace of the allocations; GPUs without one are omitted.
    pub namespace: Option<Namespace>,
}

/// Nodes with their GPUs and allocations.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTree {
    /// The nodes, by name.
    pub nodes: Vec<NodeView>,
}

/// A node with its GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The node's name, or the pool's if the pool belongs to no single node.
    pub name: String,
    /// Conditions that keep pods off the node: `NotReady`, `Cordoned`, `Missing`,
    /// `PoolIncomplete`.
    pub state: Vec<String>,
    /// Device memory of all its GPUs.
    pub memory: CapacityUsage,
    /// Compute of all its GPUs, in percent of one GPU.
    pub cores: CapacityUsage,
    /// Its GPUs, by NVML index.
    pub gpus: Vec<GpuView>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// The device's name.
    pub device: String,
    /// The NVML index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<i64>,
    /// The UUID that NVML and `nvidia-smi` print.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The product name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product: Option<String>,
    /// Device memory.
    pub memory: CapacityUsage,
    /// Compute, in percent.
    pub cores: CapacityUsage,
    /// Taints except the managed taint, as `key=value:effect`. A failed GPU has
    /// `gpu.tessera.dev/unhealthy`.
    pub taints: Vec<String>,
    /// Conditions: `Unhealthy`, `Cordoned`, `NotManaged`, `NotPublished`, `Oversubscribed`,
    /// `Overcommitted`.
    pub state: Vec<String>,
    /// True if the GPU is in MIG mode: its allocations are MIG devices.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mig: bool,
    /// Allocations of the GPU.
    pub shares: Vec<GpuShare>,
}

/// The part of a GPU that is allocated to one claim.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuShare {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub claim: String,
    /// Pods that use the claim, bound or pending.
    pub pods: Vec<String>,
    /// The request of the claim.
    pub request: String,
    /// The profile of a MIG device, such as `1g.10gb`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// True if the GPU is allocated exclusively.
    pub whole: bool,
    /// True for admin access: the allocation consumes no capacity.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub admin: bool,
    /// The mode of sharing if it is not the default, the interceptor: `MPS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<&'static str>,
    /// Device memory; all of it for an exclusive allocation.
    pub memory: Quantity,
    /// Compute, in percent.
    pub cores: Quantity,
    /// Actual use, if it was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<ShareUse>,
    /// True if the claim was deleted while a pod uses it.
    #[serde(rename = "claimGone", skip_serializing_if = "std::ops::Not::not")]
    pub claim_deleted: bool,
}

/// A capacity of a GPU or a node, with its allocated part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityUsage {
    /// The whole capacity.
    pub total: Quantity,
    /// The part that is allocated to claims.
    #[serde(rename = "taken")]
    pub allocated: Quantity,
    /// The part that is free.
    pub free: Quantity,
}

impl CapacityUsage {
    fn new(total: Quantity, allocated: Quantity) -> Self {
        let free = total.saturating_sub(allocated);
        Self { total, allocated, free: if free.is_negative() { Quantity::ZERO } else { free } }
    }

    fn add(&mut self, other: Self) {
        let sum = |a: Quantity, b: Quantity| a.checked_add(b).unwrap_or(a);
        self.total = sum(self.total, other.total);
        self.allocated = sum(self.allocated, other.allocated);
        self.free = sum(self.free, other.free);
    }
}

/// Allocations by device.
type Shares<'i> =
    BTreeMap<&'i DeviceId, Vec<(&'i tessera_allocator::model::DeviceResult, Holding<'i>)>>;

impl GpuTree {
    /// Reads the selected nodes of an index.
    pub fn read(index: &Index, filter: &TreeFilter) -> Self {
        read(index, filter)
    }

    /// Returns all GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuView> {
        self.nodes.iter().flat_map(|node| &node.gpus)
    }

    /// Returns the memory and the compute of all GPUs.
    pub fn usage(&self) -> (CapacityUsage, CapacityUsage) {
        usage(self.gpus())
    }
}

/// Returns the memory and the compute of these GPUs.
fn usage<'g>(gpus: impl Iterator<Item = &'g GpuView>) -> (CapacityUsage, CapacityUsage) {
    let (mut memory, mut cores) = (CapacityUsage::default(), CapacityUsage::default());
    for gpu in gpus {
        memory.add(gpu.memory);
        cores.add(gpu.cores);
    }
    (memory, cores)
}

impl GpuView {
    /// Returns true if the GPU is healthy, nothing of it is allocated, and it is not in MIG mode.
    pub fn is_free(&self) -> bool {
        !self.mig && self.is_unused() && !self.state.iter().any(|state| state == "Unhealthy")
    }

    fn is_unused(&self) -> bool {
        self.memory.allocated.is_zero()
            && self.cores.allocated.is_zero()
            && self.shares.iter().all(|share| share.admin)
    }
}

fn read(index: &Index, filter: &TreeFilter) -> GpuTree {
    let snapshot = index.snapshot();
    let mut shares: Shares<'_> = BTreeMap::new();
    for holding in index.holdings() {
        for result in holding.results {
            shares.entry(&result.device).or_default().push((result, holding.clone()));
        }
    }
    let mut pools = pools(snapshot.slices.values());
    // Devices of a pool that is no longer published are still allocated.
    for device in shares.keys() {
        pools.entry(device.pool.clone()).or_default();
    }
    let mut nodes: Vec<NodeView> = Vec::new();
    // Devices of other managed drivers are no GPUs of ours.
    for (id, pool) in pools.iter().filter(|(id, _)| id.driver.as_str() == DRIVER_NAME) {
        let name = pool.node().unwrap_or_else(|| id.pool.to_string());
        if !filter.nodes.is_empty() && !filter.nodes.contains(&name) {
            continue;
        }
        let node = snapshot
            .nodes
            .iter()
            .find(|(known, _)| known.as_str() == name)
            .map(|(_, node)| node.as_ref());
        let gpus = gpus(id, pool, &snapshot.usage, &shares, filter);
        if gpus.is_empty() && (filter.namespace.is_some() || filter.nodes.is_empty()) {
            continue;
        }
        nodes.push(node_view(name, node, pool, gpus));
    }
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    GpuTree { nodes }
}

/// The last published generation of a pool.
#[derive(Default)]
struct Pool<'s> {
    /// The slices of the highest generation.
    slices: Vec<&'s Arc<Slice>>,
}

impl Pool<'_> {
    fn node(&self) -> Option<String> {
        match self.slices.first().map(|slice| &slice.nodes) {
            Some(NodeChoice::Node(node)) => Some(node.to_string()),
            _ => None,
        }
    }

    fn is_incomplete(&self) -> bool {
        let count = self.slices.first().map_or(0, |slice| slice.slice_count);
        i64::try_from(self.slices.len()).ok() != Some(count)
    }

    fn devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.slices.iter().flat_map(|slice| &slice.devices)
    }
}

fn pools<'s>(slices: impl Iterator<Item = &'s Arc<Slice>>) -> BTreeMap<PoolId, Pool<'s>> {
    let mut pools: BTreeMap<PoolId, Pool<'s>> = BTreeMap::new();
    for slice in slices {
        let known = pools.entry(slice.pool.clone()).or_default();
        match known.slices.first().map(|first| first.generation) {
            Some(newest) if newest > slice.generation => {}
            Some(newest) if newest == slice.generation => known.slices.push(slice),
            _ => known.slices = vec![slice],
        }
    }
    pools
}

fn gpus(
    pool: &PoolId,
    published: &Pool<'_>,
    usage: &tessera_allocator::model::Usage,
    shares: &Shares<'_>,
    filter: &TreeFilter,
) -> Vec<GpuView> {
    let id = |device: &Device| DeviceId { pool: pool.clone(), device: device.name.clone() };
    let mut gpus: Vec<GpuView> = Vec::new();
    let mut mig = mig::MigGpus::default();
    for device in published.devices() {
        let id = id(device);
        let view = gpu(device, usage.get(&id), shares.get(&id).map_or(&[][..], Vec::as_slice));
        match mig::parent(device) {
            Some(parent) => mig.add(&parent, device, view),
            None => gpus.push(view),
        }
    }
    gpus.extend(mig.into_views());
    for (id, held) in shares.iter().filter(|(id, _)| id.pool == *pool) {
        if !published.devices().any(|device| device.name == id.device) {
            let vanished = Device::new(id.device.clone());
            let mut view = gpu(&vanished, usage.get(id), held);
            view.state = vec!["NotPublished".to_owned()];
            gpus.push(view);
        }
    }
    if let Some(namespace) = &filter.namespace {
        gpus.iter_mut()
            .for_each(|gpu| gpu.shares.retain(|share| *namespace == share.namespace.as_str()));
        gpus.retain(|gpu| !gpu.shares.is_empty());
    }
    gpus.sort_by(|a, b| {
        (a.index.unwrap_or(i64::MAX), &a.device).cmp(&(b.index.unwrap_or(i64::MAX), &b.device))
    });
    gpus
}

fn gpu(
    device: &Device,
    used: Option<&DeviceUsage>,
    held: &[(&tessera_allocator::model::DeviceResult, Holding<'_>)],
) -> GpuView {
    let whole = |name: &str| device.capacity.get(name).map(|c| c.value).unwrap_or_default();
    let is_exclusive = used.is_some_and(|used| used.exclusive > 0);
    let allocated = |name: &str| {
        let sum = used.and_then(|used| used.consumed.get(name)).copied().unwrap_or_default();
        if is_exclusive { whole(name) } else { sum }
    };
    let amount = |name: &str| CapacityUsage::new(whole(name), allocated(name));
    let share = |(result, holding): &(&tessera_allocator::model::DeviceResult, Holding<'_>)| {
        let of = |name: &str| {
            let consumed = result.consumed.get(name).copied().unwrap_or_default();
            if result.shared || result.admin { consumed } else { whole(name) }
        };
        GpuShare {
            namespace: holding.namespace.to_string(),
            claim: holding.name.to_string(),
            pods: holding.pods.iter().map(ToString::to_string).collect(),
            request: result.request.to_string(),
            profile: text_of(device, attribute::PROFILE),
            whole: !result.shared && !result.admin,
            admin: result.admin,
            sharing: sharing_mode(result),
            memory: of(capacity::MEMORY),
            cores: of(capacity::CORES),
            used: None,
            claim_deleted: holding.gone,
        }
    };
    let mut shares: Vec<GpuShare> = held.iter().map(share).collect();
    shares.sort_by(|a, b| {
        (&a.namespace, &a.claim, &a.request).cmp(&(&b.namespace, &b.claim, &b.request))
    });
    GpuView {
        device: device.name.to_string(),
        index: match attribute_of(device, attribute::INDEX) {
            Some(Attribute::Int(index)) => Some(*index),
            _ => None,
        },
        uuid: text_of(device, attribute::UUID),
        product: text_of(device, attribute::PRODUCT_NAME),
        memory: amount(capacity::MEMORY),
        cores: amount(capacity::CORES),
        taints: device.taints.iter().map(taint).collect(),
        state: state(device, used),
        mig: false,
        shares,
    }
}

fn text_of(device: &Device, name: &str) -> Option<String> {
    match attribute_of(device, name) {
        Some(Attribute::String(text)) => Some(text.to_string()),
        _ => None,
    }
}

fn attribute_of<'d>(device: &'d Device, name: &str) -> Option<&'d Attribute> {
    device.attributes.get(name).or_else(|| device.attributes.get(&format!("{DRIVER_NAME}/{name}")))
}

fn taint(taint: &tessera_allocator::model::Taint) -> String {
    let value = if taint.value.is_empty() { String::new() } else { format!("={}", taint.value) };
    format!("{}{value}:{}", taint.key, taint.effect.as_str())
}

fn state(device: &Device, used: Option<&DeviceUsage>) -> Vec<String> {
    let has_taint = |key: &str| device.taints.iter().any(|taint| taint.key == key);
    let is_overcommitted = used.is_some_and(|used| used.exceeds(device));
    let all = [
        ("Unhealthy", has_taint(UNHEALTHY_TAINT_KEY)),
        ("Cordoned", has_taint(CORDONED_TAINT_KEY)),
        ("NotManaged", device.is_unmanaged),
        ("Oversubscribed", device.oversubscribed),
        ("Overcommitted", is_overcommitted),
    ];
    all.into_iter().filter(|(_, applies)| *applies).map(|(name, _)| name.to_owned()).collect()
}

fn node_view(name: String, node: Option<&Node>, pool: &Pool<'_>, gpus: Vec<GpuView>) -> NodeView {
    let is_of_node = pool.node().is_some() || pool.slices.is_empty();
    let all = [
        ("Missing", is_of_node && node.is_none()),
        ("NotReady", node.is_some_and(|node| !node.ready)),
        ("Cordoned", node.is_some_and(|node| node.cordoned)),
        ("PoolIncomplete", !pool.slices.is_empty() && pool.is_incomplete()),
    ];
    let (memory, cores) = usage(gpus.iter());
    let state = all
        .into_iter()
        .filter(|(_, applies)| *applies)
        .map(|(state, _)| state.to_owned())
        .collect();
    NodeView { name, state, memory, cores, gpus }
}
