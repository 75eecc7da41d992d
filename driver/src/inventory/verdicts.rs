//! What is held against GPUs: the one source of the taint in the slice and of the health that the
//! kubelet shows.
//!
//! ```text
//! XID, ECC error -----------> verdict --\
//! recovery action (NVML) ----------------> Health
//! gone and back (a reset) --> forgets --/
//! ```

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tessera_api::{
    Inventory,
    gpu::{Health, UnpublishedReason},
    names::GpuUuid,
};
use tessera_gpu::{HealthEvent, RecoveryAction};

/// How long an event counts although NVIDIA's driver asks for nothing. The driver reports the XID
/// first and what it wants done after it; health monitors correlate the two within half a minute.
const SETTLES_WITHIN: Duration = Duration::from_secs(30);

/// What events have said against GPUs.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    by_gpu: BTreeMap<GpuUuid, Verdict>,
}

#[derive(Debug)]
struct Verdict {
    code: String,
    message: String,
    since: Instant,
    /// NVIDIA's driver sets the recovery action after this event and those before it, if one is
    /// needed.
    sets_recovery_action: bool,
    /// It has asked for something since.
    action_seen: bool,
    /// The GPU has not been there for a while since.
    was_gone: bool,
}

impl Verdict {
    /// Whether nothing speaks for it any more.
    fn is_over(&self, action: Option<RecoveryAction>, now: Instant) -> bool {
        match action {
            // A driver that does not know the question: only a reset helps, and it makes the GPU
            // disappear for a moment.
            None => self.was_gone,
            Some(RecoveryAction::None) => {
                let settled = now.saturating_duration_since(self.since) >= SETTLES_WITHIN;
                self.was_gone || self.action_seen || (self.sets_recovery_action && settled)
            }
            Some(_) => false,
        }
    }
}

impl Verdicts {
    /// Remembers what an event says. Returns whether that is news; an event that says nothing
    /// against the GPU is none.
    pub(super) fn remember(&mut self, event: &HealthEvent, now: Instant) -> bool {
        let Some(Health::Unhealthy { code, message }) = event.kind.health() else { return false };
        let known = self.by_gpu.get(&event.gpu);
        let news = known.is_none_or(|known| known.code != code);
        // What "none" proves nothing about is not over because another error came after it, as 120
        // comes after 119.
        let settles =
            |known: &Verdict| known.sets_recovery_action || known.action_seen || known.was_gone;
        let sets_recovery_action = event.kind.sets_recovery_action() && known.is_none_or(settles);
        let verdict = Verdict {
            code,
            message,
            since: now,
            sets_recovery_action,
            action_seen: false,
            was_gone: false,
        };
        self.by_gpu.insert(event.gpu.clone(), verdict);
        news
    }

    /// Sees which GPUs are not there: one that is back after that has been reset, or has even been
    /// replaced.
    pub(super) fn see(&mut self, inventory: &Inventory) {
        for (gpu, verdict) in &mut self.by_gpu {
            let known = inventory.unpublished.iter().find(|known| known.uuid.as_ref() == Some(gpu));
            let is_there = inventory.gpu(gpu).is_some()
                || known.is_some_and(|known| known.reason != UnpublishedReason::Lost);
            verdict.was_gone |= !is_there;
        }
    }

    /// The health of a GPU for which NVIDIA's driver asks `action`; `None` where it does not know
    /// that question. A verdict that is over is forgotten.
    pub(super) fn health(
        &mut self,
        gpu: &GpuUuid,
        action: Option<RecoveryAction>,
        now: Instant,
    ) -> Health {
        let asked = action.filter(|action| *action != RecoveryAction::None);
        if let Some(verdict) = self.by_gpu.get_mut(gpu) {
            verdict.action_seen |= asked.is_some();
            if verdict.is_over(action, now) {
                self.by_gpu.remove(gpu);
            }
        }
        match (self.by_gpu.get(gpu), asked) {
            (None, None) => Health::Healthy,
            (Some(verdict), None) => {
                Health::Unhealthy { code: verdict.code.clone(), message: verdict.message.clone() }
            }
            (Some(verdict), Some(action)) => Health::Unhealthy {
                code: verdict.code.clone(),
                message: format!("{}; NVIDIA's driver asks for {action}", verdict.message),
            },
            (None, Some(action)) => Health::Unhealthy {
                code: action.code(),
                message: format!("NVIDIA's driver asks for {action}"),
            },
        }
    }
}

#[cfg(test)]
mod tests;
