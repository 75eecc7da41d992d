//! Deletes the contents of a namespace under deletion, then the namespace.

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::api::{KINDS, Kind};
use crate::informer::Informer;
use crate::queue::WorkQueue;

/// Reason why a namespace cannot be removed yet.
#[derive(Debug, thiserror::Error)]
enum EmptyError {
    #[error("{count} {what} still exist")]
    Remaining { what: &'static str, count: usize },
    #[error("API request failed")]
    Api(#[from] kube::Error),
}

pub(super) struct Controller {
    client: Client,
    namespaces: Informer<Namespace>,
    work: WorkQueue<String>,
}

impl Controller {
    pub(super) fn new(client: Client) -> Self {
        Self {
            namespaces: Informer::start(Api::all(client.clone())),
            client,
            work: WorkQueue::new(),
        }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                changes = self.namespaces.next() => {
                    for namespace in changes.into_iter().filter_map(|change| change.new) {
                        if namespace.metadata.deletion_timestamp.is_some() {
                            self.work.add(namespace.name_any());
                        }
                    }
                }
                () = self.work.wait_until_due() => {}
                () = std::future::ready(()), if !self.work.is_empty() => self.work_once().await,
            }
        }
    }

    async fn work_once(&mut self) {
        let Some(name) = self.work.pop() else { return };
        let done = self.empty(&name).await;
        self.work.finish(name, done, "namespace controller");
    }

    async fn empty(&self, name: &str) -> Result<(), EmptyError> {
        let key = (String::new(), name.to_owned());
        let Some(namespace) = self.namespaces.get(&key) else { return Ok(()) };
        // Pods are deleted first. Other objects stay until the last pod is gone, since pods use
        // them.
        let (pods, others): (Vec<&Kind>, Vec<&Kind>) = KINDS
            .iter()
            .filter(|kind| kind.namespaced && (kind.group.is_empty() || kind.plural != "events"))
            .partition(|kind| kind.plural == "pods");
        for kinds in [pods, others] {
            let mut left = None;
            for kind in kinds {
                let count = self.delete_all(name, kind).await?;
                if count > 0 {
                    left = left.or(Some(EmptyError::Remaining { what: kind.plural, count }));
                }
            }
            if let Some(left) = left {
                return Err(left);
            }
        }
        self.finalize(namespace).await
    }

    /// Deletes all objects of a kind. Returns the number that still exist.
    async fn delete_all(&self, namespace: &str, kind: &Kind) -> Result<usize, kube::Error> {
        let objects: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &resource(kind));
        objects.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        Ok(objects.list_metadata(&ListParams::default()).await?.items.len())
    }

    async fn finalize(&self, namespace: &Namespace) -> Result<(), EmptyError> {
        let name = namespace.name_any();
        let body = json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "resourceVersion": namespace.resource_version()},
            "spec": {"finalizers": []},
        });
        let request = axum::http::Request::put(format!("/api/v1/namespaces/{name}/finalize"))
            .header("content-type", "application/json")
            .body(body.to_string().into_bytes())
            .expect("invariant: a namespace name forms a valid path");
        match self.client.request::<serde_json::Value>(request).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Ok(()),
        }
    }
}

/// Returns the kube-rs resource of a kind.
pub(super) fn resource(kind: &Kind) -> ApiResource {
    ApiResource {
        group: kind.group.to_owned(),
        version: kind.version.to_owned(),
        api_version: kind.api_version(),
        kind: kind.kind.to_owned(),
        plural: kind.plural.to_owned(),
    }
}
