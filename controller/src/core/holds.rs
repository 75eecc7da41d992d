//! Holds: objects that are left alone for a while, all by one type and one table.
//!
//! A hold has a subject and a reason. The reason's [`Rule`] gives the first pause, its growth with
//! each further hold of the same subject and reason, the longest pause, the object whose end ends
//! the count, and what ends the hold before its time. Questions do not change a hold.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimUid, NodeGroupName, NodeName};

use super::clock::Moment;
use super::effect::{QuotaReference, TemplateReference};

/// The subject of a hold: a claim, a pod, a pod together with a claim or a node, or an
/// object of Tessera.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Subject {
    // The order of the fields has all subjects of one pod side by side.
    pod: Option<PodUid>,
    claim: Option<ClaimUid>,
    node: Option<NodeName>,
    object: Option<HeldObject>,
}

/// An object that the controller writes, other than a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HeldObject {
    /// The status of a GpuQuota.
    Quota(QuotaReference),
    /// A claim template.
    Template(TemplateReference),
    /// The placeholder pods of a group of nodes.
    NodeGroup(NodeGroupName),
}

impl Subject {
    const NONE: Self = Self { pod: None, claim: None, node: None, object: None };

    pub(super) fn claim(claim: &ClaimUid) -> Self {
        Self { claim: Some(claim.clone()), ..Self::NONE }
    }

    pub(super) fn pod(pod: &PodUid) -> Self {
        Self { pod: Some(pod.clone()), ..Self::NONE }
    }

    pub(super) fn pod_on(pod: &PodUid, node: &NodeName) -> Self {
        Self { pod: Some(pod.clone()), node: Some(node.clone()), ..Self::NONE }
    }

    pub(super) fn quota(quota: &QuotaReference) -> Self {
        Self { object: Some(HeldObject::Quota(quota.clone())), ..Self::NONE }
    }

    pub(super) fn template(template: &TemplateReference) -> Self {
        Self { object: Some(HeldObject::Template(template.clone())), ..Self::NONE }
    }

    pub(super) fn node_group(group: &NodeGroupName) -> Self {
        Self { object: Some(HeldObject::NodeGroup(group.clone())), ..Self::NONE }
    }

    pub(super) fn pod_with(pod: &PodUid, claim: &ClaimUid) -> Self {
        Self { pod: Some(pod.clone()), claim: Some(claim.clone()), ..Self::NONE }
    }
}

/// The reason of a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HoldReason {
    /// A claim lost its allocation. A PreBind under way meets a conflict, reads the claim again and
    /// would accept any allocation that it finds then, on any node: it gets time to find none.
    ClaimDeallocated,
    /// A write that clears a claim was refused.
    ClearingFailed,
    /// Writes of a claim were overtaken by others. The first is decided again at once; a storm of
    /// foreign writes must not be answered by one of ours for each.
    WriteContended,
    /// An allocation of a pod was released: kube-scheduler gets time to notice.
    AllocationReleased,
    /// An allocation could not be written. The longest pause is kube-scheduler's own longest
    /// back-off.
    WriteFailed,
    /// The API server refuses an allocation and will refuse it again.
    WriteDenied,
    /// A search was ended without a decision because the steps of a pod were spent. Such a pod
    /// costs as much as thousands of others.
    SearchUndecided,
    /// A pod could not run on a node, which is left out for the pod. The pauses grow with the
    /// failures of the pod on all nodes.
    NodeFailed,
    /// A claim was seen on another node than its pod. Pods and claims arrive by different watches,
    /// so it may be so only between two events.
    MisplacementUnconfirmed,
    /// A write to repair a misplaced claim was started.
    RepairWritten,
    /// A plan found no devices on the node of a bound pod. Users wait for devices that they have
    /// just freed, so the pauses stay short.
    RepairUnplaced,
    /// A search on the node of a bound pod was ended without a decision.
    RepairUndecided,
    /// An event was published about a pod: events of other reasons wait.
    EventPublished,
    /// An event was published about a pod: other texts of the same reason wait.
    EventRepeated,
    /// The API server has not taken an event.
    EventRefused,
    /// The status of a quota was written: further changes are written together.
    QuotaStatusWritten,
    /// The status of a quota could not be written.
    QuotaStatusFailed,
    /// A claim template could not be created or deleted.
    TemplateFailed,
    /// No evictions were found after which a pod would fit, or the pod did not fit after them.
    PreemptionFailed,
    /// An eviction of a pod was refused: others are chosen.
    EvictionRefused,
    /// kube-scheduler could not place all pods of the group, and the devices were released.
    GroupNotBound,
    /// A placeholder pod could not be created or deleted.
    PlaceholderFailed,
    /// A node that a placeholder pod has asked for has published no GPUs. Further ones are likely
    /// to be as useless.
    NodeWithoutGpus,
}

/// The object that keeps the count of a hold. The count ends with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CountEnd {
    /// The hold itself: the next one is a first one.
    Hold,
    /// The claim is deleted, or a write of it is stored.
    Claim,
    /// The pod is bound or deleted, or what the hold waits for succeeds.
    WaitingPod,
    /// The pod is deleted.
    Pod,
    /// The claim is on the node of its pod, or on another node than before.
    Misplacement,
    /// The object of Tessera does not exist any more, or it is written.
    Object,
}

/// The event that ends a hold before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EarlyEnd {
    /// Nothing but the object that keeps the count.
    Never,
    /// A change of what the failure depends on ([`Basis`]) ends the hold and its count, as does an
    /// allocation of all claims of the pod. The release of its allocations from a node where it
    /// could not run ends the hold: another node may have another outcome. The release because one
    /// claim is not allocated does not: the next attempt would be the same.
    Basis,
}

/// A digest of what a failure depends on. After a change of it the next attempt may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Basis(pub(super) u64);

/// The pauses of one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    /// The first pause.
    pub(super) first: Duration,
    /// The factor of each further pause.
    pub(super) factor: u32,
    /// The longest pause.
    pub(super) longest: Duration,
    /// The number of holds without a pause before the first.
    pub(super) free: u32,
    /// The end of the count.
    pub(super) count_end: CountEnd,
    /// The early end of the hold.
    pub(super) early_end: EarlyEnd,
    /// True if the core decides again when the hold ends.
    pub(super) wakes: bool,
}

impl HoldReason {
    /// Returns the rule of the reason. This is the table of all pauses (ADR 32).
    pub(super) const fn rule(self) -> Rule {
        use CountEnd::{Claim, Hold, Misplacement, Object, Pod, WaitingPod};
        use EarlyEnd::{Basis, Never};
        //                   first, factor, longest, free, (count ends, early end), wakes
        match self {
            Self::ClaimDeallocated => rule(ms(2_000), 1, secs(2), 0, (Hold, Never), true),
            Self::ClearingFailed => rule(ms(2_000), 1, secs(2), 0, (Hold, Never), true),
            Self::WriteContended => rule(ms(50), 2, secs(2), 1, (Claim, Never), true),
            Self::AllocationReleased => rule(ms(2_000), 1, secs(2), 0, (Hold, Never), true),
            Self::WriteFailed => rule(ms(1_000), 2, secs(10), 0, (WaitingPod, Never), true),
            Self::WriteDenied => rule(ms(1_000), 2, secs(300), 0, (WaitingPod, Basis), true),
            Self::SearchUndecided => rule(ms(1_000), 2, secs(300), 0, (WaitingPod, Basis), true),
            Self::NodeFailed => rule(ms(10_000), 2, secs(300), 0, (WaitingPod, Never), true),
            Self::MisplacementUnconfirmed => {
                rule(ms(2_000), 1, secs(2), 0, (Misplacement, Never), true)
            }
            Self::RepairWritten => rule(ms(4_000), 2, secs(300), 0, (Misplacement, Never), true),
            Self::RepairUnplaced => rule(ms(4_000), 2, secs(30), 0, (Misplacement, Never), true),
            Self::RepairUndecided => rule(ms(4_000), 2, secs(300), 0, (Misplacement, Never), true),
            Self::EventPublished => rule(ms(2_000), 1, secs(2), 0, (Hold, Never), false),
            Self::EventRepeated => rule(ms(2_000), 2, secs(300), 0, (Pod, Never), false),
            Self::EventRefused => rule(ms(2_000), 2, secs(300), 0, (Pod, Never), false),
            Self::QuotaStatusWritten => rule(ms(1_000), 1, secs(1), 0, (Hold, Never), true),
            Self::QuotaStatusFailed => rule(ms(1_000), 2, secs(60), 0, (Object, Never), true),
            Self::PreemptionFailed => rule(ms(5_000), 2, secs(60), 0, (WaitingPod, Never), true),
            Self::EvictionRefused => rule(ms(10_000), 2, secs(300), 0, (Pod, Never), false),
            Self::GroupNotBound => rule(ms(10_000), 2, secs(300), 0, (WaitingPod, Never), true),
            Self::PlaceholderFailed => rule(ms(10_000), 2, secs(300), 0, (Object, Never), false),
            Self::NodeWithoutGpus => rule(ms(900_000), 2, secs(14_400), 0, (Object, Never), false),
            Self::TemplateFailed => rule(ms(500), 2, secs(60), 0, (Object, Never), true),
        }
    }
}

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const fn rule(
    first: Duration,
    factor: u32,
    longest: Duration,
    free: u32,
    (count_end, early_end): (CountEnd, EarlyEnd),
    wakes: bool,
) -> Rule {
    Rule { first, factor, longest, free, count_end, early_end, wakes }
}

impl Rule {
    /// Returns the pause of the hold after `before` others.
    fn pause(self, before: u32) -> Duration {
        match before.checked_sub(self.free) {
            None => Duration::ZERO,
            Some(grown) => {
                self.first.saturating_mul(self.factor.saturating_pow(grown)).min(self.longest)
            }
        }
    }
}

/// One hold: its end, and the number of holds so far.
#[derive(Debug, Clone, Copy)]
struct Hold {
    until: Moment,
    count: u32,
    /// Digest at the time of the failure, for reasons with [`EarlyEnd::Basis`].
    basis: Option<Basis>,
}

/// All holds.
#[derive(Debug, Default)]
pub(super) struct Holds {
    holds: BTreeMap<Subject, BTreeMap<HoldReason, Hold>>,
    /// The ends of the holds that wake the core, for the next wake.
    ends: BTreeSet<(Moment, Subject, HoldReason)>,
    /// The subjects with a hold that wakes the core and that has begun or ended since
    /// [`take_changed`](Self::take_changed).
    changed: BTreeSet<Subject>,
}

impl Holds {
    /// Holds the subject, longer than the last time. Returns the end of the hold.
    pub(super) fn hold(&mut self, subject: Subject, reason: HoldReason, now: Moment) -> Moment {
        let before = self.get(&subject, reason).map_or(0, |hold| hold.count);
        self.hold_after(subject, reason, before, now)
    }

    /// Holds the subject as [`hold`](Self::hold) does, until a change of `basis` at the latest.
    pub(super) fn hold_on(
        &mut self,
        subject: &Subject,
        reason: HoldReason,
        basis: Basis,
        now: Moment,
    ) -> Moment {
        debug_assert_eq!(reason.rule().early_end, EarlyEnd::Basis, "{reason:?}");
        let until = self.hold(subject.clone(), reason, now);
        if let Some(hold) = self.get_mut(subject, reason) {
            hold.basis = Some(basis);
        }
        until
    }

    /// Ends the hold and its count if what the failure depends on is not `basis` any more.
    pub(super) fn end_if_changed(&mut self, subject: &Subject, reason: HoldReason, basis: Basis) {
        let before = self.get(subject, reason).and_then(|hold| hold.basis);
        if before.is_some_and(|before| before != basis) {
            self.end_of(subject, reason);
        }
    }

    /// Holds the subject as after this number of holds before.
    pub(super) fn hold_after(
        &mut self,
        subject: Subject,
        reason: HoldReason,
        before: u32,
        now: Moment,
    ) -> Moment {
        let rule = reason.rule();
        let until = now + rule.pause(before);
        self.forget_end(&subject, reason);
        if rule.wakes && until > now {
            self.ends.insert((until, subject.clone(), reason));
            self.changed.insert(subject.clone());
        }
        let hold = Hold { until, count: before.saturating_add(1), basis: None };
        self.holds.entry(subject).or_default().insert(reason, hold);
        until
    }

    fn get(&self, subject: &Subject, reason: HoldReason) -> Option<Hold> {
        self.holds.get(subject)?.get(&reason).copied()
    }

    fn get_mut(&mut self, subject: &Subject, reason: HoldReason) -> Option<&mut Hold> {
        self.holds.get_mut(subject)?.get_mut(&reason)
    }

    /// Returns the end of the hold; none if the subject is not held for this reason.
    pub(super) fn until(
        &self,
        subject: &Subject,
        reason: HoldReason,
        now: Moment,
    ) -> Option<Moment> {
        self.get(subject, reason).map(|hold| hold.until).filter(|until| *until > now)
    }

    /// Returns true if the subject is held for this reason.
    pub(super) fn is_held(&self, subject: &Subject, reason: HoldReason, now: Moment) -> bool {
        self.until(subject, reason, now).is_some()
    }

    /// Returns true if the subject is held for one of these reasons.
    pub(super) fn is_held_for_any(
        &self,
        subject: &Subject,
        reasons: &[HoldReason],
        now: Moment,
    ) -> bool {
        reasons.iter().any(|reason| self.is_held(subject, *reason, now))
    }

    /// Returns the end of the last hold of the subject, for any reason.
    pub(super) fn last_end(&self, subject: &Subject, now: Moment) -> Option<Moment> {
        let ends = self.holds.get(subject)?.values().map(|hold| hold.until);
        ends.filter(|until| *until > now).max()
    }

    /// Returns the nodes that are left out for a pod.
    pub(super) fn excluded_nodes(&self, pod: &PodUid, now: Moment) -> BTreeSet<NodeName> {
        let first = Subject::pod(pod);
        let of_pod = self.holds.range(first..).take_while(|(s, _)| s.pod.as_ref() == Some(pod));
        let is_excluded = |holds: &BTreeMap<HoldReason, Hold>| {
            holds.get(&HoldReason::NodeFailed).is_some_and(|hold| hold.until > now)
        };
        of_pod
            .filter(|(_, holds)| is_excluded(holds))
            .filter_map(|(subject, _)| subject.node.clone())
            .collect()
    }

    /// Has the next hold be a first one. A hold under way lasts.
    pub(super) fn restart_count(&mut self, subject: &Subject, reason: HoldReason) {
        if let Some(hold) = self.get_mut(subject, reason) {
            hold.count = 0;
        }
    }

    /// Ends the hold of the subject for this reason, and its count.
    pub(super) fn end_of(&mut self, subject: &Subject, reason: HoldReason) {
        self.forget_end(subject, reason);
        if let Some(holds) = self.holds.get_mut(subject) {
            if holds.remove(&reason).is_some() && reason.rule().wakes {
                self.changed.insert(subject.clone());
            }
            if holds.is_empty() {
                self.holds.remove(subject);
            }
        }
    }

    /// Ends the hold of the subject for this reason now. The next one counts as a further one.
    pub(super) fn cut_short(&mut self, subject: &Subject, reason: HoldReason, now: Moment) {
        self.forget_end(subject, reason);
        if let Some(hold) = self.get_mut(subject, reason) {
            hold.until = hold.until.min(now);
            self.changed.insert(subject.clone());
        }
    }

    /// Ends all holds of the subject and their counts.
    pub(super) fn end(&mut self, subject: &Subject) {
        for (reason, hold) in self.holds.remove(subject).into_iter().flatten() {
            self.ends.remove(&(hold.until, subject.clone(), reason));
            self.changed.insert(subject.clone());
        }
    }

    /// Returns the end of the next hold that wakes the core.
    pub(super) fn next_end(&self, now: Moment) -> Option<Moment> {
        self.ends.iter().map(|(until, _, _)| *until).find(|until| *until > now)
    }

    /// Takes the subjects with a hold that wakes the core and that has begun or ended since the
    /// last call.
    pub(super) fn take_changed(&mut self, now: Moment) -> BTreeSet<Subject> {
        while let Some((until, _, _)) = self.ends.first()
            && *until <= now
        {
            self.changed.extend(self.ends.pop_first().map(|(_, subject, _)| subject));
        }
        std::mem::take(&mut self.changed)
    }

    /// Returns the pods with a hold that ends with a change of what it depends on.
    pub(super) fn pods_with_basis(&self) -> BTreeSet<PodUid> {
        let is_early = |holds: &BTreeMap<HoldReason, Hold>| {
            holds.keys().any(|reason| reason.rule().early_end == EarlyEnd::Basis)
        };
        let subjects = self.holds.iter().filter(|(_, holds)| is_early(holds));
        subjects.filter_map(|(subject, _)| subject.pod.clone()).collect()
    }

    /// Forgets the holds of a pod that does not wait any more, and all of them if it does not
    /// exist.
    pub(super) fn forget_pod(&mut self, pod: &PodUid, exists: bool) {
        let first = Subject::pod(pod);
        let of_pod = self.holds.range(first..).take_while(|(s, _)| s.pod.as_ref() == Some(pod));
        let ended = of_pod.flat_map(|(subject, holds)| {
            let is_ended =
                |reason: &&HoldReason| !exists || reason.rule().count_end == CountEnd::WaitingPod;
            holds.keys().filter(is_ended).map(|reason| (subject.clone(), *reason))
        });
        for (subject, reason) in ended.collect::<Vec<_>>() {
            self.end_of(&subject, reason);
        }
    }

    /// Forgets holds that are over, and counts whose object `exists` no more.
    pub(super) fn retain(&mut self, now: Moment, exists: impl Fn(&Subject, CountEnd) -> bool) {
        let ends = &mut self.ends;
        self.holds.retain(|subject, holds| {
            holds.retain(|reason, hold| {
                let is_counted = hold.count > 0 && exists(subject, reason.rule().count_end);
                let is_kept = match reason.rule().count_end {
                    CountEnd::Hold => hold.until > now,
                    _ => is_counted || (hold.count == 0 && hold.until > now),
                };
                if !is_kept {
                    ends.remove(&(hold.until, subject.clone(), *reason));
                }
                is_kept
            });
            !holds.is_empty()
        });
    }

    fn forget_end(&mut self, subject: &Subject, reason: HoldReason) {
        if let Some(hold) = self.get(subject, reason) {
            self.ends.remove(&(hold.until, subject.clone(), reason));
        }
    }
}

impl Subject {
    /// Returns the pod, and the claim of this pod that the subject names.
    pub(super) fn parts(&self) -> (Option<&PodUid>, Option<&ClaimUid>) {
        (self.pod.as_ref(), self.claim.as_ref())
    }

    /// Returns the object of Tessera.
    pub(super) fn object(&self) -> Option<&HeldObject> {
        self.object.as_ref()
    }
}
