//! Statuses of GpuQuotas (ADR 124). The allocator holds claims to the quotas; this part reports
//! what they hold. Nothing reads a status back: the sums follow from the claims.
//!
//! A status is written when it differs, at most once a second, so that a burst of allocations is
//! one write. Work is proportional to the namespaces whose sums have changed.

use std::collections::BTreeSet;

use tessera_api::names::Namespace;

use super::Step;
use super::effect::{Effect, QuotaFigure, QuotaReference, QuotaStatusWrite};
use super::event::QuotaStatusOutcome;
use super::holds::{HoldReason, Subject};

/// Reasons for which a status is not written until a delay has ended.
const HOLDS: [HoldReason; 2] = [HoldReason::QuotaStatusWritten, HoldReason::QuotaStatusFailed];

/// The statuses to be written.
#[derive(Debug, Default)]
pub(super) struct QuotaStatuses {
    /// Quotas whose status may differ from what it should be.
    unwritten: BTreeSet<QuotaReference>,
    /// Quotas whose status is being written.
    open: BTreeSet<QuotaReference>,
}

impl Step<'_> {
    /// Writes the statuses that differ, and reports the figures of the quotas that have changed.
    pub(super) fn write_quota_statuses(&mut self) {
        for namespace in self.state.index.take_changed_quotas() {
            self.note_quotas(namespace);
        }
        let unwritten = std::mem::take(&mut self.state.quota_statuses.unwritten);
        for quota in unwritten {
            self.write_quota_status(quota);
        }
    }

    fn note_quotas(&mut self, namespace: Namespace) {
        let mut figures = Vec::new();
        for standing in self.state.index.quotas_of(&namespace) {
            let (quota, used) = (&standing.state.quota, &standing.state.used);
            for (resource, hard) in &quota.hard {
                let used = used.get(resource).copied().unwrap_or_default();
                let (quota, resource, hard) = (quota.name.clone(), *resource, *hard);
                figures.push(QuotaFigure { quota, resource, hard, used });
            }
            let name = quota.name.clone();
            let reference = QuotaReference { namespace: namespace.clone(), name };
            self.state.quota_statuses.unwritten.insert(reference);
        }
        self.figures.quotas.insert(namespace, figures);
    }

    fn write_quota_status(&mut self, quota: QuotaReference) {
        // It is deleted, or its status is as it should be.
        let Some(standing) = self.state.index.quota(&quota.namespace, &quota.name) else { return };
        let status = standing.wanted_status();
        if standing.status == Some(&status) {
            return;
        }
        let is_open = self.state.quota_statuses.open.contains(&quota);
        let is_held = self.state.holds.is_held_for_any(&Subject::quota(&quota), &HOLDS, self.now);
        if !is_open && !is_held {
            self.state.quota_statuses.open.insert(quota.clone());
            let write = QuotaStatusWrite { quota: quota.clone(), status };
            self.effects.push(Effect::WriteQuotaStatus(write));
        }
        self.state.quota_statuses.unwritten.insert(quota);
    }

    /// Takes in the end of a write of a status.
    pub(super) fn absorb_quota_status(
        &mut self,
        quota: &QuotaReference,
        outcome: QuotaStatusOutcome,
    ) {
        self.state.quota_statuses.open.remove(quota);
        let subject = Subject::quota(quota);
        let holds = &mut self.state.holds;
        match outcome {
            QuotaStatusOutcome::Stored => {
                holds.end_of(&subject, HoldReason::QuotaStatusFailed);
                holds.hold(subject, HoldReason::QuotaStatusWritten, self.now);
            }
            QuotaStatusOutcome::Failed => {
                holds.hold(subject, HoldReason::QuotaStatusFailed, self.now);
            }
        }
    }
}
