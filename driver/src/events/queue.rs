//! The bounded queue of events on pods, and the texts that were written lately.
//!
//! Tenants decide how many of their claims fail, and how often: each text is written once in five
//! minutes for a claim, and a queue that is full drops events.

use std::{
    collections::VecDeque,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::api::events::v1::Event;
use tokio::{sync::mpsc, time::Instant};

/// Events that wait to be written.
const MAX_QUEUED: usize = 256;

/// Texts that are remembered.
const MAX_REMEMBERED: usize = 1024;

/// Time for which a text of a claim is not written again.
const REPEAT_AFTER: Duration = Duration::from_secs(300);

/// The sending side of the queue.
#[derive(Clone, Debug)]
pub(super) struct EventQueue {
    queued: mpsc::Sender<Event>,
    written: Arc<Mutex<WrittenTexts>>,
}

/// Texts that were written within the last five minutes, oldest first.
#[derive(Debug, Default)]
struct WrittenTexts(VecDeque<(Instant, u64)>);

impl EventQueue {
    /// Returns an empty queue and its receiving side.
    pub(super) fn new() -> (Self, mpsc::Receiver<Event>) {
        let (queued, received) = mpsc::channel(MAX_QUEUED);
        (Self { queued, written: Arc::default() }, received)
    }

    /// Returns true, once in five minutes, if the text may be written for the claim.
    pub(super) fn is_new(&self, claim_uid: &str, text: &str) -> bool {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.add(claim_uid, text, Instant::now())
    }

    /// Adds an event, or drops it if the queue is full.
    pub(super) fn send(&self, event: Event) {
        if let Err(error) = self.queued.try_send(event) {
            tracing::debug!(%error, "dropped event");
        }
    }
}

impl WrittenTexts {
    /// Adds a text. Returns false if it is there.
    fn add(&mut self, claim_uid: &str, text: &str, now: Instant) -> bool {
        let mut hasher = DefaultHasher::new();
        (claim_uid, text).hash(&mut hasher);
        let hash = hasher.finish();
        let is_old = |at: Instant| now.saturating_duration_since(at) >= REPEAT_AFTER;
        while self.0.front().is_some_and(|(at, _)| is_old(*at)) {
            self.0.pop_front();
        }
        if self.0.iter().any(|(_, written)| *written == hash) {
            return false;
        }
        if self.0.len() == MAX_REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((now, hash));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_claim_is_new_once_in_five_minutes() {
        let (mut written, now) = (WrittenTexts::default(), Instant::now());
        assert!(written.add("a", "no room", now));
        assert!(!written.add("a", "no room", now + REPEAT_AFTER - Duration::from_secs(1)));
        assert!(written.add("a", "no GPU", now) && written.add("b", "no room", now));
        assert!(written.add("a", "no room", now + REPEAT_AFTER));
    }

    #[test]
    fn remembered_texts_and_queued_events_are_bounded() {
        let (mut written, now) = (WrittenTexts::default(), Instant::now());
        for claim in 0..10 * MAX_REMEMBERED {
            assert!(written.add(&claim.to_string(), "no room", now));
        }
        assert_eq!(written.0.len(), MAX_REMEMBERED);

        let (queue, received) = EventQueue::new();
        for _ in 0..10 * MAX_QUEUED {
            queue.send(Event::default());
        }
        assert_eq!(received.len(), MAX_QUEUED);
    }
}
