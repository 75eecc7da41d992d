//! Filters that do not involve claims: cordon, taints, node selection, resources.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Node, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::affinity;
use super::cycle::Plugin;
use crate::api::quantity::{self, Nano};

/// Reason of one filter against a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    pub(super) plugin: Plugin,
    pub(super) text: String,
    /// True if the eviction of other pods could help.
    pub(super) preemption_helps: bool,
}

impl Reason {
    /// Returns a reason that no eviction changes.
    pub(super) fn new(plugin: Plugin, text: impl Into<String>) -> Self {
        Self { plugin, text: text.into(), preemption_helps: false }
    }
}

/// Amounts by resource name, in billionths.
pub(super) type Amounts = BTreeMap<String, i128>;

/// Returns the reasons of the filters before the claims' filter; empty if the node passes.
///
/// As upstream, the first rejecting filter ends the check, and a node short of several resources
/// reports all of them.
pub(super) fn check(pod: &Pod, node: &Node, used: &Usage) -> Vec<Reason> {
    let tolerations =
        pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
    let spec = node.spec.as_ref();
    if spec.is_some_and(|spec| spec.unschedulable == Some(true)) {
        let cordon = taint("node.kubernetes.io/unschedulable");
        if !is_tolerated(&cordon, tolerations) {
            return vec![Reason::new(Plugin::NodeUnschedulable, "node(s) were unschedulable")];
        }
    }
    let mut taints = spec.and_then(|spec| spec.taints.clone()).unwrap_or_default();
    if !is_ready(node) {
        // On a real cluster, the node life cycle controller turns the condition into this taint.
        taints.push(taint("node.kubernetes.io/not-ready"));
    }
    let hard = |taint: &&Taint| taint.effect == "NoSchedule" || taint.effect == "NoExecute";
    if taints.iter().filter(hard).any(|taint| !is_tolerated(taint, tolerations)) {
        return vec![Reason::new(Plugin::TaintToleration, "node(s) had untolerated taint(s)")];
    }
    if !affinity::pod_allows(pod, node) {
        return vec![Reason::new(
            Plugin::NodeAffinity,
            "node(s) didn't match Pod's node affinity/selector",
        )];
    }
    resources(pod, node, used)
}

fn taint(key: &str) -> Taint {
    Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() }
}

/// Returns true if the kubelet reports the node ready.
pub(super) fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn is_tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| {
        let effect = toleration.effect.as_deref().unwrap_or_default();
        let key = toleration.key.as_deref().unwrap_or_default();
        let value = toleration.value.as_deref().unwrap_or_default();
        let same_value = || value == taint.value.as_deref().unwrap_or_default();
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && match toleration.operator.as_deref().unwrap_or("Equal") {
                "Exists" => true,
                _ => !key.is_empty() && same_value(),
            }
    })
}

/// Sum of the requests of a node's pods.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    pub(super) pods: usize,
    pub(super) amounts: Amounts,
}

impl Usage {
    pub(super) fn add(&mut self, pod: &Pod) {
        self.pods += 1;
        for (name, amount) in requests(pod) {
            *self.amounts.entry(name).or_default() += amount;
        }
    }
}

fn resources(pod: &Pod, node: &Node, used: &Usage) -> Vec<Reason> {
    let mut reasons = Vec::new();
    let allocatable = allocatable(node);
    let pods = allocatable.get("pods").copied().unwrap_or_default();
    if (used.pods as i128 + 1) * 1_000_000_000 > pods {
        let reason = Reason::new(Plugin::NodeResourcesFit, "Too many pods");
        reasons.push(Reason { preemption_helps: true, ..reason });
    }
    for (name, wanted) in requests(pod) {
        let have = allocatable.get(&name).copied().unwrap_or_default();
        if wanted > 0 && used.amounts.get(&name).copied().unwrap_or_default() + wanted > have {
            let reason = Reason::new(Plugin::NodeResourcesFit, format!("Insufficient {name}"));
            reasons.push(Reason { preemption_helps: wanted <= have, ..reason });
        }
    }
    reasons
}

/// Returns the node's allocatable resources.
pub(super) fn allocatable(node: &Node) -> Amounts {
    amounts(node.status.as_ref().and_then(|status| status.allocatable.as_ref()))
}

fn amounts(list: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let parsed =
        |quantity: &Quantity| quantity::parse(&quantity.0).map_or(0, |Nano(amount)| amount);
    list.into_iter().flatten().map(|(name, quantity)| (name.clone(), parsed(quantity))).collect()
}

/// Returns a pod's requests: those of its containers together with restartable init containers, or
/// of the largest init container, plus overhead.
pub(super) fn requests(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
    let of = |container: &Container| {
        amounts(container.resources.as_ref().and_then(|resources| resources.requests.as_ref()))
    };
    let mut running = Amounts::new();
    let mut largest = Amounts::new();
    for container in spec.init_containers.iter().flatten() {
        let wanted = of(container);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut running, &wanted);
            raise_to(&mut largest, &running);
        } else {
            let mut together = running.clone();
            add(&mut together, &wanted);
            raise_to(&mut largest, &together);
        }
    }
    for container in &spec.containers {
        add(&mut running, &of(container));
    }
    raise_to(&mut running, &largest);
    add(&mut running, &amounts(spec.overhead.as_ref()));
    running
}

fn add(total: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *total.entry(name.clone()).or_default() += amount;
    }
}

fn raise_to(total: &mut Amounts, least: &Amounts) {
    for (name, amount) in least {
        let entry = total.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}
