//! Replays a trace on the allocator. The nodes' GPUs are published as by Tessera's driver. Each pod
//! is a claim for cores of its GPUs; its CPU, memory and GPU model are constraints on the node.
//!
//! The allocator does not place pods without GPUs: [`WithoutGpus`] selects how they are placed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_allocator::fragmentation::{
    GpuFraction, GpuState, GpuType, NodeCapacity, PotentialRise,
};
use tessera_allocator::model::{
    AllocationMode, Alternative, Attribute, Capacity, Claim, Device, DeviceClass, DeviceId,
    DeviceResult, DeviceSelector, NameMap, Node as ModelNode, NodeAffinityTerm, NodeChoice,
    NodeSelector, PendingPod, PodClaim, PodUid, PoolId, Request, Requirement,
    SchedulingConstraints, SelectorOperator, Slice, Usage,
};
use tessera_allocator::{FeatureGates, PlanSettings, Planner, Policy};
use tessera_api::config::Sharing;
use tessera_api::names::{
    ClaimName, ClaimUid, DRIVER_NAME, DeviceClassName, DeviceName, DriverName, Namespace, NodeName,
    PodName, PoolName, RequestName, attribute, capacity,
};
use tessera_api::quantity::Quantity;

use super::cluster::{Cluster, Demand, ModelSet, Models, Node, Placement};
use super::placer::Placer;
use super::trace::{NodeRow, WHOLE};

/// Label of NVIDIA's feature discovery for a node's GPU model.
const MODEL_LABEL: &str = "nvidia.com/gpu.product";

/// Placement of pods without GPUs, which kube-scheduler decides in a real cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum WithoutGpus {
    /// The node on which LeastFragmentation's potential rises least. FGD also places all pods by
    /// its own rule.
    LeastRise,
    /// The node with the least remaining GPU capacity, where the pod's CPU affects the fewest GPUs.
    FewestGpus,
    /// The node with the most remaining CPU, as kube-scheduler by default.
    LeastAllocated,
}

/// The allocator, with its default policy, and its cluster.
#[derive(Debug)]
pub struct AllocatorPlacer {
    planner: Planner,
    without_gpus: WithoutGpus,
    /// The cluster as the replay counts it.
    cluster: Cluster,
    models: Vec<String>,
    /// Models in the planner's order, as indexes into `models`.
    kinds: Vec<usize>,
    /// Nodes by index in the trace.
    nodes: Vec<ModelNode>,
    by_name: BTreeMap<NodeName, usize>,
    usage: Usage,
    pods: u64,
}

impl AllocatorPlacer {
    /// Returns an empty cluster with the nodes of a trace. The nodes are named by their ranks,
    /// because the allocator takes the first by name of equally good nodes.
    ///
    /// # Panics
    /// Never panics: the generated names are valid.
    #[must_use]
    pub fn new(without_gpus: WithoutGpus, rows: &[NodeRow], node_rank: &[usize]) -> Self {
        let models = Models::of(rows);
        let mut planner = Planner::new(FeatureGates::default());
        planner.set_class(&Arc::new(class()));
        let nodes: Vec<_> =
            rows.iter().zip(node_rank).map(|(row, rank)| node(row, *rank)).collect();
        for (row, node) in rows.iter().zip(&nodes) {
            planner.set_slice(&Arc::new(slice(row, &node.name)));
            planner.set_node(&Arc::new(node.clone()));
        }
        Self {
            planner,
            without_gpus,
            cluster: Cluster::empty(rows, &models),
            models: models.names().map(str::to_owned).collect(),
            kinds: in_order_of_appearance(rows, &models),
            by_name: nodes.iter().enumerate().map(|(at, node)| (node.name.clone(), at)).collect(),
            nodes,
            usage: Usage::default(),
            pods: 0,
        }
    }

    fn plan(&mut self, demand: &Demand) -> Option<Placement> {
        let settings =
            PlanSettings { policy: Policy::LeastFragmentation, ..PlanSettings::default() };
        let decision = self.planner.plan(&[self.pod(demand)], settings).decisions.pop()?;
        let results = decision.claims.iter().flat_map(|claim| &claim.results);
        let gpus = results.map(|result| gpu_of(&result.device.device)).collect();
        Some(Placement { node: self.by_name[&decision.node], gpus })
    }

    fn place_without_gpus(&self, demand: &Demand) -> Option<Placement> {
        let fitting = self.cluster.nodes().iter().enumerate().filter(|(_, node)| node.fits(demand));
        let best = fitting
            .min_by_key(|(at, node)| (self.rank_without_gpus(demand, node), &self.nodes[*at].name));
        best.map(|(node, _)| Placement { node, gpus: Vec::new() })
    }

    /// Returns the node's rank; the lowest is first.
    fn rank_without_gpus(&self, demand: &Demand, node: &Node) -> i64 {
        let rank = match self.without_gpus {
            WithoutGpus::LeastRise => return self.rise(demand, node).steps(),
            WithoutGpus::FewestGpus => node.total_gpu_milli(),
            WithoutGpus::LeastAllocated => u64::MAX / 2 - node.cpu_milli,
        };
        i64::try_from(rank).unwrap_or(i64::MAX)
    }

    fn rise(&self, demand: &Demand, node: &Node) -> PotentialRise {
        // The planner numbers models in the order in which it meets them.
        let kind = |at: usize| {
            GpuType(self.kinds.iter().position(|kind| *kind == at).map_or(0, |kind| kind as u16))
        };
        let kind = node.model.positions().next().map_or(GpuType(0), kind);
        let gpus: Vec<GpuState> = node
            .gpus
            .iter()
            .map(|&left| GpuState { gpu_type: kind, free: GpuFraction::new(left) })
            .collect();
        let potential = self.planner.forecast();
        let before = potential.of(&NodeCapacity { cpu_milli: node.cpu_milli, gpus: &gpus });
        potential.rise(
            before,
            &NodeCapacity { cpu_milli: node.cpu_milli - demand.cpu_milli, gpus: &gpus },
        )
    }

    fn pod(&self, demand: &Demand) -> PendingPod {
        let name = format!("pod-{}", self.pods);
        PendingPod {
            uid: PodUid::new(&name),
            namespace: valid(Namespace::new("trace")),
            name: valid(PodName::new(&name)),
            priority: 0,
            created: 0,
            claims: vec![PodClaim::Pending(Arc::new(claim(&name, demand)))],
            scheduling: Arc::new(self.scheduling(demand)),
            nominated_node: None,
            excluded_nodes: BTreeSet::new(),
            together_with: Vec::new(),
            topology: None,
        }
    }

    fn scheduling(&self, demand: &Demand) -> SchedulingConstraints {
        let affinity = (demand.models != ModelSet::ANY).then(|| {
            let values = demand.models.positions().map(|at| self.models[at].clone()).collect();
            let label =
                Requirement { key: MODEL_LABEL.to_owned(), operator: SelectorOperator::In, values };
            NodeSelector {
                terms: vec![NodeAffinityTerm { labels: vec![label], fields: Vec::new() }],
            }
        });
        let requests = resources(demand.cpu_milli, demand.memory_mib);
        SchedulingConstraints { affinity, requests, ..SchedulingConstraints::default() }
    }

    /// Updates the planner with the remaining resources of the node and the GPUs.
    fn update_planner(&mut self, placement: &Placement) {
        let left = &self.cluster.nodes()[placement.node];
        let node = &mut self.nodes[placement.node];
        let left = resources(left.cpu_milli, left.memory_mib);
        node.used = node
            .allocatable
            .iter()
            .map(|(name, all)| (name.clone(), all.saturating_sub(left[name])))
            .collect();
        self.planner.set_node(&Arc::new(node.clone()));
        for gpu in &placement.gpus {
            let device = device(&node.name, *gpu);
            self.planner.set_device_use(&device, self.usage.get(&device));
        }
    }

    fn results(&self, demand: &Demand, placement: &Placement) -> Vec<DeviceResult> {
        let node = &self.nodes[placement.node].name;
        let result = |gpu: &usize| DeviceResult {
            request: request_name(),
            device: device(node, *gpu),
            shared: true,
            consumed: cores(demand.gpu_milli),
            admin: false,
            sharing: Sharing::Intercept,
            binding: None,
        };
        placement.gpus.iter().map(result).collect()
    }
}

impl Placer for AllocatorPlacer {
    fn place(&mut self, demand: &Demand) -> Option<Placement> {
        self.pods += 1;
        let placement =
            if demand.gpus == 0 { self.place_without_gpus(demand) } else { self.plan(demand) }?;
        self.cluster.allocate(demand, &placement).ok()?;
        self.usage.add(&self.results(demand, &placement));
        self.update_planner(&placement);
        Some(placement)
    }

    fn release(&mut self, demand: &Demand, placement: &Placement) {
        self.cluster.release(demand, placement);
        self.usage.remove(&self.results(demand, placement));
        self.update_planner(placement);
    }
}

fn in_order_of_appearance(rows: &[NodeRow], models: &Models) -> Vec<usize> {
    let mut seen = Vec::new();
    for at in
        rows.iter().flat_map(|row| models.set(std::iter::once(row.model.as_str())).positions())
    {
        if !seen.contains(&at) {
            seen.push(at);
        }
    }
    seen
}

fn class() -> DeviceClass {
    let selectors = vec![DeviceSelector::new(&format!("device.driver == '{DRIVER_NAME}'"))];
    DeviceClass { name: valid(DeviceClassName::new(DRIVER_NAME)), selectors, configs: Vec::new() }
}

fn node(row: &NodeRow, rank: usize) -> ModelNode {
    ModelNode {
        name: valid(NodeName::new(format!("node-{rank:06}"))),
        labels: BTreeMap::from([(MODEL_LABEL.to_owned(), row.model.clone())]),
        ready: true,
        cordoned: false,
        taints: Vec::new(),
        allocatable: resources(row.cpu_milli, row.memory_mib),
        used: NameMap::new(),
        releasable: NameMap::new(),
    }
}

fn slice(row: &NodeRow, node: &NodeName) -> Slice {
    let model = Attribute::String(row.model.as_str().into());
    let gpu = |gpu| {
        let amounts = cores(WHOLE).into_iter();
        Arc::new(Device {
            attributes: NameMap::from_iter([(attribute::PRODUCT_NAME.to_owned(), model.clone())]),
            capacity: Arc::new(
                amounts.map(|(name, value)| (name, Capacity { value, policy: None })).collect(),
            ),
            shared: true,
            ..Device::new(device(node, gpu).device)
        })
    };
    Slice {
        name: node.to_string(),
        pool: pool(node),
        generation: 1,
        slice_count: 1,
        list_position: None,
        nodes: NodeChoice::Node(node.clone()),
        devices: (0..row.gpu).map(gpu).collect(),
        counter_sets: Vec::new(),
        ignored: false,
    }
}

fn claim(name: &str, demand: &Demand) -> Claim {
    let alternative = Alternative {
        name: request_name(),
        class: Some(valid(DeviceClassName::new(DRIVER_NAME))),
        selectors: Vec::new(),
        mode: AllocationMode::Exact(demand.gpus as u64),
        tolerations: Vec::new(),
        capacity: cores(demand.gpu_milli),
        admin: None,
        unsupported: None,
    };
    Claim {
        uid: valid(ClaimUid::new(name)),
        namespace: valid(Namespace::new("trace")),
        name: valid(ClaimName::new(name)),
        requests: [Request { name: request_name(), alternatives: vec![alternative] }].into(),
        constraints: Vec::new(),
        configs: Vec::new(),
        defaults: None,
    }
}

fn request_name() -> RequestName {
    valid(RequestName::new("gpu"))
}

fn pool(node: &NodeName) -> PoolId {
    PoolId { driver: DriverName::ours(), pool: valid(PoolName::new(node.as_str())) }
}

/// Returns the device of a GPU. Names have the GPU's index, which determines their order.
fn device(node: &NodeName, gpu: usize) -> DeviceId {
    DeviceId { pool: pool(node), device: valid(DeviceName::new(format!("gpu-{gpu}"))) }
}

fn gpu_of(device: &DeviceName) -> usize {
    let number = device.as_str().strip_prefix("gpu-").and_then(|number| number.parse().ok());
    number.expect("invariant: the name was made by `device`")
}

/// Returns cores in thousandths of a GPU, so that a trace's requests are exact.
fn cores(thousandths: u32) -> NameMap<Quantity> {
    NameMap::from_iter([(
        capacity::CORES.to_owned(),
        Quantity::from_integer(i64::from(thousandths)),
    )])
}

fn resources(cpu_milli: u64, memory_mib: u64) -> NameMap<Quantity> {
    let cpu = Quantity::from_nano(i128::from(cpu_milli) * 1_000_000);
    NameMap::from_iter([
        ("cpu".to_owned(), cpu),
        ("memory".to_owned(), Quantity::from_mib(memory_mib)),
    ])
}

/// Unwraps a name that was generated here.
fn valid<N, E: std::fmt::Debug>(name: Result<N, E>) -> N {
    name.expect("invariant: generated names are valid")
}
