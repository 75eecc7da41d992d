//! What comes out of a plan: writes, events, figures.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::events::EventType;
use tessera_allocator::model::PodUid;
use tessera_allocator::{Allotment, Cause, Decision, Kept, Plan, Refusal};
use tessera_api::names::{ClaimUid, NodeName, ShareId};
use tessera_index::{Blocked, Obstacle, Scope, Waiting, convert};
use tessera_messages as message;
use tokio::time::Instant;

use super::{Outcome, Planner, Write, WriteId, Writing, pending_claims};
use crate::commit::CommitError;
use crate::metrics::ReasonLabel;
use crate::notices::Notice;
use crate::retries::{NotWritten, TakenBack, Verdict};

impl Planner {
    /// Counts a decision as taken and starts to write it.
    pub(super) fn carry_out(&mut self, decision: &Decision, cause: Instant, now: Instant) {
        let message = self.index.unschedulable_message(&decision.pod);
        self.retries.placed(&decision.pod, decision.node.clone(), message, now);
        tracing::info!(pod = %decision.pod, node = %decision.node, claims = decision.claims.len(), "placed");
        for allotment in &decision.claims {
            self.allocate(allotment, &decision.pod, cause);
        }
    }

    fn allocate(&mut self, allotment: &Allotment, pod: &PodUid, cause: Instant) {
        let Some(object) = self.index.claim_object(&allotment.claim).cloned() else { return };
        let at = Time(now_in_seconds());
        let allocation =
            convert::allocation(allotment, &object, &self.index.class_objects(), at, fresh_share);
        let writer = self.writer.clone();
        let request = async move { writer.allocate(&object, &allocation).await };
        if self.start_write(&allotment.claim, Write::Allocation, Some(pod), cause, request) {
            self.index.assume(allotment);
        }
    }

    /// Takes back allocations that serve nobody: of pods that went away before they reserved
    /// anything, of pods that the scheduler cannot place there or does not try, and of pods of
    /// which another claim found no room.
    pub(super) fn take_back(
        &mut self,
        refusals: &[Refusal],
        taken_back: &BTreeSet<PodUid>,
        now: Instant,
    ) {
        for claim in self.index.abandoned() {
            self.release(&claim, None, now);
        }
        let refused: BTreeSet<&PodUid> = refusals.iter().map(|r| &r.pod).collect();
        let written: BTreeSet<PodUid> =
            self.writing.values().filter_map(|w| w.pod.clone()).collect();
        for waiting in self.index.waiting() {
            // What cannot be written now is not given up either, nor the claims beside it: the node
            // would be blamed for it.
            let busy = |claim| self.writing.contains_key(claim) || self.is_held(claim, now);
            if written.contains(&waiting.pod) || waiting.movable.iter().any(busy) {
                continue;
            }
            if self.is_long_unlisted(&waiting.pod) {
                // kube-scheduler does not come as far as to look at nodes.
                self.retries.not_written(&waiting.pod, NotWritten::Outdated, now);
            } else if refused.contains(&waiting.pod) {
                if waiting.nominated {
                    // Room is being made for the rest where the others are.
                    continue;
                }
                // The rest of its claims cannot follow the first. That says nothing against the
                // node.
                self.retries.not_written(&waiting.pod, NotWritten::Outdated, now);
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
        if waiting.node_gone {
            let node = waiting.node.as_ref().map_or_else(String::new, ToString::to_string);
            let note = format!(
                "node {node}, where the devices of the pod are, does not exist any more; trying elsewhere"
            );
            self.tell_pod(&waiting.pod, "TryingElsewhere", note, waiting.node.as_ref(), now);
            return;
        }
        let place = waiting
            .node
            .as_ref()
            .map_or_else(|| "anywhere".to_owned(), |node| format!("on node {node}"));
        let why = waiting.unschedulable.as_deref().unwrap_or_default();
        let note = format!(
            "kube-scheduler cannot place the pod {place}, where its devices are: {why}; trying elsewhere"
        );
        self.tell_pod(&waiting.pod, "TryingElsewhere", note, waiting.node.as_ref(), now);
    }

    /// Says that the pod is tried elsewhere; where preemption has made room it is not.
    pub(super) fn tell_taken_back(&mut self, pod: &PodUid, what: &TakenBack, now: Instant) {
        let TakenBack::NotThere(node) = what else { return };
        let note = format!(
            "kube-scheduler cannot place the pod on node {node} and gave the devices there back; trying elsewhere"
        );
        self.tell_pod(pod, "TryingElsewhere", note, Some(node), now);
    }

    /// Starts `request`, which writes the claim. Returns `false` while another write of it is under
    /// way: of a claim there is one write at a time, and what it was decided on is not known
    /// any more before it has ended.
    pub(super) fn start_write(
        &mut self,
        claim: &ClaimUid,
        write: Write,
        pod: Option<&PodUid>,
        since: Instant,
        request: impl Future<Output = Result<ResourceClaim, CommitError>> + Send + 'static,
    ) -> bool {
        if self.writing.contains_key(claim) {
            return false;
        }
        self.writes += 1;
        let id = WriteId(self.writes);
        self.writing.insert(claim.clone(), Writing { id, write, pod: pod.cloned(), since });
        let (claim, outcomes) = (claim.clone(), self.outcomes.clone());
        self.executor.spawn(async move {
            let result = request.await;
            // The planner ends only after it has received the outcome of every write, so it is
            // there to receive it.
            let _ = outcomes.send(Outcome { id, claim, result });
        });
        true
    }

    /// Returns the write that has ended; none if it is not under way.
    pub(super) fn end_write(&mut self, id: WriteId, claim: &ClaimUid) -> Option<Writing> {
        if self.writing.get(claim)?.id != id {
            return None;
        }
        self.writing.remove(claim)
    }

    pub(super) fn release(&mut self, claim: &ClaimUid, pod: Option<&PodUid>, now: Instant) {
        if self.is_held(claim, now) {
            return;
        }
        let Some(object) = self.index.claim_object(claim).cloned() else { return };
        let writer = self.writer.clone();
        let request = async move { writer.release(&object).await };
        if self.start_write(claim, Write::Release, pod, now, request) {
            tracing::info!(claim = %claim, "taking an unused allocation back");
        }
    }

    /// Logs which node is kept free for which pod, once, and counts it.
    pub(super) fn note_kept(&mut self, kept: Option<&Kept>) {
        self.metrics.kept.set(i64::from(kept.is_some()));
        if self.kept.as_ref() == kept {
            return;
        }
        self.kept = kept.cloned();
        match kept {
            Some(Kept { namespace, name, node, until, .. }) => {
                tracing::info!(%node, pod = %name, %namespace, until, "keeping a node free for a pod that has waited long");
            }
            None => tracing::info!("no node is kept free any more"),
        }
    }

    /// Tells the pods that have to wait why, and counts them. So many claims are of pods that were
    /// not decided on and are not planned yet again.
    pub(super) fn tell_refused(
        &mut self,
        plan: &Plan,
        blocked: &[Blocked],
        undecided: i64,
        now: Instant,
    ) {
        let mut pending: BTreeMap<&'static str, i64> = BTreeMap::new();
        if undecided > 0 {
            pending.insert(message::label(&Cause::NotDecided), undecided);
        }
        for refusal in &plan.refusals {
            // A claim that any driver could serve is not ours to complain about, as long as it is
            // sound.
            let anybodys = self.index.scope(&refusal.claim) == Some(Scope::Any);
            if anybodys && !matches!(*refusal.cause, Cause::UnknownClass { .. }) {
                continue;
            }
            *pending.entry(message::label(&refusal.cause)).or_default() += 1;
            let kept = plan.kept_for(&refusal.pod);
            let note = message::note(&self.claim_name(&refusal.claim), &refusal.cause, kept);
            let node = kept.map(|kept| &kept.node);
            self.tell_pod(&refusal.pod, message::reason(&refusal.cause), note, node, now);
        }
        for blocked in blocked {
            let claim = self.claim_name(&blocked.claim);
            let (reason, note) = message::obstacle(&claim, blocked.obstacle);
            *pending.entry(reason).or_default() += 1;
            // Between two events of one cause it may be so for a moment.
            if blocked.obstacle == Obstacle::MixedDrivers
                || self.repairs.is_confirmed(&blocked.claim)
            {
                self.tell_pod(&blocked.pod, reason, note, None, now);
            }
        }
        for pod in self.unlisted.confirmed.iter().filter(|pod| self.is_long_unlisted(pod)) {
            let Ok(Some(held_back)) = self.index.pending(pod) else { continue };
            *pending.entry(message::NOT_LISTED).or_default() += pending_claims(&held_back);
        }
        self.metrics.pending.clear();
        for (reason, claims) in pending {
            self.metrics.pending.get_or_create(&ReasonLabel { reason }).set(claims);
        }
    }

    /// Tells `pod` something; `node` is the one that it is about, if it is about one.
    pub(super) fn tell_pod(
        &mut self,
        pod: &PodUid,
        reason: &'static str,
        note: String,
        node: Option<&NodeName>,
        now: Instant,
    ) {
        let Some((namespace, name)) = self.index.pod_name(pod) else { return };
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace.to_string()),
            name: Some(name.to_string()),
            uid: Some(pod.to_string()),
            ..ObjectReference::default()
        };
        let related = node.map(|node| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_string()),
            ..ObjectReference::default()
        });
        let notice = Notice { regarding, related, kind: EventType::Warning, reason, note };
        let later = self.notices.tell(pod, notice, now);
        self.wake_at(later);
    }

    pub(super) fn claim_name(&self, claim: &ClaimUid) -> String {
        let object = self.index.claim_object(claim);
        object.and_then(|o| o.metadata.name.clone()).unwrap_or_else(|| claim.to_string())
    }
}

/// `metav1.Time` has whole seconds: with a fraction, what is read back would differ from what was
/// sent.
fn now_in_seconds() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

fn fresh_share() -> ShareId {
    ShareId::new(uuid::Uuid::new_v4().to_string())
        .expect("invariant: a UUID prints as a lowercase UUID")
}
