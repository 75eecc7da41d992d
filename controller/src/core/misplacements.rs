//! Misplacements: claims that were seen on another node than the pod that is bound with them, and
//! the time of the next action.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimUid, NodeName};
use tessera_index::Misplaced;

use super::clock::Moment;
use super::holds::{HoldReason, Holds, Subject};

/// The misplaced claims.
#[derive(Debug, Default)]
pub(super) struct Misplacements {
    /// The claims of each pod, with the nodes that they are allocated on.
    seen: BTreeMap<PodUid, BTreeMap<ClaimUid, Option<NodeName>>>,
    /// The pods for which each claim has been misplaced for longer than a moment.
    confirmed: BTreeMap<ClaimUid, BTreeSet<PodUid>>,
    /// The number of these.
    count: usize,
}

impl Misplacements {
    /// Takes over which claims of a pod are misplaced. One that is new, or on another node than
    /// before, is held until it is confirmed: that is also the time that a PreBind under way gets
    /// to notice that the claim was deallocated. Returns the claims that are confirmed since.
    pub(super) fn observe(
        &mut self,
        holds: &mut Holds,
        pod: &PodUid,
        misplaced: &[Misplaced],
        now: Moment,
    ) -> Vec<ClaimUid> {
        let fresh = misplaced.iter().map(|one| (one.claim.clone(), one.allocated.clone()));
        let fresh: BTreeMap<ClaimUid, Option<NodeName>> = fresh.collect();
        let known = self.seen.remove(pod).unwrap_or_default();
        for (claim, allocated) in &known {
            if fresh.get(claim) != Some(allocated) {
                holds.end(&Subject::pod_with(pod, claim));
                self.end_confirmation(pod, claim);
            }
        }
        let mut confirmed = Vec::new();
        let reason = HoldReason::MisplacementUnconfirmed;
        for (claim, allocated) in &fresh {
            let subject = Subject::pod_with(pod, claim);
            if known.get(claim) != Some(allocated) {
                holds.hold(subject, reason, now);
            } else if !holds.is_held(&subject, reason, now) && self.confirm(pod, claim) {
                confirmed.push(claim.clone());
            }
        }
        if !fresh.is_empty() {
            self.seen.insert(pod.clone(), fresh);
        }
        confirmed
    }

    /// Notes that the claim is misplaced for longer than a moment. Returns true if it is news.
    fn confirm(&mut self, pod: &PodUid, claim: &ClaimUid) -> bool {
        let is_news = self.confirmed.entry(claim.clone()).or_default().insert(pod.clone());
        self.count += usize::from(is_news);
        is_news
    }

    fn end_confirmation(&mut self, pod: &PodUid, claim: &ClaimUid) {
        let Some(pods) = self.confirmed.get_mut(claim) else { return };
        if pods.remove(pod) {
            self.count -= 1;
        }
        if pods.is_empty() {
            self.confirmed.remove(claim);
        }
    }

    /// Returns true if the claim has been misplaced for longer than a moment, for some pod.
    pub(super) fn is_confirmed(&self, claim: &ClaimUid) -> bool {
        self.confirmed.contains_key(claim)
    }

    /// Returns the number of claims that have been misplaced for longer than a moment.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns true if the claim is misplaced for the pod.
    pub(super) fn contains(&self, pod: &PodUid, claim: &ClaimUid) -> bool {
        self.seen.get(pod).is_some_and(|claims| claims.contains_key(claim))
    }

    /// Returns the pods with misplaced claims.
    pub(super) fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.seen.keys()
    }

    /// Returns true if a claim is misplaced for the pod.
    pub(super) fn has_pod(&self, pod: &PodUid) -> bool {
        self.seen.contains_key(pod)
    }
}

/// Returns the subject of the holds of a misplaced claim.
pub(super) fn subject(misplaced: &Misplaced) -> Subject {
    Subject::pod_with(&misplaced.pod, &misplaced.claim)
}
