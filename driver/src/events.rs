//! Writes events on pods whose claims cannot be prepared, and on the Node.

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event, resource::v1::ResourceClaim},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tessera_api::{
    events::{self, EventReason},
    names::NodeName,
};
use tessera_runtime::error_chain::chain;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::prepare::claim::{ReservingPod, reserving_pods};

/// `action` of events on pods.
const ACTION: &str = "PrepareResources";
/// `action` of events on the Node.
const NODE_ACTION: &str = "PublishGpus";

/// Namespace of events on objects without a namespace.
const NODE_NAMESPACE: &str = "default";

/// An event on the Node, for its operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// The reason.
    pub reason: EventReason,
    /// The message.
    pub note: String,
}

/// Upper bound of a note; the API server refuses longer notes (`validateV1Event`).
const MAX_NOTE_BYTES: usize = 1024;

/// Writes events, each in a short task of its own. An event that cannot be written is logged.
#[derive(Clone)]
pub struct EventRecorder {
    client: Client,
    node: NodeName,
}

impl std::fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventRecorder").field("node", &self.node).finish_non_exhaustive()
    }
}

impl EventRecorder {
    /// Returns a recorder that writes through `client`, as the driver of `node`.
    #[must_use]
    pub fn new(client: Client, node: NodeName) -> Self {
        Self { client, node }
    }

    /// Writes an event on every pod that has reserved `claim`, with the reason of the failure.
    pub fn prepare_failed(&self, claim: &ResourceClaim, why: &str) {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let note = truncated(&format!(
            "ResourceClaim {name} cannot be prepared on node {}: {why}",
            self.node
        ));
        for pod in reserving_pods(claim) {
            let event = self.event(&pod, claim, &note);
            self.write(pod.namespace.as_str(), event);
        }
    }

    /// Writes the received events on the Node, until `stop`.
    pub async fn record_node_events(
        self,
        mut received: mpsc::UnboundedReceiver<NodeEvent>,
        stop: CancellationToken,
    ) {
        while let Some(Some(NodeEvent { reason, note })) =
            stop.run_until_cancelled(received.recv()).await
        {
            // The kubelet's own events on its Node use the name as UID, and kubectl searches for
            // that.
            let regarding = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(self.node.to_string()),
                uid: Some(self.node.to_string()),
                ..ObjectReference::default()
            };
            let event = Event {
                regarding: Some(regarding),
                ..self.warning(
                    self.node.as_str(),
                    NODE_NAMESPACE,
                    reason,
                    NODE_ACTION,
                    &truncated(&note),
                )
            };
            self.write(NODE_NAMESPACE, event);
        }
    }

    fn write(&self, namespace: &str, event: Event) {
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        tokio::spawn(async move {
            if let Err(error) = api.create(&PostParams::default(), &event).await {
                let about =
                    event.regarding.and_then(|regarding| regarding.name).unwrap_or_default();
                tracing::warn!(about, error = %chain(&error), "cannot write event");
            }
        });
    }

    fn event(&self, pod: &ReservingPod, claim: &ResourceClaim, note: &str) -> Event {
        let namespace = pod.namespace.as_str();
        Event {
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(pod.name.to_string()),
                namespace: Some(namespace.to_owned()),
                uid: Some(pod.uid.clone()),
                ..ObjectReference::default()
            }),
            related: Some(ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                name: claim.metadata.name.clone(),
                namespace: claim.metadata.namespace.clone(),
                uid: claim.metadata.uid.clone(),
                ..ObjectReference::default()
            }),
            ..self.warning(pod.name.as_str(), namespace, events::FAILED_PREPARE, ACTION, note)
        }
    }

    /// Returns a warning without its objects. `name` is the name of the object that it is about.
    fn warning(
        &self,
        name: &str,
        namespace: &str,
        reason: EventReason,
        action: &str,
        note: &str,
    ) -> Event {
        let now = Timestamp::now();
        Event {
            metadata: ObjectMeta {
                // As client-go names events. Long names are cut so that the time fits.
                name: Some(format!("{}.{:x}", prefix(name, 200), now.as_nanosecond())),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            type_: Some("Warning".to_owned()),
            reason: Some(reason.name().to_owned()),
            action: Some(action.to_owned()),
            note: Some(note.to_owned()),
            reporting_controller: Some(reason.reporter().name().to_owned()),
            // At most 128 bytes; the name of a node may be longer.
            reporting_instance: Some(prefix(self.node.as_str(), 128).to_owned()),
            ..Event::default()
        }
    }
}

fn truncated(note: &str) -> String {
    const CUT: &str = "...";
    if note.len() < MAX_NOTE_BYTES {
        return note.to_owned();
    }
    format!("{}{CUT}", prefix(note, MAX_NOTE_BYTES - 1 - CUT.len()))
}

/// Returns the longest prefix of `text` with at most `bytes` bytes.
fn prefix(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
