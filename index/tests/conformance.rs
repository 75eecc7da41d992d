//! The golden cases of upstream's allocator (`../shared/conformance` beside the repository), as far as this version goes.
//!
//! Whatever we allocate, upstream must allocate as well; with the policy `FirstFit` it must be the very same. Where upstream
//! allocates and we do not, the reason must say that something is not supported.
//!
//! `TESSERA_CONFORMANCE_CASES` names another folder of cases, such as a fresh set from `oracle generate --seed N`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;
use tessera_allocator::model::{PendingPod, PodClaim, PodUid, Scheduling, Snapshot, Usage};
use tessera_allocator::{Cause, Decision, Plan, Policy, Refusal, Settings, plan};
use tessera_api::names::{Namespace, PodName, ShareId};
use tessera_api::quantity::Quantity;
use tessera_api::reason::Reason;
use tessera_index::convert::{self, Fence};

/// What is compared with upstream in each case.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    /// The outcome and every field of the result.
    Exact,
    /// The outcome.
    Outcome,
}

#[derive(Debug, Default)]
struct Score {
    nodes: u32,
    fits: u32,
    not_supported: u32,
    wrong: Vec<String>,
}

#[test]
fn first_fit_gives_upstreams_very_result() {
    run(Policy::FirstFit, Level::Exact);
}

#[test]
fn binpack_allocates_where_upstream_does() {
    run(Policy::Binpack, Level::Outcome);
}

#[test]
fn spread_allocates_where_upstream_does() {
    run(Policy::Spread, Level::Outcome);
}

fn run(policy: Policy, level: Level) {
    let given = std::env::var_os("TESSERA_CONFORMANCE_CASES").map(PathBuf::from);
    let folder =
        given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/conformance/cases"));
    let Ok(entries) = std::fs::read_dir(&folder) else {
        eprintln!("SKIPPED: no conformance cases at {}", folder.display());
        return;
    };
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    files.sort();
    let mut wrong = Vec::new();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "jsonl")) {
        let mut score = Score::default();
        for line in std::fs::read_to_string(file).unwrap().lines() {
            case(&serde_json::from_str(line).unwrap(), policy, level, &mut score);
        }
        let name = file.file_stem().unwrap().to_string_lossy();
        let Score { nodes, fits, not_supported, wrong: errors } = score;
        println!(
            "{name:>16}: {nodes} nodes, {fits} fits, {not_supported} not supported, {} wrong",
            errors.len()
        );
        wrong.extend(errors);
    }
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
}

fn case(case: &Value, policy: Policy, level: Level, score: &mut Score) {
    // Another set of gates is another allocator.
    if case.get("features").is_some() {
        return;
    }
    let world = World::read(case);
    // Where a device or a pool cannot be used by us, the first fit is another one.
    let level =
        if world.has_unsupported_devices() || world.slices_disagree() { Level::Outcome } else { level };
    for (node, expected) in case["results"].as_object().unwrap() {
        score.nodes += 1;
        let allowed: Vec<&str> =
            case["allowed"][node].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let plan = world.plan(node, policy);
        let complaint = match (plan.decisions.as_slice(), expected.as_array()) {
            ([decision], Some(golden)) => {
                score.fits += 1;
                let got = world.allocations(decision);
                (level == Level::Exact && normal(&got) != normal(&Value::Array(golden.clone())))
                    .then(|| format!("got {got}\nnot {expected}"))
            }
            ([_], None) if !allowed.contains(&"fit") => Some(format!("allocated, upstream says {expected}")),
            ([_], None) => None,
            ([], Some(_)) if world.slices_disagree() || plan.refusals.iter().any(is_not_supported) => {
                score.not_supported += 1;
                None
            }
            ([], Some(_)) if level == Level::Outcome && allowed.iter().any(|a| *a != "fit") => None,
            ([], Some(_)) => Some(format!("refused: {:?}", plan.refusals)),
            ([], None) => None,
            _ => Some("more than one decision for one pod".to_owned()),
        };
        score.wrong.extend(complaint.map(|c| format!("{} on {node}: {c}", case["name"])));
    }
}

fn is_not_supported(refusal: &Refusal) -> bool {
    match &refusal.cause {
        Cause::NotSupported { .. } => true,
        Cause::NoFit(explanation) => explanation.tallies().any(|(reason, _)| match reason {
            Reason::Unsupported { .. } => true,
            Reason::SelectorError { message } => message.contains("not supported in this version"),
            _ => false,
        }),
        _ => false,
    }
}

/// One case in the allocator's terms.
struct World {
    snapshot: Snapshot,
    pod: PendingPod,
    claims: Vec<api::ResourceClaim>,
    classes: Vec<api::DeviceClass>,
}

impl World {
    fn read(case: &Value) -> Self {
        let mut claims: Vec<api::ResourceClaim> = objects(case, "claims");
        for (i, claim) in claims.iter_mut().enumerate() {
            claim.metadata.uid = Some(format!("uid-{i}"));
        }
        let classes: Vec<api::DeviceClass> = objects(case, "deviceClasses");
        let slices: Vec<api::ResourceSlice> = objects(case, "resourceSlices");
        let nodes: Vec<ApiNode> = objects(case, "nodes");
        let slices = slices.iter().map(|s| convert::slice(s, Fence::None).unwrap());
        let nodes = nodes.iter().map(|n| {
            let mut node = convert::node(n).unwrap();
            node.ready = true;
            node
        });
        let read = |c: &api::ResourceClaim| PodClaim::Pending(Arc::new(convert::claim(c).unwrap()));
        Self {
            snapshot: Snapshot {
                nodes: nodes.map(|n| (n.name.clone(), Arc::new(n))).collect(),
                slices: slices.map(|s| (s.name.clone(), Arc::new(s))).collect(),
                classes: classes
                    .iter()
                    .map(|c| convert::class(c).unwrap())
                    .map(|c| (c.name.clone(), Arc::new(c)))
                    .collect(),
                usage: usage(case),
            },
            pod: PendingPod {
                uid: PodUid::new("pod"),
                namespace: Namespace::new("default").unwrap(),
                name: PodName::new("pod").unwrap(),
                priority: 0,
                created: 0,
                claims: claims.iter().map(read).collect(),
                scheduling: Arc::new(Scheduling::default()),
                nominated: None,
                excluded: Default::default(),
            },
            claims,
            classes,
        }
    }

    /// Slices of one generation of a pool that differ in how many they are: upstream's answer depends on the order in
    /// which it meets them, ours is to wait.
    fn slices_disagree(&self) -> bool {
        let mut counts = BTreeMap::new();
        let mut slices = self.snapshot.slices.values();
        slices.any(|s| *counts.entry((&s.pool, s.generation)).or_insert(s.slice_count) != s.slice_count)
    }

    fn has_unsupported_devices(&self) -> bool {
        self.snapshot.slices.values().any(|s| s.counters || s.devices.iter().any(|d| d.unsupported.is_some()))
    }

    fn plan(&self, node: &str, policy: Policy) -> Plan {
        let mut snapshot = self.snapshot.clone();
        snapshot.nodes.retain(|name, _| name.as_str() == node);
        plan(&snapshot, std::slice::from_ref(&self.pod), Settings { policy, ..Settings::default() })
    }

    fn allocations(&self, decision: &Decision) -> Value {
        let classes: BTreeMap<String, &api::DeviceClass> =
            self.classes.iter().map(|c| (c.metadata.name.clone().unwrap(), c)).collect();
        let mut shares = 0;
        let write = |(allotment, claim)| {
            let share = || {
                shares += 1;
                ShareId::new(format!("00000000-0000-0000-0000-{shares:012}")).unwrap()
            };
            let at = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
            serde_json::to_value(convert::allocation(allotment, claim, &classes, at, share)).unwrap()
        };
        decision.claims.iter().zip(&self.claims).map(write).collect()
    }
}

fn usage(case: &Value) -> Usage {
    let mut usage = Usage::default();
    for claim in objects::<api::ResourceClaim>(case, "allocatedClaims") {
        if let Some(allocation) = claim.status.and_then(|s| s.allocation) {
            usage.add(&convert::allocated("old", &allocation).unwrap().results);
        }
    }
    let state = &case["allocatedState"];
    for list in ["devices", "sharedDevices", "consumed"] {
        let results: Vec<api::DeviceRequestAllocationResult> = objects(state, list);
        let allocation = api::AllocationResult {
            devices: Some(api::DeviceAllocationResult {
                results: Some(results.into_iter().map(|r| stated(r, list)).collect()),
                config: None,
            }),
            ..Default::default()
        };
        usage.add(&convert::allocated("state", &allocation).unwrap().results);
    }
    usage
}

/// A result for a state that no claim can produce.
fn stated(mut result: api::DeviceRequestAllocationResult, list: &str) -> api::DeviceRequestAllocationResult {
    result.request = "state".to_owned();
    if list != "devices" {
        result.share_id.get_or_insert_with(|| "00000000-0000-0000-0000-000000000000".to_owned());
    }
    result
}

fn objects<T: serde::de::DeserializeOwned>(case: &Value, field: &str) -> Vec<T> {
    case.get(field)
        .filter(|v| !v.is_null())
        .map(|v| serde_json::from_value(v.clone()).unwrap())
        .unwrap_or_default()
}

/// Without what differs in spelling only: share IDs, quantities, time stamps.
fn normal(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.iter().filter(|(key, _)| *key != "allocationTimestamp");
            let normal = kept.map(|(key, value)| (key.clone(), normal_field(key, value)));
            normal.filter(|(_, value)| !is_empty(value)).collect()
        }
        Value::Array(list) => list.iter().map(normal).collect(),
        other => other.clone(),
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null()
        || value.as_array().is_some_and(Vec::is_empty)
        || value.as_object().is_some_and(|o| o.is_empty())
}

fn normal_field(key: &str, value: &Value) -> Value {
    let amount = |v: &Value| Value::String(Quantity::parse(v.as_str().unwrap()).unwrap().nano().to_string());
    match (key, value) {
        ("shareID", _) => Value::Bool(true),
        ("consumedCapacity", Value::Object(map)) => {
            map.iter().map(|(name, v)| (name.clone(), amount(v))).collect()
        }
        _ => normal(value),
    }
}
