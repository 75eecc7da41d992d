//! Writes events on pods whose claims cannot be prepared, and on the Node.

mod queue;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event, resource::v1::ResourceClaim},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tessera_api::{
    events::{self, EventReason},
    names::{ClaimName, ClaimUid, Namespace, NodeName},
};
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use self::queue::EventQueue;
use crate::prepare::{
    claim::{ReservingPod, reserving_pods},
    source::ClaimSource,
};

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

/// An event on the pods of a prepared claim, for its users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimEvent {
    /// The namespace of the claim.
    pub namespace: Namespace,
    /// The name of the claim.
    pub claim: ClaimName,
    /// The UID of the claim.
    pub uid: ClaimUid,
    /// The reason.
    pub reason: EventReason,
    /// The message.
    pub note: String,
}

/// Events on claims that wait to be written. Further ones are dropped.
pub const MAX_CLAIM_EVENTS: usize = 64;

/// Upper bound of a note; the API server refuses longer notes (`validateV1Event`).
const MAX_NOTE_BYTES: usize = 1024;

/// Pods of a claim that get an event. A claim may be reserved for 256.
const MAX_PODS: usize = 32;

/// Deadline of one write or read.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes events, one after the other. An event that cannot be written is logged.
#[derive(Clone)]
pub struct EventRecorder {
    client: Client,
    node: NodeName,
    queue: EventQueue,
}

impl std::fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventRecorder").field("node", &self.node).finish_non_exhaustive()
    }
}

/// The events on pods that a recorder has queued.
#[derive(Debug)]
pub struct QueuedEvents(mpsc::Receiver<Event>);

impl EventRecorder {
    /// Returns a recorder that writes through `client`, as the driver of `node`, and its queue.
    #[must_use]
    pub fn new(client: Client, node: NodeName) -> (Self, QueuedEvents) {
        let (queue, received) = EventQueue::new();
        (Self { client, node, queue }, QueuedEvents(received))
    }

    /// Queues an event on pods that have reserved `claim`, with the reason of the failure. The
    /// same reason is written once in five minutes.
    pub fn prepare_failed(&self, claim: &ResourceClaim, why: &str) {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let note = format!("ResourceClaim {name} cannot be prepared on node {}: {why}", self.node);
        self.queue_for_pods(claim, events::FAILED_PREPARE, &note);
    }

    fn queue_for_pods(&self, claim: &ResourceClaim, reason: EventReason, note: &str) {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        if !self.queue.is_new(uid, note) {
            return;
        }
        let note = truncated(note);
        let pods = reserving_pods(claim);
        for pod in pods.iter().take(MAX_PODS) {
            self.queue.send(self.event(pod, claim, reason, &note));
        }
        // A PodGroup has reserved it (KEP-5729), whose pods are not known.
        if pods.is_empty() {
            self.queue.send(self.event_about_claim(claim, reason, &note));
        }
    }

    /// Writes the queued events on pods, until `stop`.
    pub async fn record_pod_events(self, queued: QueuedEvents, stop: CancellationToken) {
        let QueuedEvents(mut received) = queued;
        while let Some(Some(event)) = stop.run_until_cancelled(received.recv()).await {
            let namespace = event.metadata.namespace.clone().unwrap_or_default();
            stop.run_until_cancelled(self.write(&namespace, event)).await;
        }
    }

    /// Queues the received events for the pods of their claims, which are read from `source`, until
    /// `stop`.
    pub async fn record_claim_events(
        self,
        source: ClaimSource,
        mut received: mpsc::Receiver<ClaimEvent>,
        stop: CancellationToken,
    ) {
        while let Some(Some(ClaimEvent { namespace, claim: name, uid, reason, note })) =
            stop.run_until_cancelled(received.recv()).await
        {
            let until = Instant::now() + REQUEST_TIMEOUT;
            match stop.run_until_cancelled(source.read(&namespace, &name, until)).await {
                // Another claim may have the name by now.
                Some(Ok(claim)) if claim.metadata.uid.as_deref() == Some(uid.as_str()) => {
                    self.queue_for_pods(&claim, reason, &note);
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    tracing::warn!(%namespace, claim = %name, error = %chain(&error), "cannot read the pods of a claim; no event is written");
                }
                None => return,
            }
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
            stop.run_until_cancelled(self.write(NODE_NAMESPACE, event)).await;
        }
    }

    async fn write(&self, namespace: &str, event: Event) {
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let about = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
        match timeout(REQUEST_TIMEOUT, api.create(&PostParams::default(), &event)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::warn!(about, error = %chain(&error), "cannot write event");
            }
            Err(_) => {
                tracing::warn!(about, error = "timeout of the API server", "cannot write event")
            }
        }
    }

    fn event(
        &self,
        pod: &ReservingPod,
        claim: &ResourceClaim,
        reason: EventReason,
        note: &str,
    ) -> Event {
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
            related: Some(claim_reference(claim)),
            ..self.warning(pod.name.as_str(), namespace, reason, ACTION, note)
        }
    }

    fn event_about_claim(&self, claim: &ResourceClaim, reason: EventReason, note: &str) -> Event {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let warning = self.warning(name, namespace, reason, ACTION, note);
        Event { regarding: Some(claim_reference(claim)), ..warning }
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

fn claim_reference(claim: &ResourceClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("resource.k8s.io/v1".to_owned()),
        kind: Some("ResourceClaim".to_owned()),
        name: claim.metadata.name.clone(),
        namespace: claim.metadata.namespace.clone(),
        uid: claim.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}
