//! Allocation: the pods that are planned, and the writes of what a plan decides.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use tessera_allocator::model::{Claim, DeviceResult, PendingPod, PodUid};
use tessera_allocator::selector::CompiledSelector;
use tessera_allocator::{AllocationPlan, Decision};
use tessera_api::events;
use tessera_api::names::{GROUP_COMPLETE_CONDITION, GROUP_FAILED_CONDITION};
use tessera_index::Index;
use tracing::field::display;

use super::clock::{Moment, Now};
use super::effect::{AllocationDraft, ClaimChange, Effect};
use super::holds::{Basis, HoldReason, Subject};
use super::notices::Topic;
use super::placements::Deallocated;
use super::planning::pending_claims;
use super::writes::WritePurpose;
use super::{State, Step};

/// Reasons for which a pod is not planned until a delay has ended.
const POD_HOLDS: [HoldReason; 5] = [
    HoldReason::GroupNotBound,
    HoldReason::AllocationReleased,
    HoldReason::WriteFailed,
    HoldReason::WriteDenied,
    HoldReason::SearchUndecided,
];

/// One plan, and the pods that it does not contain.
pub(super) struct Round {
    pub(super) plan: AllocationPlan,
    /// Pods that may have changed since the last step.
    pub(super) changed: BTreeSet<PodUid>,
    /// Pods that have lost their allocation, as noted in this step.
    pub(super) lost: BTreeSet<PodUid>,
}

/// Pods that are delayed because their last search ended without a decision.
#[derive(Debug, Default)]
pub(super) struct UndecidedPods {
    /// The number of their claims to allocate.
    pods: BTreeMap<PodUid, i64>,
    /// Their sum.
    claims: i64,
}

impl UndecidedPods {
    fn insert(&mut self, pod: &PendingPod) {
        let claims = pending_claims(pod);
        self.claims += claims;
        self.claims -= self.pods.insert(pod.uid.clone(), claims).unwrap_or_default();
    }

    fn remove(&mut self, pod: &PodUid) {
        self.claims -= self.pods.remove(pod).unwrap_or_default();
    }

    /// Returns the number of their claims to allocate.
    pub(super) fn claims(&self) -> i64 {
        self.claims
    }
}

impl Step<'_> {
    /// Plans the pending pods and starts the writes of their allocations.
    pub(super) fn plan_pending(&mut self, changed: BTreeSet<PodUid>) -> Round {
        let late = self.changed_pods();
        let mut left_out = std::mem::take(&mut self.state.revisited);
        left_out.extend(changed.iter().chain(&late).cloned());
        self.state.changed_late = late;
        self.state.index.complete_groups(&mut left_out);
        let mut examined = self.examine(&left_out);
        let lost = self.note_deallocated(&mut examined);
        self.withhold(&mut examined);
        for pod in examined {
            left_out.remove(&pod.uid);
            self.state.planning.backlog.insert(pod);
        }
        left_out.iter().for_each(|pod| self.state.planning.backlog.remove(pod));
        let now = Now { monotonic: self.now, wall: self.wall };
        let plan = self.state.planning.plan(&mut self.state.index, now);
        self.figures.is_planned = true;
        self.carry_out_plan(&plan);
        if !plan.unreached.is_empty() {
            self.figures.cut_plans += 1;
        }
        let next = self.state.planning.next_plan(&plan, now);
        self.wake_at(next);
        Round { plan, changed, lost }
    }

    /// Counts the steps of a plan, has the selectors compiled that its pods need, and carries out
    /// its decisions.
    pub(super) fn carry_out_plan(&mut self, plan: &AllocationPlan) {
        for (namespace, steps) in &plan.selector_steps {
            *self.figures.selector_steps.entry(namespace.clone()).or_default() += steps;
        }
        for (namespace, steps) in &plan.long_search_steps {
            *self.figures.long_search_steps.entry(namespace.clone()).or_default() += steps;
        }
        for (namespace, expression) in &plan.to_compile {
            let steps = CompiledSelector::compile_steps(expression);
            if self.state.planning.begin_to_compile(namespace, steps, self.now) {
                *self.figures.selector_steps.entry(namespace.clone()).or_default() += steps;
                let (namespace, expression) = (namespace.clone(), Arc::clone(expression));
                self.effects.push(Effect::Compile { namespace, expression });
            }
        }
        for decision in &plan.decisions {
            self.carry_out(decision);
        }
    }

    /// Returns the pods that may have changed since the last call: in the index, or because a hold
    /// of them or of one of their claims has begun or ended.
    pub(super) fn changed_pods(&mut self) -> BTreeSet<PodUid> {
        let mut changed = std::mem::take(&mut self.state.changed_late);
        changed.append(&mut self.state.index.take_changed_pods());
        for subject in self.state.holds.take_changed(self.now) {
            match subject.parts() {
                (Some(pod), _) => drop(changed.insert(pod.clone())),
                (None, Some(claim)) => changed.extend(self.state.index.pods_with(claim)),
                (None, None) => {}
            }
        }
        changed
    }

    /// Returns those of the pods that wait for devices.
    fn examine(&mut self, pods: &BTreeSet<PodUid>) -> Vec<PendingPod> {
        let work = self.state.index.work_of(pods);
        for pod in pods {
            self.state.blocked.remove(pod);
            self.state.deallocated.remove(pod);
            self.state.undecided.remove(pod);
        }
        for blocked in work.blocked {
            self.state.blocked.insert(blocked);
        }
        work.pending
    }

    /// Records the pods that have lost their allocation, and excludes the nodes where they failed.
    /// Returns them. Removes pods with a claim that was deallocated within the last seconds.
    fn note_deallocated(&mut self, pending: &mut Vec<PendingPod>) -> BTreeSet<PodUid> {
        let mut lost = BTreeSet::new();
        let now = self.now;
        pending.retain(|pod| {
            // A PreBind in flight must find no allocation, and kube-scheduler may nominate a node
            // on which it preempts pods.
            let State { index, holds, placements, deallocated, .. } = &mut *self.state;
            let reasons = [HoldReason::ClaimDeallocated, HoldReason::ClearingFailed];
            let is_held = pod
                .members()
                .flat_map(PendingPod::pending_claims)
                .any(|claim| holds.is_held_for_any(&Subject::claim(&claim.uid), &reasons, now));
            for pod in pod.members().filter(|_| is_held) {
                deallocated.insert(pod.uid.clone());
                if let Some(nomination) = index.nomination(&pod.uid) {
                    let message = index.unschedulable_message(&pod.uid);
                    placements.nominated(&pod.uid, nomination, message);
                }
            }
            !is_held
        });
        for pod in pending {
            let mut others = std::mem::take(&mut pod.together_with);
            for member in others.iter_mut().chain([&mut *pod]) {
                if self.note_placement(member) {
                    lost.insert(member.uid.clone());
                }
            }
            pod.together_with = others;
        }
        lost
    }

    /// Records if a pod has lost its allocation, and excludes the nodes where it failed. Returns
    /// true if it has.
    fn note_placement(&mut self, pod: &mut PendingPod) -> bool {
        let State { index, holds, placements, .. } = &mut *self.state;
        let nomination = index.nomination(&pod.uid);
        let message = index.unschedulable_message(&pod.uid);
        let lost = placements.deallocated(holds, &pod.uid, nomination, message, self.now);
        let is_lost = lost.is_some();
        if let Some(lost) = lost {
            self.note_lost(pod, lost);
        }
        pod.excluded_nodes = self.state.holds.excluded_nodes(&pod.uid, self.now);
        is_lost
    }

    fn note_lost(&mut self, pod: &mut PendingPod, lost: Deallocated) {
        tracing::info!(pod = %pod.name, namespace = %pod.namespace, ?lost, "allocation was cleared, planning again");
        match lost {
            Deallocated::Unplaceable(node) => {
                let note = format!(
                    "kube-scheduler cannot place the pod on node {node} and released the devices there; trying elsewhere"
                );
                let reason = events::RESCHEDULING;
                self.notify_incident(&pod.uid, Topic::Pod, reason, note, Some(&node));
            }
            Deallocated::RoomMade(node) => pod.nominated_node = Some(node),
        }
    }

    /// Removes the pods that must not be planned yet, with their groups. Each is examined again
    /// when its hold or the write of its claim ends.
    fn withhold(&mut self, pending: &mut Vec<PendingPod>) {
        let (state, now) = (&mut *self.state, self.now);
        pending.retain(|pod| {
            let mut is_ready = true;
            for pod in pod.members() {
                let subject = Subject::pod(&pod.uid);
                state.end_outdated_holds(pod, now);
                if state.holds.is_held(&subject, HoldReason::SearchUndecided, now) {
                    state.undecided.insert(pod);
                }
                let mut claims = pod.pending_claims().map(|claim| &claim.uid);
                is_ready &= !state.holds.is_held_for_any(&subject, &POD_HOLDS, now)
                    && !state.audits.is_long_unlisted(&state.index, &pod.uid)
                    && !claims.any(|claim| state.is_busy(claim, now));
            }
            is_ready
        });
    }

    /// Assumes the allocation of a decision and starts to write it.
    pub(super) fn carry_out(&mut self, decision: &Decision) {
        let message = self.state.index.unschedulable_message(&decision.pod).map(str::to_owned);
        let (pod, node) = (&decision.pod, decision.node.clone());
        let (namespace, name) = self.state.index.pod_name(pod).unzip();
        let (namespace, name) = (namespace.map(display), name.map(display));
        tracing::info!(namespace, name, %pod, %node, claims = decision.claims.len(), "allocated claims");
        let State { placements, holds, notices, .. } = &mut *self.state;
        notices.placed(pod);
        placements.placed(holds, pod, node.clone(), message, self.now);
        self.nominate(pod, &node);
        let has_barrier = self.state.index.has_barrier(pod);
        for claim_allocation in &decision.claims {
            let mut claim_allocation = claim_allocation.clone();
            if has_barrier {
                claim_allocation.results.iter_mut().for_each(add_barrier);
            }
            let uid = claim_allocation.claim.clone();
            let draft = |index: &Index| {
                let claim = index.requests_of(&claim_allocation.claim);
                let classes = claim.map(|claim| index.classes_of(claim)).unwrap_or_default();
                let defaults = claim.and_then(|claim| claim.defaults.clone());
                ClaimChange::Allocate(AllocationDraft { claim_allocation, classes, defaults })
            };
            self.write(&uid, WritePurpose::Allocation, Some(pod), self.cause, draft);
        }
    }

    /// Delays the pods whose search ended without a decision although it had all steps of a pod.
    pub(super) fn hold_undecided(&mut self, plan: &AllocationPlan) {
        let undecided = plan.refusals.iter().filter(|refusal| refusal.is_undecided());
        let pods: BTreeSet<&PodUid> = undecided.map(|refusal| &refusal.pod).collect();
        for pod in pods {
            self.figures.undecided_plans += 1;
            let pending = self.state.index.pending(pod).ok().flatten();
            let basis = pending.map(|pending| self.state.basis_of_search(&pending));
            let (subject, reason) = (Subject::pod(pod), HoldReason::SearchUndecided);
            self.state.holds.hold_on(&subject, reason, basis.unwrap_or_default(), self.now);
        }
    }
}

/// Adds the binding conditions of a group to a device.
fn add_barrier(result: &mut DeviceResult) {
    let mut binding = result.binding.as_deref().cloned().unwrap_or_default();
    binding.conditions.push(GROUP_COMPLETE_CONDITION.to_owned());
    binding.failure_conditions.push(GROUP_FAILED_CONDITION.to_owned());
    result.binding = Some(Arc::new(binding));
}

impl State {
    /// Ends the long delays of a pending pod if the objects that caused them have changed.
    fn end_outdated_holds(&mut self, pod: &PendingPod, now: Moment) {
        let subject = Subject::pod(&pod.uid);
        if self.holds.is_held(&subject, HoldReason::SearchUndecided, now) {
            let basis = self.basis_of_search(pod);
            self.holds.end_if_changed(&subject, HoldReason::SearchUndecided, basis);
        }
        if self.holds.is_held(&subject, HoldReason::WriteDenied, now) {
            let basis = self.basis_of_write(&pod.uid);
            self.holds.end_if_changed(&subject, HoldReason::WriteDenied, basis);
        }
    }

    /// Returns a digest of the objects that a search for the pod's devices depends on, apart from
    /// the devices: the claims, which of them are allocated, and the classes. Labels do not count:
    /// a change of them must not repeat an expensive search.
    fn basis_of_search(&self, pod: &PendingPod) -> Basis {
        let mut digest = DefaultHasher::new();
        for claim in pod.pending_claims() {
            claim.uid.hash(&mut digest);
        }
        for (claim, _) in self.index.claims_of_pod(&pod.uid) {
            self.add_claim(claim, &mut digest);
        }
        Basis(digest.finish())
    }

    /// Returns a digest of the objects that the API server's policies may read for a write of the
    /// pod: its claims, with labels and annotations, and their classes.
    pub(super) fn basis_of_write(&self, pod: &PodUid) -> Basis {
        let mut digest = DefaultHasher::new();
        for (claim, metadata) in self.index.claims_of_pod(pod) {
            self.add_claim(claim, &mut digest);
            metadata.hash(&mut digest);
        }
        Basis(digest.finish())
    }

    /// Adds the identity of a claim, whose requests never change, and of its classes.
    fn add_claim(&self, claim: &Claim, digest: &mut DefaultHasher) {
        claim.uid.hash(digest);
        for (name, class) in self.index.classes_of(claim) {
            (name, &class.metadata.uid, &class.metadata.resource_version).hash(digest);
        }
    }
}
