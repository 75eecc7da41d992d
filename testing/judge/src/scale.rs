//! Cost of a large cluster in the controller's memory: the index and the planner, fed with API
//! objects as watches deliver them.
//!
//! ```text
//! generated objects --apply--> Index --take_changes--> Planner --plan--> decision for one pod
//!      not measured      CPU time, resident memory            CPU time of a single event
//! ```
//!
//! Every object is dropped after it was applied, as after a watch event. Slices are those that the
//! driver publishes for eight H100.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_allocator::{AllocationPlan, PlanSettings, Planner};
use tessera_api::gpu::{ComputeCapability, CudaVersion, Gpu, Health, Inventory};
use tessera_api::names::{GpuUuid, NodeName, PciBusId};
use tessera_api::slice::{SliceOptions, build};
use tessera_index::Index;

/// GPUs of each node.
pub(crate) const GPUS: usize = 8;

/// Memory of each share, in MiB: with four of them on a GPU, there is room for another.
const SHARE_MIB: usize = 10_000;

/// Size of a generated cluster.
#[derive(Debug, Clone, Copy)]
pub struct ClusterSize {
    /// Number of nodes, with eight GPUs each.
    pub nodes: usize,
    /// Number of allocated shares, each of a running pod.
    pub shares: usize,
    /// Number of times that each event is measured.
    pub events: usize,
}

/// Costs of a cluster.
#[derive(Debug, Clone, Serialize)]
pub struct ScaleReport {
    /// CPU time to apply all objects, in ms.
    pub apply_ms: f64,
    /// CPU time to give all of it to the planner, in ms.
    pub planner_ms: f64,
    /// CPU time of the first plan of one pod, in ms.
    pub first_plan_ms: f64,
    /// Resident memory that all of it added, in MiB.
    pub memory_mib: f64,
    /// Resident memory of the index alone, in MiB.
    pub index_mib: f64,
    /// Costs of single events, each with the plan of one pod after it.
    pub events: Vec<EventCost>,
}

/// CPU time of one kind of event.
#[derive(Debug, Clone, Serialize)]
pub struct EventCost {
    /// The event.
    pub event: &'static str,
    /// Median in ms.
    pub p50_ms: f64,
    /// 99th percentile in ms.
    pub p99_ms: f64,
}

/// Builds the cluster and measures it.
///
/// # Errors
/// The resident memory cannot be read.
///
/// # Panics
/// Panics if a generated object is invalid, or the pending pod gets no devices.
pub fn run(size: ClusterSize) -> std::io::Result<ScaleReport> {
    let before = resident_mib()?;
    let mut controller = Controller::default();
    let mut apply = Duration::ZERO;
    controller.index.apply_class(class()).expect("invariant: valid");
    for node in 0..size.nodes {
        let (object, slices) = (node_object(node), slices(node));
        apply += cpu_time(|| {
            controller.index.apply_node(&object).expect("invariant: valid");
            for slice in &slices {
                controller.index.apply_slice(slice).expect("invariant: valid");
            }
        });
    }
    for share in 0..size.shares {
        let (claim, pod) =
            (Arc::new(allocated_claim(share, SHARE_MIB, size)), running_pod(share, size));
        apply += cpu_time(|| {
            controller.index.apply_claim(&claim).expect("invariant: valid");
            controller.index.apply_pod(&pod);
        });
    }
    apply += cpu_time(|| assert_eq!(controller.index.overcommitted(), []));
    let index_mib = resident_mib()? - before;
    let planner = cpu_time(|| controller.update_planner());
    controller.index.apply_claim(&Arc::new(pending_claim())).expect("invariant: valid");
    controller.index.apply_pod(&pending_pod());
    let first_plan = cpu_time(|| controller.plan());
    let memory_mib = resident_mib()? - before;
    Ok(ScaleReport {
        apply_ms: ms(apply),
        planner_ms: ms(planner),
        first_plan_ms: ms(first_plan),
        memory_mib,
        index_mib,
        events: controller.events(size),
    })
}

/// The parts of the controller that hold the cluster.
#[derive(Debug, Default)]
struct Controller {
    index: Index,
    planner: Planner,
}

impl Controller {
    fn update_planner(&mut self) {
        self.index.take_changes().apply_to(&mut self.planner);
    }

    /// Plans the pending pod, which fits.
    fn plan(&mut self) {
        let plan = self.try_plan();
        assert_eq!(plan.decisions.len(), 1, "{:?}", plan.refusals);
    }

    /// Plans the pending pod.
    fn try_plan(&mut self) -> AllocationPlan {
        let work = self.index.work();
        self.planner.plan(&work.pending, PlanSettings::default())
    }

    /// Measures each kind of event, together with the update of the planner and a plan.
    fn events(&mut self, size: ClusterSize) -> Vec<EventCost> {
        let target = |n: usize| n * 7919 % size.nodes;
        let mut costs = Vec::new();
        let mut measure =
            |event, controller: &mut Self, each: &mut dyn FnMut(&mut Index, usize)| {
                let once = |n| {
                    cpu_time(|| {
                        each(&mut controller.index, n);
                        controller.index.overcommitted();
                        controller.update_planner();
                        controller.plan();
                    })
                };
                costs.push(EventCost::of(event, (0..size.events).map(once).collect()));
            };
        let rules: Vec<_> = (0..size.events).map(|n| taint_rule(n, Some(target(n)))).collect();
        measure("taint rule on one device", self, &mut |index, n| {
            index.apply_taint_rule(&rules[n])
        });
        measure("its removal", self, &mut |index, n| index.remove_taint_rule(&rules[n]));
        let claims: Vec<_> = (0..size.events)
            .map(|n| (running_pod(n, size), allocated_claim(n, SHARE_MIB, size)))
            .collect();
        measure("pod and claim deleted", self, &mut |index, n| {
            index.remove_pod(&claims[n].0);
            index.remove_claim(&claims[n].1);
        });
        let nodes: Vec<_> =
            (0..size.events).map(|n| (node_object(target(n)), slices(target(n)))).collect();
        measure("node removed", self, &mut |index, n| {
            nodes[n].1.iter().for_each(|slice| index.remove_slice(slice));
            index.remove_node(&nodes[n].0);
        });
        measure("node added", self, &mut |index, n| {
            index.apply_node(&nodes[n].0).expect("invariant: valid");
            for slice in &nodes[n].1 {
                index.apply_slice(slice).expect("invariant: valid");
            }
        });
        let all = taint_rule(0, None);
        let mut parts = Vec::new();
        let mut is_left = true;
        while is_left {
            parts.push(cpu_time(|| {
                if parts.is_empty() {
                    self.index.apply_taint_rule(&all);
                }
                is_left = self.index.continue_tainting();
                self.index.overcommitted();
                self.update_planner();
                self.try_plan();
            }));
        }
        let total = parts.iter().sum();
        costs.push(EventCost::of("taint rule on all devices, in total", vec![total]));
        costs.push(EventCost::of("each of its parts, with a plan", parts));
        costs
    }
}

impl EventCost {
    pub(crate) fn of(event: &'static str, mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| ms(times[(times.len() * percent / 100).min(times.len() - 1)]);
        Self { event, p50_ms: at(50), p99_ms: at(99) }
    }
}

/// Returns the CPU time of this thread in `work`: other processes do not count.
pub(crate) fn cpu_time(work: impl FnOnce()) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    let start = now();
    work();
    now().saturating_sub(start)
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub(crate) fn resident_mib() -> std::io::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
    let kib = kib.and_then(|kib| kib.parse::<f64>().ok());
    kib.map(|kib| kib / 1024.0)
        .ok_or_else(|| std::io::Error::other("no VmRSS in /proc/self/status"))
}

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("invariant: a valid object")
}

pub(crate) fn node_name(node: usize) -> String {
    format!("gpu-node-{node:05}.example.com")
}

pub(crate) fn node_object(node: usize) -> Node {
    let labels = json!({
        "kubernetes.io/hostname": node_name(node), "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64", "node.kubernetes.io/instance-type": "p5.48xlarge",
        "topology.kubernetes.io/region": "eu-west-1",
        "topology.kubernetes.io/zone": format!("eu-west-1{}", ["a", "b", "c"][node % 3]),
    });
    read(json!({
        "metadata": {"name": node_name(node), "uid": format!("node-uid-{node}"), "labels": labels},
        "status": {
            "allocatable": {"cpu": "192", "memory": "2000Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
}

fn uuid(node: usize, gpu: usize) -> GpuUuid {
    let text = format!(
        "GPU-{:08x}-9a41-7c3b-8e55-{:012x}",
        node * 2_654_435 % 0xffff_ffff,
        node * GPUS + gpu
    );
    GpuUuid::new(text).expect("invariant: a UUID")
}

pub(crate) fn slices(node: usize) -> Vec<ResourceSlice> {
    let gpu = |index: usize| Gpu {
        uuid: uuid(node, index),
        index: index as u32,
        minor: index as u32,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        architecture: "Hopper".to_owned(),
        memory_bytes: 81_559 << 20,
        cuda_compute_capability: ComputeCapability { major: 9, minor: 0 },
        driver_version: "580.95.05".to_owned(),
        cuda_driver_version: CudaVersion { major: 13, minor: 0 },
        pci_bus_id: PciBusId::new(format!("0000:{:02x}:00.0", 0x18 + 8 * index))
            .expect("invariant: an address"),
        pcie_root: Some(format!("pci0000:{:02x}", 0x16 + 8 * index)),
        numa_node: Some(index as i32 / 4),
        mig: None,
        health: Health::Healthy,
    };
    let inventory = Inventory::new((0..GPUS).map(gpu).collect(), Vec::new(), Vec::new());
    let name = NodeName::new(node_name(node)).expect("invariant: a name");
    let mut slices = build(&inventory, &SliceOptions::new(name));
    for (n, slice) in slices.iter_mut().enumerate() {
        slice.metadata.name = Some(format!("{n}-gpu.tessera.dev-{}", node_name(node)));
    }
    slices
}

pub(crate) fn class() -> DeviceClass {
    let expression =
        "device.driver == 'gpu.tessera.dev' && device.attributes['gpu.tessera.dev'].type == 'gpu'";
    read(json!({
        "metadata": {"name": "gpu.tessera.dev"},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }))
}

fn taint_rule(number: usize, node: Option<usize>) -> DeviceTaintRule {
    let selector = match node {
        Some(node) => json!({
            "driver": "gpu.tessera.dev", "pool": node_name(node),
            "device": uuid(node, 3).device_name().as_str(),
        }),
        None => json!({"driver": "gpu.tessera.dev"}),
    };
    read(json!({
        "metadata": {"name": format!("rule-{}-{number}", node.is_some())},
        "spec": {
            "deviceSelector": selector,
            "taint": {"key": "example.com/maintenance", "effect": "NoSchedule"},
        },
    }))
}

/// Returns a UID that differs from others in the first characters, like those of an API server.
fn uid(kind: &str, name: &str) -> String {
    let mut hasher = DefaultHasher::new();
    (kind, name).hash(&mut hasher);
    let hash = hasher.finish();
    format!("{:08x}-{:04x}-4c2e-8b51-{kind}-{name}", hash >> 32, hash & 0xffff)
}

pub(crate) fn pod(name: &str, node: Option<String>) -> Pod {
    read(json!({
        "metadata": {
            "name": name, "namespace": "team-a", "uid": uid("pod", name),
            "creationTimestamp": "2026-01-10T11:00:00Z",
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "main", "image": "registry.example.com/team-a/trainer:1.4",
                            "resources": {"requests": {"cpu": "4", "memory": "16Gi"}}}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
        },
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }},
    }))
}

pub(crate) fn claim(name: &str, memory: &str, status: Value) -> ResourceClaim {
    read(json!({
        "metadata": {
            "name": name, "namespace": "team-a", "uid": uid("claim", name),
            "resourceVersion": "1", "creationTimestamp": "2026-01-10T11:00:00Z",
            "finalizers": ["resource.kubernetes.io/delete-protection"],
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "gpu.tessera.dev", "allocationMode": "ExactCount", "count": 1,
            "capacity": {"requests": {"memory": memory, "cores": "12"}},
        }}]}},
        "status": status,
    }))
}

/// Returns the node of a share: shares fill the nodes one after the other.
fn place(share: usize, size: ClusterSize) -> (usize, usize) {
    let gpu = share % (size.nodes * GPUS);
    (gpu / GPUS, gpu % GPUS)
}

pub(crate) fn allocated_claim(share: usize, memory_mib: usize, size: ClusterSize) -> ResourceClaim {
    claim_on(&format!("share-{share}"), place(share, size), memory_mib as u64, share)
}

/// Returns a running pod and its claim, which has memory of a GPU of the cluster. The GPUs are
/// numbered through, and `share` is a number of its own.
pub(crate) fn allocated_on(
    name: &str,
    gpu: usize,
    memory_mib: u64,
    share: usize,
) -> (Pod, ResourceClaim) {
    let (node, gpu) = (gpu / GPUS, gpu % GPUS);
    let claim = claim_on(name, (node, gpu), memory_mib, share);
    (pod(name, Some(node_name(node))), claim)
}

/// Returns a claim that has memory of a GPU of a node.
fn claim_on(
    name: &str,
    (node, gpu): (usize, usize),
    memory_mib: u64,
    share: usize,
) -> ResourceClaim {
    let memory = format!("{memory_mib}Mi");
    let status = json!({
        "allocation": {
            "devices": {"results": [{
                "request": "gpu", "driver": "gpu.tessera.dev", "pool": node_name(node),
                "device": uuid(node, gpu).device_name().as_str(),
                "shareID": format!("1f0c2d3e-9a41-7c3b-8e55-{share:012x}"),
                "consumedCapacity": {"memory": memory, "cores": "12"},
            }]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": [node_name(node)]},
            ]}]},
        },
        "reservedFor": [{"resource": "pods", "name": name, "uid": uid("pod", name)}],
    });
    claim(name, &memory, status)
}

pub(crate) fn running_pod(share: usize, size: ClusterSize) -> Pod {
    pod(&format!("share-{share}"), Some(node_name(place(share, size).0)))
}

fn pending_claim() -> ResourceClaim {
    claim("pending", "20Gi", Value::Null)
}

fn pending_pod() -> Pod {
    pod("pending", None)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn measures_every_event_of_a_small_cluster() {
        let report = run(ClusterSize { nodes: 20, shares: 40, events: 5 }).expect("measured");
        assert_eq!(report.events.len(), 7);
        assert!(report.apply_ms > 0.0 && report.planner_ms > 0.0 && report.first_plan_ms > 0.0);
        let distinct: BTreeSet<&str> = report.events.iter().map(|cost| cost.event).collect();
        assert_eq!(distinct.len(), report.events.len());
    }
}
