//! Placements: decisions that wait for kube-scheduler, and the pods that could not run where their
//! devices are.
//!
//! kube-scheduler may find that a pod does not fit where we allocated (a port, a volume, a pod that
//! was faster). Two signals show it: it clears an allocation itself, or the pod stays
//! unschedulable. Then the node is left out for this pod for a while that grows with every failure,
//! and the pod is planned elsewhere.
//!
//! Time stamps in the pod do not show if a failure is newer than the allocation (identical failures
//! are not written again). So a message that differs from the one at the decision counts as new,
//! and otherwise a deadline does.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_api::names::NodeName;
use tessera_index::{Nomination, Nominator, Waiting};

use super::clock::Moment;
use super::holds::{Basis, HoldReason, Holds, Subject};

/// The time from a new failure message to the release: an attempt that began before kube-scheduler
/// saw the allocation may have been under way.
const AFTER_NEW_FAILURE: Duration = Duration::from_secs(2);

/// The time that kube-scheduler gets without a new message; its own back-off is at most 10 s.
const WITHOUT_NEWS: Duration = Duration::from_secs(20);

/// With a queue of pods before this one, kube-scheduler gets this multiple of the time that it took
/// for the pod that it bound last: a pod that has failed waits for its turn again.
const TURNS: u32 = 2;

/// The further time where the API server was away while the pod waited, or this long before:
/// kube-scheduler may learn of it later than we. client-go's reflector waits up to 30 s between
/// attempts, and its jitter doubles that.
const AFTER_INTERRUPTION: Duration = Duration::from_secs(60);

/// The time after which the devices of a pod are released if another of its claims is still not
/// allocated. Retries of its write do not extend it.
const INCOMPLETE: Duration = Duration::from_secs(20);

/// The time from a new failure message to the release where the controller's nomination is still
/// there: kube-scheduler may be evicting pods from that node, as a rule within their 30 s of grace.
/// It also stays with a scheduler profile without preemption, and for pods that never preempt.
const KEPT_NOMINATION: Duration = Duration::from_secs(60);

/// The time after which a deadline that depends on the speed of kube-scheduler is determined again:
/// kube-scheduler may have become faster.
const PACE_CHECK: Duration = Duration::from_secs(1);

/// No time grows beyond this.
const LONGEST: Duration = Duration::from_secs(300);

/// The message of the plugin DynamicResources about a pod whose claims are not allocated. It is
/// outdated once they are.
const NOT_ALLOCATED: &str = "cannot allocate all claims";

/// The holds of a pod whose last plan could not be made or not be written.
const PLANNING_FAILURES: [HoldReason; 3] =
    [HoldReason::WriteFailed, HoldReason::WriteDenied, HoldReason::SearchUndecided];

/// The placements of pods, and the speed of kube-scheduler.
#[derive(Debug, Default)]
pub(super) struct Placements {
    pods: BTreeMap<PodUid, Attempts>,
    pace: Option<Pace>,
    /// The last time that the API server was seen to be away.
    interrupted: Option<Moment>,
}

/// The speed of kube-scheduler.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// The time from the write of our decision to the binding, for the slowest of the pods that
    /// were bound last.
    took: Duration,
    /// The time of their binding.
    seen: Moment,
}

#[derive(Debug, Default)]
struct Attempts {
    /// The number of times that the pod could not run where it was placed. Failed writes do not
    /// count: they are no evidence against nodes.
    failures: u32,
    placed: Option<Placement>,
    /// The time since which some of its claims have been allocated and others have not.
    incomplete_since: Option<Moment>,
}

/// A decision that waits for kube-scheduler.
#[derive(Debug)]
struct Placement {
    node: Option<NodeName>,
    /// It was decided for this pod. Otherwise the pod came to a claim that was allocated already.
    is_decided: bool,
    /// The time from which kube-scheduler can see it: of the decision, then of its write.
    since: Moment,
    /// kube-scheduler's message at that time.
    message: Option<String>,
    /// The time at which another message was first seen.
    changed: Option<Moment>,
    /// kube-scheduler has made room on the node since.
    has_room: bool,
}

/// The treatment of a pod that waits for kube-scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing is done until the pod, a claim of it, a node or a device changes.
    Wait,
    /// Nothing is done before this time, when the verdict is determined again.
    WaitUntil(Moment),
    /// The allocation is released, and the pod is planned elsewhere.
    GiveUp,
    /// The allocation is released because another claim of the pod has none: the node is not the
    /// cause.
    ReleaseIncomplete,
}

/// The cause of a decision that is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotWritten {
    /// The objects that it was based on have changed, and are known as they are now.
    Outdated,
    /// It could not be written now.
    Failed,
    /// The API server refuses it until something is changed.
    Denied(Basis),
}

/// An allocation that another client, as a rule kube-scheduler, has cleared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Deallocated {
    /// The pod cannot run on this node, which is left out from now on.
    Unplaceable(NodeName),
    /// Pods are evicted from this node to make room, so it is tried again.
    RoomMade(NodeName),
}

impl Placements {
    /// Notes a decision for the pod. `message` is kube-scheduler's at this time.
    pub(super) fn placed(
        &mut self,
        holds: &mut Holds,
        pod: &PodUid,
        node: NodeName,
        message: Option<String>,
        now: Moment,
    ) {
        holds.restart_count(&Subject::pod(pod), HoldReason::SearchUndecided);
        let attempts = self.pods.entry(pod.clone()).or_default();
        attempts.placed = Some(Placement {
            node: Some(node),
            is_decided: true,
            since: now,
            message,
            changed: None,
            has_room: false,
        });
    }

    /// Notes that a decision for the pod is stored. The time until then, which may be long, was not
    /// kube-scheduler's.
    pub(super) fn written(&mut self, pod: &PodUid, now: Moment) {
        if let Some(placed) = self.pods.get_mut(pod).and_then(|attempts| attempts.placed.as_mut()) {
            placed.since = now;
        }
    }

    /// Notes that the API server is or was away.
    pub(super) fn interrupted(&mut self, at: Moment) {
        self.interrupted = Some(at);
    }

    /// Notes that a decision is not stored, or not all of it. Unless the objects that it was based
    /// on have changed, the pod is held before the next try.
    pub(super) fn not_written(
        &mut self,
        holds: &mut Holds,
        pod: &PodUid,
        cause: NotWritten,
        now: Moment,
    ) {
        self.pods.entry(pod.clone()).or_default().placed = None;
        let subject = Subject::pod(pod);
        match cause {
            NotWritten::Outdated => {}
            NotWritten::Failed => {
                holds.hold(subject, HoldReason::WriteFailed, now);
            }
            NotWritten::Denied(basis) => {
                holds.hold_on(&subject, HoldReason::WriteDenied, basis, now);
            }
        }
    }

    /// Notes the nomination of a pod with a claim that was deallocated. If kube-scheduler makes
    /// room, a failed attempt while the claim is held takes the nomination away, and the room
    /// exists all the same.
    pub(super) fn nominated(
        &mut self,
        pod: &PodUid,
        nomination: &Nomination,
        message: Option<&str>,
    ) {
        let placed = self.pods.get_mut(pod).and_then(|attempts| attempts.placed.as_mut());
        if let Some(placed) = placed.filter(|placed| placed.is_making_room(nomination, message)) {
            placed.has_room = true;
        }
    }

    /// Notes that a pod has claims to be allocated. If it had been placed, another client has
    /// cleared its allocation. Where preemption has just made room the node is tried again,
    /// otherwise it is left out for a while. `message` is kube-scheduler's at this time.
    pub(super) fn deallocated(
        &mut self,
        holds: &mut Holds,
        pod: &PodUid,
        nomination: Option<&Nomination>,
        message: Option<&str>,
        now: Moment,
    ) -> Option<Deallocated> {
        let attempts = self.pods.get_mut(pod)?;
        // A claim that was another pod's and is free now is no evidence against its node, and the
        // claims that the pod still has keep their deadline.
        let placed = attempts.placed.take_if(|placed| placed.is_decided)?;
        let has_room = placed.has_room
            || nomination.is_some_and(|nomination| placed.is_making_room(nomination, message));
        let node = placed.node?;
        if has_room {
            return Some(Deallocated::RoomMade(node));
        }
        attempts.exclude(holds, pod, &node, now);
        Some(Deallocated::Unplaceable(node))
    }

    /// Notes that these pods have been bound, as far as they were placed.
    pub(super) fn bound<'p>(&mut self, pods: impl Iterator<Item = &'p PodUid>, now: Moment) {
        let placed = |pod| self.pods.remove(pod)?.placed.filter(|placed| placed.is_decided);
        let took = pods.filter_map(placed).map(|placed| now - placed.since).max();
        self.pace = took.map(|took| Pace { took, seen: now }).or(self.pace);
    }

    /// Returns true if the pod is placed on the node.
    pub(super) fn is_placed_on(&self, pod: &PodUid, node: &NodeName) -> bool {
        let placed = self.pods.get(pod).and_then(|attempts| attempts.placed.as_ref());
        placed.is_some_and(|placed| placed.node.as_ref() == Some(node))
    }

    /// Notes the state of a pod that waits for kube-scheduler: its verdict depends on it.
    pub(super) fn observe(&mut self, holds: &mut Holds, waiting: &Waiting, now: Moment) {
        if waiting.is_complete {
            // All that was decided is stored.
            for reason in PLANNING_FAILURES {
                holds.end_of(&Subject::pod(&waiting.pod), reason);
            }
        }
        let attempts = self.pods.entry(waiting.pod.clone()).or_default();
        let incomplete_since = attempts.incomplete_since.unwrap_or(now);
        attempts.incomplete_since = (!waiting.is_complete).then_some(incomplete_since);
        let placed = attempts.placed.get_or_insert_with(|| Placement {
            node: waiting.node.clone(),
            is_decided: false,
            since: now,
            message: waiting.unschedulable.clone(),
            changed: None,
            has_room: false,
        });
        if may_give_up(waiting) && placed.has_news(waiting.unschedulable.as_deref()) {
            placed.changed.get_or_insert(now);
        }
    }

    /// Returns the treatment of a pod that was [observed](Self::observe).
    pub(super) fn verdict(&self, waiting: &Waiting, now: Moment) -> Verdict {
        let Some(attempts) = self.pods.get(&waiting.pod) else { return Verdict::Wait };
        let Some(placed) = attempts.placed.as_ref().filter(|_| may_give_up(waiting)) else {
            return Verdict::Wait;
        };
        if waiting.node_gone {
            return Verdict::GiveUp;
        }
        if waiting.unschedulable.is_none() {
            return Verdict::Wait;
        }
        let changed = placed.changed.filter(|_| placed.has_news(waiting.unschedulable.as_deref()));
        let mut check = Moment::after_start(Duration::MAX);
        let (deadline, verdict) = match (changed, attempts.incomplete_since) {
            (Some(changed), _) if waiting.nominated_by == Some(Nominator::Controller) => {
                (changed + KEPT_NOMINATION, Verdict::GiveUp)
            }
            (Some(changed), _) => {
                (changed + grown(AFTER_NEW_FAILURE, attempts.failures), Verdict::GiveUp)
            }
            (None, Some(since)) => (since + INCOMPLETE, Verdict::ReleaseIncomplete),
            (None, None) => {
                let grace = self.grace_period(attempts.failures, now);
                if grace > grown(WITHOUT_NEWS, attempts.failures) {
                    check = now + PACE_CHECK;
                }
                let further = self.interruption_grace(placed);
                (placed.since + (grace + further).min(LONGEST), Verdict::GiveUp)
            }
        };
        if now >= deadline { verdict } else { Verdict::WaitUntil(deadline.min(check)) }
    }

    /// Returns the time that kube-scheduler gets for a pod without a new message. The time that it
    /// took for another pod counts for no longer than it would be waited for.
    fn grace_period(&self, failures: u32, now: Moment) -> Duration {
        let turns = self.pace.map(|pace| (pace.took * TURNS, pace.seen));
        let turns = turns.filter(|(turns, seen)| now - *seen < *turns);
        let turns = turns.map_or(Duration::ZERO, |(turns, _)| turns);
        grown(WITHOUT_NEWS, failures).max(turns).min(LONGEST)
    }

    fn interruption_grace(&self, placed: &Placement) -> Duration {
        let is_affected = |at: Moment| at + AFTER_INTERRUPTION > placed.since;
        let was_interrupted = self.interrupted.is_some_and(is_affected);
        if was_interrupted { AFTER_INTERRUPTION } else { Duration::ZERO }
    }

    /// Notes that we release the allocation of the pod. `node` is the one where it could not run.
    pub(super) fn gave_up(
        &mut self,
        holds: &mut Holds,
        pod: &PodUid,
        node: Option<&NodeName>,
        now: Moment,
    ) {
        let attempts = self.pods.entry(pod.clone()).or_default();
        attempts.forget_placement();
        let subject = Subject::pod(pod);
        for reason in PLANNING_FAILURES {
            // Another node may have another outcome.
            holds.cut_short(&subject, reason, now);
        }
        holds.hold(subject, HoldReason::AllocationReleased, now);
        if let Some(node) = node {
            attempts.exclude(holds, pod, node, now);
        }
    }

    /// Notes that we release what the pod has, since another of its claims is not allocated. The
    /// next plan would be the same, so the pause of the failed write lasts.
    pub(super) fn released_incomplete(&mut self, holds: &mut Holds, pod: &PodUid, now: Moment) {
        self.pods.entry(pod.clone()).or_default().forget_placement();
        holds.hold(Subject::pod(pod), HoldReason::AllocationReleased, now);
    }

    /// Forgets what was observed of a pod of which no claim has devices any more.
    pub(super) fn forget_observed(&mut self, pod: &PodUid) {
        if let Some(attempts) = self.pods.get_mut(pod) {
            attempts.placed.take_if(|placed| !placed.is_decided);
            attempts.incomplete_since = None;
        }
    }

    /// Forgets a pod that does not wait any more.
    pub(super) fn forget(&mut self, pod: &PodUid) {
        self.pods.remove(pod);
    }

    /// Forgets pods that do not wait any more.
    pub(super) fn retain(&mut self, is_waiting: impl Fn(&PodUid) -> bool) {
        self.pods.retain(|pod, _| is_waiting(pod));
    }
}

impl Placement {
    /// Returns true if kube-scheduler's message is newer than the decision.
    fn has_news(&self, message: Option<&str>) -> bool {
        message.is_some_and(|message| {
            Some(message) != self.message.as_deref() && !message.contains(NOT_ALLOCATED)
        })
    }

    /// Returns true if the nomination shows that kube-scheduler evicts pods from the node of the
    /// placement. It does not write the controller's nomination again when it evicts pods from
    /// that node, but removes it where an attempt fails without that.
    fn is_making_room(&self, nomination: &Nomination, message: Option<&str>) -> bool {
        self.node.as_ref() == Some(&nomination.node)
            && match nomination.by {
                Nominator::Scheduler => true,
                Nominator::Controller => self.has_news(message),
            }
    }
}

impl Attempts {
    /// Forgets the placement: it is being released.
    fn forget_placement(&mut self) {
        self.placed = None;
        self.incomplete_since = None;
    }

    fn exclude(&mut self, holds: &mut Holds, pod: &PodUid, node: &NodeName, now: Moment) {
        let subject = Subject::pod_on(pod, node);
        holds.hold_after(subject, HoldReason::NodeFailed, self.failures, now);
        self.failures += 1;
    }
}

/// Returns true if the allocations of the pod can be released: no room is being made for it, and
/// its claims are not reserved.
fn may_give_up(waiting: &Waiting) -> bool {
    waiting.nominated_by != Some(Nominator::Scheduler) && !waiting.movable.is_empty()
}

/// Returns `base`, doubled for each failure.
fn grown(base: Duration, failures: u32) -> Duration {
    base.saturating_mul(1 << failures.min(10)).min(LONGEST)
}
