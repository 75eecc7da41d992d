//! Release: allocations that no pod needs, and allocations on nodes where the pod cannot run.

use std::collections::BTreeSet;

use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_index::{Nominator, Repelled, Waiting};

use super::allocate::Round;
use super::notices::Topic;
use super::placements::{NotWritten, Verdict};
use super::{State, Step};

impl Step<'_> {
    /// Counts how long kube-scheduler took for those of the changed pods that it has bound.
    pub(super) fn note_bound(&mut self, changed: &BTreeSet<PodUid>) {
        let State { index, placements, .. } = &mut *self.state;
        let bound = changed.iter().filter(|pod| index.node_of(pod).is_some());
        placements.bound(bound, self.now);
    }

    /// Releases allocations of pods that went away before they reserved anything, of pods that
    /// kube-scheduler cannot place there or does not try, of pods of which another claim found no
    /// devices, and of devices that were tainted since: kube-scheduler does not look at the taints
    /// of allocated devices.
    ///
    /// `affected` are the pods whose claims or devices may have changed.
    pub(super) fn release_unneeded(&mut self, round: &Round, affected: BTreeSet<PodUid>) {
        for claim in self.state.index.unneeded() {
            self.release(&claim, None);
        }
        let refused: BTreeSet<&PodUid> = round.plan.refusals.iter().map(|r| &r.pod).collect();
        let mut pods = affected;
        pods.extend(refused.iter().map(|pod| (*pod).clone()));
        let pods = self.state.waiting_visits.take(pods, self.now);
        let written = self.state.pods_being_written();
        for pod in &pods {
            let Some(waiting) = self.state.index.waiting(pod) else {
                self.state.placements.forget_observed(pod);
                continue;
            };
            // Where one claim cannot be written now, none is released: the node would be blamed.
            let is_busy = |claim| self.state.is_busy(claim, self.now);
            if written.contains(pod) || waiting.movable.iter().any(is_busy) {
                self.state.waiting_visits.visit_next(pod.clone());
                continue;
            }
            if self.gives_up(&waiting, &refused, &round.lost) {
                // Until the writes have ended, or where a claim cannot be written.
                self.state.waiting_visits.visit_next(pod.clone());
                for claim in &waiting.movable {
                    self.release(claim, Some(pod));
                }
            }
        }
        self.wake_at(self.state.waiting_visits.next());
    }

    /// Decides if the claims of a waiting pod are released, and notes why.
    fn gives_up(
        &mut self,
        waiting: &Waiting,
        refused: &BTreeSet<&PodUid>,
        lost: &BTreeSet<PodUid>,
    ) -> bool {
        let pod = &waiting.pod;
        if self.state.audits.is_long_unlisted(&self.state.index, pod) {
            // kube-scheduler does not come as far as to look at nodes.
            self.note_not_written(pod, NotWritten::Outdated);
            return true;
        }
        if let Some(repelled) = &waiting.repelled {
            // No evidence against the node.
            self.note_not_written(pod, NotWritten::Outdated);
            self.notify_repelled(waiting, repelled);
            return true;
        }
        if refused.contains(pod) {
            // The rest of its claims cannot follow the first, which is no evidence against the
            // node. Where kube-scheduler has nominated one, room is being made for the rest.
            let has_room = waiting.nominated_by == Some(Nominator::Scheduler);
            if !has_room {
                self.note_not_written(pod, NotWritten::Outdated);
            }
            return !has_room;
        }
        if lost.contains(pod) || self.state.deallocated.contains(pod) {
            // It is observed when its hold has ended.
            self.state.waiting_visits.visit_next(pod.clone());
            return false;
        }
        self.gives_up_stuck(waiting)
    }

    /// Observes the pod, and decides if it has had its time to be placed where its devices are.
    fn gives_up_stuck(&mut self, waiting: &Waiting) -> bool {
        let State { placements, holds, .. } = &mut *self.state;
        placements.observe(holds, waiting, self.now);
        match placements.verdict(waiting, self.now) {
            Verdict::Wait => return false,
            Verdict::WaitUntil(deadline) => {
                self.state.waiting_visits.visit_at(waiting.pod.clone(), deadline);
                return false;
            }
            Verdict::GiveUp => {
                placements.gave_up(holds, &waiting.pod, waiting.node.as_ref(), self.now);
                self.notify_stuck(waiting);
            }
            Verdict::ReleaseIncomplete => {
                placements.released_incomplete(holds, &waiting.pod, self.now);
                self.notify_incomplete(waiting);
            }
        }
        true
    }

    fn notify_incomplete(&mut self, waiting: &Waiting) {
        let note = "another claim of the pod is still not allocated, so the devices that the pod \
                    has are released; all of its claims are allocated again later; if no other \
                    event has the cause, look for failed writes in the controller's log";
        let (pod, node) = (&waiting.pod, waiting.node.as_ref());
        self.notify_incident(pod, Topic::Pod, events::RESCHEDULING, note.to_owned(), node);
    }

    fn notify_repelled(&mut self, waiting: &Waiting, Repelled { device, taint }: &Repelled) {
        let note = format!(
            "GPU {}/{} has the taint {taint} since it was allocated to the pod; trying elsewhere",
            device.pool.pool, device.device
        );
        let (pod, node) = (&waiting.pod, waiting.node.as_ref());
        self.notify_incident(pod, Topic::Pod, events::RESCHEDULING, note, node);
    }

    fn notify_stuck(&mut self, waiting: &Waiting) {
        let node = waiting.node.as_ref();
        let note = if waiting.node_gone {
            let node = node.map_or_else(String::new, ToString::to_string);
            format!(
                "node {node}, where the devices of the pod are, does not exist any more; trying elsewhere"
            )
        } else {
            let place = node.map_or_else(|| "anywhere".to_owned(), |n| format!("on node {n}"));
            let cause = waiting.unschedulable.as_deref().unwrap_or_default();
            format!(
                "kube-scheduler cannot place the pod {place}, where its devices are: {cause}; trying elsewhere"
            )
        };
        self.notify_incident(&waiting.pod, Topic::Pod, events::RESCHEDULING, note, node);
    }
}

impl State {
    /// Returns the pods that a write is open for, and those that name a claim being written.
    fn pods_being_written(&self) -> BTreeSet<PodUid> {
        let claims = self.writes.iter().map(|(claim, _)| claim);
        let mut pods = self.writes.pods();
        pods.extend(claims.flat_map(|claim| self.index.pods_with(claim)));
        pods
    }
}
