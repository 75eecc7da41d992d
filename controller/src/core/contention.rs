//! Claims that somebody else writes as fast as we do.
//!
//! A write that was overtaken is decided anew at once: that is what the version is for, and mostly
//! it was a coincidence. Who is overtaken again and again waits longer each time. Otherwise a storm
//! of foreign writes (a labeller gone wild, a controller that fights another one) is answered with
//! one of our own, as fast as the API server can refuse.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use super::clock::Moment;
use tessera_api::names::ClaimUid;

/// So often a write may fail without a pause.
const FREE: u32 = 2;

/// The first pause, doubled with each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// At most this: it is also how long a pod waits at most after the storm is over.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Claims whose last writes failed.
#[derive(Debug, Default)]
pub(super) struct Contention {
    claims: BTreeMap<ClaimUid, Lost>,
}

#[derive(Debug)]
struct Lost {
    times: u32,
    held_until: Moment,
}

impl Contention {
    /// A write of the claim did not go through.
    pub(super) fn lost(&mut self, claim: &ClaimUid, now: Moment) {
        let lost = self.claims.entry(claim.clone()).or_insert(Lost { times: 0, held_until: now });
        lost.times += 1;
        if let Some(doublings) = lost.times.checked_sub(FREE) {
            lost.held_until =
                now + FIRST_PAUSE.saturating_mul(1 << doublings.min(10)).min(LONGEST_PAUSE);
        }
    }

    /// A write of the claim went through: the next failure is a first one.
    pub(super) fn won(&mut self, claim: &ClaimUid) {
        self.claims.remove(claim);
    }

    /// Whether the claim is not to be written yet.
    pub(super) fn is_held(&self, claim: &ClaimUid, now: Moment) -> bool {
        self.claims.get(claim).is_some_and(|lost| lost.held_until > now)
    }

    /// When the next pause is over.
    pub(super) fn next_wake(&self, now: Moment) -> Option<Moment> {
        self.claims.values().map(|lost| lost.held_until).filter(|until| *until > now).min()
    }

    /// Forgets claims that are not there any more.
    pub(super) fn retain(&mut self, is_there: impl Fn(&ClaimUid) -> bool) {
        self.claims.retain(|claim, _| is_there(claim));
    }
}
