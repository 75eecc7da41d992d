//! Writes of placeholder pods, with a fake API server.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::{FakeApi, failure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tessera_api::names::{Namespace, PodName};
use tessera_controller::core::effect::{PlaceholderChange, PlaceholderWrite};
use tessera_controller::core::event::Event;
use tessera_controller::leadership::Tenure;
use tessera_controller::placeholder::write_placeholder;

const NAME: &str = "tessera-node-a-0";

/// An API server with the PriorityClass.
fn cluster() -> FakeApi {
    let api = FakeApi::new();
    api.put("priorityclasses", json!({"metadata": {"name": "low", "uid": "uid-of-class"}}));
    api
}

fn creation() -> PlaceholderChange {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": NAME, "namespace": "tessera-system", "uid": "uid-of-pod"},
        "spec": {"containers": [], "priorityClassName": "low"},
    }))
    .unwrap();
    PlaceholderChange::Create(Box::new(pod))
}

/// Writes, and returns true if the pod is as it was to be.
async fn write(api: &FakeApi, change: PlaceholderChange) -> bool {
    let write = PlaceholderWrite {
        namespace: Namespace::new("tessera-system").unwrap(),
        pod: PodName::new(NAME).unwrap(),
        change,
    };
    match write_placeholder(api.client(), Tenure::endless(), write).await {
        Event::PlaceholderEnded { pod, is_done } if pod.as_str() == NAME => is_done,
        other => panic!("{other:?}"),
    }
}

fn exists(api: &FakeApi) -> bool {
    api.get("pods", "tessera-system", NAME).is_some()
}

#[tokio::test]
async fn its_priority_class_owns_a_placeholder() {
    let api = cluster();
    assert!(write(&api, creation()).await);
    let pod = api.get("pods", "tessera-system", NAME).unwrap();
    let owner = json!([{
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "name": "low", "uid": "uid-of-class",
    }]);
    assert_eq!(pod["metadata"]["ownerReferences"], owner);
    assert!(write(&api, creation()).await, "it exists, as it was to be");
}

#[tokio::test]
async fn no_placeholder_is_created_without_its_class() {
    let api = FakeApi::new();
    assert!(!write(&api, creation()).await);
    assert!(!exists(&api));
}

#[tokio::test]
async fn only_the_placeholder_with_the_uid_is_deleted() {
    let api = cluster();
    assert!(write(&api, creation()).await);
    assert!(write(&api, PlaceholderChange::Delete("another".into())).await, "it is gone");
    assert!(exists(&api));
    assert!(write(&api, PlaceholderChange::Delete("uid-of-pod".into())).await);
    assert!(!exists(&api));
    assert!(write(&api, PlaceholderChange::Delete("uid-of-pod".into())).await);
}

#[tokio::test]
async fn refused_write_is_reported() {
    let api = cluster();
    api.fault(|_, _| Some(failure(403, "Forbidden")));
    assert!(!write(&api, creation()).await);
}
