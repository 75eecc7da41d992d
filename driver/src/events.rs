//! Events on pods whose claims cannot be prepared.

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

use crate::{
    prepare::claim::{ReservingPod, reserving_pods},
    report::chain,
};

/// What was done.
const ACTION: &str = "PrepareResources";

/// The API refuses longer notes (`validateV1Event`).
const MOST_BYTES_OF_NOTE: usize = 1024;

/// Writes events, in tasks of their own: nobody waits for them, and one that is not written is logged.
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
        let note =
            shortened(&format!("ResourceClaim {name} cannot be prepared on node {}: {why}", self.node));
        for pod in reserving_pods(claim) {
            let event = self.event(&pod, claim, &note);
            let api: Api<Event> = Api::namespaced(self.client.clone(), pod.namespace.as_str());
            tokio::spawn(async move {
                if let Err(error) = api.create(&PostParams::default(), &event).await {
                    tracing::warn!(pod = %pod.name, error = %chain(&error), "an event could not be written");
                }
            });
        }
    }

    fn event(&self, pod: &ReservingPod, claim: &ResourceClaim, note: &str) -> Event {
        let now = Timestamp::now();
        Event {
            metadata: ObjectMeta {
                // As client-go names events; long pod names are cut so that the time always fits.
                name: Some(format!("{}.{:x}", prefix(pod.name.as_str(), 200), now.as_nanosecond())),
                namespace: Some(pod.namespace.to_string()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            type_: Some("Warning".to_owned()),
            reason: Some(event::PREPARE_FAILED.to_owned()),
            action: Some(ACTION.to_owned()),
            note: Some(note.to_owned()),
            reporting_controller: Some(DRIVER_NAME.to_owned()),
            // At most 128 bytes, which a node's name may exceed.
            reporting_instance: Some(prefix(self.node.as_str(), 128).to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(pod.name.to_string()),
                namespace: Some(pod.namespace.to_string()),
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
