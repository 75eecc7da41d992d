//! Work to do: each key once, failures again after a growing delay.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::error::Error;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

const FIRST_DELAY: Duration = Duration::from_millis(10);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Keys in the order in which they came.
pub(crate) struct WorkQueue<T> {
    ready: VecDeque<T>,
    waiting: BTreeSet<(Instant, T)>,
    /// The keys of `waiting`: each once.
    delayed: HashSet<T>,
    failures: HashMap<T, u32>,
}

impl<T: Clone + Eq + Ord + Hash> WorkQueue<T> {
    pub(crate) fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            waiting: BTreeSet::new(),
            delayed: HashSet::new(),
            failures: HashMap::new(),
        }
    }

    /// Adds a key, unless it waits already.
    pub(crate) fn add(&mut self, key: T) {
        if !self.ready.contains(&key) {
            self.ready.push_back(key);
        }
    }

    /// Takes the oldest key.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.ready.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// The work on this key came to an end: well, or it comes again later. `who` is for the log.
    pub(crate) fn settle<E: Error + 'static>(
        &mut self,
        key: T,
        outcome: Result<(), E>,
        who: &'static str,
    ) where
        T: Debug,
    {
        match outcome {
            Ok(()) => self.done(&key),
            Err(error) => {
                tracing::debug!(who, ?key, error = &error as &dyn Error, "tries again");
                self.retry(key);
            }
        }
    }

    /// The work on this key is done; its next failure is a first one.
    pub(crate) fn done(&mut self, key: &T) {
        self.failures.remove(key);
    }

    /// The work on this key failed; it comes again later, or when it would have come anyway.
    pub(crate) fn retry(&mut self, key: T) {
        if !self.delayed.insert(key.clone()) {
            return;
        }
        let failures = self.failures.entry(key.clone()).or_insert(0);
        let delay = FIRST_DELAY.saturating_mul(1 << (*failures).min(16)).min(LONGEST_DELAY);
        *failures += 1;
        self.waiting.insert((Instant::now() + delay, key));
    }

    /// Waits until a failed key is due, and makes it ready. For ever where none failed.
    pub(crate) async fn due(&mut self) {
        let Some((when, _)) = self.waiting.first().cloned() else {
            return std::future::pending().await;
        };
        tokio::time::sleep_until(when).await;
        while let Some((when, key)) = self.waiting.pop_first() {
            if when > Instant::now() {
                self.waiting.insert((when, key));
                break;
            }
            self.delayed.remove(&key);
            self.add(key);
        }
    }
}
