//! Events on pods, as the kubelet writes them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};

/// Writes events. A repeated event about a pod is written once.
pub(crate) struct Recorder {
    client: Client,
    node: String,
    last: Mutex<HashMap<String, String>>,
}

impl Recorder {
    pub(crate) fn new(client: Client, node: String) -> Self {
        Self { client, node, last: Mutex::default() }
    }

    pub(crate) async fn warn(&self, pod: &Pod, reason: &str, message: String) {
        let text = format!("{reason}: {message}");
        let uid = pod.uid().unwrap_or_default();
        let before =
            self.last.lock().unwrap_or_else(PoisonError::into_inner).insert(uid, text.clone());
        if before.as_ref() == Some(&text) {
            return;
        }
        let namespace = pod.namespace().unwrap_or_default();
        tracing::warn!(namespace, pod = pod.name_any(), reason, note = message, "pod event");
        let event = self.event(pod, &namespace, reason, message);
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        if let Err(error) = api.create(&PostParams::default(), &event).await {
            tracing::warn!(%error, reason, "cannot write event");
        }
    }

    /// Removes the state of a deleted pod.
    pub(crate) fn forget(&self, pod_uid: &str) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).remove(pod_uid);
    }

    fn event(&self, pod: &Pod, namespace: &str, reason: &str, message: String) -> Event {
        let now = Some(Time(Timestamp::now()));
        Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{}.", pod.name_any())),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                namespace: Some(namespace.to_owned()),
                name: Some(pod.name_any()),
                uid: pod.uid(),
                ..ObjectReference::default()
            },
            type_: Some("Warning".into()),
            reason: Some(reason.to_owned()),
            message: Some(message),
            source: Some(EventSource {
                component: Some("kubelet".into()),
                host: Some(self.node.clone()),
            }),
            reporting_component: Some("kubelet".into()),
            reporting_instance: Some(self.node.clone()),
            first_timestamp: now.clone(),
            last_timestamp: now,
            count: Some(1),
            ..Event::default()
        }
    }
}
