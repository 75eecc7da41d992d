//! Events on pods whose claims cannot be prepared, and on the Node whose GPUs cannot be used.

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event, resource::v1::ResourceClaim},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tessera_api::{
    labels::event,
    names::{DRIVER_NAME, NodeName},
};
use tessera_runtime::error_chain::chain;
use tokio::sync::mpsc;

use crate::prepare::claim::{ReservingPod, reserving_pods};

/// What was done.
const ACTION: &str = "PrepareResources";
const NODE_ACTION: &str = "PublishGpus";

/// Events on what has no namespace are written into this one.
const NODE_NAMESPACE: &str = "default";

/// What an operator of the node should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeNews {
    /// The event's reason, of [`tessera_api::labels::event`].
    pub reason: &'static str,
    /// What it is.
    pub note: String,
}

/// The API refuses longer notes (`validateV1Event`).
const MOST_BYTES_OF_NOTE: usize = 1024;

/// Writes events, in tasks of their own: nobody waits for them, and one that is not written is
/// logged.
#[derive(Clone)]
pub struct Events {
    client: Client,
    node: NodeName,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Events {
    /// Writes through `client`, as the driver of `node`.
    #[must_use]
    pub fn new(client: Client, node: NodeName) -> Self {
        Self { client, node }
    }

    /// Tells every pod that has reserved `claim` why it is not prepared.
    pub fn prepare_failed(&self, claim: &ResourceClaim, why: &str) {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let note = shortened(&format!(
            "ResourceClaim {name} cannot be prepared on node {}: {why}",
            self.node
        ));
        for pod in reserving_pods(claim) {
            let event = self.event(&pod, claim, &note);
            self.write(pod.namespace.as_str(), event);
        }
    }

    /// Writes what comes over `news` as events on the Node, until nobody can send any more.
    pub async fn tell_of_node(self, mut news: mpsc::UnboundedReceiver<NodeNews>) {
        while let Some(NodeNews { reason, note }) = news.recv().await {
            // The kubelet's own events on its Node have the name for a UID, and kubectl looks for
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
                    &shortened(&note),
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
                tracing::warn!(about, error = %chain(&error), "an event could not be written");
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
            ..self.warning(pod.name.as_str(), namespace, event::PREPARE_FAILED, ACTION, note)
        }
    }

    /// All of an event but what it is about; `name` is that of the object.
    fn warning(
        &self,
        name: &str,
        namespace: &str,
        reason: &str,
        action: &str,
        note: &str,
    ) -> Event {
        let now = Timestamp::now();
        Event {
            metadata: ObjectMeta {
                // As client-go names events; long names are cut so that the time always fits.
                name: Some(format!("{}.{:x}", prefix(name, 200), now.as_nanosecond())),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            type_: Some("Warning".to_owned()),
            reason: Some(reason.to_owned()),
            action: Some(action.to_owned()),
            note: Some(note.to_owned()),
            reporting_controller: Some(DRIVER_NAME.to_owned()),
            // At most 128 bytes, which a node's name may exceed.
            reporting_instance: Some(prefix(self.node.as_str(), 128).to_owned()),
            ..Event::default()
        }
    }
}

fn shortened(note: &str) -> String {
    const CUT: &str = "...";
    if note.len() < MOST_BYTES_OF_NOTE {
        return note.to_owned();
    }
    format!("{}{CUT}", prefix(note, MOST_BYTES_OF_NOTE - 1 - CUT.len()))
}

/// The longest beginning of `text` with at most so many bytes.
fn prefix(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
