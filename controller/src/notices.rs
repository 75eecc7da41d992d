//! Telling users: events on pods, each text once.
//!
//! `kube`'s recorder merges events of one reason into a series and keeps the first text, so a
//! reason that changes its numbers would never be read. Here the same text is told once, and
//! another text is another event.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tessera_allocator::model::PodUid;
use tessera_api::reason::MAX_EVENT_BYTES;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Between two events on a pod lies at least this, doubled with each event of the same reason:
/// numbers change with every pod that comes and goes, for each pod that waits.
const INTERVAL: Duration = Duration::from_secs(2);

/// At most this.
const LONGEST_INTERVAL: Duration = Duration::from_secs(300);

/// Events that wait to be written; beyond this pods are told later.
const QUEUE: usize = 1024;

/// Something to say.
#[derive(Debug, Clone)]
pub(crate) struct Notice {
    pub(crate) regarding: ObjectReference,
    /// What else it is about: a node.
    pub(crate) related: Option<ObjectReference>,
    pub(crate) kind: EventType,
    pub(crate) reason: &'static str,
    pub(crate) note: String,
}

/// Sends notices to the task that writes them, and remembers what each pod was told last.
#[derive(Debug)]
pub(crate) struct Notices {
    queue: mpsc::Sender<Notice>,
    told: BTreeMap<PodUid, Told>,
}

#[derive(Debug)]
struct Told {
    reason: &'static str,
    note: String,
    /// How many events of this reason came before this one.
    before: u32,
    at: Instant,
}

impl Told {
    /// Before when nothing else of `reason` is told.
    fn quiet_until(&self, reason: &str) -> Instant {
        let before = if self.reason == reason { self.before } else { 0 };
        self.at + INTERVAL.saturating_mul(1 << before.min(10)).min(LONGEST_INTERVAL)
    }
}

impl Notices {
    /// Starts the writing task.
    pub(crate) fn start(client: Client, identity: &str) -> Self {
        let (queue, mut waiting) = mpsc::channel::<Notice>(QUEUE);
        let reporter = Reporter {
            controller: "tessera-controller".to_owned(),
            instance: Some(identity.to_owned()),
        };
        tokio::spawn(async move {
            while let Some(notice) = waiting.recv().await {
                // A recorder of its own for each: it would otherwise put a new text into an old
                // event's series.
                let recorder = Recorder::new(client.clone(), reporter.clone());
                let event = Event {
                    type_: notice.kind,
                    reason: notice.reason.to_owned(),
                    note: Some(notice.note),
                    action: "Allocating".to_owned(),
                    secondary: notice.related,
                };
                if let Err(error) = recorder.publish(&event, &notice.regarding).await {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        reason = notice.reason,
                        "cannot write an event"
                    );
                }
            }
        });
        Self { queue, told: BTreeMap::new() }
    }

    /// Tells `pod` something, unless it was told just that, or something else just now. In the
    /// latter case the time is returned at which to try again.
    pub(crate) fn tell(
        &mut self,
        pod: &PodUid,
        mut notice: Notice,
        now: Instant,
    ) -> Option<Instant> {
        if let Some(told) = self.told.get(pod) {
            if told.note == notice.note {
                return None;
            }
            let quiet_until = told.quiet_until(notice.reason);
            if now < quiet_until {
                return Some(quiet_until);
            }
        }
        let Ok(slot) = self.queue.try_reserve() else { return Some(now + INTERVAL) };
        let before = self
            .told
            .get(pod)
            .filter(|told| told.reason == notice.reason)
            .map_or(0, |t| t.before + 1);
        let told = Told { reason: notice.reason, note: notice.note.clone(), before, at: now };
        self.told.insert(pod.clone(), told);
        truncate(&mut notice.note);
        slot.send(notice);
        None
    }

    /// Forgets pods that are not there any more.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        self.told.retain(|pod, _| is_there(pod));
    }
}

fn truncate(note: &mut String) {
    if note.len() <= MAX_EVENT_BYTES {
        return;
    }
    note.truncate(note.floor_char_boundary(MAX_EVENT_BYTES - '…'.len_utf8()));
    note.push('…');
}
