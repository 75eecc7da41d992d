//! Evictions by the Eviction API.
//!
//! kube's own `evict` writes the options of the deletion under a name that the API server ignores
//! (kube 5.0: `delete_options`), so the object is made here.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::PostParams;
use kube::core::response::Status;
use kube::{Api, Client};

/// An eviction of one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodEviction<'a> {
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Name of the pod.
    pub name: &'a str,
    /// UID of the pod: another pod of this name is not evicted.
    pub uid: &'a str,
    /// Seconds for the pod to end; `None` = as the pod says.
    pub grace_period: Option<u32>,
    /// Nothing is changed.
    pub is_dry_run: bool,
}

/// The answer to an eviction.
#[derive(Debug)]
pub enum EvictionAnswer {
    /// The pod is being deleted, or would be.
    Evicted,
    /// The pod does not exist any more.
    Gone,
    /// A PodDisruptionBudget does not allow it now; the API server's message.
    Refused(String),
    /// The request failed.
    Failed(kube::Error),
}

/// Evicts a pod. `client` must [not repeat](super::client_without_retries) refused requests: the
/// API server refuses an eviction that a PodDisruptionBudget does not allow with the status of an
/// overloaded server.
pub async fn evict(client: &Client, eviction: PodEviction<'_>) -> EvictionAnswer {
    let PodEviction { namespace, name, uid, grace_period, is_dry_run } = eviction;
    let body = Eviction {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions {
            dry_run: is_dry_run.then(|| vec!["All".to_owned()]),
            grace_period_seconds: grace_period.map(i64::from),
            preconditions: Some(Preconditions {
                uid: Some(uid.to_owned()),
                resource_version: None,
            }),
            ..DeleteOptions::default()
        }),
    };
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let parameters = PostParams { dry_run: is_dry_run, field_manager: None };
    let answer = pods.create_subresource::<_, Status>("eviction", name, &parameters, &body).await;
    match answer {
        Ok(_) => EvictionAnswer::Evicted,
        // It has ended, or another one has its name.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => EvictionAnswer::Gone,
        Err(kube::Error::Api(status)) if status.code == 429 => {
            EvictionAnswer::Refused(status.message)
        }
        Err(error) => EvictionAnswer::Failed(error),
    }
}
