//! Builders for snapshots and pods, as published by the Tessera driver.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_allocator::model::{
    AllocationMode, Alternative, Attribute, Capacity, Claim, ClusterSnapshot, Constraint,
    ConstraintKind, Device, DeviceClass, DeviceId, DeviceResult, DeviceSelector, NameMap, Node,
    NodeChoice, PendingPod, PodClaim, PodUid, PoolId, Request, RequestPolicy,
    SchedulingConstraints, Slice, Taint, TaintEffect, ValidRange,
};
use tessera_allocator::{AllocationPlan, Decision, PlanSettings, plan};
use tessera_api::config::Sharing;
use tessera_api::names::{
    ClaimName, ClaimUid, DeviceClassName, DeviceName, DriverName, Namespace, NodeName, PodName,
    PoolName, RequestName,
};
use tessera_api::quantity::Quantity;

pub(crate) const CLASS: &str = "gpu.tessera.dev";

pub(crate) fn quantity(text: &str) -> Quantity {
    Quantity::parse(text).unwrap()
}

pub(crate) fn device_id(node: &str, device: &str) -> DeviceId {
    DeviceId {
        pool: PoolId { driver: DriverName::ours(), pool: PoolName::new(node).unwrap() },
        device: DeviceName::new(device).unwrap(),
    }
}

/// Creates a GPU as published by the driver.
pub(crate) fn gpu(name: &str, memory: &str) -> Device {
    let whole = quantity(memory);
    let range = |min: &str, step: &str| ValidRange {
        min: Some(quantity(min)),
        max: None,
        step: Some(quantity(step)),
    };
    let policy = |default, range| {
        Some(RequestPolicy {
            default: Some(default),
            valid_range: Some(range),
            ..Default::default()
        })
    };
    let memory = Capacity { value: whole, policy: policy(whole, range("1Mi", "1Mi")) };
    let cores = Capacity { value: quantity("100"), policy: policy(quantity("0"), range("0", "1")) };
    Device {
        capacity: Arc::new(
            [("memory".to_owned(), memory), ("cores".to_owned(), cores)].into_iter().collect(),
        ),
        shared: true,
        ..Device::new(DeviceName::new(name).unwrap())
    }
}

pub(crate) trait DeviceBuilder: Sized {
    fn with(self, attribute: &str, value: Attribute) -> Self;
    fn tainted(self, key: &str) -> Self;
}

impl DeviceBuilder for Device {
    fn with(mut self, attribute: &str, value: Attribute) -> Self {
        self.attributes.insert(attribute.to_owned(), value);
        self
    }
    fn tainted(mut self, key: &str) -> Self {
        self.taints.push(Taint {
            key: key.to_owned(),
            value: String::new(),
            effect: TaintEffect::NoSchedule,
        });
        self
    }
}

/// A cluster under construction.
#[derive(Default)]
pub(crate) struct Cluster(pub(crate) ClusterSnapshot);

impl Cluster {
    pub(crate) fn new() -> Self {
        let mut cluster = Self::default();
        cluster.class(CLASS, &["device.driver == 'gpu.tessera.dev'"]);
        cluster
    }

    pub(crate) fn class(&mut self, name: &str, selectors: &[&str]) -> &mut Self {
        let name = DeviceClassName::new(name).unwrap();
        let selectors = selectors.iter().map(|s| DeviceSelector::new(s)).collect();
        let class = DeviceClass { name: name.clone(), selectors, configs: Vec::new() };
        self.0.classes.insert(name, Arc::new(class));
        self
    }

    pub(crate) fn node(mut self, name: &str, devices: Vec<Device>) -> Self {
        self.put_node(name, |_| {});
        self.0.slices.insert(name.to_owned(), Arc::new(slice(name, devices)));
        self
    }

    pub(crate) fn put_node(&mut self, name: &str, change: impl FnOnce(&mut Node)) {
        let mut node = Node {
            name: NodeName::new(name).unwrap(),
            labels: BTreeMap::new(),
            ready: true,
            cordoned: false,
            taints: Vec::new(),
            allocatable: NameMap::from_iter([
                ("cpu".to_owned(), quantity("64")),
                ("pods".to_owned(), quantity("110")),
            ]),
            used: NameMap::new(),
            releasable: NameMap::new(),
        };
        change(&mut node);
        self.0.nodes.insert(node.name.clone(), Arc::new(node));
    }

    pub(crate) fn use_share(&mut self, node: &str, device: &str, memory: &str, cores: &str) {
        self.0.usage.add(&[share(node, device, memory, cores)]);
    }
}

pub(crate) fn share(node: &str, device: &str, memory: &str, cores: &str) -> DeviceResult {
    DeviceResult {
        request: RequestName::new("gpu").unwrap(),
        device: device_id(node, device),
        shared: true,
        consumed: NameMap::from_iter([
            ("memory".to_owned(), quantity(memory)),
            ("cores".to_owned(), quantity(cores)),
        ]),
        admin: false,
        sharing: Sharing::Intercept,
        binding: None,
    }
}

pub(crate) fn slice(node: &str, devices: Vec<Device>) -> Slice {
    Slice {
        name: node.to_owned(),
        pool: PoolId { driver: DriverName::ours(), pool: PoolName::new(node).unwrap() },
        generation: 1,
        slice_count: 1,
        list_position: None,
        nodes: NodeChoice::Node(NodeName::new(node).unwrap()),
        devices: devices.into_iter().map(Arc::new).collect(),
        counter_sets: Vec::new(),
        ignored: false,
    }
}

pub(crate) fn request(name: &str, count: u64, amounts: &[(&str, &str)]) -> Request {
    let name = RequestName::new(name).unwrap();
    let alternative = Alternative {
        name: name.clone(),
        class: Some(DeviceClassName::new(CLASS).unwrap()),
        selectors: Vec::new(),
        mode: AllocationMode::Exact(count),
        tolerations: Vec::new(),
        capacity: amounts
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), quantity(amount)))
            .collect(),
        admin: None,
        unsupported: None,
    };
    Request { name, alternatives: vec![alternative] }
}

/// Creates a `firstAvailable` request from requests built by [`request`].
pub(crate) fn first_available(name: &str, requests: Vec<Request>) -> Request {
    let alternatives =
        requests.into_iter().flat_map(|r| r.alternatives).map(|alternative| Alternative {
            name: RequestName::new(format!("{name}/{}", alternative.name)).unwrap(),
            ..alternative
        });
    Request { name: RequestName::new(name).unwrap(), alternatives: alternatives.collect() }
}

pub(crate) fn claim(name: &str, requests: Vec<Request>) -> Claim {
    Claim {
        uid: ClaimUid::new(format!("uid-{name}")).unwrap(),
        namespace: Namespace::new("default").unwrap(),
        name: ClaimName::new(name).unwrap(),
        requests: requests.into(),
        constraints: Vec::new(),
        configs: Vec::new(),
        defaults: None,
    }
}

pub(crate) fn matching(attribute: &str) -> Constraint {
    Constraint { requests: Vec::new(), kind: ConstraintKind::Match(attribute.to_owned()) }
}

/// Adds `parameters` to the claim as a GpuConfig.
pub(crate) fn configured(mut claim: Claim, parameters: serde_json::Value) -> Claim {
    let mut parameters = parameters;
    parameters["apiVersion"] = "gpu.tessera.dev/v1alpha1".into();
    parameters["kind"] = "GpuConfig".into();
    let config =
        serde_json::json!({"opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}});
    claim.configs.push(serde_json::from_value(config).unwrap());
    claim
}

pub(crate) fn pod(name: &str, claims: Vec<Claim>) -> PendingPod {
    PendingPod {
        uid: PodUid::new(name),
        namespace: Namespace::new("default").unwrap(),
        name: PodName::new(name).unwrap(),
        priority: 0,
        created: 0,
        claims: claims.into_iter().map(|c| PodClaim::Pending(Arc::new(c))).collect(),
        scheduling: Arc::new(SchedulingConstraints {
            requests: NameMap::from_iter([("pods".to_owned(), quantity("1"))]),
            ..Default::default()
        }),
        nominated_node: None,
        excluded_nodes: BTreeSet::new(),
        together_with: Vec::new(),
        topology: None,
    }
}

/// Creates a pod with one claim for a share of one GPU.
pub(crate) fn share_pod(name: &str, memory: &str, cores: &str) -> PendingPod {
    pod(name, vec![claim(name, vec![request("gpu", 1, &[("memory", memory), ("cores", cores)])])])
}

pub(crate) fn decide(cluster: &Cluster, pods: &[PendingPod]) -> AllocationPlan {
    plan(&cluster.0, pods, PlanSettings::default())
}

/// Returns the devices of each decision as `node/device`.
pub(crate) fn placements(plan: &AllocationPlan) -> Vec<Vec<String>> {
    let placement = |d: &Decision| {
        let results = d.claims.iter().flat_map(|c| &c.results);
        results.map(|r| format!("{}/{}", d.node, r.device.device)).collect()
    };
    plan.decisions.iter().map(placement).collect()
}

pub(crate) fn two_nodes() -> Cluster {
    let gpus = || (0..4).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    Cluster::new().node("node-a", gpus()).node("node-b", gpus())
}
