//! Claims that are not where the pods are that are bound with them: a bound pod's node wins.

use std::collections::BTreeMap;

use tessera_allocator::model::PodUid;
use tessera_allocator::{Plan, Refusal};
use tessera_index::{Misplaced, Remedy};
use tessera_messages as message;
use tokio::time::Instant;

use super::{Planner, Write};
use crate::repairs::Due;

/// Steps for the claims of bound pods in one step of the planner, and at most those of one pod
/// more. Any tenant makes such pods, by `spec.nodeName`.
const STEPS_FOR_BOUND: u64 = 500_000;

impl Planner {
    /// Brings claims to the nodes of the pods that are bound with them, or says why not.
    pub(super) fn repair(&mut self, cause: Instant, now: Instant) {
        let misplaced = self.index.misplaced();
        self.repairs.retain(&misplaced);
        let mut to_plan: BTreeMap<PodUid, Vec<Misplaced>> = BTreeMap::new();
        let mut confirmed = 0;
        for one in misplaced {
            let Due { at, is_confirmed } = self.repairs.due(&one, now);
            confirmed += i64::from(is_confirmed);
            if now < at {
                self.wake_at(Some(at));
                continue;
            }
            if self.writing.contains_key(&one.claim) || self.contention.is_held(&one.claim, now) {
                continue;
            }
            match &one.remedy {
                Remedy::Plan => to_plan.entry(one.pod.clone()).or_default().push(one),
                Remedy::None(_) => self.tell_misplaced(&one, now),
                Remedy::TakeBack | Remedy::Restore(_) => {
                    self.tell_misplaced(&one, now);
                    self.put_right(&one, now);
                }
            }
        }
        self.metrics.misplaced.set(confirmed);
        self.plan_all_bound(&to_plan, cause, now);
    }

    /// Plans the claims of bound pods as far as the steps go; the next step goes on with the
    /// others. What was tried has to wait, so that each has its turn.
    fn plan_all_bound(
        &mut self,
        pods: &BTreeMap<PodUid, Vec<Misplaced>>,
        cause: Instant,
        now: Instant,
    ) {
        let mut left = STEPS_FOR_BOUND;
        for (pod, misplaced) in pods {
            if left == 0 {
                self.wake_at(Some(now));
                return;
            }
            let Some(plan) = self.plan_bound(pod, cause, now) else { continue };
            left = left.saturating_sub(plan.steps);
            let is_undecided = plan.refusals.iter().any(Refusal::is_undecided);
            misplaced.iter().for_each(|one| self.repairs.planned(one, is_undecided, now));
        }
    }

    /// Starts the one write that brings the claim nearer to its pod.
    fn put_right(&mut self, misplaced: &Misplaced, now: Instant) {
        let Misplaced { pod, claim, node, .. } = misplaced;
        let Some(object) = self.index.claim_object(claim).cloned() else { return };
        let (writer, remedy) = (self.writer.clone(), misplaced.remedy.clone());
        let request = async move {
            match remedy {
                Remedy::Restore(allocation) => writer.allocate(&object, &allocation).await,
                _ => writer.take_back(&object).await,
            }
        };
        if self.start_write(claim, Write::Repair, Some(pod), now, request) {
            tracing::warn!(%pod, %claim, %node, "repairing a claim of a bound pod");
            self.repairs.tried(misplaced, now);
        }
    }

    /// Plans the claims of a bound pod on its node. None if they cannot be planned now.
    fn plan_bound(&mut self, pod: &PodUid, cause: Instant, now: Instant) -> Option<Plan> {
        let pending = self.index.bound_pending(pod)?;
        let node = self.index.node_of(pod).cloned()?;
        let mut claims = pending.pending_claims().map(|claim| &claim.uid);
        if claims.any(|claim| self.writing.contains_key(claim) || self.is_held(claim, now)) {
            return None;
        }
        let plan = self.index.plan_on(&node, &pending, self.settings);
        for decision in &plan.decisions {
            self.carry_out(decision, cause, now);
        }
        for refusal in &plan.refusals {
            let why = message::note(&self.claim_name(&refusal.claim), &refusal.cause, None);
            let note = format!(
                "the pod is bound to node {node} and its claim has to be allocated there: {why}; \
                 make room on the node, or delete the pod to start over"
            );
            self.tell_pod(pod, "ClaimElsewhere", note, Some(&node), now);
        }
        Some(plan)
    }

    fn tell_misplaced(&mut self, misplaced: &Misplaced, now: Instant) {
        let note = message::misplaced(&self.claim_name(&misplaced.claim), misplaced);
        self.tell_pod(&misplaced.pod, "ClaimElsewhere", note, Some(&misplaced.node), now);
    }
}
