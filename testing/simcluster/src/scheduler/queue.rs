//! Pods on their way to a node: active, backing off, unschedulable until an event, gated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::SchedulerOptions;
use super::cycle::Plugin;
use crate::informer::Key;

/// Why a pod found no node.
#[derive(Clone, Debug)]
pub(super) struct Rejection {
    pub(super) key: Key,
    /// Who rejected it: events that concern none of them do not help.
    pub(super) plugins: BTreeSet<Plugin>,
}

#[derive(Debug)]
enum State {
    Active,
    /// Until this moment; after an error not even an idle scheduler takes it earlier.
    Backoff {
        until: Instant,
        error: bool,
    },
    Unschedulable {
        rejection: Rejection,
        backoff_until: Instant,
        flush_at: Instant,
    },
    /// A binding or attempt is under way; events meanwhile count.
    InFlight {
        news: bool,
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
    longest_backoff: Duration,
    pop_from_backoff: bool,
    longest_wait: Duration,
}

impl PodQueue {
    pub(super) fn new(options: &SchedulerOptions) -> Self {
        Self {
            entries: BTreeMap::new(),
            order: 0,
            first_backoff: options.first_backoff,
            longest_backoff: options.longest_backoff,
            pop_from_backoff: options.pop_from_backoff,
            longest_wait: options.longest_wait,
        }
    }

    fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Adds a pod that passed its gates; one that is in the queue stays where it is.
    pub(super) fn add(&mut self, key: &Key, priority: i32) {
        let order = self.next_order();
        let fresh = Entry { state: State::Active, failures: 0, priority, order };
        let entry = self.entries.entry(key.clone()).or_insert(fresh);
        if matches!(entry.state, State::Gated) {
            entry.state = State::Active;
            entry.order = order;
        }
    }

    /// Keeps a pod out until its gates open.
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

    /// Whether a pod can be tried now.
    pub(super) fn has_next(&self) -> bool {
        self.choose().is_some()
    }

    /// Highest priority first, then the longest waiting; pods that back off only while no other
    /// waits.
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
            entry.state = State::InFlight { news: false };
        }
        Some(key)
    }

    fn backoff(&self, failures: u32) -> Duration {
        self.first_backoff
            .saturating_mul(1 << failures.saturating_sub(1).min(16))
            .min(self.longest_backoff)
    }

    /// The attempt found no node.
    pub(super) fn reject(&mut self, rejection: Rejection) {
        let order = self.next_order();
        let now = Instant::now();
        let Some(failures) = self.entries.get(&rejection.key).map(|entry| entry.failures + 1)
        else {
            return;
        };
        let backoff_until = now + self.backoff(failures);
        let flush_at = now + self.longest_wait;
        let Some(entry) = self.entries.get_mut(&rejection.key) else { return };
        let news = matches!(entry.state, State::InFlight { news: true });
        entry.failures = failures;
        entry.order = order;
        entry.state = match news {
            true => State::Backoff { until: backoff_until, error: false },
            false => State::Unschedulable { rejection, backoff_until, flush_at },
        };
    }

    /// The attempt ended with an error; only time helps.
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

    /// Something happened that may help the pods that were rejected so.
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
                State::InFlight { news } => {
                    // Who will reject it is not known yet; upstream replays the events, here any
                    // counts.
                    let any = Rejection { key: key.clone(), plugins: Plugin::ALL.into() };
                    *news = *news || helps(&any);
                }
                _ => {}
            }
        }
        self.order = order;
    }

    /// Waits until time alone lets a pod go on, and lets it.
    pub(super) async fn due(&mut self) {
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
    async fn higher_priority_goes_first_then_the_longest_waiting() {
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
    async fn a_rejected_pod_waits_for_an_event_that_concerns_who_rejected_it() {
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
    async fn backoff_doubles_up_to_its_longest() {
        let mut queue = queue(false);
        queue.add(&key("a"), 0);
        for expected in [1, 2, 4, 8, 10, 10] {
            queue.pop();
            let before = Instant::now();
            queue.reject(rejected("a", Plugin::DynamicResources));
            queue.wake(|_| true);
            assert!(!queue.has_next());
            queue.due().await;
            assert_eq!(before.elapsed().as_secs(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_scheduler_takes_a_pod_that_backs_off_but_not_after_an_error() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        queue.failed(&key("a"));
        assert!(!queue.has_next());
        queue.due().await;
        assert_eq!(queue.pop(), Some(key("a")));
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_during_the_attempt_is_not_lost() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        queue.wake(|rejection| rejection.key == key("a"));
        queue.reject(rejected("a", Plugin::DynamicResources));
        assert!(queue.has_next());
    }

    #[tokio::test(start_paused = true)]
    async fn after_five_minutes_a_pod_is_tried_without_any_event() {
        let mut queue = queue(true);
        queue.add(&key("a"), 0);
        queue.pop();
        let before = Instant::now();
        queue.reject(rejected("a", Plugin::DynamicResources));
        queue.due().await;
        assert_eq!(before.elapsed().as_secs(), 300);
        assert!(queue.has_next());
    }
}
