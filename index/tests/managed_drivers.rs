//! Devices of other managed drivers, by applying objects.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, OpaqueDeviceConfiguration, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_allocator::model::DeviceResult;
use tessera_allocator::{AllocationPlan, ClaimAllocation, PlanSettings, Planner, RefusalCause};
use tessera_api::GpuConfig;
use tessera_api::names::{ClaimUid, DriverName, ManagedDrivers, ShareId};
use tessera_index::{Index, PlanningBlocker, Scope, convert};

const GPU: &str = "gpu.tessera.dev";
const NIC: &str = "nic.example.com";

/// Node `node-a` with GPUs and NICs on two PCIe roots, classes for both, and an index.
struct World {
    index: Index,
    planner: Planner,
    version: u64,
}

impl World {
    fn new(managed: &[&str]) -> Self {
        let managed: ManagedDrivers =
            managed.iter().map(|name| DriverName::new(name).unwrap()).collect();
        let mut world =
            Self { index: Index::new(managed), planner: Planner::default(), version: 0 };
        let node = json!({
            "metadata": {"name": "node-a"},
            "status": {"allocatable": {"cpu": "8", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        world.index.apply_node(&read::<Node>(node)).unwrap();
        world.slice(GPU, &[("gpu-0", "pci0000:01"), ("gpu-1", "pci0000:02")]);
        world.slice(NIC, &[("nic-0", "pci0000:02"), ("nic-1", "pci0000:03")]);
        for (name, driver) in [("gpu", GPU), ("nic", NIC)] {
            let expression = format!("device.driver == '{driver}'");
            let class = json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}});
            world.index.apply_class(read::<DeviceClass>(class)).unwrap();
        }
        world
    }

    /// A world in which Tessera allocates NICs too.
    fn with_managed_nics() -> Self {
        let mut world = Self::new(&[NIC]);
        world.index.apply_taint_rule(&fence(NIC));
        world
    }

    fn slice(&mut self, driver: &str, devices: &[(&str, &str)]) {
        let device = |(name, root): &(&str, &str)| {
            let attributes = json!({"resource.kubernetes.io/pcieRoot": {"string": root}});
            let taint = json!([{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}]);
            let taints = if driver == GPU { taint } else { Value::Null };
            json!({
                "name": name, "attributes": attributes, "taints": taints,
                "allowMultipleAllocations": true,
                "capacity": {"memory": {"value": "80Gi"}},
            })
        };
        let devices: Vec<Value> = devices.iter().map(device).collect();
        let slice = json!({
            "metadata": {"name": format!("node-a-{driver}")},
            "spec": {
                "driver": driver, "nodeName": "node-a", "devices": devices,
                "pool": {"name": "node-a", "generation": 1, "resourceSliceCount": 1},
            },
        });
        self.index.apply_slice(&read::<ResourceSlice>(slice)).unwrap();
    }

    fn claim(&mut self, mut claim: Value) -> Arc<ResourceClaim> {
        self.version += 1;
        claim["metadata"]["resourceVersion"] = self.version.to_string().into();
        let claim = Arc::new(read::<ResourceClaim>(claim));
        self.index.apply_claim(&claim).unwrap();
        claim
    }

    fn pod(&mut self, name: &str, claim: &str) {
        let pod = json!({
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"), "creationTimestamp": "2026-11-24T10:00:00Z"},
            "spec": {
                "containers": [],
                "resourceClaims": [{"name": "c", "resourceClaimName": claim}],
            },
        });
        self.index.apply_pod(&read(pod));
    }

    fn plan(&mut self) -> AllocationPlan {
        let pods = self.index.work().pending;
        self.index.take_changes().apply_to(&mut self.planner);
        self.planner.plan(&pods, PlanSettings::default())
    }

    /// The devices of the claims that are planned.
    fn planned(&mut self) -> Vec<Vec<String>> {
        let devices = |claim: &ClaimAllocation| {
            claim.results.iter().map(|result| result.device.device.to_string()).collect()
        };
        let plan = self.plan();
        plan.decisions.iter().flat_map(|decision| &decision.claims).map(devices).collect()
    }

    fn scope(&self, claim: &str) -> Scope {
        self.index.scope(&ClaimUid::new(format!("uid-{claim}")).unwrap()).unwrap()
    }
}

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn fence(driver: &str) -> DeviceTaintRule {
    read(json!({
        "metadata": {"name": format!("tessera-fence-{driver}")},
        "spec": {
            "deviceSelector": {"driver": driver},
            "taint": {"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"},
        },
    }))
}

fn claim(name: &str, classes: &[&str]) -> Value {
    let request = |class: &&str| json!({"name": class, "exactly": {"deviceClassName": class}});
    let requests: Vec<Value> = classes.iter().map(request).collect();
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
        "spec": {"devices": {"requests": requests}},
    })
}

fn exclusive() -> Value {
    json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "exclusive": true})
}

/// A claim for a GPU and a NIC on one PCIe root.
fn pair(name: &str) -> Value {
    let mut claim = claim(name, &["gpu", "nic"]);
    claim["spec"]["devices"]["constraints"] =
        json!([{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]);
    claim
}

#[test]
fn gpu_and_nic_are_on_one_pcie_root() {
    let mut world = World::with_managed_nics();
    world.claim(pair("c"));
    world.pod("p", "c");
    assert_eq!(world.scope("c"), Scope::Ours);
    assert_eq!(world.planned(), [["gpu-1", "nic-0"]]);
}

#[test]
fn claim_for_nics_alone_is_planned() {
    let mut world = World::with_managed_nics();
    world.claim(claim("c", &["nic"]));
    world.pod("p", "c");
    assert_eq!(world.scope("c"), Scope::Ours);
    assert_eq!(world.planned(), [["nic-0"]]);
}

#[test]
fn unmanaged_driver_stays_with_kube_scheduler() {
    let mut world = World::new(&[]);
    world.index.apply_taint_rule(&fence(NIC));
    world.claim(claim("c", &["nic"]));
    world.claim(pair("d"));
    world.pod("p", "c");
    world.pod("q", "d");
    assert_eq!((world.scope("c"), world.scope("d")), (Scope::Foreign, Scope::Mixed));
    let work = world.index.work();
    assert!(work.pending.is_empty());
    assert_eq!(work.blocked[0].blocker, PlanningBlocker::MixedDrivers);
}

#[test]
fn devices_without_their_fence_are_not_planned() {
    let mut world = World::new(&[NIC]);
    world.claim(pair("c"));
    world.pod("p", "c");
    let plan = world.plan();
    assert!(matches!(*plan.refusals[0].cause, RefusalCause::NoFit(_)), "{:?}", plan.refusals);
    world.index.apply_taint_rule(&fence(NIC));
    assert_eq!(world.planned().len(), 1);
    world.index.remove_taint_rule(&fence(NIC));
    assert!(world.planned().is_empty());
}

#[test]
fn fence_of_one_driver_is_not_that_of_another() {
    let mut world = World::new(&[NIC, "cpu.example.com"]);
    world.index.apply_taint_rule(&fence("cpu.example.com"));
    world.claim(claim("c", &["nic"]));
    world.pod("p", "c");
    assert!(world.planned().is_empty());
}

#[test]
fn rule_taints_devices_of_its_driver_only() {
    let mut world = World::with_managed_nics();
    world.index.apply_taint_rule(&read(json!({
        "metadata": {"name": "nics"},
        "spec": {
            "deviceSelector": {"driver": NIC, "pool": "node-a"},
            "taint": {"key": "example.com/broken", "effect": "NoSchedule"},
        },
    })));
    for (name, class) in [("c", "gpu"), ("d", "nic")] {
        world.claim(claim(name, &[class]));
        world.pod(&format!("pod-{name}"), name);
    }
    assert_eq!(world.planned(), [["gpu-0"]]);
}

#[test]
fn allocated_devices_of_managed_drivers_are_taken() {
    let mut world = World::with_managed_nics();
    for nic in ["nic-0", "nic-1"] {
        let mut taken = claim(nic, &["nic"]);
        taken["status"] = json!({"allocation": {"devices": {"results": [
            {"request": "nic", "driver": NIC, "pool": "node-a", "device": nic},
        ]}}});
        world.claim(taken);
    }
    world.claim(pair("c"));
    world.pod("p", "c");
    assert!(world.planned().is_empty());
}

#[test]
fn gpu_config_does_not_apply_to_other_devices() {
    let mut world = World::with_managed_nics();
    let quarter = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"percent": 25},
    });
    let mut quarters = claim("c", &["gpu", "nic"]);
    quarters["spec"]["devices"]["config"] =
        json!([{"opaque": {"driver": GPU, "parameters": quarter}}]);
    world.claim(quarters);
    world.pod("p", "c");
    let plan = world.plan();
    let results = plan.decisions[0].claims[0].results.iter();
    let gib =
        |result: &DeviceResult| result.consumed.get("memory").unwrap().value_i64().unwrap() >> 30;
    assert_eq!(results.map(gib).collect::<Vec<_>>(), [20, 80]);
}

#[test]
fn allocation_has_the_configs_of_other_drivers() {
    let mut world = World::with_managed_nics();
    let mut object = pair("c");
    object["spec"]["devices"]["config"] = json!([
        {"requests": ["nic"], "opaque": {"driver": NIC, "parameters": {"mtu": 9000}}},
    ]);
    let object = world.claim(object);
    world.pod("p", "c");
    let plan = world.plan();
    let defaults = GpuConfig::decode(&exclusive()).unwrap();
    let share = || ShareId::new("11111111-1111-4111-8111-111111111111").unwrap();
    let allocation = convert::allocation(
        &plan.decisions[0].claims[0],
        &object,
        &Default::default(),
        Some(&defaults),
        Time(Timestamp::UNIX_EPOCH),
        share,
    );
    let configs = allocation.devices.unwrap().config.unwrap();
    let of = |driver: &str| -> Vec<Option<Vec<String>>> {
        let is_of = |opaque: &OpaqueDeviceConfiguration| opaque.driver == driver;
        let matching = configs.iter().filter(|c| c.opaque.as_ref().is_some_and(is_of));
        matching.map(|config| config.requests.clone()).collect()
    };
    assert_eq!(of(NIC), [Some(vec!["nic".to_owned()])]);
    assert_eq!(of(GPU), [Some(vec!["gpu".to_owned()])]);
}
