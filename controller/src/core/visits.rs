//! Visits: what the next steps look at although it has not changed.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::Moment;

/// The keys to visit, each in the next step or at a time.
#[derive(Debug)]
pub(super) struct Visits<K> {
    next_step: BTreeSet<K>,
    times: BTreeMap<K, Moment>,
    /// `times` in the order of time.
    order: BTreeSet<(Moment, K)>,
}

impl<K> Default for Visits<K> {
    fn default() -> Self {
        Self { next_step: BTreeSet::new(), times: BTreeMap::new(), order: BTreeSet::new() }
    }
}

impl<K: Ord + Clone> Visits<K> {
    /// Has the key visited in the next step, which this does not wake.
    pub(super) fn visit_next(&mut self, key: K) {
        self.forget_time(&key);
        self.next_step.insert(key);
    }

    /// Has the key visited in the first step from this time on, instead of at another time.
    pub(super) fn visit_at(&mut self, key: K, at: Moment) {
        self.forget_time(&key);
        self.order.insert((at, key.clone()));
        self.times.insert(key, at);
    }

    /// Takes the keys to visit now, and adds those that have changed. No visit of any of them is
    /// left.
    pub(super) fn take(&mut self, changed: BTreeSet<K>, now: Moment) -> BTreeSet<K> {
        let mut keys = changed;
        keys.append(&mut self.next_step);
        while let Some((at, _)) = self.order.first()
            && *at <= now
        {
            keys.extend(self.order.pop_first().map(|(_, key)| key));
        }
        for key in &keys {
            self.forget_time(key);
        }
        keys
    }

    /// Returns the first time of a visit.
    pub(super) fn next(&self) -> Option<Moment> {
        self.order.first().map(|(at, _)| *at)
    }

    fn forget_time(&mut self, key: &K) {
        if let Some(at) = self.times.remove(key) {
            self.order.remove(&(at, key.clone()));
        }
    }
}
