//! Repair: claims that are not on the node of the pod that is bound with them (ADR 32). The node
//! of a bound pod takes precedence.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::PodUid;
use tessera_allocator::{AllocationPlan, Refusal};
use tessera_api::events;
use tessera_api::names::{ClaimUid, NodeName};
use tessera_index::{Misplaced, RepairAction};
use tessera_messages as message;

use super::effect::ClaimChange;
use super::holds::{HoldReason, Subject};
use super::misplacements::subject;
use super::notices::{NoticeDraft, Topic};
use super::writes::WritePurpose;
use super::{State, Step, gauge};

/// The steps for the claims of bound pods in one step of the core, exceeded at most by those of
/// one plan. Any tenant can make such pods with `spec.nodeName`.
const STEPS_FOR_BOUND: u64 = 20_000;

impl Step<'_> {
    /// Moves claims to the nodes of the pods that are bound with them, or reports why not.
    ///
    /// `affected` are the pods whose claims may have changed.
    pub(super) fn repair_misplaced(&mut self, affected: BTreeSet<PodUid>) {
        let mut to_plan: BTreeMap<PodUid, Vec<Misplaced>> = BTreeMap::new();
        for pod in self.state.repair_visits.take(affected, self.now) {
            for one in self.observe_misplaced(&pod) {
                self.treat_misplaced(one, &mut to_plan);
            }
        }
        self.figures.misplaced = Some(gauge(self.state.misplacements.count()));
        self.plan_bound_pods(&to_plan);
        self.wake_at(self.state.repair_visits.next());
    }

    /// Returns the misplaced claims of a pod. Where one is confirmed, the pods are told that wait
    /// for it.
    fn observe_misplaced(&mut self, pod: &PodUid) -> Vec<Misplaced> {
        let State { index, misplacements, holds, blocked, .. } = &mut *self.state;
        let misplaced = index.misplaced(pod);
        if !misplaced.is_empty() || misplacements.has_pod(pod) {
            for claim in misplacements.observe(holds, pod, &misplaced, self.now) {
                index.pods_with(&claim).iter().for_each(|pod| blocked.tell_again(pod));
            }
        }
        misplaced
    }

    /// Repairs a misplaced claim or reports it, or adds it to those to plan, unless it is held.
    fn treat_misplaced(&mut self, one: Misplaced, to_plan: &mut BTreeMap<PodUid, Vec<Misplaced>>) {
        let (holds, subject) = (&self.state.holds, subject(&one));
        let contended = HoldReason::WriteContended;
        if holds.last_end(&subject, self.now).is_some()
            || holds.is_held(&Subject::claim(&one.claim), contended, self.now)
            || self.state.writes.contains(&one.claim)
        {
            return;
        }
        match &one.repair_action {
            RepairAction::Plan => to_plan.entry(one.pod.clone()).or_default().push(one),
            RepairAction::Blocked(_) => self.notify_misplaced(&one),
            RepairAction::Deallocate | RepairAction::Restore(_) => {
                self.notify_misplaced(&one);
                self.repair(&one);
            }
        }
    }

    /// Plans the claims of bound pods as far as the steps last; the next step continues with the
    /// others. A pod that was planned is held, and one whose search has not ended comes after the
    /// others, so that each gets its turn.
    fn plan_bound_pods(&mut self, pods: &BTreeMap<PodUid, Vec<Misplaced>>) {
        let mut left = STEPS_FOR_BOUND;
        let after = self.state.planning.last_bound.take();
        let is_earlier = |pod: &&PodUid| after.as_ref().is_some_and(|after| *pod <= after);
        let (earlier, later): (Vec<&PodUid>, Vec<&PodUid>) = pods.keys().partition(is_earlier);
        for pod in later.into_iter().chain(earlier) {
            if left == 0 {
                self.wake_at(Some(self.now));
                self.state.repair_visits.visit_next(pod.clone());
                continue;
            }
            let Some(plan) = self.plan_bound(pod) else { continue };
            left = left.saturating_sub(plan.steps);
            self.state.planning.last_bound = Some(pod.clone());
            if !plan.unreached.is_empty() {
                self.wake_at(Some(self.now));
                self.state.repair_visits.visit_next(pod.clone());
                continue;
            }
            if !plan.to_compile.is_empty() {
                // The end of the compilation is an event.
                self.state.repair_visits.visit_next(pod.clone());
                continue;
            }
            let reason = if plan.refusals.iter().any(Refusal::is_undecided) {
                HoldReason::RepairUndecided
            } else {
                HoldReason::RepairUnplaced
            };
            for one in &pods[pod] {
                self.state.holds.hold(subject(one), reason, self.now);
            }
        }
    }

    /// Starts the write that brings the claim nearer to the node of its pod.
    fn repair(&mut self, misplaced: &Misplaced) {
        let Misplaced { pod, claim, node, .. } = misplaced;
        let change = match &misplaced.repair_action {
            RepairAction::Restore(allocation) => ClaimChange::Restore(allocation.clone()),
            _ => ClaimChange::Deallocate,
        };
        if self.write(claim, WritePurpose::Repair, Some(pod), self.now, |_| change) {
            tracing::warn!(%pod, %claim, %node, "repairing a claim of a bound pod");
            self.state.holds.hold(subject(misplaced), HoldReason::RepairWritten, self.now);
        }
    }

    /// Plans the claims of a bound pod on its node. Returns none if they cannot be planned now.
    fn plan_bound(&mut self, pod: &PodUid) -> Option<AllocationPlan> {
        let pending = self.state.index.bound_pending(pod)?;
        let node = self.state.index.node_of(pod).cloned()?;
        if pending.pending_claims().any(|claim| self.state.is_busy(&claim.uid, self.now)) {
            return None;
        }
        let plan = self.state.planning.plan_on(&mut self.state.index, &node, &pending, self.now);
        self.carry_out_plan(&plan);
        for refusal in &plan.refusals {
            let claim = self.state.claim_name(&refusal.claim);
            let cause = message::refusal_message(&claim, &refusal.cause, None);
            let note = format!(
                "the pod is bound to node {node} and its claim has to be allocated there: {cause}; \
                 make room on the node, or delete the pod to start over"
            );
            self.notify_bound(pod, &refusal.claim, note, &node);
        }
        Some(plan)
    }

    fn notify_misplaced(&mut self, misplaced: &Misplaced) {
        let note =
            message::node_mismatch_message(&self.state.claim_name(&misplaced.claim), misplaced);
        self.notify_bound(&misplaced.pod, &misplaced.claim, note, &misplaced.node);
    }

    /// Tells a bound pod about a misplaced claim, later if other events make it wait.
    fn notify_bound(&mut self, pod: &PodUid, claim: &ClaimUid, note: String, node: &NodeName) {
        let (topic, reason) = (Topic::Claim(claim.clone()), events::CLAIM_NODE_MISMATCH);
        let draft = NoticeDraft { pod: pod.clone(), topic, reason, node: Some(node.clone()) };
        if let Some(later) = self.publish(&draft, note) {
            self.state.repair_visits.visit_at(pod.clone(), later);
        }
    }
}
