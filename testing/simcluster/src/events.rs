//! Events written by the controllers and the scheduler through kube-rs.

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};

/// Maximum length of an event's note. The API allows 1024 bytes.
const MAX_NOTE_CHARS: usize = 1000;

/// Writes the events of one component.
pub(crate) struct EventWriter {
    recorder: Recorder,
}

/// Reason, action and note of an event on a pod.
pub(crate) struct PodEvent<'a> {
    pub(crate) type_: EventType,
    pub(crate) reason: &'static str,
    pub(crate) action: &'static str,
    pub(crate) note: &'a str,
}

impl EventWriter {
    pub(crate) fn new(client: Client, component: &str) -> Self {
        let reporter = Reporter { controller: component.to_owned(), instance: None };
        Self { recorder: Recorder::new(client, reporter) }
    }

    /// Writes an event. A failure is logged only.
    pub(crate) async fn publish(&self, pod: &Pod, event: PodEvent<'_>) {
        let PodEvent { type_, reason, action, note } = event;
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(MAX_NOTE_CHARS).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        let regarding: ObjectReference = pod.object_ref(&());
        if let Err(error) = self.recorder.publish(&event, &regarding).await {
            let error = &error as &dyn std::error::Error;
            tracing::debug!(error, reason, pod = ?regarding.name, "cannot write event");
        }
    }
}
