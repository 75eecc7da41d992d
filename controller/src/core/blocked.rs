//! Pods that cannot be planned until a user changes a claim or creates a pod, or a bound pod gets
//! its claim.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::PodUid;
use tessera_index::{Blocked, PlanningBlocker};
use tessera_messages as message;

use super::Step;
use super::explain::Pending;
use super::notices::{NoticeDraft, Topic};
use super::visits::Visits;

/// The pods that cannot be planned.
#[derive(Debug, Default)]
pub(super) struct BlockedPods {
    pods: BTreeMap<PodUid, Blocked>,
    /// Their number by reason.
    counts: Pending,
    /// The pods to tell.
    visits: Visits<PodUid>,
}

impl BlockedPods {
    pub(super) fn insert(&mut self, blocked: Blocked) {
        let pod = blocked.pod.clone();
        self.remove(&pod);
        *self.counts.entry(label(&blocked)).or_default() += 1;
        self.visits.visit_next(pod.clone());
        self.pods.insert(pod, blocked);
    }

    pub(super) fn remove(&mut self, pod: &PodUid) {
        let Some(blocked) = self.pods.remove(pod) else { return };
        if let Some(count) = self.counts.get_mut(label(&blocked)) {
            *count -= 1;
        }
    }

    /// Has the pod told again, if it cannot be planned.
    pub(super) fn tell_again(&mut self, pod: &PodUid) {
        if self.pods.contains_key(pod) {
            self.visits.visit_next(pod.clone());
        }
    }
}

impl Step<'_> {
    /// Counts the pods that cannot be planned, and tells those that do not know it yet.
    pub(super) fn explain_blocked(&mut self, pending: &mut Pending) {
        let counts = self.state.blocked.counts.iter().filter(|(_, count)| **count > 0);
        for (label, count) in counts {
            *pending.entry(label).or_default() += count;
        }
        for pod in self.state.blocked.visits.take(BTreeSet::new(), self.now) {
            if let Some(blocked) = self.state.blocked.pods.get(&pod).cloned() {
                self.tell_blocked(&blocked);
            }
        }
        self.wake_at(self.state.blocked.visits.next());
    }

    fn tell_blocked(&mut self, Blocked { pod, claim, blocker }: &Blocked) {
        // A claim in use may be so only between two events of one cause. The pod is told again once
        // that is confirmed.
        let is_confirmed = || self.state.misplacements.is_confirmed(claim);
        if *blocker == PlanningBlocker::BoundPod && !is_confirmed() {
            return;
        }
        let note = message::blocker_message(&self.state.claim_name(claim), *blocker);
        let (topic, reason) = (Topic::Claim(claim.clone()), message::blocker_reason(*blocker));
        let draft = NoticeDraft { pod: pod.clone(), topic, reason, node: None };
        if let Some(later) = self.publish(&draft, note) {
            self.state.blocked.visits.visit_at(pod.clone(), later);
        }
    }
}

/// Returns the label of the reason in metrics.
fn label(blocked: &Blocked) -> &'static str {
    message::blocker_reason(blocked.blocker).name()
}
