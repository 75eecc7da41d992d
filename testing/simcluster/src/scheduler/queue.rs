//! Pods waiting for a node: active, backing off, unschedulable until an event, gated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::SchedulerOptions;
use super::cycle::Plugin;
use crate::informer::Key;
use crate::queue::backoff;

/// A rejected pod and the filters that rejected it.
#[derive(Clone, Debug)]
pub(super) struct Rejection {
    pub(super) key: Key,
    /// Only events relevant to these filters wake the pod.
    pub(super) plugins: BTreeSet<Plugin>,
}

#[derive(Debug)]
enum State {
    Active,
    /// Waits until this moment. After an error it is not tried earlier, even by an idle scheduler.
    Backoff {
        until: Instant,
        error: bool,
    },
    Unschedulable {
        rejection: Rejection,
        backoff_until: Instant,
        flush_at: Instant,
    },
    /// An attempt is in progress; events during it are recorded.
    InFlight {
        event_seen: bool,
    },
    Gated,
}

struct Entry {
    state: State,
    failures: u32,
    priority: i32,
    /// Order of arrival in the current state.
    order: u64,
}

pub(super) struct PodQueue {
    entries: BTreeMap<Key, Entry>,
    order: u64,
    first_backoff: Duration,
    max_backoff: Duration,
    pop_from_backoff: bool,
    max_wait: Duration,
}

impl PodQueue {
    pub(super) fn new(options: &SchedulerOptions) -> Self {
        Self {
            entries: BTreeMap::new(),
            order: 0,
            first_backoff: options.first_backoff,
            max_backoff: options.max_backoff,
            pop_from_backoff: options.pop_from_backoff,
            max_wait: options.max_wait,
        }
    }

    fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Adds a pod without gates. A queued pod keeps its position.
    pub(super) fn add(&mut self, key: &Key, priority: i32) {
        let order = self.next_order();
        let fresh = Entry { state: State::Active, failures: 0, priority, order };
        let entry = self.entries.entry(key.clone()).or_insert(fresh);
        if matches!(entry.state, State::Gated) {
            entry.state = State::Active;
            entry.order = order;
        }
    }

    /// Holds a pod until its gates are removed.
    pub(super) fn gate(&mut self, key: &Key) {
        let order = self.next_order();
        let entry = self.entries.entry(key.clone()).or_insert(Entry {
            state: State::Gated,
            failures: 0,
            priority: 0,
            order,
        });
        entry.state = State::Gated;
    }

    pub(super) fn remove(&mut self, key: &Key) {
        self.entries.remove(key);
    }

    /// Returns true if a pod can be tried now.
    pub(super) fn has_next(&self) -> bool {
        self.choose().is_some()
    }

    /// Selects by priority, then by waiting time. Pods in back-off are selected only if no other
    /// pod is active.
    fn choose(&self) -> Option<&Key> {
        let active = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry.state, State::Active))
            .min_by_key(|(_, entry)| (-i64::from(entry.priority), entry.order));
        let early = || {
            self.entries
                .iter()
                .filter(|_| self.pop_from_backoff)
                .filter_map(|(key, entry)| match entry.state {
                    State::Backoff { until, error: false } => Some((key, until, entry)),
                    _ => None,
                })
                .min_by_key(|(_, until, entry)| (*until, -i64::from(entry.priority), entry.order))
                .map(|(key, _, _)| key)
        };
        active.map(|(key, _)| key).or_else(early)
    }

    pub(super) fn pop(&mut self) -> Option<Key> {
        let key = self.choose()?.clone();
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.state = State::InFlight { event_seen: false };
        }
        Some(key)
    }

    fn backoff(&self, failures: u32) -> Duration {
        backoff(self.first_backoff, failures.saturating_sub(1), self.max_backoff)
    }

    /// Records that the attempt found no node.
    pub(super) fn reject(&mut self, rejection: Rejection) {
        let order = self.next_order();
        let now = Instant::now();
        let Some(failures) = self.entries.get(&rejection.key).map(|entry| entry.failures + 1)
        else {
            return;
        };
        let backoff_until = now + self.backoff(failures);
        let flush_at = now + self.max_wait;
        let Some(entry) = self.entries.get_mut(&rejection.key) else { return };
        let event_seen = matches!(entry.state, State::InFlight { event_seen: true });
        entry.failures = failures;
        entry.order = order;
        entry.state = match event_seen {
            true => State::Backoff { until: backoff_until, error: false },
            false => State::Unschedulable { rejection, backoff_until, flush_at },
        };
    }

    /// Records that the attempt failed; the pod is retried after its back-off.
    pub(super) fn failed(&mut self, key: &Key) {
        let order = self.next_order();
        let Some(failures) = self.entries.get(key).map(|entry| entry.failures + 1) else { return };
        let until = Instant::now() + self.backoff(failures);
        if let Some(entry) = self.entries.get_mut(key) {
            *entry = Entry {
                state: State::Backoff { until, error: true },
                failures,
                order,
                priority: entry.priority,
            };
        }
    }

    /// Wakes rejected pods for which `helps` returns true.
    pub(super) fn wake(&mut self, helps: impl Fn(&Rejection) -> bool) {
        let mut order = self.order;
        for (key, entry) in &mut self.entries {
            match &mut entry.state {
                State::Unschedulable { rejection, backoff_until, .. } if helps(rejection) => {
                    order += 1;
                    entry.order = order;
                    entry.state = match *backoff_until <= Instant::now() {
                        true => State::Active,
                        false => State::Backoff { until: *backoff_until, error: false },
                    };
                }
                State::InFlight { event_seen } => {
                    // The rejecting filters are not known yet. Upstream replays the events; here
                    // any event counts.
                    let any = Rejection { key: key.clone(), plugins: Plugin::ALL.into() };
                    *event_seen = *event_seen || helps(&any);
                }
                _ => {}
            }
        }
        self.order = order;
    }

    /// Waits until a pod's back-off or waiting time is over, and activates it.
    pub(super) async fn wait_until_due(&mut self) {
        let next = self.entries.values().filter_map(|entry| match entry.state {
            State::Backoff { until, .. } => Some(until),
            State::Unschedulable { flush_at, .. } => Some(flush_at),
            _ => None,
        });
        let Some(when) = next.min() else { return std::future::pending().await };
        tokio::time::sleep_until(when).await;
        let now = Instant::now();
        for entry in self.entries.values_mut() {
            match entry.state {
                State::Backoff { until, .. } if until <= now => entry.state = State::Active,
                State::Unschedulable { flush_at, .. } if flush_at <= now => {
                    entry.state = State::Active
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        ("default".to_owned(), name.to_owned())
    }

    fn rejected(name: &str, plugin: Plugin) -> Rejection {
        Rejection { key: key(name), plugins: [plugin].into() }
    }

    fn queue(pop_from_backoff: bool) -> PodQueue {
        PodQueue::new(&SchedulerOptions { pop_from_backoff, ..SchedulerOptions::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn higher_priority_is_first_then_longest_waiting() {
        let mut queue = queue(true);
        queue.add(&key("b"), 0);
        queue.add(&key("a"), 0);
        queue.add(&key("c"), 10);
        assert_eq!(
            [queue.pop(), queue.pop(), queue.pop(), queue.pop()],
            [Some(key("c")), Some(key("b")), Some(key("a")), None]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn rejected_pod_waits_for_a_relevant_event() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        queue.reject(rejected("a", Plugin::DynamicResources));
        queue.wake(|rejection| rejection.plugins.contains(&Plugin::NodeResourcesFit));
        assert!(!queue.has_next());
        queue.wake(|rejection| rejection.plugins.contains(&Plugin::DynamicResources));
        assert_eq!(queue.pop(), Some(key("a")));
    }

    #[tokio::test(start_paused = true)]
    async fn backoff_doubles_up_to_its_maximum() {
        let mut queue = queue(false);
        queue.add(&key("a"), 0);
        for expected in [1, 2, 4, 8, 10, 10] {
            queue.pop();
            let before = Instant::now();
            queue.reject(rejected("a", Plugin::DynamicResources));
            queue.wake(|_| true);
            assert!(!queue.has_next());
            queue.wait_until_due().await;
            assert_eq!(before.elapsed().as_secs(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_scheduler_pops_from_backoff_except_after_error() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        queue.failed(&key("a"));
        assert!(!queue.has_next());
        queue.wait_until_due().await;
        assert_eq!(queue.pop(), Some(key("a")));
    }

    #[tokio::test(start_paused = true)]
    async fn event_during_attempt_is_kept() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        queue.wake(|rejection| rejection.key == key("a"));
        queue.reject(rejected("a", Plugin::DynamicResources));
        assert!(queue.has_next());
    }

    #[tokio::test(start_paused = true)]
    async fn pod_is_retried_after_five_minutes() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        let before = Instant::now();
        queue.reject(rejected("a", Plugin::DynamicResources));
        queue.wait_until_due().await;
        assert_eq!(before.elapsed().as_secs(), 300);
        assert!(queue.has_next());
    }
}
