//! Barriers of groups: no pod of a group is bound before kube-scheduler has a node for all.
//!
//! The allocations of a group have a binding condition. kube-scheduler reserves the claims of a pod
//! once it has a node for it, and binds the pod when the condition is true. The condition of all is
//! set once as many pods as the group has have reserved their claims. If that takes too long, the
//! failure condition is set instead, and all devices of the group are released.
//!
//! ```text
//! allocated --kube-scheduler reserves all--> complete --> bound
//!     |
//!     '--time is up--> failed --kube-scheduler gives the reservations back--> released
//! ```
//!
//! The state is in the claims. Only the time since which a group waits is in memory: a new leader
//! waits for the whole time again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_api::names::ClaimUid;
use tessera_index::{GroupBarrier, GroupKey};

use super::clock::Moment;
use super::effect::{BarrierOutcome, ClaimChange};
use super::holds::{HoldReason, Subject};
use super::notices::Topic;
use super::placements::NotWritten;
use super::visits::Visits;
use super::writes::WritePurpose;
use super::{State, Step};

/// The time within which kube-scheduler finds a node for all pods of a group. Its own back-off is
/// at most 10 s, and a pod that it cannot place gets devices elsewhere after 2 s to 20 s.
const TIME: Duration = Duration::from_secs(40);

/// The groups at their barriers.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    /// The time since which each has waited.
    since: BTreeMap<GroupKey, Moment>,
    /// The groups whose time ends, and those with claims to write.
    visits: Visits<GroupKey>,
}

impl Step<'_> {
    /// Opens the barriers of the groups that are complete, and fails those whose time is up.
    pub(super) fn settle_barriers(&mut self, changed: &BTreeSet<PodUid>) {
        let State { index, barriers, .. } = &mut *self.state;
        let changed = changed.iter().filter_map(|pod| index.group_of(pod)).cloned().collect();
        for group in barriers.visits.take(changed, self.now) {
            self.settle_barrier(&group);
        }
        self.wake_at(self.state.barriers.visits.next());
    }

    fn settle_barrier(&mut self, group: &GroupKey) {
        let barrier = self.state.index.barrier_of(group);
        let Barriers { since, visits } = &mut self.state.barriers;
        if barrier.waiting.is_empty() && barrier.failed.is_empty() {
            since.remove(group);
            return;
        }
        let end = *since.entry(group.clone()).or_insert(self.now) + TIME;
        if !barrier.is_complete && barrier.failed.is_empty() && self.now < end {
            visits.visit_at(group.clone(), end);
            return;
        }
        // Until all of its claims are written.
        visits.visit_next(group.clone());
        if barrier.is_complete {
            self.conclude(&barrier.waiting, BarrierOutcome::Complete);
        } else {
            self.fail_barrier(&barrier);
        }
    }

    /// Has the reservations of a group given back, and releases what is not reserved.
    fn fail_barrier(&mut self, barrier: &GroupBarrier) {
        let is_new = barrier.failed.is_empty();
        if is_new {
            self.figures.failed_groups += 1;
            barrier.pods.iter().for_each(|pod| self.note_failed_group(pod, barrier));
        }
        let all = || barrier.waiting.iter().chain(&barrier.failed);
        for (claim, _) in all().filter(|(_, is_idle)| *is_idle) {
            self.release(claim, None);
        }
        let reserved: Vec<(ClaimUid, bool)> =
            barrier.waiting.iter().filter(|(_, is_idle)| !is_idle).cloned().collect();
        self.conclude(&reserved, BarrierOutcome::Failed);
    }

    fn note_failed_group(&mut self, pod: &PodUid, barrier: &GroupBarrier) {
        // No evidence against the node: kube-scheduler's message about the pod that it could not
        // place has been that.
        self.note_not_written(pod, NotWritten::Outdated);
        self.state.holds.hold(Subject::pod(pod), HoldReason::GroupNotBound, self.now);
        let GroupBarrier { size, arrived, .. } = barrier;
        let note = format!(
            "kube-scheduler has found nodes for {arrived} of the {size} pods of the group within \
             {} s, so the devices of the group are released; trying again later",
            TIME.as_secs()
        );
        self.notify_incident(pod, Topic::Pod, events::RESCHEDULING, note, None);
    }

    fn conclude(&mut self, claims: &[(ClaimUid, bool)], outcome: BarrierOutcome) {
        for (claim, _) in claims {
            if !self.state.is_busy(claim, self.now) {
                let change = |_: &_| ClaimChange::Conclude(outcome);
                self.write(claim, WritePurpose::Barrier, None, self.now, change);
            }
        }
    }
}
