//! Relocation: the pods to move to other devices so that a pod fits.
//!
//! As in a [preemption](crate::preemption), pods leave one node, but of any priority, and each of
//! them must fit elsewhere afterwards. Of all nodes, the one with the least loss is chosen on which
//! that holds. For each node only one set of pods is tried: the one that a preemption would evict.
//! Quotas restrict the pod, not those that are moved.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::NodeName;

use crate::model::{ClusterSnapshot, PendingPod, PodUid};
use crate::outcome::Decision;
use crate::plan::plan;
use crate::preemption::{
    Holder, NodeHolders, NodePreemption, Preemption, candidates, node_without,
};
use crate::settings::PlanSettings;

/// The most nodes whose pods are tried elsewhere, those with the least loss.
const MAX_CANDIDATES: usize = 100;

/// The result of [`relocate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocation {
    /// The devices that the pod gets after the moves.
    pub decision: Decision,
    /// The devices that each moved pod gets, the least important pod first.
    pub moves: Vec<Decision>,
}

/// Returns the moves after which the pod, without its group, fits, with the least loss; `None` if
/// there are none. `replacement` returns the pod that replaces a moved one, `None` if none would.
///
/// The cost is that of a preemption without priorities, and one plan of the cluster for each node
/// from which pods would have to move.
pub fn relocate(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &BTreeMap<NodeName, NodeHolders>,
    replacement: impl Fn(&PodUid) -> Option<PendingPod>,
    settings: PlanSettings,
) -> Option<Relocation> {
    // No priority keeps a pod from being moved.
    let urgent =
        PendingPod { priority: i32::MAX, together_with: Vec::new(), topology: None, ..pod.clone() };
    let alone = without_groups(holders);
    let mut found: Vec<NodePreemption> = candidates(snapshot, &urgent, &alone, settings).collect();
    found.retain(|candidate| !candidate.preemption.victims.is_empty());
    found.sort_by(|a, b| a.loss.cmp(&b.loss));
    let tried = found.into_iter().take(MAX_CANDIDATES);
    let mut relocations = tried.filter_map(|NodePreemption { preemption, .. }| {
        let [decision] = preemption.decisions.as_slice() else { return None };
        let holders = holders.get(&decision.node)?;
        let moved: Option<Vec<PendingPod>> = preemption.victims.iter().map(&replacement).collect();
        let moved = moved?;
        let after = after(snapshot, pod, holders, &preemption, decision);
        let settings = PlanSettings { reservation_delay: None, ..settings };
        let mut plan = plan(&after, &moved, settings);
        let order = |decision: &Decision| {
            preemption.victims.iter().position(|victim| *victim == decision.pod)
        };
        plan.decisions.sort_by_key(order);
        (plan.decisions.len() == moved.len())
            .then(|| Relocation { decision: decision.clone(), moves: plan.decisions })
    });
    relocations.next()
}

/// Returns the holders without their groups: a pod that moves has devices again at once, so the
/// others of its group stay.
fn without_groups(holders: &BTreeMap<NodeName, NodeHolders>) -> BTreeMap<NodeName, NodeHolders> {
    let mut alone = holders.clone();
    for holder in alone.values_mut().flat_map(|holders| &mut holders.pods) {
        holder.group = None;
    }
    alone
}

/// Returns the cluster once the pod has its devices and the victims are gone.
fn after(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &NodeHolders,
    preemption: &Preemption,
    decision: &Decision,
) -> ClusterSnapshot {
    let mut after = snapshot.clone();
    // They count the pods that are to be moved.
    after.quotas.clear();
    let freed = holders.claims.iter().filter(|claim| preemption.freed.contains(&claim.claim));
    freed.for_each(|claim| after.usage.remove(&claim.results));
    for claim in &decision.claims {
        after.usage.add(&claim.results);
    }
    let Some(node) = after.nodes.get_mut(&decision.node) else { return after };
    let victims: BTreeSet<&PodUid> = preemption.victims.iter().collect();
    let is_gone = |holder: &Holder| holder.is_ending || victims.contains(&holder.pod);
    let mut changed = node_without(node, holders, is_gone);
    for (name, amount) in &pod.scheduling.requests {
        let used = changed.used.entry(name.clone()).or_default();
        *used = used.checked_add(*amount).unwrap_or(*used);
    }
    *node = Arc::new(changed);
    after
}
