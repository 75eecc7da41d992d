//! Scenarios in the oracle's format: Kubernetes objects, and upstream's result for every node.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::resource::v1 as api;
use serde::Deserialize;
use serde_json::Value;
use tessera_allocator::model::{Claim, ClusterSnapshot, Slice, Usage};
use tessera_allocator::{FeatureGates, Planner};
use tessera_api::names::NodeName;
use tessera_index::convert::{self, DeviceFilter};

/// A parsed scenario.
#[derive(Debug)]
pub struct Scenario {
    /// Name.
    pub name: String,
    /// Feature gates.
    pub features: FeatureGates,
    /// Cluster.
    pub snapshot: ClusterSnapshot,
    /// Claims of one pod, which are allocated together.
    pub claims: Vec<Arc<Claim>>,
    /// The claims as API objects.
    pub claim_objects: Vec<api::ResourceClaim>,
    /// Classes as API objects, by name.
    pub class_objects: BTreeMap<String, api::DeviceClass>,
    /// Nodes in the given order.
    pub nodes: Vec<NodeName>,
    /// Upstream's result per node, if the scenario is a golden case.
    pub results: BTreeMap<String, Value>,
    /// Further valid outcomes per node, if the order of the search decides.
    pub allowed: BTreeMap<String, Vec<String>>,
    /// Allocated claims with their devices.
    pub allocated: Vec<api::ResourceClaim>,
    /// Benchmark parameters, if the scenario is a benchmark.
    pub bench: Option<BenchSpec>,
}

/// Benchmark parameters of a scenario.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct BenchSpec {
    /// Mode: `filter` or `sequence`.
    pub mode: String,
    /// Number of repetitions.
    pub repeat: usize,
    /// True if the oldest share is released before each claim.
    pub churn: bool,
}

/// Document of a scenario.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Document {
    name: String,
    features: Option<Vec<String>>,
    device_classes: Vec<api::DeviceClass>,
    resource_slices: Vec<api::ResourceSlice>,
    claims: Vec<api::ResourceClaim>,
    nodes: Vec<ApiNode>,
    allocated_claims: Vec<api::ResourceClaim>,
    allocated_state: AllocatedState,
    results: BTreeMap<String, Value>,
    allowed: BTreeMap<String, Vec<String>>,
    bench: Option<BenchSpec>,
}

/// Usage that no claim can produce.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AllocatedState {
    devices: Vec<api::DeviceRequestAllocationResult>,
    shared_devices: Vec<api::DeviceRequestAllocationResult>,
    consumed: Vec<api::DeviceRequestAllocationResult>,
}

impl Scenario {
    /// Parses a scenario.
    ///
    /// # Errors
    /// Returns an error if the text is not a valid scenario.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let document: Document = serde_json::from_str(text).context("not a scenario")?;
        let name =
            if document.name.is_empty() { "unnamed".to_owned() } else { document.name.clone() };
        document.read(&name).with_context(|| format!("invalid object in scenario `{name}`"))
    }

    /// Returns a planner for the cluster.
    pub fn planner(&self) -> Planner {
        Planner::from_snapshot(&self.snapshot, self.features)
    }
}

impl Document {
    fn read(mut self, name: &str) -> Result<Scenario, convert::ConvertError> {
        for (i, claim) in self.claims.iter_mut().enumerate() {
            claim.metadata.uid.get_or_insert_with(|| format!("uid-{i}"));
        }
        let claims = self.claims.iter().map(|c| convert::claim(c).map(Arc::new));
        let (snapshot, nodes) = self.snapshot(name)?;
        let features = self
            .features
            .as_ref()
            .map(|names| FeatureGates::with_names(names.iter().map(String::as_str)));
        let named =
            |class: api::DeviceClass| (class.metadata.name.clone().unwrap_or_default(), class);
        Ok(Scenario {
            name: name.to_owned(),
            features: features.unwrap_or_default(),
            snapshot,
            claims: claims.collect::<Result<_, _>>()?,
            claim_objects: self.claims,
            class_objects: self.device_classes.into_iter().map(named).collect(),
            nodes,
            results: self.results,
            allowed: self.allowed,
            allocated: self.allocated_claims,
            bench: self.bench,
        })
    }

    fn snapshot(
        &self,
        name: &str,
    ) -> Result<(ClusterSnapshot, Vec<NodeName>), convert::ConvertError> {
        let mut snapshot =
            ClusterSnapshot { usage: self.usage(name)?, ..ClusterSnapshot::default() };
        for (i, slice) in self.resource_slices.iter().enumerate() {
            let slice =
                Slice { list_position: Some(i), ..convert::slice(slice, DeviceFilter::None)? };
            snapshot.slices.insert(slice.name.clone(), Arc::new(slice));
        }
        for class in &self.device_classes {
            let class = convert::class(class)?;
            snapshot.classes.insert(class.name.clone(), Arc::new(class));
        }
        let mut names = Vec::new();
        for node in &self.nodes {
            let mut node = convert::node(node)?;
            node.ready = true;
            names.push(node.name.clone());
            snapshot.nodes.insert(node.name.clone(), Arc::new(node));
        }
        Ok((snapshot, names))
    }

    /// Returns the usage of allocated claims and of the explicit state.
    fn usage(&self, name: &str) -> Result<Usage, convert::ConvertError> {
        let mut usage = Usage::default();
        let allocations = self
            .allocated_claims
            .iter()
            .filter_map(|claim| claim.status.as_ref()?.allocation.as_ref());
        for allocation in allocations {
            usage.add(&convert::allocated(name, allocation, &[])?.results);
        }
        let AllocatedState { devices, shared_devices, consumed } = &self.allocated_state;
        let whole = devices.iter().map(|result| stated(result, false));
        let shares = shared_devices.iter().chain(consumed).map(|result| stated(result, true));
        let results = Some(whole.chain(shares).collect());
        let devices = Some(api::DeviceAllocationResult { results, config: None });
        let allocation = api::AllocationResult { devices, ..Default::default() };
        usage.add(&convert::allocated(name, &allocation, &[])?.results);
        Ok(usage)
    }
}

fn stated(
    result: &api::DeviceRequestAllocationResult,
    shared: bool,
) -> api::DeviceRequestAllocationResult {
    let mut result = result.clone();
    result.request = "state".to_owned();
    if shared {
        result.share_id.get_or_insert_with(|| "00000000-0000-0000-0000-000000000000".to_owned());
    }
    result
}
