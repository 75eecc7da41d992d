//! What planning is asked with.

use crate::features::Features;
use crate::model::{PendingPod, Snapshot};
use crate::outcome::Plan;
use crate::planner::Planner;
use crate::policy::Policy;

/// What the caller decides about a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Devices that may be looked at for one pod, on all nodes together. Beyond that the pod is
    /// "not decided".
    pub steps_per_pod: u64,
    /// Devices that may be looked at in one plan, but no fewer than for one pod. Pods that it does
    /// not reach are [`Plan::unreached`].
    pub steps_per_plan: u64,
    /// The policy of pods whose configuration names none.
    pub policy: Policy,
    /// For policies that draw lots.
    pub seed: u64,
    /// The time, in seconds since the epoch: what [`PendingPod::created`] is compared with.
    pub now: i64,
    /// How many seconds a pod waits at least before a node is kept free for it: see [`plan`]. None
    /// = no node is kept.
    pub patience: Option<u32>,
}

/// How many seconds a pod waits before a node is kept free for it, unless the caller says something
/// else.
const PATIENCE: u32 = 300;

impl Default for Settings {
    fn default() -> Self {
        Self {
            steps_per_pod: 1_000_000,
            steps_per_plan: u64::MAX,
            policy: Policy::default(),
            seed: 0,
            now: 0,
            patience: Some(PATIENCE),
        }
    }
}

/// Decides for each pod on which node its pending claims get which devices, or says why it has to
/// wait.
///
/// Pods are taken by priority, then age, then namespace and name; what one gets is gone for the
/// next. All pending claims of a pod are placed on one node, or none is. The same arguments give
/// the same plan. Whoever plans again and again keeps a [`Planner`] instead.
///
/// Where the steps of a plan end before all pods are reached, the namespaces that have spent the
/// most come last in the plans after it, until one has reached all pods: a namespace whose requests
/// are expensive waits for itself.
///
/// One node at most is kept free ([`Plan::kept`]): for the first pod in this order that has waited
/// for longer than [`Settings::patience`] and lacks nothing but what others hold, where it would
/// fit once they have given that back. Pods that come later in the order do not go there. It is
/// kept for a while, then not for as long, then for twice as long, and so on: a pod that never fits
/// keeps others from a node for half of the time at most.
pub fn plan(snapshot: &Snapshot, pods: &[PendingPod], settings: Settings) -> Plan {
    Planner::of(snapshot, Features::default()).plan(pods, settings)
}
