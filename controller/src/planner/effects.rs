//! What comes out of a plan: writes, events, figures.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::runtime::events::EventType;
use tessera_allocator::model::PodUid;
use tessera_allocator::{Allotment, Decision, Refusal};
use tessera_api::names::{ClaimUid, ShareId};
use tessera_index::{Blocked, Misplaced, Obstacle, Scope, Waiting, convert};
use tokio::time::Instant;

use super::{Outcome, Planner, Write};
use crate::message;
use crate::metrics::ReasonLabel;
use crate::notices::Notice;
use crate::retries::{TakenBack, Verdict};

impl Planner {
    /// Counts a decision as taken and starts to write it.
    pub(super) fn carry_out(&mut self, decision: &Decision, cause: Instant, now: Instant) {
        let message = self.index.unschedulable_message(&decision.pod);
        self.retries.placed(&decision.pod, decision.node.clone(), message, now);
        tracing::info!(pod = %decision.pod, node = %decision.node, claims = decision.claims.len(), "placed");
        for allotment in &decision.claims {
            self.index.assume(allotment);
            self.allocate(allotment, &decision.pod, cause);
        }
    }

    fn allocate(&mut self, allotment: &Allotment, pod: &PodUid, cause: Instant) {
        let Some(object) = self.index.claim_object(&allotment.claim).cloned() else { return };
        let at = Time(now_in_seconds());
        let allocation =
            convert::allocation(allotment, &object, &self.index.class_objects(), at, fresh_share);
        let writer = self.writer.clone();
        let (claim, outcomes) = (allotment.claim.clone(), self.outcomes.clone());
        self.writing.insert(claim.clone(), pod.clone());
        let pod = Some(pod.clone());
        tokio::spawn(async move {
            let result = writer.allocate(&object, &allocation).await;
            // The planner ends only after it has heard of every write, so it is there to hear.
            let _ = outcomes.send(Outcome { claim, pod, write: Write::Allocation, result, cause });
        });
    }

    /// Takes back allocations that serve nobody: of pods that went away before they reserved anything, of pods that the
    /// scheduler cannot place there, and of pods of which another claim found no room.
    pub(super) fn take_back(&mut self, refusals: &[Refusal], taken_back: &BTreeSet<PodUid>, now: Instant) {
        for claim in self.index.abandoned() {
            self.release(&claim, None, now);
        }
        let refused: BTreeSet<&PodUid> = refusals.iter().map(|r| &r.pod).collect();
        for waiting in self.index.waiting() {
            if waiting.movable.iter().any(|claim| self.writing.contains_key(claim)) {
                continue;
            }
            if refused.contains(&waiting.pod) {
                // The rest of its claims cannot follow the first. That says nothing against the node.
                self.retries.not_written(&waiting.pod, false, now);
            } else if !taken_back.contains(&waiting.pod) && self.is_stuck(&waiting, now) {
                self.tell_stuck(&waiting, now);
                self.retries.gave_up(&waiting.pod, waiting.node.as_ref(), now);
            } else {
                continue;
            }
            for claim in &waiting.movable {
                self.release(claim, Some(&waiting.pod), now);
            }
        }
    }

    /// Whether kube-scheduler has had its time to place the pod where its devices are.
    fn is_stuck(&mut self, waiting: &Waiting, now: Instant) -> bool {
        match self.retries.verdict(waiting, now) {
            Verdict::Wait => false,
            Verdict::WaitUntil(deadline) => {
                self.wake_at(Some(deadline));
                false
            }
            Verdict::GiveUp => true,
        }
    }

    fn tell_stuck(&mut self, waiting: &Waiting, now: Instant) {
        let place =
            waiting.node.as_ref().map_or_else(|| "anywhere".to_owned(), |node| format!("on node {node}"));
        let why = waiting.unschedulable.as_deref().unwrap_or_default();
        let note = format!(
            "kube-scheduler cannot place the pod {place}, where its devices are: {why}; trying elsewhere"
        );
        self.tell_pod(&waiting.pod, "TryingElsewhere", note, now);
    }

    /// Says that the pod is tried elsewhere; where preemption has made room it is not.
    pub(super) fn tell_taken_back(&mut self, pod: &PodUid, what: &TakenBack, now: Instant) {
        let TakenBack::NotThere(node) = what else { return };
        let note = format!(
            "kube-scheduler cannot place the pod on node {node} and gave the devices there back; trying elsewhere"
        );
        self.tell_pod(pod, "TryingElsewhere", note, now);
    }

    fn release(&mut self, claim: &ClaimUid, pod: Option<&PodUid>, cause: Instant) {
        if self.writing.contains_key(claim) || self.contention.is_held(claim, cause) {
            return;
        }
        let Some(object) = self.index.claim_object(claim).cloned() else { return };
        let writer = self.writer.clone();
        let (claim, outcomes) = (claim.clone(), self.outcomes.clone());
        self.writing.insert(claim.clone(), pod.cloned().unwrap_or_else(|| PodUid::new("")));
        let pod = pod.cloned();
        tracing::info!(claim = %claim, "taking an unused allocation back");
        tokio::spawn(async move {
            let result = writer.release(&object).await;
            let _ = outcomes.send(Outcome { claim, pod, write: Write::Release, result, cause });
        });
    }

    /// Tells the pods that have to wait why, and counts them.
    pub(super) fn tell_refused(&mut self, refusals: &[Refusal], blocked: &[Blocked], now: Instant) {
        let mut pending: BTreeMap<&'static str, i64> = BTreeMap::new();
        for refusal in refusals {
            // A claim that any driver could serve is not ours to complain about, as long as it is sound.
            let anybodys = self.index.scope(&refusal.claim) == Some(Scope::Any);
            if anybodys && !matches!(refusal.cause, tessera_allocator::Cause::UnknownClass { .. }) {
                continue;
            }
            *pending.entry(message::label(&refusal.cause)).or_default() += 1;
            let note = message::note(&self.claim_name(&refusal.claim), &refusal.cause);
            self.tell_pod(&refusal.pod, message::reason(&refusal.cause), note, now);
        }
        for blocked in blocked {
            *pending.entry("MixedDrivers").or_default() += 1;
            let Obstacle::MixedDrivers = blocked.obstacle;
            let note = format!(
                "ResourceClaim {} asks gpu.tessera.dev and another driver for devices; split it into one claim per driver",
                self.claim_name(&blocked.claim)
            );
            self.tell_pod(&blocked.pod, "MixedDrivers", note, now);
        }
        self.metrics.pending.clear();
        for (reason, claims) in pending {
            self.metrics.pending.get_or_create(&ReasonLabel { reason }).set(claims);
        }
    }

    pub(super) fn tell_pod(&mut self, pod: &PodUid, reason: &'static str, note: String, now: Instant) {
        let Some(object) = self.index.pod_object(pod) else { return };
        let notice = Notice { regarding: object.object_ref(&()), kind: EventType::Warning, reason, note };
        let later = self.notices.tell(pod, notice, now);
        self.wake_at(later);
    }

    fn claim_name(&self, claim: &ClaimUid) -> String {
        let object = self.index.claim_object(claim);
        object.and_then(|o| o.metadata.name.clone()).unwrap_or_else(|| claim.to_string())
    }

    /// Checks the running sums, and that nothing is given out twice.
    pub(super) fn audit(&mut self) {
        let audit = self.index.audit();
        if audit.drifted {
            self.metrics.drift.inc();
            tracing::error!("the running sums of allocated capacity were wrong and have been put right");
        }
        self.metrics.overcommitted.set(i64::try_from(audit.overcommitted.len()).unwrap_or(i64::MAX));
        for device in &audit.overcommitted {
            tracing::error!(%device, "more of the device is allocated than there is");
            for pod in self.index.pods_on(device) {
                let note = format!(
                    "more of device {device} is allocated than there is; this pod is one of those that hold it"
                );
                self.tell_pod(&pod, "Overcommitted", note, Instant::now());
            }
        }
        self.audit_places();
    }

    /// Reports claims of bound pods that are elsewhere. Pods and claims come over different watches, so what only one audit
    /// sees may be a moment between two events.
    fn audit_places(&mut self) {
        let seen: BTreeSet<Misplaced> = self.index.misplaced().into_iter().collect();
        let before = std::mem::replace(&mut self.suspects, seen);
        let confirmed: Vec<Misplaced> = self.suspects.intersection(&before).cloned().collect();
        self.metrics.misplaced.set(i64::try_from(confirmed.len()).unwrap_or(i64::MAX));
        for Misplaced { pod, claim, node, allocated } in confirmed {
            let place = allocated
                .map_or_else(|| "not allocated".to_owned(), |node| format!("allocated on node {node}"));
            let claim = self.claim_name(&claim);
            tracing::error!(%pod, claim, %node, place, "a bound pod cannot have its devices");
            let note = format!(
                "the pod is bound to node {node}, but ResourceClaim {claim} is {place}; it cannot have its devices there, \
                 delete the pod to start over"
            );
            self.tell_pod(&pod, "ClaimElsewhere", note, Instant::now());
        }
    }
}

/// `metav1.Time` has whole seconds: with a fraction, what is read back would differ from what was sent.
fn now_in_seconds() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

fn fresh_share() -> ShareId {
    ShareId::new(uuid::Uuid::new_v4().to_string()).expect("invariant: a UUID prints as a lowercase UUID")
}
