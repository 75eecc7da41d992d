//! When a bound pod's claim that is elsewhere is acted upon.

use std::collections::BTreeMap;
use std::time::Duration;

use super::clock::Moment;
use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimUid, NodeName};
use tessera_index::Misplaced;

/// Pods and claims come over different watches, so what is seen may be a moment between two events.
/// It is also the time that a PreBind under way gets to notice that the claim was taken back,
/// before it is allocated anew.
const SETTLED: Duration = Duration::from_secs(2);

/// A write that does not help is not repeated faster than this in the end.
const LONGEST: Duration = Duration::from_secs(300);

/// A plan that finds no room on the pod's node is not repeated faster than this in the end. It
/// costs the planner little, and users wait for room that they have just made.
const LONGEST_PLAN: Duration = Duration::from_secs(30);

/// What is known of the claims that are not where their pods are.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    suspects: BTreeMap<(PodUid, ClaimUid), Suspect>,
}

#[derive(Debug)]
struct Suspect {
    allocated: Option<NodeName>,
    not_before: Moment,
    attempts: u32,
    confirmed: bool,
}

/// When a claim may be acted upon.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    pub(super) at: Moment,
    /// It has been elsewhere for longer than a moment.
    pub(super) is_confirmed: bool,
}

impl Repairs {
    /// When the claim may be acted upon, and whether it has been elsewhere for longer than a
    /// moment.
    pub(super) fn due(&mut self, misplaced: &Misplaced, now: Moment) -> Due {
        let fresh = || Suspect {
            allocated: misplaced.allocated.clone(),
            not_before: now + SETTLED,
            attempts: 0,
            confirmed: false,
        };
        let suspect = self.suspects.entry(key(misplaced)).or_insert_with(fresh);
        if suspect.allocated != misplaced.allocated {
            *suspect = fresh();
        }
        suspect.confirmed |= now >= suspect.not_before;
        Due { at: suspect.not_before, is_confirmed: suspect.confirmed }
    }

    /// Whether the claim has been elsewhere for longer than a moment.
    pub(super) fn is_confirmed(&self, claim: &ClaimUid) -> bool {
        self.suspects.iter().any(|((_, known), suspect)| known == claim && suspect.confirmed)
    }

    /// Notes that a write was started for it.
    pub(super) fn tried(&mut self, misplaced: &Misplaced, now: Moment) {
        self.hold(misplaced, LONGEST, now);
    }

    /// Notes that a plan was made for it, which may have ended without a decision because all steps
    /// of a pod were spent.
    pub(super) fn planned(&mut self, misplaced: &Misplaced, is_undecided: bool, now: Moment) {
        self.hold(misplaced, if is_undecided { LONGEST } else { LONGEST_PLAN }, now);
    }

    fn hold(&mut self, misplaced: &Misplaced, longest: Duration, now: Moment) {
        if let Some(suspect) = self.suspects.get_mut(&key(misplaced)) {
            suspect.attempts += 1;
            suspect.not_before =
                now + SETTLED.saturating_mul(1 << suspect.attempts.min(10)).min(longest);
        }
    }

    /// Forgets those that are where they should be.
    pub(super) fn retain(&mut self, misplaced: &[Misplaced]) {
        self.suspects
            .retain(|known, _| misplaced.iter().any(|m| m.pod == known.0 && m.claim == known.1));
    }
}

fn key(misplaced: &Misplaced) -> (PodUid, ClaimUid) {
    (misplaced.pod.clone(), misplaced.claim.clone())
}
