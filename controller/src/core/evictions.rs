//! Evictions: their outcomes, for all purposes.

use super::Step;
use super::effect::{EvictionPurpose, PodReference};
use super::event::EvictionOutcome;
use super::holds::{HoldReason, Subject};

impl Step<'_> {
    /// Takes in how evictions have ended. A pod whose eviction a PodDisruptionBudget refused is
    /// left alone for a time.
    pub(super) fn absorb_evictions(
        &mut self,
        purpose: &EvictionPurpose,
        outcomes: &[(PodReference, EvictionOutcome)],
    ) {
        for (victim, outcome) in outcomes {
            let pod = format!("{}/{}", victim.namespace, victim.name);
            match outcome {
                EvictionOutcome::Evicted => {
                    tracing::info!(pod, "evicted");
                    self.figures.evictions += 1;
                }
                EvictionOutcome::Gone => {}
                EvictionOutcome::Refused { message } => {
                    tracing::info!(pod, message, "an eviction was refused");
                    self.figures.evictions_refused += 1;
                    let subject = Subject::pod(&victim.uid);
                    self.state.holds.hold(subject, HoldReason::EvictionRefused, self.now);
                }
                EvictionOutcome::Failed { message } => {
                    tracing::warn!(pod, error = message, "cannot evict a pod");
                    self.figures.eviction_errors += 1;
                }
            }
        }
        match purpose {
            EvictionPurpose::Preemption { preemptor } => {
                self.end_preemption_evictions(preemptor, outcomes);
            }
            EvictionPurpose::Recovery => self.end_recovery(outcomes),
        }
    }
}
