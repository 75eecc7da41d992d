//! A work queue: each key once, failed keys again after a growing delay.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::error::Error;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

const FIRST_DELAY: Duration = Duration::from_millis(10);
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Returns `first`, doubled `doublings` times, but at most `max`.
pub(crate) fn backoff(first: Duration, doublings: u32, max: Duration) -> Duration {
    first.saturating_mul(1 << doublings.min(16)).min(max)
}

/// Keys in order of arrival.
pub(crate) struct WorkQueue<T> {
    ready: VecDeque<T>,
    waiting: BTreeSet<(Instant, T)>,
    /// The keys in `waiting`, each once.
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

    /// Adds a key unless it is already queued.
    pub(crate) fn add(&mut self, key: T) {
        if !self.ready.contains(&key) {
            self.ready.push_back(key);
        }
    }

    /// Removes and returns the oldest key.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.ready.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Records the outcome of the work on a key. Failed work is retried. `controller` is for the
    /// log.
    pub(crate) fn finish<E: Error + 'static>(
        &mut self,
        key: T,
        outcome: Result<(), E>,
        controller: &'static str,
    ) where
        T: Debug,
    {
        match outcome {
            Ok(()) => self.done(&key),
            Err(error) => {
                tracing::debug!(
                    controller,
                    ?key,
                    error = &error as &dyn Error,
                    "work failed; retrying"
                );
                self.retry(key);
            }
        }
    }

    /// Resets the failure count of a key.
    pub(crate) fn done(&mut self, key: &T) {
        self.failures.remove(key);
    }

    /// Queues a failed key again after a delay. A key that is already delayed is unchanged.
    pub(crate) fn retry(&mut self, key: T) {
        if !self.delayed.insert(key.clone()) {
            return;
        }
        let failures = self.failures.entry(key.clone()).or_insert(0);
        let delay = backoff(FIRST_DELAY, *failures, MAX_DELAY);
        *failures += 1;
        self.waiting.insert((Instant::now() + delay, key));
    }

    /// Waits until a failed key is due and makes it ready. Never resolves if there is none.
    pub(crate) async fn wait_until_due(&mut self) {
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
