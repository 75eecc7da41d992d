//! Explanation: events and metrics about pods that are pending, and the node that is reserved.

use std::collections::BTreeMap;

use tessera_allocator::{AllocationPlan, Refusal, RefusalCause, ReservedNode};
use tessera_api::events;
use tessera_index::{Blocked, PlanningBlocker, Scope};
use tessera_messages as message;

use super::allocate::Round;
use super::notices::{NoteSource, NoticeDraft, Topic};
use super::planning::pending_claims;
use super::{State, Step};

/// Pending claims by reason.
type Pending = BTreeMap<&'static str, i64>;

impl Step<'_> {
    /// Reports to the pending pods what they wait for, and counts their claims.
    pub(super) fn explain(&mut self, round: &Round) {
        self.note_reserved(round.plan.reserved.as_ref());
        let mut pending = Pending::new();
        if round.undecided_claims > 0 {
            pending.insert(
                message::metric_label(&RefusalCause::BudgetExceeded),
                round.undecided_claims,
            );
        }
        self.explain_refusals(&round.plan, &mut pending);
        self.explain_blocked(&round.blocked, &mut pending);
        for pod in self.state.audits.long_unlisted(&self.state.index) {
            if let Ok(Some(withheld)) = self.state.index.pending(pod) {
                let claims = pending.entry(events::POD_STATUS_MISSING_CLAIM.name()).or_default();
                *claims += pending_claims(&withheld);
            }
        }
        self.figures.pending = Some(pending);
    }

    fn explain_refusals(&mut self, plan: &AllocationPlan, pending: &mut Pending) {
        for refusal in &plan.refusals {
            // Another driver may serve a claim that does not name ours, so only its mistakes are
            // reported.
            let is_any = self.state.index.scope(&refusal.claim) == Some(Scope::Any);
            if is_any && !matches!(*refusal.cause, RefusalCause::UnknownClass { .. }) {
                continue;
            }
            *pending.entry(message::metric_label(&refusal.cause)).or_default() += 1;
            self.notify_refused(refusal, plan.reserved_for(&refusal.pod));
        }
    }

    /// Reports a refusal. Its text, which may name every node, is only rendered when it is due.
    fn notify_refused(&mut self, refusal: &Refusal, reserved: Option<&ReservedNode>) {
        let draft = NoticeDraft {
            pod: refusal.pod.clone(),
            topic: Topic::Claim(refusal.claim.clone()),
            reason: message::refusal_reason(&refusal.cause),
            node: reserved.map(|reserved| reserved.node.clone()),
        };
        let source = NoteSource::new(&refusal.cause, reserved);
        let State { notices, holds, .. } = &mut *self.state;
        let Some(at) = notices.render_at(holds, &draft, &source, self.now) else { return };
        if at > self.now {
            return self.wake_at(Some(at));
        }
        let claim = self.state.claim_name(&refusal.claim);
        let note = message::refusal_message(&claim, &refusal.cause, reserved);
        let later = self.publish(&draft, note);
        self.wake_at(later);
        self.state.notices.rendered(&draft, source, self.now);
    }

    fn explain_blocked(&mut self, blocked: &[Blocked], pending: &mut Pending) {
        for Blocked { pod, claim, blocker } in blocked {
            let reason = message::blocker_reason(*blocker);
            *pending.entry(reason.name()).or_default() += 1;
            // A claim in use may be so only between two events of one cause.
            let State { misplacements, holds, .. } = &*self.state;
            let is_confirmed = || misplacements.is_confirmed(holds, claim, self.now);
            if *blocker == PlanningBlocker::MixedDrivers || is_confirmed() {
                let note = message::blocker_message(&self.state.claim_name(claim), *blocker);
                self.notify(pod, Topic::Claim(claim.clone()), reason, note, None);
            }
        }
    }

    /// Logs once which node is reserved, and counts it.
    fn note_reserved(&mut self, reserved: Option<&ReservedNode>) {
        self.figures.reserved_nodes = Some(i64::from(reserved.is_some()));
        if self.state.reserved.as_ref() == reserved {
            return;
        }
        self.state.reserved = reserved.cloned();
        match reserved {
            Some(ReservedNode { namespace, name, node, until, .. }) => {
                tracing::info!(%node, pod = %name, %namespace, until, "keeping a node free for a pod");
            }
            None => tracing::info!("no node is reserved any more"),
        }
    }
}
