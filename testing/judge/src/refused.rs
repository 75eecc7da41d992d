//! Cost of plans in which no pod gets devices: it must not depend on the pods and nodes that have
//! not changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use tessera_allocator::model::{
    AllocationMode, Alternative, Attribute, Capacity, Claim, ClusterSnapshot, Device, DeviceClass,
    DeviceId, DeviceResult, DeviceSelector, NameMap, Node, NodeChoice, PendingPod, PodClaim,
    PodUid, PoolId, Request, SchedulingConstraints, Slice,
};
use tessera_allocator::{FeatureGates, PlanSettings, Planner};
use tessera_api::config::Sharing;
use tessera_api::names::{
    ClaimName, ClaimUid, DeviceClassName, DeviceName, DriverName, Namespace, NodeName, PodName,
    PoolName, RequestName,
};
use tessera_api::quantity::Quantity;

const CLASS: &str = "gpu.tessera.dev";

/// GiB of memory of each GPU, and of the share that is in use on it.
const MEMORY: u64 = 80;
const USED: u64 = 30;

/// GPUs of each node.
const GPUS: usize = 8;

/// A cluster and pods that fit nowhere.
#[derive(Debug, Clone, Copy)]
pub struct RefusedBatch {
    /// Number of nodes, with eight GPUs each.
    pub nodes: usize,
    /// Number of pending pods.
    pub pods: usize,
    /// Number of different requests among them.
    pub shapes: usize,
    /// The devices of the requests fit on every node, but the pods select no node.
    pub devices_fit: bool,
}

/// Time of each plan in nanoseconds, and the number of plans it took to reach all pods.
#[derive(Debug, Clone, Serialize)]
pub struct RefusedReport {
    /// The first plan.
    pub first_ns: u64,
    /// A plan after which nothing has changed.
    pub unchanged_ns: u64,
    /// A plan after the use of one device has changed.
    pub changed_ns: u64,
    /// Time to render the message of one refusal of each shape after that plan.
    pub messages_ns: u64,
}

/// Plans the pods three times.
///
/// # Panics
/// Panics if a pod is placed.
#[must_use]
pub fn run(batch: RefusedBatch) -> RefusedReport {
    let snapshot = cluster(batch.nodes);
    let mut planner = Planner::from_snapshot(&snapshot, FeatureGates::default());
    planner.collect_devices();
    let pods: Vec<PendingPod> = (0..batch.pods).map(|n| pod(n, batch)).collect();
    let plan = |planner: &mut Planner| {
        let start = Instant::now();
        let plan = planner.plan(&pods, PlanSettings::default());
        let nanos = start.elapsed().as_nanos() as u64;
        assert!(plan.decisions.is_empty(), "the pods fit nowhere");
        assert_eq!(plan.refusals.len(), batch.pods, "all pods are refused");
        (nanos, plan)
    };
    let (first_ns, _) = plan(&mut planner);
    let (unchanged_ns, _) = plan(&mut planner);
    let device = id(batch.nodes / 2, 3);
    let mut usage = snapshot.usage.clone();
    usage.add(&[share(&device, 1)]);
    planner.set_device_use(&device, usage.get(&device));
    let (changed_ns, last) = plan(&mut planner);
    let start = Instant::now();
    let mut seen = BTreeSet::new();
    for refusal in &last.refusals {
        if let tessera_allocator::RefusalCause::NoFit(explanation) = &*refusal.cause
            && seen.insert(Arc::as_ptr(&refusal.cause))
        {
            assert!(!explanation.render(1024).is_empty());
        }
    }
    let messages_ns = start.elapsed().as_nanos() as u64;
    RefusedReport { first_ns, unchanged_ns, changed_ns, messages_ns }
}

fn named<T, E: std::fmt::Debug>(name: Result<T, E>) -> T {
    name.expect("invariant: a valid name")
}

fn gib(amount: u64) -> Quantity {
    Quantity::from_mib(amount * 1024)
}

fn pool(node: usize) -> PoolId {
    PoolId { driver: DriverName::ours(), pool: named(PoolName::new(format!("node-{node:05}"))) }
}

fn id(node: usize, gpu: usize) -> DeviceId {
    DeviceId { pool: pool(node), device: named(DeviceName::new(format!("gpu-{gpu}"))) }
}

fn share(device: &DeviceId, memory: u64) -> DeviceResult {
    DeviceResult {
        request: named(RequestName::new("gpu")),
        device: device.clone(),
        shared: true,
        consumed: NameMap::from_iter([("memory".to_owned(), gib(memory))]),
        admin: false,
        sharing: Sharing::Intercept,
        binding: None,
    }
}

/// Builds a cluster of which each GPU has a share in use.
#[must_use]
pub fn cluster(nodes: usize) -> ClusterSnapshot {
    let mut snapshot = ClusterSnapshot::default();
    let class = named(DeviceClassName::new(CLASS));
    let selectors = vec![DeviceSelector::new("device.driver == 'gpu.tessera.dev'")];
    snapshot.classes.insert(
        class.clone(),
        Arc::new(DeviceClass { name: class, selectors, configs: Vec::new() }),
    );
    for number in 0..nodes {
        let name = named(NodeName::new(format!("node-{number:05}")));
        let devices = (0..GPUS).map(|gpu| device(number, gpu)).map(Arc::new).collect();
        let slice = Slice {
            name: name.to_string(),
            pool: pool(number),
            generation: 1,
            slice_count: 1,
            list_position: None,
            nodes: NodeChoice::Node(name.clone()),
            devices,
            counter_sets: Vec::new(),
            ignored: false,
        };
        snapshot.slices.insert(slice.name.clone(), Arc::new(slice));
        let amount = |count| Quantity::from_integer(count);
        let node = Node {
            name: name.clone(),
            labels: BTreeMap::new(),
            ready: true,
            cordoned: false,
            taints: Vec::new(),
            allocatable: NameMap::from_iter([
                ("cpu".to_owned(), amount(64)),
                ("pods".to_owned(), amount(110)),
            ]),
            used: NameMap::new(),
            releasable: NameMap::new(),
        };
        snapshot.nodes.insert(name, Arc::new(node));
        (0..GPUS).for_each(|gpu| snapshot.usage.add(&[share(&id(number, gpu), USED)]));
    }
    snapshot
}

fn device(node: usize, gpu: usize) -> Device {
    let memory = Capacity { value: gib(MEMORY), policy: None };
    let text = |text: String| Attribute::String(text.into());
    Device {
        attributes: NameMap::from_iter([
            ("productName".to_owned(), text("NVIDIA A100-SXM4-80GB".to_owned())),
            ("uuid".to_owned(), text(format!("GPU-{node:05}-{gpu}"))),
        ]),
        capacity: Arc::new(NameMap::from_iter([("memory".to_owned(), memory)])),
        shared: true,
        ..Device::new(named(DeviceName::new(format!("gpu-{gpu}"))))
    }
}

fn pod(number: usize, batch: RefusedBatch) -> PendingPod {
    let shape = (number % batch.shapes) as u64;
    let base = if batch.devices_fit { 1 } else { MEMORY - USED + 1 };
    let memory = Quantity::from_mib(base * 1024 + shape);
    let name = named(RequestName::new("gpu"));
    let alternative = Alternative {
        name: name.clone(),
        class: Some(named(DeviceClassName::new(CLASS))),
        selectors: Vec::new(),
        mode: AllocationMode::Exact(1),
        tolerations: Vec::new(),
        capacity: NameMap::from_iter([("memory".to_owned(), memory)]),
        admin: None,
        unsupported: None,
    };
    let claim = Claim {
        uid: named(ClaimUid::new(format!("claim-uid-{number}"))),
        namespace: named(Namespace::new("default")),
        name: named(ClaimName::new(format!("claim-{number}"))),
        requests: [Request { name, alternatives: vec![alternative] }].into(),
        constraints: Vec::new(),
        configs: Vec::new(),
        defaults: None,
    };
    let node_selector = match batch.devices_fit {
        true => BTreeMap::from([("pool".to_owned(), "none".to_owned())]),
        false => BTreeMap::new(),
    };
    let requests = NameMap::from_iter([("pods".to_owned(), Quantity::from_integer(1))]);
    let scheduling = SchedulingConstraints { node_selector, requests, ..Default::default() };
    PendingPod {
        uid: PodUid::new(&format!("pod-{number}")),
        namespace: named(Namespace::new("default")),
        name: named(PodName::new(format!("pod-{number}"))),
        priority: 0,
        created: 0,
        claims: vec![PodClaim::Pending(Arc::new(claim))],
        scheduling: Arc::new(scheduling),
        nominated_node: None,
        excluded_nodes: BTreeSet::new(),
        together_with: Vec::new(),
        topology: None,
    }
}
