//! `kubectl tessera tree`: nodes, their GPUs, and who holds how much of each.

mod render;

pub use render::{claims, tree};

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;
use tessera_allocator::model::{
    Attribute, Device, DeviceId, DeviceUse, Node, NodeChoice, PoolId, Slice,
};
use tessera_api::names::{DRIVER_NAME, Namespace, attribute, capacity};
use tessera_api::quantity::Quantity;
use tessera_index::{Holding, Index};

use crate::devices::way;

/// What to show.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// These nodes only; empty = all that have GPUs.
    pub nodes: BTreeSet<String>,
    /// Shares of this namespace only, and the GPUs with such.
    pub namespace: Option<Namespace>,
}

/// Nodes, GPUs, shares.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tree {
    /// By name.
    pub nodes: Vec<NodeView>,
}

/// A node with its GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// Its name, or the pool's where a pool belongs to no single node.
    pub name: String,
    /// What keeps pods from it: `NotReady`, `Cordoned`, `Missing`, `PoolIncomplete`; empty if
    /// nothing does.
    pub state: Vec<String>,
    /// Sums over its GPUs.
    pub memory: Amount,
    /// Sums over its GPUs.
    pub cores: Amount,
    /// By NVML's index.
    pub gpus: Vec<GpuView>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// The device's name.
    pub device: String,
    /// NVML's index, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<i64>,
    /// The product.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product: Option<String>,
    /// Device memory.
    pub memory: Amount,
    /// Percent of its compute.
    pub cores: Amount,
    /// Taints but the fence, as `key=value:effect`; `gpu.tessera.dev/unhealthy` tells a GPU that
    /// failed.
    pub taints: Vec<String>,
    /// What else is wrong or worth knowing: `Unhealthy`, `NotManaged`, `NotPublished`,
    /// `Oversubscribed`, `Overcommitted`.
    pub state: Vec<String>,
    /// Who holds what of it.
    pub shares: Vec<Share>,
}

/// What one claim holds of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim.
    pub claim: String,
    /// Pods that are bound with it or wait to be.
    pub pods: Vec<String>,
    /// The request it is for.
    pub request: String,
    /// The whole GPU.
    pub whole: bool,
    /// For administration: takes nothing from anybody.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub admin: bool,
    /// What keeps it from the others, where that is not the library in each process: `MPS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<&'static str>,
    /// Device memory; all of it where it is the whole GPU.
    pub memory: Quantity,
    /// Percent of its compute.
    pub cores: Quantity,
    /// The claim was deleted under the pod that uses it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub claim_gone: bool,
}

/// How much there is of something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Amount {
    /// All of it.
    pub total: Quantity,
    /// Given to claims.
    pub taken: Quantity,
    /// What is left.
    pub free: Quantity,
}

impl Amount {
    fn new(total: Quantity, taken: Quantity) -> Self {
        let free = total.saturating_sub(taken);
        Self { total, taken, free: if free.is_negative() { Quantity::ZERO } else { free } }
    }

    fn add(&mut self, other: Self) {
        let sum = |a: Quantity, b: Quantity| a.checked_add(b).unwrap_or(a);
        self.total = sum(self.total, other.total);
        self.taken = sum(self.taken, other.taken);
        self.free = sum(self.free, other.free);
    }
}

/// Shares by device.
type Shares<'i> =
    BTreeMap<&'i DeviceId, Vec<(&'i tessera_allocator::model::DeviceResult, Holding<'i>)>>;

/// Looks at all there is.
pub fn look(index: &Index, filter: &Filter) -> Tree {
    let snapshot = index.snapshot();
    let mut shares: Shares<'_> = BTreeMap::new();
    for holding in index.holdings() {
        for result in holding.results {
            shares.entry(&result.device).or_default().push((result, holding.clone()));
        }
    }
    let mut pools = pools(snapshot.slices.values());
    // What is held of a pool that is published no more is still held.
    for device in shares.keys() {
        pools.entry(device.pool.clone()).or_default();
    }
    let mut nodes: Vec<NodeView> = Vec::new();
    for (id, pool) in &pools {
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
        nodes.push(view(name, node, pool, gpus));
    }
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    Tree { nodes }
}

/// A pool as last published.
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
    filter: &Filter,
) -> Vec<GpuView> {
    let id = |device: &Device| DeviceId { pool: pool.clone(), device: device.name.clone() };
    let mut gpus: Vec<GpuView> = Vec::new();
    for device in published.devices() {
        let id = id(device);
        gpus.push(gpu(device, usage.of(&id), shares.get(&id).map_or(&[][..], Vec::as_slice)));
    }
    for (id, held) in shares.iter().filter(|(id, _)| id.pool == *pool) {
        if !published.devices().any(|device| device.name == id.device) {
            let vanished = Device::new(id.device.clone());
            let mut view = gpu(&vanished, usage.of(id), held);
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
    used: Option<&DeviceUse>,
    held: &[(&tessera_allocator::model::DeviceResult, Holding<'_>)],
) -> GpuView {
    let whole = |name: &str| device.capacity.get(name).map(|c| c.value).unwrap_or_default();
    let is_whole = used.is_some_and(|used| used.exclusive > 0);
    let taken = |name: &str| {
        let sum = used.and_then(|used| used.consumed.get(name)).copied().unwrap_or_default();
        if is_whole { whole(name) } else { sum }
    };
    let amount = |name: &str| Amount::new(whole(name), taken(name));
    let share = |(result, holding): &(&tessera_allocator::model::DeviceResult, Holding<'_>)| {
        let of = |name: &str| {
            let consumed = result.consumed.get(name).copied().unwrap_or_default();
            if result.shared || result.admin { consumed } else { whole(name) }
        };
        Share {
            namespace: holding.namespace.to_string(),
            claim: holding.name.to_string(),
            pods: holding.pods.iter().map(ToString::to_string).collect(),
            request: result.request.to_string(),
            whole: !result.shared && !result.admin,
            admin: result.admin,
            sharing: way(result),
            memory: of(capacity::MEMORY),
            cores: of(capacity::CORES),
            claim_gone: holding.gone,
        }
    };
    let mut shares: Vec<Share> = held.iter().map(share).collect();
    shares.sort_by(|a, b| {
        (&a.namespace, &a.claim, &a.request).cmp(&(&b.namespace, &b.claim, &b.request))
    });
    GpuView {
        device: device.name.to_string(),
        index: match attribute_of(device, attribute::INDEX) {
            Some(Attribute::Int(index)) => Some(*index),
            _ => None,
        },
        product: match attribute_of(device, attribute::PRODUCT_NAME) {
            Some(Attribute::String(product)) => Some(product.to_string()),
            _ => None,
        },
        memory: amount(capacity::MEMORY),
        cores: amount(capacity::CORES),
        taints: device.taints.iter().map(taint).collect(),
        state: state(device, used),
        shares,
    }
}

fn attribute_of<'d>(device: &'d Device, name: &str) -> Option<&'d Attribute> {
    device.attributes.get(name).or_else(|| device.attributes.get(&format!("{DRIVER_NAME}/{name}")))
}

fn taint(taint: &tessera_allocator::model::Taint) -> String {
    let value = if taint.value.is_empty() { String::new() } else { format!("={}", taint.value) };
    format!("{}{value}:{}", taint.key, taint.effect.as_str())
}

fn state(device: &Device, used: Option<&DeviceUse>) -> Vec<String> {
    let unhealthy =
        device.taints.iter().any(|taint| taint.key == tessera_api::names::UNHEALTHY_TAINT_KEY);
    let exceeded = used.is_some_and(|used| used.exceeds(device));
    let all = [
        ("Unhealthy", unhealthy),
        ("NotManaged", device.foreign),
        ("Oversubscribed", device.oversubscribed),
        ("Overcommitted", exceeded),
    ];
    all.into_iter().filter(|(_, is_so)| *is_so).map(|(name, _)| name.to_owned()).collect()
}

fn view(name: String, node: Option<&Node>, pool: &Pool<'_>, gpus: Vec<GpuView>) -> NodeView {
    let is_nodes = pool.node().is_some() || pool.slices.is_empty();
    let all = [
        ("Missing", is_nodes && node.is_none()),
        ("NotReady", node.is_some_and(|node| !node.ready)),
        ("Cordoned", node.is_some_and(|node| node.cordoned)),
        ("PoolIncomplete", !pool.slices.is_empty() && pool.is_incomplete()),
    ];
    let (mut memory, mut cores) = (Amount::default(), Amount::default());
    for gpu in &gpus {
        memory.add(gpu.memory);
        cores.add(gpu.cores);
    }
    let state =
        all.into_iter().filter(|(_, is_so)| *is_so).map(|(state, _)| state.to_owned()).collect();
    NodeView { name, state, memory, cores, gpus }
}
