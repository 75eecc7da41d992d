//! Explanation: events and metrics about pods that are pending, and the node that is kept free.

use std::collections::BTreeMap;

use tessera_allocator::{Cause, Kept, Plan};
use tessera_api::events;
use tessera_index::{Blocked, Obstacle, Scope};
use tessera_messages as message;

use super::allocate::Round;
use super::notices::Topic;
use super::planning::pending_claims;
use super::{State, Step};

/// Pending claims by reason.
type Pending = BTreeMap<&'static str, i64>;

impl Step<'_> {
    /// Reports to the pending pods what they wait for, and counts their claims.
    pub(super) fn explain(&mut self, round: &Round) {
        self.note_kept(round.plan.kept.as_ref());
        let mut pending = Pending::new();
        if round.undecided_claims > 0 {
            pending.insert(message::label(&Cause::NotDecided), round.undecided_claims);
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

    fn explain_refusals(&mut self, plan: &Plan, pending: &mut Pending) {
        for refusal in &plan.refusals {
            // Another driver may serve a claim that does not name ours, so only its mistakes are
            // reported.
            let is_any = self.state.index.scope(&refusal.claim) == Some(Scope::Any);
            if is_any && !matches!(*refusal.cause, Cause::UnknownClass { .. }) {
                continue;
            }
            *pending.entry(message::label(&refusal.cause)).or_default() += 1;
            let kept = plan.kept_for(&refusal.pod);
            let claim = self.state.claim_name(&refusal.claim);
            let note = message::note(&claim, &refusal.cause, kept);
            let node = kept.map(|kept| &kept.node);
            let topic = Topic::Claim(refusal.claim.clone());
            let reason = message::reason(&refusal.cause);
            self.notify(&refusal.pod, topic, reason, note, node);
        }
    }

    fn explain_blocked(&mut self, blocked: &[Blocked], pending: &mut Pending) {
        for Blocked { pod, claim, obstacle } in blocked {
            let reason = message::obstacle_reason(*obstacle);
            *pending.entry(reason.name()).or_default() += 1;
            // A claim in use may be so only between two events of one cause.
            let State { misplacements, holds, .. } = &*self.state;
            let is_confirmed = || misplacements.is_confirmed(holds, claim, self.now);
            if *obstacle == Obstacle::MixedDrivers || is_confirmed() {
                let note = message::obstacle(&self.state.claim_name(claim), *obstacle);
                self.notify(pod, Topic::Claim(claim.clone()), reason, note, None);
            }
        }
    }

    /// Logs once which node is kept free, and counts it.
    fn note_kept(&mut self, kept: Option<&Kept>) {
        self.figures.kept_nodes = Some(i64::from(kept.is_some()));
        if self.state.kept.as_ref() == kept {
            return;
        }
        self.state.kept = kept.cloned();
        match kept {
            Some(Kept { namespace, name, node, until, .. }) => {
                tracing::info!(%node, pod = %name, %namespace, until, "keeping a node free for a pod");
            }
            None => tracing::info!("no node is kept free any more"),
        }
    }
}
