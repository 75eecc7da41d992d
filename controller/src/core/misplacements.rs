//! Misplacements: claims that were seen on another node than the pod that is bound with them, and
//! the time of the next action.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimUid, NodeName};
use tessera_index::Misplaced;

use super::clock::Moment;
use super::holds::{HoldReason, Holds, Subject};

/// The misplaced claims, each with the node that it is allocated on.
#[derive(Debug, Default)]
pub(super) struct Misplacements {
    seen: BTreeMap<(PodUid, ClaimUid), Option<NodeName>>,
}

impl Misplacements {
    /// Takes over which claims are misplaced. One that is new, or on another node than before, is
    /// held until it is confirmed: that is also the time that a PreBind under way gets to notice
    /// that the claim was deallocated.
    pub(super) fn observe(&mut self, holds: &mut Holds, misplaced: &[Misplaced], now: Moment) {
        let keys: BTreeSet<_> = misplaced.iter().map(key).collect();
        for ((pod, claim), _) in self.seen.extract_if(.., |known, _| !keys.contains(known)) {
            holds.end(&Subject::pod_with(&pod, &claim));
        }
        for one in misplaced {
            let known = self.seen.insert(key(one), one.allocated.clone());
            if known.as_ref() != Some(&one.allocated) {
                let subject = subject(one);
                holds.end(&subject);
                holds.hold(subject, HoldReason::MisplacementUnconfirmed, now);
            }
        }
    }

    /// Returns true if the claim has been misplaced for longer than a moment, for some pod.
    pub(super) fn is_confirmed(&self, holds: &Holds, claim: &ClaimUid, now: Moment) -> bool {
        let reason = HoldReason::MisplacementUnconfirmed;
        let mut pods = self.seen.keys().filter(|(_, known)| known == claim);
        pods.any(|(pod, _)| !holds.is_held(&Subject::pod_with(pod, claim), reason, now))
    }

    /// Returns true if the claim is misplaced for the pod.
    pub(super) fn contains(&self, pod: &PodUid, claim: &ClaimUid) -> bool {
        self.seen.contains_key(&(pod.clone(), claim.clone()))
    }
}

/// Returns the subject of the holds of a misplaced claim.
pub(super) fn subject(misplaced: &Misplaced) -> Subject {
    Subject::pod_with(&misplaced.pod, &misplaced.claim)
}

fn key(misplaced: &Misplaced) -> (PodUid, ClaimUid) {
    (misplaced.pod.clone(), misplaced.claim.clone())
}
