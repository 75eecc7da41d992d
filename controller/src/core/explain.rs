//! Explanation: events and metrics about pods that are pending, and the node that is reserved.

use std::collections::BTreeMap;

use tessera_allocator::{AllocationPlan, GroupsAlike, Refusal, RefusalCause, ReservedNode};
use tessera_api::events;
use tessera_index::Scope;
use tessera_messages as message;

use super::allocate::Round;
use super::clock::Moment;
use super::notices::{NoteSource, NoticeDraft, Topic};
use super::planning::pending_claims;
use super::{State, Step, gauge};

/// Pending claims by reason.
pub(super) type Pending = BTreeMap<&'static str, i64>;

impl Step<'_> {
    /// Reports to the pending pods what they wait for, and counts their claims.
    pub(super) fn explain(&mut self, round: &Round) {
        self.note_reserved(round.plan.reserved.as_ref());
        let mut pending = Pending::new();
        let undecided = self.state.undecided.claims();
        if undecided > 0 {
            pending.insert(message::metric_label(&RefusalCause::BudgetExceeded), undecided);
        }
        self.explain_refusals(&round.plan, &mut pending);
        self.explain_queued(&round.plan, &mut pending);
        self.explain_blocked(&mut pending);
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
            if !self.state.is_reported(refusal) {
                continue;
            }
            let later = self.notify_refused(refusal, plan.reserved_for(&refusal.pod));
            if self.state.planning.backlog.class_of(&refusal.pod).is_some() {
                self.state.queued.tell_at(later);
            } else {
                *pending.entry(message::metric_label(&refusal.cause)).or_default() += 1;
                self.wake_at(later);
            }
        }
        for GroupsAlike { tried, others, is_news } in &plan.alike {
            for refusal in tried.iter().filter(|refusal| self.state.is_reported(refusal)) {
                *pending.entry(message::metric_label(&refusal.cause)).or_default() +=
                    gauge(*others);
            }
            if *is_news {
                self.state.queued.texts_changed();
            }
        }
    }

    /// Reports a refusal. Its text, which may name every node, is only rendered when it is due.
    /// Returns the time at which it is to be offered again.
    pub(super) fn notify_refused(
        &mut self,
        refusal: &Refusal,
        reserved: Option<&ReservedNode>,
    ) -> Option<Moment> {
        let draft = NoticeDraft {
            pod: refusal.pod.clone(),
            topic: Topic::Claim(refusal.claim.clone()),
            reason: message::refusal_reason(&refusal.cause),
            node: reserved.map(|reserved| reserved.node.clone()),
        };
        let source = NoteSource::new(&refusal.cause, reserved);
        let State { notices, holds, .. } = &mut *self.state;
        let at = notices.render_at(holds, &draft, &source, self.now)?;
        if at > self.now {
            return Some(at);
        }
        let claim = self.state.claim_name(&refusal.claim);
        let note = message::refusal_message(&claim, &refusal.cause, reserved);
        let later = self.publish(&draft, note);
        self.state.notices.rendered(&draft, source, self.now);
        later
    }

    /// Logs once which node is reserved, and counts it.
    fn note_reserved(&mut self, reserved: Option<&ReservedNode>) {
        self.figures.reserved_nodes = Some(i64::from(reserved.is_some()));
        if self.state.reserved.as_ref() == reserved {
            return;
        }
        self.state.reserved = reserved.cloned();
        self.state.queued.texts_changed();
        match reserved {
            Some(ReservedNode { namespace, name, node, until, .. }) => {
                tracing::info!(%node, pod = %name, %namespace, until, "keeping a node free for a pod");
            }
            None => tracing::info!("no node is reserved any more"),
        }
    }
}

impl State {
    /// Returns true if the refusal is reported. Another driver may serve a claim that does not name
    /// ours, so only its mistakes are.
    pub(super) fn is_reported(&self, refusal: &Refusal) -> bool {
        let is_mistake = matches!(*refusal.cause, RefusalCause::UnknownClass { .. });
        is_mistake || self.index.scope(&refusal.claim) != Some(Scope::Any)
    }
}
