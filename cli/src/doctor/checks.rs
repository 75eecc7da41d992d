//! The checks of `kubectl tessera doctor`. Each returns the problems that it finds.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Event, Pod};
use tessera_api::names::{DRIVER_NAME, FENCE_RULE};
use tessera_api::slice::{is_fence_of, is_fenced_by_rule};
use tessera_messages as message;

use super::{Problem, Severity};
use crate::explain::{ExtendedResource, Finding, NOT_MANAGED, PlanView, is_our_class, of_cluster};
use crate::output::count;
use crate::tree::GpuTree;

/// States of GPUs and nodes, each with its severity, its meaning and the next step.
const STATES: [(&str, Severity, &str, &str); 6] = [
    (
        "Overcommitted",
        Severity::Error,
        "more is allocated than the GPU publishes",
        "delete pods until the rest fits; `kubectl tessera tree` shows them",
    ),
    (
        "Unhealthy",
        Severity::Error,
        "the GPU has failed, and nothing is allocated on it",
        "read the taint in the node's ResourceSlice, and the events of the node",
    ),
    (
        "NotPublished",
        Severity::Error,
        "the GPU is allocated, and no ResourceSlice has it",
        "check the driver on the node; delete the pods if the GPU is gone",
    ),
    (
        NOT_MANAGED,
        Severity::Warning,
        "the GPU is not fenced, so kube-scheduler may allocate it, and Tessera does not",
        "wait for `stockDrainSeconds` after a change of the mode; otherwise see docs/operator/stock-mode.md",
    ),
    (
        "PoolIncomplete",
        Severity::Warning,
        "not all ResourceSlices of the node are there, so none of its GPUs is allocated",
        "check the driver on the node",
    ),
    (
        "Missing",
        Severity::Warning,
        "GPUs are published for a node that does not exist",
        "delete the node's ResourceSlices if it does not come back",
    ),
];

/// Runs all checks.
pub(super) fn all(
    view: &PlanView<'_>,
    tree: &GpuTree,
    refused: &[String],
    events: &[Event],
) -> Vec<Problem> {
    let mut problems = cluster(view);
    // In mode stock, all GPUs are without the taint: one line says so.
    let is_stock = problems.iter().any(|problem| problem.code == NOT_MANAGED);
    problems
        .extend(states(tree).into_iter().filter(|found| !is_stock || found.code != NOT_MANAGED));
    problems.extend(missing_fence(view));
    problems.extend(deleted_claims(tree));
    problems.extend(extended_resources(view));
    problems.extend(named_resources(view));
    problems.extend(unclaimed_gpus(events));
    problems.extend(refused.iter().map(|error| unreadable(error)));
    problems.extend(pending(view));
    problems.extend(not_read(view));
    problems
}

/// The controller runs, and GPUs are published.
fn cluster(view: &PlanView<'_>) -> Vec<Problem> {
    let problem = |finding: Finding| Problem {
        severity: if finding.code == NOT_MANAGED { Severity::Info } else { Severity::Error },
        code: finding.code.to_owned(),
        objects: Vec::new(),
        message: finding.message,
        hint: None,
    };
    of_cluster(view).into_iter().map(problem).collect()
}

/// GPUs and nodes are in a state in which they serve.
fn states(tree: &GpuTree) -> Vec<Problem> {
    let mut objects: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for node in &tree.nodes {
        for state in &node.state {
            objects.entry(state).or_default().push(format!("node {}", node.name));
        }
        for gpu in &node.gpus {
            for state in &gpu.state {
                objects.entry(state).or_default().push(format!("GPU {}/{}", node.name, gpu.device));
            }
        }
    }
    let problem = |(state, severity, meaning, hint): (&str, Severity, &str, &str)| {
        let objects = objects.remove(state)?;
        let (code, message) = (state.to_owned(), meaning.to_owned());
        Some(Problem { severity, code, objects, message, hint: Some(hint.to_owned()) })
    };
    STATES.into_iter().filter_map(problem).collect()
}

/// The DeviceTaintRule exists that slices rely on.
fn missing_fence(view: &PlanView<'_>) -> Option<Problem> {
    let snapshot = view.snapshot;
    let relying = snapshot.resource_slices.iter().filter(|slice| is_fenced_by_rule(slice));
    let nodes: BTreeSet<String> = relying
        .filter_map(|slice| slice.spec.node_name.as_ref())
        .map(|node| format!("node {node}"))
        .collect();
    let is_read = !snapshot.not_read.iter().any(|not| not.resource.starts_with("devicetaintrules"));
    let has_rule = snapshot.device_taint_rules.iter().any(|rule| is_fence_of(rule, DRIVER_NAME));
    (is_read && !has_rule && !nodes.is_empty()).then(|| Problem {
        severity: Severity::Error,
        code: "FenceMissing".to_owned(),
        objects: nodes.into_iter().collect(),
        message: format!(
            "no DeviceTaintRule keeps kube-scheduler from the GPUs: it tries to allocate them, and \
             only the policy tessera-allocation refuses that (the rule is {FENCE_RULE})"
        ),
        hint: Some(
            "the controller restores the rule: read its log, and apply the chart again".to_owned(),
        ),
    })
}

/// No pod uses devices of a claim that was deleted.
fn deleted_claims(tree: &GpuTree) -> Option<Problem> {
    let shares = tree.nodes.iter().flat_map(|node| &node.gpus).flat_map(|gpu| &gpu.shares);
    let gone: BTreeSet<String> = shares
        .filter(|share| share.claim_deleted)
        .map(|share| format!("claim {}/{}", share.namespace, share.claim))
        .collect();
    (!gone.is_empty()).then(|| Problem {
        severity: Severity::Error,
        code: "ClaimDeletedInUse".to_owned(),
        objects: gone.into_iter().collect(),
        message: "the claim was deleted while a pod uses it".to_owned(),
        hint: Some("delete the pod: another one may be given its devices".to_owned()),
    })
}

/// No pod waits for an extended resource that Tessera is not asked to serve. Another system may
/// serve its own.
fn extended_resources(view: &PlanView<'_>) -> Vec<Problem> {
    let mut pods: BTreeMap<(Severity, String, String), Vec<String>> = BTreeMap::new();
    for pod in view.snapshot.pods.iter().filter(|pod| is_waiting_without_claims(pod)) {
        if let Some(ExtendedResource { message, hint, is_ours }) = ExtendedResource::of(view, pod) {
            let severity = if is_ours { Severity::Warning } else { Severity::Info };
            let metadata = &pod.metadata;
            let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
            let name =
                format!("pod {}/{}", namespace.unwrap_or_default(), name.unwrap_or_default());
            pods.entry((severity, message, hint)).or_default().push(name);
        }
    }
    let problem = |((severity, message, hint), objects)| Problem {
        severity,
        code: "ExtendedResource".to_owned(),
        objects,
        message,
        hint: Some(hint),
    };
    pods.into_iter().map(problem).collect()
}

fn is_waiting_without_claims(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let has_claims = spec.is_some_and(|s| s.resource_claims.iter().flatten().next().is_some());
    let is_bound = spec.is_some_and(|spec| spec.node_name.is_some());
    !has_claims && !is_bound
}

/// In mode managed no class of Tessera's devices has the name of an extended resource.
fn named_resources(view: &PlanView<'_>) -> Option<Problem> {
    let devices = || view.cluster.slices.values().flat_map(|slice| &slice.devices);
    let is_managed = devices().any(|device| !device.is_unmanaged && !device.is_foreign);
    let classes = view.snapshot.device_classes.iter().filter_map(|class| {
        let name = class.metadata.name.as_deref().filter(|name| is_our_class(name))?;
        class.spec.as_ref()?.extended_resource_name.as_ref()?;
        Some(format!("deviceclass {name}"))
    });
    let objects: Vec<String> = classes.collect();
    (is_managed && !objects.is_empty()).then(|| Problem {
        severity: Severity::Warning,
        code: "ExtendedResourceName".to_owned(),
        objects,
        message: "kube-scheduler makes claims of the class's extendedResourceName itself, and may not \
                  allocate them in mode managed, so such pods are pending"
            .to_owned(),
        hint: Some(
            "remove extendedResourceName, and name the resource in dialects.settings.nvidia.resources"
                .to_owned(),
        ),
    })
}

/// No process uses a GPU without a claim.
fn unclaimed_gpus(events: &[Event]) -> Option<Problem> {
    let last = events.last()?;
    let nodes: BTreeSet<String> = events
        .iter()
        .filter_map(|event| event.involved_object.name.as_ref())
        .map(|name| format!("node {name}"))
        .collect();
    Some(Problem {
        severity: Severity::Warning,
        code: last.reason.clone().unwrap_or_default(),
        objects: nodes.into_iter().collect(),
        message: format!(
            "processes use more of a GPU than claims account for; the last event: {}",
            last.message.as_deref().unwrap_or_default()
        ),
        hint: Some(
            "a pod without a claim sees all GPUs if its image sets NVIDIA_VISIBLE_DEVICES and the \
             node's default runtime is NVIDIA's: set unclaimedGpus.hide"
                .to_owned(),
        ),
    })
}

fn unreadable(error: &str) -> Problem {
    Problem {
        severity: Severity::Warning,
        code: "ObjectIgnored".to_owned(),
        objects: Vec::new(),
        message: format!("an object cannot be read and is ignored: {error}"),
        hint: None,
    }
}

/// Pods that wait for GPUs, by the reason.
fn pending(view: &PlanView<'_>) -> Option<Problem> {
    let mut reasons: BTreeMap<&'static str, BTreeSet<String>> = BTreeMap::new();
    for refusal in &view.plan.refusals {
        let Some((namespace, name)) = view.index.pod_name(&refusal.pod) else { continue };
        let reason = message::refusal_reason(&refusal.cause).name();
        reasons.entry(reason).or_default().insert(format!("pod {namespace}/{name}"));
    }
    let objects: BTreeSet<String> = reasons.values().flatten().cloned().collect();
    let by_reason =
        reasons.iter().map(|(reason, pods)| format!("{reason}: {}", count(pods.len(), "pod")));
    let by_reason = by_reason.collect::<Vec<_>>().join(", ");
    (!objects.is_empty()).then(|| Problem {
        severity: Severity::Info,
        code: "PodsPending".to_owned(),
        message: format!("pods wait for GPUs ({by_reason})"),
        objects: objects.into_iter().collect(),
        hint: Some(
            "`kubectl tessera explain pod NAME -n NAMESPACE` says what each lacks".to_owned(),
        ),
    })
}

/// Kinds that could not be read: what depends on them was not checked.
fn not_read(view: &PlanView<'_>) -> Vec<Problem> {
    let problem = |not: &crate::snapshot::NotRead| Problem {
        severity: Severity::Info,
        code: "NotChecked".to_owned(),
        objects: Vec::new(),
        message: format!("what depends on {} was not checked: {}", not.resource, not.because),
        hint: None,
    };
    view.snapshot.not_read.iter().map(problem).collect()
}
