//! The steps that each namespace may spend on expensive work of the planner: a token bucket.
//!
//! The allocator shares the time of the planner among namespaces while they wait for it. Beyond
//! that, a namespace whose pods need more and more of it must neither keep the controller busy for
//! ever nor delay the pods of others, which wait for work that cannot be interrupted.

use std::collections::{BTreeMap, BTreeSet};

use tessera_api::names::Namespace;

use super::clock::Moment;

/// Steps that a namespace may spend at once, and in the long run. Two steps take about 1 us of CPU
/// time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allowance {
    burst: i64,
    per_second: i64,
}

impl Allowance {
    /// Selectors: two seconds of CPU time at once, and two percent of a core. Without steps, the
    /// selectors of the namespace's pods are not evaluated. A namespace with a thousand different
    /// selectors of 200 bytes spends a third of the burst.
    pub(super) const SELECTORS: Self = Self { burst: 4_000_000, per_second: 40_000 };

    /// Long searches, each of at most a million steps: a second of CPU time at once, and half a
    /// percent of a core, so that less than one pod in a hundred of others waits for one. Without
    /// steps, no long search of the namespace's pods begins.
    pub(super) const LONG_SEARCHES: Self = Self { burst: 2_000_000, per_second: 10_000 };
}

/// The steps of all namespaces that have spent some.
#[derive(Debug)]
pub(super) struct StepsByNamespace {
    allowance: Allowance,
    of: BTreeMap<Namespace, Bucket>,
}

/// The steps of a namespace.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    /// Negative if a plan has spent more than there were: one selector or search is not
    /// interrupted.
    left: i64,
    at: Moment,
}

impl Bucket {
    fn refilled(self, now: Moment, allowance: Allowance) -> Self {
        let micros = (now - self.at).as_micros();
        let added = i64::try_from(micros).unwrap_or(i64::MAX).saturating_mul(allowance.per_second)
            / 1_000_000;
        Self { left: self.left.saturating_add(added).min(allowance.burst), at: now }
    }
}

impl StepsByNamespace {
    pub(super) fn new(allowance: Allowance) -> Self {
        Self { allowance, of: BTreeMap::new() }
    }

    /// Takes steps that a namespace has spent.
    pub(super) fn spend(&mut self, namespace: &Namespace, steps: u64, now: Moment) {
        let full = Bucket { left: self.allowance.burst, at: now };
        let known = self.of.get(namespace).copied().unwrap_or(full).refilled(now, self.allowance);
        let left = known.left.saturating_sub_unsigned(steps);
        self.of.insert(namespace.clone(), Bucket { left, at: now });
    }

    /// Returns the namespaces without steps, and forgets those that have all of them again.
    pub(super) fn exhausted(&mut self, now: Moment) -> BTreeSet<Namespace> {
        let left = |bucket: &Bucket| bucket.refilled(now, self.allowance).left;
        self.of.retain(|_, bucket| left(bucket) < self.allowance.burst);
        let exhausted = self.of.iter().filter(|(_, bucket)| left(bucket) <= 0);
        exhausted.map(|(namespace, _)| namespace.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const BURST: i64 = Allowance::SELECTORS.burst;
    const RATE: i64 = Allowance::SELECTORS.per_second;

    fn full() -> StepsByNamespace {
        StepsByNamespace::new(Allowance::SELECTORS)
    }

    fn spent(time: &mut StepsByNamespace, steps: i64, now: Moment) -> bool {
        let namespace = Namespace::new("tenant").unwrap();
        time.spend(&namespace, steps.cast_unsigned(), now);
        time.exhausted(now).contains(&namespace)
    }

    #[test]
    fn steps_are_exhausted_by_a_burst_and_come_back() {
        let (mut time, now) = (full(), Moment::START);
        assert!(!spent(&mut time, BURST - 1, now));
        assert!(spent(&mut time, 1, now));
        assert!(!spent(&mut time, 0, now + Duration::from_secs(1)));
        assert!(spent(&mut time, RATE, now + Duration::from_secs(1)));
    }

    #[test]
    fn steps_beyond_the_burst_are_paid_back_first() {
        let (mut time, now) = (full(), Moment::START);
        assert!(spent(&mut time, BURST + 2 * RATE, now));
        assert!(spent(&mut time, 0, now + Duration::from_secs(2)));
        assert!(!spent(&mut time, 0, now + Duration::from_secs(3)));
    }

    #[test]
    fn namespaces_with_all_steps_are_forgotten() {
        let (mut time, now) = (full(), Moment::START);
        assert!(spent(&mut time, BURST, now));
        let later = now + Duration::from_secs((BURST / RATE).cast_unsigned());
        assert!(time.exhausted(later).is_empty() && time.of.is_empty());
    }
}
