//! `kubectl tessera defrag`: the pods to move so that a pending pod fits.
//!
//! Free capacity in pieces serves no pod that needs a whole GPU. The plan names pods of any
//! priority on one node whose devices the pod would get, and where each of them fits afterwards.
//! With `--apply` the GPUs are cordoned until the pods have left, and their owners create them
//! again.

mod apply;
mod likely;

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::preemption::NodeHolders;
use tessera_allocator::relocation::{Relocation, relocate};
use tessera_allocator::{ClaimAllocation, Decision};
use tessera_api::names::{DRIVER_NAME, Namespace, NodeName, PodName};

pub use self::apply::{Apply, ApplyError, ApplyOptions};
pub use self::likely::{LikelyRequest, likely_requests, requests_text};
use crate::explain::PlanView;
use crate::output::{Table, count};

/// The moves after which a pod fits.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Defragmentation {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The result, in one word.
    pub result: DefragmentationResult,
    /// The node where the pod gets its devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The GPUs that the pod gets.
    pub devices: Vec<String>,
    /// The pods to move, the least important first.
    pub moves: Vec<PodMove>,
}

/// The result of the search for moves, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum DefragmentationResult {
    /// The pod fits without moves.
    Fits,
    /// The pod fits after the moves.
    FitsAfterMoves,
    /// No moves from one node help.
    DoesNotFit,
}

/// A pod to move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodMove {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Its priority.
    pub priority: i32,
    /// Its node.
    pub from: String,
    /// The devices that it leaves.
    pub devices: Vec<String>,
    /// The node where it fits afterwards. The controller decides when the pod is created again.
    pub to: String,
}

/// Errors of the search.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DefragmentError {
    /// The pod does not wait for devices.
    #[error(
        "pod {namespace}/{pod} does not wait for devices of Tessera; see `kubectl tessera explain \
         pod {pod} -n {namespace}`"
    )]
    NotPending {
        /// The namespace.
        namespace: Namespace,
        /// The pod.
        pod: PodName,
    },
    /// The pod is of a group.
    #[error(
        "pod {namespace}/{pod} is of a pod group of several nodes: moves are searched for single \
         pods only"
    )]
    Group {
        /// The namespace.
        namespace: Namespace,
        /// The pod.
        pod: PodName,
    },
}

/// Searches the moves for a pending pod.
///
/// # Errors
/// [`DefragmentError`].
pub fn defragment(
    view: &PlanView<'_>,
    namespace: &Namespace,
    pod: &PodName,
) -> Result<Defragmentation, DefragmentError> {
    let is_it = |pending: &&PendingPod| pending.namespace == *namespace && pending.name == *pod;
    let Some(pending) = view.work.pending.iter().find(is_it) else {
        return Err(DefragmentError::NotPending { namespace: namespace.clone(), pod: pod.clone() });
    };
    if pending.is_group() {
        return Err(DefragmentError::Group { namespace: namespace.clone(), pod: pod.clone() });
    }
    Ok(moves_for(view, pending, &view.index.holders()))
}

/// Searches the moves for a pod, which need not exist.
fn moves_for(
    view: &PlanView<'_>,
    pending: &PendingPod,
    holders: &BTreeMap<NodeName, NodeHolders>,
) -> Defragmentation {
    let report = |result, decision: Option<&Decision>, moves| Defragmentation {
        namespace: pending.namespace.to_string(),
        pod: pending.name.to_string(),
        result,
        node: decision.map(|decision| decision.node.to_string()),
        devices: decision.map(devices).unwrap_or_default(),
        moves,
    };
    let alone = view.plan_alone(std::slice::from_ref(pending));
    if let Some(decision) = alone.decisions.first() {
        return report(DefragmentationResult::Fits, Some(decision), Vec::new());
    }
    let replacement = |pod: &PodUid| view.index.replacement_of(pod);
    let found = relocate(&view.cluster, pending, holders, replacement, view.settings);
    let Some(Relocation { decision, moves }) = found else {
        return report(DefragmentationResult::DoesNotFit, None, Vec::new());
    };
    let of_node = holders.get(&decision.node);
    let priorities: BTreeMap<&PodUid, i32> = of_node
        .iter()
        .flat_map(|holders| &holders.pods)
        .map(|holder| (&holder.pod, holder.priority))
        .collect();
    let moved = |to: &Decision| {
        let (namespace, name) = view.index.pod_name(&to.pod)?;
        let claims = of_node.iter().flat_map(|holders| &holders.claims);
        let held = claims.filter(|claim| claim.users.contains(&to.pod));
        let devices = held.flat_map(|claim| &claim.results).map(|r| r.device.device.to_string());
        Some(PodMove {
            namespace: namespace.to_string(),
            pod: name.to_string(),
            uid: to.pod.to_string(),
            priority: priorities.get(&to.pod).copied().unwrap_or_default(),
            from: decision.node.to_string(),
            devices: devices.collect(),
            to: to.node.to_string(),
        })
    };
    let moves = moves.iter().filter_map(moved).collect();
    report(DefragmentationResult::FitsAfterMoves, Some(&decision), moves)
}

/// Returns the GPUs of a decision.
fn devices(decision: &Decision) -> Vec<String> {
    let results = decision.claims.iter().flat_map(|claim: &ClaimAllocation| &claim.results);
    let ours = results.filter(|result| result.device.pool.driver.as_str() == DRIVER_NAME);
    ours.map(|result| result.device.device.to_string()).collect()
}

/// Returns the result as text.
#[must_use]
pub fn text(found: &Defragmentation) -> String {
    let pod = format!("pod {}/{}", found.namespace, found.pod);
    let place = found.node.as_ref().map(|node| format!("{node}: {}", found.devices.join(", ")));
    let place = place.unwrap_or_default();
    match found.result {
        DefragmentationResult::Fits => format!("{pod} fits without moves on {place}\n"),
        DefragmentationResult::DoesNotFit => format!(
            "{pod} does not fit, and no moves from one node help; see `kubectl tessera explain pod \
             {} -n {}`\n",
            found.pod, found.namespace
        ),
        DefragmentationResult::FitsAfterMoves => {
            let mut table = Table::new(Some(&["POD", "PRIORITY", "FROM", "DEVICES", "TO"]));
            for one in &found.moves {
                table.row(vec![
                    format!("{}/{}", one.namespace, one.pod),
                    one.priority.to_string(),
                    one.from.clone(),
                    one.devices.join(","),
                    one.to.clone(),
                ]);
            }
            let moves = count(found.moves.len(), "pod");
            format!("{pod} fits on {place}\nonce {moves} moved:\n\n{}", table.render())
        }
    }
}
