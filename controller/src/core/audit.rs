//! Audit: once a minute, what no event leads to. Running sums are recounted, in parts, because a
//! whole count delays pods by 0.7 s in the largest clusters; claims that were deleted in use, pods
//! whose status lacks a claim, and writes without an answer are reported.

use std::collections::BTreeSet;
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_api::names::ClaimUid;
use tessera_index::Index;
use tessera_messages as message;

use super::clock::Moment;
use super::holds::{CountEnd, HeldObject};
use super::notices::Topic;
use super::{State, Step, gauge};

/// The interval between audits.
const INTERVAL: Duration = Duration::from_secs(60);

/// The number of claims or devices of one part of the count: about a millisecond.
const PART: usize = 250;

/// The interval between the parts.
const PART_INTERVAL: Duration = Duration::from_millis(10);

/// The age of a write without an answer that is reported. The API server has had more than ten
/// tries by then.
const UNANSWERED: Duration = Duration::from_secs(30);

/// The results of the last audits.
#[derive(Debug)]
pub(super) struct Audits {
    next: Moment,
    /// The time of the next part of the count; none = no count is under way.
    next_part: Option<Moment>,
    /// Claims deleted in use that the last audit saw.
    orphans: BTreeSet<(PodUid, ClaimUid)>,
    /// Pods whose status lacks a claim that the last audit saw.
    unlisted: BTreeSet<PodUid>,
    /// Pods among them that the audit before it saw too.
    long_unlisted: BTreeSet<PodUid>,
}

impl Default for Audits {
    fn default() -> Self {
        Self {
            next: Moment::START + INTERVAL,
            next_part: None,
            orphans: BTreeSet::new(),
            unlisted: BTreeSet::new(),
            long_unlisted: BTreeSet::new(),
        }
    }
}

impl Audits {
    /// Returns the time of the next audit, or of the next part of the one under way.
    pub(super) fn next(&self) -> Moment {
        self.next_part.map_or(self.next, |part| part.min(self.next))
    }

    /// Returns true if devices would be idle with the pod: for more than a minute its status has
    /// not named all of its claims, so kube-scheduler does not bind it.
    pub(super) fn is_long_unlisted(&self, index: &Index, pod: &PodUid) -> bool {
        self.long_unlisted.contains(pod) && index.is_unlisted(pod)
    }

    /// Returns the pods of which [`is_long_unlisted`](Self::is_long_unlisted) holds.
    pub(super) fn long_unlisted<'a>(
        &'a self,
        index: &'a Index,
    ) -> impl Iterator<Item = &'a PodUid> {
        self.long_unlisted.iter().filter(|pod| index.is_unlisted(pod))
    }
}

impl Step<'_> {
    /// Audits the state if a minute has passed since the last time, or continues the count.
    pub(super) fn audit_if_due(&mut self) {
        if self.state.audits.next_part.is_some_and(|part| self.now >= part) {
            self.audit_sums();
        }
        if self.now < self.state.audits.next {
            return;
        }
        self.state.audits.next = self.now + INTERVAL;
        if self.state.audits.next_part.is_none() {
            self.audit_sums();
        }
        self.audit_orphans();
        self.audit_unlisted();
        self.audit_writes();
        // A claim may be reserved by a pod that does not name it.
        for pod in self.state.misplacements.pods() {
            self.state.repair_visits.visit_next(pod.clone());
        }
        self.forget_all_gone();
    }

    /// Forgets holds, placements and notices of all that does not exist any more. Those of pods are
    /// forgotten with the pods; the others are only memory by now.
    fn forget_all_gone(&mut self) {
        let State {
            index,
            holds,
            placements,
            placeholders,
            misplacements,
            notices,
            nominations,
            templates,
            ..
        } = &mut *self.state;
        let waiting = index.unbound_pods();
        let exists = |pod: &PodUid| index.pod_name(pod).is_some();
        placements.retain(|pod| waiting.contains(pod));
        nominations.retain(|pod| waiting.contains(pod));
        notices.retain(exists);
        holds.retain(self.now, |subject, end| match (end, subject.parts()) {
            (CountEnd::WaitingPod, (Some(pod), _)) => waiting.contains(pod),
            (CountEnd::Pod, (Some(pod), _)) => exists(pod),
            (CountEnd::Claim, (_, Some(claim))) => index.claim_exists(claim),
            (CountEnd::Misplacement, (Some(pod), Some(claim))) => {
                misplacements.contains(pod, claim)
            }
            (CountEnd::Object, _) => match subject.object() {
                Some(HeldObject::Quota(quota)) => {
                    index.quota(&quota.namespace, &quota.name).is_some()
                }
                Some(HeldObject::Template(template)) => templates.contains(template),
                Some(HeldObject::NodeGroup(group)) => placeholders.has_group(group),
                None => false,
            },
            _ => false,
        });
    }

    fn audit_sums(&mut self) {
        let audit = self.state.index.audit_part(PART);
        if audit.drifted {
            self.figures.drifts += 1;
            tracing::error!("running sums of allocated capacity were wrong and are corrected");
        }
        self.state.audits.next_part = (!audit.is_complete).then(|| self.now + PART_INTERVAL);
        if audit.is_complete {
            self.report_overcommitted();
        }
    }

    fn report_overcommitted(&mut self) {
        let overcommitted = self.state.index.overcommitted();
        self.figures.overcommitted = Some(gauge(overcommitted.len()));
        for device in overcommitted.iter().map(|over| &over.device) {
            tracing::error!(%device, "device is overcommitted");
            for pod in self.state.index.pods_on(device) {
                let note = format!(
                    "more of device {device} is allocated than there is; this pod is one of those that hold it"
                );
                let topic = Topic::Device(device.clone());
                self.notify(&pod, topic, events::OVERCOMMITTED, note, None);
            }
        }
    }

    /// Reports claims that were deleted under their pods. Pods and claims arrive by different
    /// watches, so what only one audit sees may be a pod that has just ended.
    fn audit_orphans(&mut self) {
        let orphaned = self.state.index.orphaned();
        let seen = orphaned.iter().map(|(pod, claim, _)| (pod.clone(), claim.clone())).collect();
        let before = std::mem::replace(&mut self.state.audits.orphans, seen);
        let mut confirmed = 0;
        for (pod, uid, node) in orphaned {
            if !before.contains(&(pod.clone(), uid.clone())) {
                continue;
            }
            confirmed += 1;
            let name = self.state.index.claim_called(&uid);
            let claim = name.map_or_else(|| uid.to_string(), ToString::to_string);
            tracing::error!(%pod, claim, %node, "claim was deleted while in use");
            let note = format!(
                "ResourceClaim {claim} was deleted while the pod uses it on node {node}; its devices stay taken until the pod \
                 has ended"
            );
            self.notify(&pod, Topic::Claim(uid), events::CLAIM_DELETED_IN_USE, note, Some(&node));
        }
        self.figures.orphaned = Some(confirmed);
    }

    /// Reports pods whose status lacks one of their claims for longer than from one audit to the
    /// next. Devices are of no use to them.
    fn audit_unlisted(&mut self) {
        let seen = self.state.index.unlisted();
        let audits = &mut self.state.audits;
        let before = std::mem::replace(&mut audits.unlisted, seen);
        audits.long_unlisted = before.intersection(&audits.unlisted).cloned().collect();
        if !audits.long_unlisted.is_empty() {
            // Their allocations are released, also where nothing else changes.
            self.wake_at(Some(self.now));
        }
        for pod in self.state.audits.long_unlisted.clone() {
            self.state.revisited.insert(pod.clone());
            self.state.waiting_visits.visit_next(pod.clone());
            tracing::warn!(%pod, "pod status does not name all claims of the pod");
            let note = message::NOT_LISTED_NOTE.to_owned();
            self.notify(&pod, Topic::Pod, events::POD_STATUS_MISSING_CLAIM, note, None);
        }
    }

    /// Reports writes without an answer: their devices stay taken.
    fn audit_writes(&mut self) {
        let open = self.state.writes.iter();
        let old = open.filter(|(_, write)| self.now - write.since >= UNANSWERED);
        let old: Vec<_> = old.map(|(claim, write)| (claim.clone(), write.pod.clone())).collect();
        self.figures.unanswered = Some(gauge(old.len()));
        for (claim, pod) in old {
            let topic = Topic::Claim(claim.clone());
            let claim = self.state.claim_name(&claim);
            tracing::error!(claim, "API server does not answer a write");
            let note = format!(
                "the API server does not answer a write of ResourceClaim {claim}; it is sent again until there is an answer, \
                 and the devices stay taken until then (is an admission webhook away?)"
            );
            if let Some(pod) = pod {
                self.notify(&pod, topic, events::API_SERVER_TIMEOUT, note, None);
            }
        }
    }
}
