//! Compares the allocator's results with upstream's, case by case.
//!
//! *Exact* (the oracle's L2): outcome, error class, and every field of every result are equal; for
//! [`Policy::FirstFit`](tessera_allocator::Policy). *Outcome* (L1): the claims fit if and only if
//! they fit for upstream; for the other policies. `oracle compare --level L1` replays their
//! allocations on upstream from this program's results.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tessera_allocator::selector::SelectorError;
use tessera_allocator::{
    AllocateError, CapacityError, ClaimAllocation, Planner, Policy, RefusalCause, SearchFailure,
    UnsupportedFeature,
};
use tessera_api::names::{NodeName, ShareId};
use tessera_api::quantity::Quantity;
use tessera_index::convert;

use crate::scenario::Scenario;

/// Level of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComparisonLevel {
    /// Compares every field.
    Exact,
    /// Compares the outcome: fits, does not fit, or the class of the error.
    Outcome,
}

/// A node of a case for which the results differ.
#[derive(Debug, Clone)]
pub struct Difference {
    /// Name of the case.
    pub case: String,
    /// Name of the node.
    pub node: String,
    /// Upstream's result.
    pub expected: Value,
    /// Tessera's result.
    pub got: Value,
}

/// Step limit, after which the result is "aborted"; no golden case needs as many.
pub const STEPS: u64 = 5_000_000;

/// Returns the results of a scenario for every node, in the oracle's format.
pub fn answer(scenario: &Scenario, policy: Policy) -> BTreeMap<String, Value> {
    let mut planner = scenario.planner();
    let nodes = scenario.nodes.iter();
    nodes.map(|node| (node.to_string(), answer_on(scenario, &mut planner, node, policy))).collect()
}

fn answer_on(scenario: &Scenario, planner: &mut Planner, node: &NodeName, policy: Policy) -> Value {
    match planner.allocate_on(node, &scenario.claims, policy, STEPS) {
        Ok(claim_allocations) => allocations(scenario, &claim_allocations),
        Err(AllocateError::NoFit { invalid_pool: false }) => Value::Null,
        Err(AllocateError::NoFit { invalid_pool: true }) => {
            error("invalidPools", false, "an invalid pool")
        }
        Err(AllocateError::OutOfSteps) => error("aborted", true, "out of steps"),
        Err(AllocateError::Failed(failure)) => {
            error(class(&failure), true, &format!("{failure:?}"))
        }
    }
}

fn error(class: &str, fatal: bool, message: &str) -> Value {
    json!({"error": message, "class": class, "fatal": fatal})
}

/// Returns the oracle's name of a failure's class.
fn class(failure: &SearchFailure) -> &'static str {
    match failure {
        SearchFailure::Request(RefusalCause::UnknownClass { .. }) => "classNotFound",
        SearchFailure::Request(RefusalCause::NotSupported { what, .. }) => match what {
            UnsupportedFeature::Field(_) | UnsupportedFeature::Gate(_) => "featureDisabled",
            UnsupportedFeature::Selector => "selectorUnsupported",
            UnsupportedFeature::NoClass => "classMissing",
            UnsupportedFeature::Mode => "modeUnsupported",
            // Tessera's own check, which upstream does not have.
            UnsupportedFeature::MpsWithSeveralGpus => "configuration",
        },
        SearchFailure::Request(_) => "configuration",
        SearchFailure::Selector(
            SelectorError::Compile { .. } | SelectorError::Unsupported { .. },
        ) => "celCompile",
        SearchFailure::Selector(_) => "celRuntime",
        SearchFailure::Capacity(CapacityError::NotRepresentable { .. }) => {
            "capacityNotRepresentable"
        }
        SearchFailure::Capacity(CapacityError::Negative { .. }) => "capacityNegative",
        SearchFailure::AllViolatesConstraint(_) => "allConstraint",
        SearchFailure::AllWithIncompletePool(_) => "allPoolIncomplete",
        SearchFailure::AllWithInvalidPool(_) => "allPoolInvalid",
        SearchFailure::TooManyDevices(_) => "tooManyDevices",
        SearchFailure::UnknownConstraint => "constraintUnsupported",
        SearchFailure::NodeSelector(_) => "nodeSelectorInvalid",
    }
}

fn allocations(scenario: &Scenario, claim_allocations: &[ClaimAllocation]) -> Value {
    let classes: BTreeMap<String, &api::DeviceClass> =
        scenario.class_objects.iter().map(|(name, class)| (name.clone(), class)).collect();
    let mut shares = 0;
    let write = |(claim_allocation, claim): (&ClaimAllocation, &api::ResourceClaim)| {
        let share = || {
            shares += 1;
            ShareId::new(format!("00000000-0000-0000-0000-{shares:012}"))
                .expect("invariant: a UUID by its form")
        };
        let allocation = convert::allocation(
            claim_allocation,
            claim,
            &classes,
            None,
            Time(Timestamp::UNIX_EPOCH),
            share,
        );
        let mut value = serde_json::to_value(allocation).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            fields.remove("allocationTimestamp");
        }
        value
    };
    claim_allocations.iter().zip(&scenario.claim_objects).map(write).collect()
}

/// Compares results with upstream's.
pub fn compare(
    scenario: &Scenario,
    answers: &BTreeMap<String, Value>,
    level: ComparisonLevel,
) -> Vec<Difference> {
    let mut differences = Vec::new();
    for (node, expected) in &scenario.results {
        let got = answers.get(node).cloned().unwrap_or_default();
        let allowed = scenario.allowed.get(node).map(Vec::as_slice).unwrap_or_default();
        let same = match level {
            ComparisonLevel::Exact => is_exact(&got, expected),
            ComparisonLevel::Outcome => {
                outcome(&got) == outcome(expected) || allowed.contains(&outcome(&got))
            }
        };
        if !same {
            let (case, node) = (scenario.name.clone(), node.clone());
            differences.push(Difference { case, node, expected: expected.clone(), got });
        }
    }
    differences
}

fn is_exact(got: &Value, expected: &Value) -> bool {
    match (got, expected) {
        (Value::Object(got), Value::Object(expected)) => {
            got.get("class") == expected.get("class") && got.get("fatal") == expected.get("fatal")
        }
        _ => normalized(got) == normalized(expected),
    }
}

/// Returns the outcome: `fit`, `none` or `error:CLASS`.
fn outcome(answer: &Value) -> String {
    match answer {
        Value::Null => "none".to_owned(),
        Value::Object(error) => {
            format!("error:{}", error.get("class").and_then(Value::as_str).unwrap_or_default())
        }
        _ => "fit".to_owned(),
    }
}

/// Normalises a value: removes share IDs and time stamps, and makes quantities comparable.
fn normalized(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let fields = map.iter().filter(|(key, _)| *key != "allocationTimestamp");
            let normalized = fields.map(|(key, value)| (key.clone(), normalized_field(key, value)));
            normalized.filter(|(_, value)| !is_empty(value)).collect()
        }
        Value::Array(list) => list.iter().map(normalized).collect(),
        other => other.clone(),
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null()
        || value.as_array().is_some_and(Vec::is_empty)
        || value.as_object().is_some_and(|o| o.is_empty())
}

fn normalized_field(key: &str, value: &Value) -> Value {
    let amount = |v: &Value| {
        let quantity = v.as_str().and_then(|text| Quantity::parse(text).ok());
        quantity.map_or_else(|| v.clone(), |q| Value::String(q.nano().to_string()))
    };
    match (key, value) {
        ("shareID", _) => Value::Bool(true),
        ("consumedCapacity", Value::Object(map)) => {
            map.iter().map(|(name, v)| (name.clone(), amount(v))).collect()
        }
        _ => normalized(value),
    }
}
