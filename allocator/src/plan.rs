//! Entry point of planning.

use crate::features::FeatureGates;
use crate::model::{ClusterSnapshot, PendingPod};
use crate::outcome::AllocationPlan;
use crate::planner::Planner;
use crate::settings::PlanSettings;

/// Decides for each pod which devices its pending claims get on which node, or why none.
///
/// Pods are planned by priority, then age, then namespace and name. A decision reduces the capacity
/// for the pods after it. All pending claims of a pod are allocated on one node, or none of them.
/// Equal arguments give equal plans. For repeated planning use a [`Planner`], which caches results.
///
/// If the steps of a plan are spent before all pods are reached, namespaces that consumed the most
/// steps come last in the following plans, until a plan reaches all pods. So expensive requests
/// delay only their own namespace.
///
/// At most one node is reserved ([`AllocationPlan::reserved`]), to avoid starvation: for the first
/// pod in this order that has waited longer than [`PlanSettings::reservation_delay`], that lacks
/// only capacity held by other pods, and that would fit on the node after they release it. Pods
/// that come later in the order are not placed there. The reservation alternates with pauses, and
/// both double in length, so a pod that never fits blocks a node for at most half of the time.
pub fn plan(
    snapshot: &ClusterSnapshot,
    pods: &[PendingPod],
    settings: PlanSettings,
) -> AllocationPlan {
    Planner::from_snapshot(snapshot, FeatureGates::default()).plan(pods, settings)
}
