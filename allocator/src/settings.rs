//! Settings of planning.

use crate::policy::Policy;

/// Settings of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanSettings {
    /// Maximum number of devices tested for one pod, on all nodes and in successive plans. Beyond
    /// it the pod is undecided.
    pub steps_per_pod: u64,
    /// Number of devices tested after which a plan ends. Pods beyond it, and a pod whose search
    /// has not ended, are listed in
    /// [`AllocationPlan::unreached`](crate::AllocationPlan::unreached). A search of one node
    /// that needs more steps gets them in a plan of its own, up to `steps_per_pod`.
    pub steps_per_plan: u64,
    /// Steps of a plan to renew the reasons of pods that were refused before with their class. A
    /// class beyond them keeps reasons of an earlier plan, and
    /// [`AllocationPlan::has_old_reasons`](crate::AllocationPlan::has_old_reasons) is true. `None`
    /// renews all reasons.
    pub steps_for_reasons: Option<u64>,
    /// Policy of pods whose configuration sets none.
    pub policy: Policy,
    /// Seed of randomized policies.
    pub seed: u64,
    /// Current time, in seconds since the epoch.
    ///
    /// It is compared with [`PendingPod::created`](crate::model::PendingPod::created).
    pub now: i64,
    /// Minimum waiting time before a node is reserved for a pod, in seconds: see
    /// [`plan`](crate::plan()). `None` disables reservations.
    pub reservation_delay: Option<u32>,
}

/// Default of [`PlanSettings::reservation_delay`], in seconds.
const DEFAULT_MIN_WAIT: u32 = 300;

impl Default for PlanSettings {
    fn default() -> Self {
        Self {
            steps_per_pod: 1_000_000,
            steps_per_plan: u64::MAX,
            steps_for_reasons: None,
            policy: Policy::default(),
            seed: 0,
            now: 0,
            reservation_delay: Some(DEFAULT_MIN_WAIT),
        }
    }
}
