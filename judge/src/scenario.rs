//! Scenarios in the format of the oracle: objects of the Kubernetes API, and what upstream answers for every node.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::resource::v1 as api;
use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tessera_allocator::model::{Claim, Slice, Snapshot, Usage};
use tessera_allocator::{Features, Planner};
use tessera_api::names::NodeName;
use tessera_index::convert::{self, Fence};

/// A scenario that has been read.
#[derive(Debug)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// Feature gates.
    pub features: Features,
    /// The cluster.
    pub snapshot: Snapshot,
    /// Claims of one pod, to be allocated together.
    pub claims: Vec<Arc<Claim>>,
    /// The same as objects.
    pub claim_objects: Vec<api::ResourceClaim>,
    /// Classes as objects, by name.
    pub class_objects: BTreeMap<String, api::DeviceClass>,
    /// Nodes in the order given.
    pub nodes: Vec<NodeName>,
    /// Per node what upstream answers, where the scenario is a golden case.
    pub results: BTreeMap<String, Value>,
    /// Per node the outcomes that are right as well, where the order of the search decides.
    pub allowed: BTreeMap<String, Vec<String>>,
    /// Claims that are allocated already, with their devices.
    pub allocated: Vec<api::ResourceClaim>,
}

/// Why a scenario cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// A part of it is not what it should be.
    #[error("scenario `{scenario}`: `{field}` is not a list of such objects")]
    Field {
        /// The scenario.
        scenario: String,
        /// The part.
        field: &'static str,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// An object in it cannot be used.
    #[error("scenario `{scenario}` has an object that cannot be used")]
    Object {
        /// The scenario.
        scenario: String,
        /// What is wrong.
        #[source]
        source: convert::ConvertError,
    },
}

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// It is not one.
    pub fn read(value: &Value) -> Result<Self, ScenarioError> {
        let name = value["name"].as_str().unwrap_or("without a name").to_owned();
        let reader = Reader { scenario: &name, value };
        let mut claim_objects: Vec<api::ResourceClaim> = reader.objects("claims")?;
        for (i, claim) in claim_objects.iter_mut().enumerate() {
            claim.metadata.uid.get_or_insert_with(|| format!("uid-{i}"));
        }
        let claims = claim_objects.iter().map(|c| convert::claim(c).map(Arc::new));
        let claims = claims.collect::<Result<_, _>>().map_err(|e| reader.unusable(e))?;
        let classes: Vec<api::DeviceClass> = reader.objects("deviceClasses")?;
        let (snapshot, nodes) = reader.snapshot(&classes)?;
        let named = |class: api::DeviceClass| (class.metadata.name.clone().unwrap_or_default(), class);
        let features = value
            .get("features")
            .and_then(Value::as_array)
            .map(|names| Features::only(names.iter().filter_map(Value::as_str)));
        let strings = |list: &Value| {
            list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let entries = |field: &str| value[field].as_object().into_iter().flatten();
        Ok(Self {
            features: features.unwrap_or_default(),
            snapshot,
            claims,
            claim_objects,
            class_objects: classes.into_iter().map(named).collect(),
            nodes,
            results: entries("results").map(|(node, result)| (node.clone(), result.clone())).collect(),
            allowed: entries("allowed").map(|(node, list)| (node.clone(), strings(list))).collect(),
            allocated: reader.objects("allocatedClaims")?,
            name,
        })
    }

    /// A planner for its cluster.
    pub fn planner(&self) -> Planner {
        Planner::of(&self.snapshot, self.features)
    }
}

struct Reader<'v> {
    scenario: &'v str,
    value: &'v Value,
}

impl Reader<'_> {
    fn objects<T: DeserializeOwned>(&self, field: &'static str) -> Result<Vec<T>, ScenarioError> {
        self.objects_of(&self.value[field], field)
    }

    fn objects_of<T: DeserializeOwned>(
        &self,
        value: &Value,
        field: &'static str,
    ) -> Result<Vec<T>, ScenarioError> {
        if value.is_null() {
            return Ok(Vec::new());
        }
        Vec::<T>::deserialize(value).map_err(|source| ScenarioError::Field {
            scenario: self.scenario.to_owned(),
            field,
            source,
        })
    }

    fn unusable(&self, source: convert::ConvertError) -> ScenarioError {
        ScenarioError::Object { scenario: self.scenario.to_owned(), source }
    }

    fn snapshot(&self, classes: &[api::DeviceClass]) -> Result<(Snapshot, Vec<NodeName>), ScenarioError> {
        let mut snapshot = Snapshot { usage: self.usage()?, ..Snapshot::default() };
        for (i, slice) in self.objects::<api::ResourceSlice>("resourceSlices")?.iter().enumerate() {
            let slice = convert::slice(slice, Fence::None).map_err(|e| self.unusable(e))?;
            let slice = Slice { listed: Some(i), ..slice };
            snapshot.slices.insert(slice.name.clone(), Arc::new(slice));
        }
        for class in classes {
            let class = convert::class(class).map_err(|e| self.unusable(e))?;
            snapshot.classes.insert(class.name.clone(), Arc::new(class));
        }
        let mut names = Vec::new();
        for node in self.objects::<ApiNode>("nodes")? {
            let mut node = convert::node(&node).map_err(|e| self.unusable(e))?;
            node.ready = true;
            names.push(node.name.clone());
            snapshot.nodes.insert(node.name.clone(), Arc::new(node));
        }
        Ok((snapshot, names))
    }

    /// What allocated claims take, and what is only stated.
    fn usage(&self) -> Result<Usage, ScenarioError> {
        let mut usage = Usage::default();
        for claim in self.objects::<api::ResourceClaim>("allocatedClaims")? {
            if let Some(allocation) = claim.status.and_then(|s| s.allocation) {
                self.add(&mut usage, &allocation)?;
            }
        }
        for list in ["devices", "sharedDevices", "consumed"] {
            let stated = |mut result: api::DeviceRequestAllocationResult| {
                result.request = "state".to_owned();
                if list != "devices" {
                    result.share_id.get_or_insert_with(|| "00000000-0000-0000-0000-000000000000".to_owned());
                }
                result
            };
            let results = self.objects_of(&self.value["allocatedState"][list], "allocatedState")?;
            let results = Some(results.into_iter().map(stated).collect());
            let devices = Some(api::DeviceAllocationResult { results, config: None });
            self.add(&mut usage, &api::AllocationResult { devices, ..Default::default() })?;
        }
        Ok(usage)
    }

    fn add(&self, usage: &mut Usage, allocation: &api::AllocationResult) -> Result<(), ScenarioError> {
        let allocated = convert::allocated(self.scenario, allocation).map_err(|e| self.unusable(e))?;
        usage.add(&allocated.results);
        Ok(())
    }
}
