//! One pod's scheduling cycle. Pure: from the cluster's state to a node or the reasons against all
//! nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;

use super::affinity;
use super::allocation::{Allocations, Allocator, Devices};
use super::conditions::Conditions;
use super::filter::{self, Reason, Usage};
use crate::pod_claim;

/// Filters that can reject a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Plugin {
    NodeUnschedulable,
    TaintToleration,
    NodeAffinity,
    NodeResourcesFit,
    DynamicResources,
}

impl Plugin {
    pub(super) const ALL: [Self; 5] = [
        Self::NodeUnschedulable,
        Self::TaintToleration,
        Self::NodeAffinity,
        Self::NodeResourcesFit,
        Self::DynamicResources,
    ];
}

/// Cluster state on which the decision is based.
pub(super) struct ClusterState<'a> {
    pub(super) nodes: Vec<&'a Node>,
    pub(super) pods: Vec<&'a Pod>,
    /// All claims, whose allocations use the devices.
    pub(super) claims: Vec<&'a Arc<ResourceClaim>>,
    pub(super) devices: &'a Devices,
}

/// Result of a scheduling cycle.
#[derive(Debug)]
pub(super) enum Verdict {
    Fits {
        node: String,
        /// Allocations of the pod's unallocated claims on that node.
        allocations: Allocations,
    },
    /// The cycle failed.
    Error(String),
    NoFit(Failure),
}

/// Reasons why no node fits, and the action of PostFilter.
#[derive(Debug)]
pub(super) struct Failure {
    /// Message before the part of PostFilter, with its final dot.
    pub(super) message: String,
    /// Message of preemption.
    pub(super) preemption: String,
    pub(super) plugins: BTreeSet<Plugin>,
    /// Index of the claim to deallocate.
    pub(super) deallocate: Option<usize>,
}

pub(super) fn decide(
    pod: &Pod,
    claims: &[Arc<ResourceClaim>],
    cluster: &ClusterState<'_>,
) -> Verdict {
    let total = cluster.nodes.len();
    if total == 0 {
        return Verdict::Error("no nodes available to schedule pods".to_owned());
    }
    if let Some(reason) = missing_class(claims, cluster.devices) {
        return Verdict::NoFit(Failure {
            message: format!("0/{total} nodes are available: {reason}."),
            preemption: preemption(total, 0),
            plugins: [Plugin::DynamicResources].into(),
            deallocate: None,
        });
    }
    let usage = usage(pod, cluster);
    let allocator = match Allocator::new(cluster.devices, claims, cluster.claims.iter().copied()) {
        Ok(allocator) => allocator,
        Err(error) => return Verdict::Error(error.to_string()),
    };
    let mut filtering = Filtering {
        pod,
        claims,
        allocator,
        unavailable: BTreeSet::new(),
        allocations: BTreeMap::new(),
    };
    let nominated = pod.status.as_ref().and_then(|status| status.nominated_node_name.as_deref());
    let mut fitting = Vec::new();
    let mut rejected = Vec::new();
    for node in &cluster.nodes {
        let name = node.name_any();
        let used = usage.get(&name).cloned().unwrap_or_default();
        let reasons = filtering.check(node, &used);
        if !reasons.is_empty() {
            rejected.push(reasons);
        } else if nominated == Some(&name) {
            return filtering.accept(name);
        } else {
            fitting.push((load(pod, node, &used), name));
        }
    }
    // The least requested node; ties are broken by name.
    fitting.sort();
    if let Some((_, node)) = fitting.into_iter().next() {
        return filtering.accept(node);
    }
    let helped = rejected
        .iter()
        .filter(|reasons| reasons.iter().any(|reason| reason.preemption_helps))
        .count();
    Verdict::NoFit(Failure {
        message: message(total, &rejected),
        preemption: preemption(total, helped),
        plugins: rejected.iter().flatten().map(|reason| reason.plugin).collect(),
        deallocate: filtering.deallocatable(),
    })
}

struct Filtering<'a> {
    pod: &'a Pod,
    claims: &'a [Arc<ResourceClaim>],
    /// `Some` if a claim is unallocated.
    allocator: Option<Allocator<'a>>,
    /// Claims that were unavailable on a node checked by this filter.
    unavailable: BTreeSet<usize>,
    /// Allocations by node.
    allocations: BTreeMap<String, Allocations>,
}

impl Filtering<'_> {
    fn accept(mut self, node: String) -> Verdict {
        let allocations = self.allocations.remove(&node).unwrap_or_default();
        Verdict::Fits { node, allocations }
    }

    fn check(&mut self, node: &Node, used: &Usage) -> Vec<Reason> {
        let reasons = filter::check(self.pod, node, used);
        if !reasons.is_empty() {
            // The filter for claims runs later and does not check this node.
            return reasons;
        }
        let elsewhere: Vec<usize> =
            (0..self.claims.len()).filter(|index| !self.available(*index, node)).collect();
        if let Some(allocator) = &self.allocator {
            match allocator.allocate(node) {
                Some(allocations) => drop(self.allocations.insert(node.name_any(), allocations)),
                None => {
                    return vec![Reason::new(
                        Plugin::DynamicResources,
                        "cannot allocate all claims",
                    )];
                }
            }
        }
        if elsewhere.is_empty() {
            return Vec::new();
        }
        self.unavailable.extend(elsewhere);
        vec![Reason::new(Plugin::DynamicResources, "resourceclaim not available on the node")]
    }

    fn available(&self, index: usize, node: &Node) -> bool {
        if Conditions::of(&self.claims[index]) == Conditions::Failed {
            return false;
        }
        let allocation =
            self.claims[index].status.as_ref().and_then(|status| status.allocation.as_ref());
        let selector = allocation.and_then(|allocation| allocation.node_selector.as_ref());
        selector.is_none_or(|selector| affinity::matches(selector, node))
    }

    /// Returns the first claim that was unavailable on some node and is used by no other pod.
    ///
    /// The real scheduler picks one at random.
    fn deallocatable(&self) -> Option<usize> {
        let uid = self.pod.metadata.uid.as_deref().unwrap_or_default();
        self.unavailable.iter().copied().find(|index| {
            pod_claim::reserved_for(&self.claims[*index]).iter().all(|consumer| consumer.uid == uid)
        })
    }
}

fn missing_class(claims: &[Arc<ResourceClaim>], devices: &Devices) -> Option<String> {
    let unallocated = claims.iter().filter(|claim| !pod_claim::is_allocated(claim));
    let requests = unallocated
        .filter_map(|claim| claim.spec.as_ref()?.devices.as_ref()?.requests.as_ref())
        .flatten();
    for request in requests {
        let exactly = request
            .exactly
            .iter()
            .map(|exactly| (request.name.clone(), &exactly.device_class_name));
        let alternatives = request.first_available.iter().flatten();
        let alternatives = alternatives
            .map(|sub| (format!("{}/{}", request.name, sub.name), &sub.device_class_name));
        for (name, class) in exactly.chain(alternatives) {
            if !devices.has_class(class) {
                return Some(format!("request {name}: device class {class} does not exist"));
            }
        }
    }
    None
}

fn usage(pod: &Pod, cluster: &ClusterState<'_>) -> BTreeMap<String, Usage> {
    let mut usage: BTreeMap<String, Usage> = BTreeMap::new();
    for other in &cluster.pods {
        let Some(node) = pod_claim::node_name(other) else { continue };
        if !pod_claim::is_terminal(other) && other.metadata.uid != pod.metadata.uid {
            usage.entry(node.to_owned()).or_default().add(other);
        }
    }
    usage
}

/// Returns the mean share of cpu and memory in use with the pod, in millionths.
fn load(pod: &Pod, node: &Node, used: &Usage) -> i128 {
    let (allocatable, wanted) = (filter::allocatable(node), filter::requests(pod));
    let amount =
        |amounts: &filter::Amounts, name: &str| amounts.get(name).copied().unwrap_or_default();
    let share = |name: &str| {
        let (have, need) =
            (amount(&allocatable, name), amount(&used.amounts, name) + amount(&wanted, name));
        if have == 0 { 0 } else { need * 1_000_000 / have }
    };
    (share("cpu") + share("memory")) / 2
}

/// Returns a message like `0/3 nodes are available: 1 Insufficient cpu, 2 cannot allocate all
/// claims.`
fn message(total: usize, rejected: &[Vec<Reason>]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in rejected.iter().flatten() {
        *counts.entry(&reason.text).or_default() += 1;
    }
    let mut parts: Vec<String> =
        counts.into_iter().map(|(text, count)| format!("{count} {text}")).collect();
    parts.sort();
    format!("0/{total} nodes are available: {}.", parts.join(", "))
}

fn preemption(total: usize, helped: usize) -> String {
    let mut parts = Vec::new();
    if helped > 0 {
        parts.push(format!("{helped} No preemption victims found for incoming pod"));
    }
    if total > helped {
        parts.push(format!("{} Preemption is not helpful for scheduling", total - helped));
    }
    parts.sort();
    format!("preemption: 0/{total} nodes are available: {}", parts.join(", "))
}
