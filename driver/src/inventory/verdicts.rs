//! Verdicts on the health of GPUs: the source of the taint in slices and of the health that the
//! kubelet shows.
//!
//! ```text
//! XID, ECC error -----------> verdict --\
//! recovery action (NVML) ----------------> Health
//! gone and back (a reset) -> removes --/
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

/// Time for which an event counts although the NVIDIA driver reports no recovery action. The driver
/// reports the XID first and the action after it; health monitors correlate them within 30 s.
const SETTLES_WITHIN: Duration = Duration::from_secs(30);

/// The verdicts of events, by GPU.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    by_gpu: BTreeMap<GpuUuid, Verdict>,
}

#[derive(Debug)]
struct Verdict {
    code: String,
    message: String,
    since: Instant,
    /// True if the NVIDIA driver sets a recovery action after this event and those before it, if
    /// one is needed.
    sets_recovery_action: bool,
    /// True if the driver has reported a recovery action since.
    action_seen: bool,
    /// True if the GPU was absent since.
    was_gone: bool,
}

impl Verdict {
    /// Returns true if the verdict is obsolete.
    fn is_over(&self, action: Option<RecoveryAction>, now: Instant) -> bool {
        match action {
            // The driver reports no recovery actions. Only a reset repairs the GPU, and during it
            // the GPU is absent.
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
    /// Records the verdict of an event. Returns true if it is new. Events without a verdict are
    /// not.
    pub(super) fn remember(&mut self, event: &HealthEvent, now: Instant) -> bool {
        let Some(Health::Unhealthy { code, message }) = event.kind.health() else { return false };
        let known = self.by_gpu.get(&event.gpu);
        let is_new = known.is_none_or(|known| known.code != code);
        // A verdict that the recovery action "none" does not end stays, although another error
        // comes after it, as 120 comes after 119.
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
        is_new
    }

    /// Records which GPUs are absent: a GPU that returns was reset or replaced.
    pub(super) fn record_absent(&mut self, inventory: &Inventory) {
        for (gpu, verdict) in &mut self.by_gpu {
            let known = inventory.unpublished.iter().find(|known| known.uuid.as_ref() == Some(gpu));
            let is_there = inventory.gpu(gpu).is_some()
                || known.is_some_and(|known| known.reason != UnpublishedReason::Lost);
            verdict.was_gone |= !is_there;
        }
    }

    /// Returns the health of a GPU whose recovery action is `action`; `None` if the driver does not
    /// report it. An obsolete verdict is removed.
    pub(super) fn health(
        &mut self,
        gpu: &GpuUuid,
        action: Option<RecoveryAction>,
        now: Instant,
    ) -> Health {
        let requested = action.filter(|action| *action != RecoveryAction::None);
        if let Some(verdict) = self.by_gpu.get_mut(gpu) {
            verdict.action_seen |= requested.is_some();
            if verdict.is_over(action, now) {
                self.by_gpu.remove(gpu);
            }
        }
        match (self.by_gpu.get(gpu), requested) {
            (None, None) => Health::Healthy,
            (Some(verdict), None) => {
                Health::Unhealthy { code: verdict.code.clone(), message: verdict.message.clone() }
            }
            (Some(verdict), Some(action)) => Health::Unhealthy {
                code: verdict.code.clone(),
                message: format!("{}; NVIDIA driver requests {action}", verdict.message),
            },
            (None, Some(action)) => Health::Unhealthy {
                code: action.code(),
                message: format!("NVIDIA driver requests {action}"),
            },
        }
    }
}

#[cfg(test)]
mod tests;
