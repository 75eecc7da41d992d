//! The steps that each namespace may spend on its selectors: a token bucket.
//!
//! The allocator shares the time of the planner among namespaces while they wait for it. Beyond
//! that, a namespace whose pods need more and more of it must not keep the controller busy for
//! ever: without steps, its selectors are not evaluated, and the pods that need it wait like those
//! whose search was ended.

use std::collections::{BTreeMap, BTreeSet};

use tessera_api::names::Namespace;

use super::clock::Moment;

/// The steps that a namespace may spend at once: about two seconds of CPU time. A namespace with a
/// thousand different selectors of 200 bytes spends a third.
const BURST: i64 = 4_000_000;

/// The steps per second that it may spend in the long run: two percent of a core.
const RATE: i64 = 40_000;

/// The steps of all namespaces that have spent some.
#[derive(Debug, Default)]
pub(super) struct SelectorTime {
    of: BTreeMap<Namespace, Bucket>,
}

/// The steps of a namespace.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    /// Negative if a plan has spent more than there were: one selector is not interrupted.
    left: i64,
    at: Moment,
}

impl Bucket {
    fn refilled(self, now: Moment) -> Self {
        let micros = (now - self.at).as_micros();
        let added = i64::try_from(micros).unwrap_or(i64::MAX).saturating_mul(RATE) / 1_000_000;
        Self { left: self.left.saturating_add(added).min(BURST), at: now }
    }
}

impl SelectorTime {
    /// Takes the steps that a plan has spent.
    pub(super) fn spend(&mut self, steps: &BTreeMap<Namespace, u64>, now: Moment) {
        for (namespace, steps) in steps {
            let full = Bucket { left: BURST, at: now };
            let known = self.of.get(namespace).copied().unwrap_or(full).refilled(now);
            let left = known.left.saturating_sub_unsigned(*steps);
            self.of.insert(namespace.clone(), Bucket { left, at: now });
        }
    }

    /// Returns the namespaces without steps, and forgets those that have all of them again.
    pub(super) fn exhausted(&mut self, now: Moment) -> BTreeSet<Namespace> {
        self.of.retain(|_, bucket| bucket.refilled(now).left < BURST);
        let exhausted = self.of.iter().filter(|(_, bucket)| bucket.refilled(now).left <= 0);
        exhausted.map(|(namespace, _)| namespace.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn spent(time: &mut SelectorTime, steps: i64, now: Moment) -> bool {
        let namespace = Namespace::new("tenant").unwrap();
        time.spend(&BTreeMap::from([(namespace.clone(), steps.cast_unsigned())]), now);
        time.exhausted(now).contains(&namespace)
    }

    #[test]
    fn steps_are_exhausted_by_a_burst_and_come_back() {
        let (mut time, now) = (SelectorTime::default(), Moment::START);
        assert!(!spent(&mut time, BURST - 1, now));
        assert!(spent(&mut time, 1, now));
        assert!(!spent(&mut time, 0, now + Duration::from_secs(1)));
        assert!(spent(&mut time, RATE, now + Duration::from_secs(1)));
    }

    #[test]
    fn steps_beyond_the_burst_are_paid_back_first() {
        let (mut time, now) = (SelectorTime::default(), Moment::START);
        assert!(spent(&mut time, BURST + 2 * RATE, now));
        assert!(spent(&mut time, 0, now + Duration::from_secs(2)));
        assert!(!spent(&mut time, 0, now + Duration::from_secs(3)));
    }

    #[test]
    fn namespaces_with_all_steps_are_forgotten() {
        let (mut time, now) = (SelectorTime::default(), Moment::START);
        assert!(spent(&mut time, BURST, now));
        let later = now + Duration::from_secs((BURST / RATE).cast_unsigned());
        assert!(time.exhausted(later).is_empty() && time.of.is_empty());
    }
}
