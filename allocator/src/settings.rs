//! Settings of planning.

use crate::policy::Policy;

/// Settings of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Maximum number of devices tested for one pod, on all nodes. Beyond it the pod is undecided.
    pub steps_per_pod: u64,
    /// Maximum number of devices tested in one plan, but at least `steps_per_pod`. Pods beyond it
    /// are listed in [`Plan::unreached`](crate::Plan::unreached).
    pub steps_per_plan: u64,
    /// Policy of pods whose configuration sets none.
    pub policy: Policy,
    /// Seed of randomized policies.
    pub seed: u64,
    /// Current time, in seconds since the epoch; compared with
    /// [`PendingPod::created`](crate::model::PendingPod::created).
    pub now: i64,
    /// Minimum waiting time before a node is reserved for a pod, in seconds: see
    /// [`plan`](crate::plan()). `None` disables reservations.
    pub patience: Option<u32>,
}

/// Default of [`Settings::patience`], in seconds.
const DEFAULT_MIN_WAIT: u32 = 300;

impl Default for Settings {
    fn default() -> Self {
        Self {
            steps_per_pod: 1_000_000,
            steps_per_plan: u64::MAX,
            policy: Policy::default(),
            seed: 0,
            now: 0,
            patience: Some(DEFAULT_MIN_WAIT),
        }
    }
}
