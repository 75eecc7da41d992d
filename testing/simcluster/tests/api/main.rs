//! The fake API server, as seen by kube-rs clients and kubectl.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod deletion;
mod faults;
mod kubectl;
mod objects;
mod patches;
mod policies;
mod status;
mod validation;
mod watches;

use std::path::Path;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Error, Resource};
use serde_json::{Value, json};
use tessera_simcluster::api::{ApiOptions, ApiServer, User};

/// A kind of objects in namespaces.
trait NamespacedKind: Resource<DynamicType = (), Scope = NamespaceResourceScope> {}

impl<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>> NamespacedKind for K {}

/// Kubeconfig of a disposable API server, to compare the fake with the real one.
///
/// Tests that need only an API server then run on it. It must run without the admission plugin
/// ServiceAccount and without controllers. Run the tests with `--test-threads 1`; its nodes and
/// slices are deleted.
const REAL: &str = "TESSERA_TEST_API_KUBECONFIG";

/// Returns an API server, real or fake, and its administrator in a namespace of the test's own.
async fn server() -> (Option<ApiServer>, Client) {
    match std::env::var_os(REAL) {
        Some(kubeconfig) => (None, real(kubeconfig.as_ref()).await),
        None => {
            let (api, client) = sim().await;
            (Some(api), client)
        }
    }
}

/// Returns a fake API server, for tests that change its settings, and its administrator.
async fn sim() -> (ApiServer, Client) {
    let api = ApiServer::start(ApiOptions::default()).await.unwrap();
    let client = api.client(&User::admin());
    (api, client)
}

/// Returns an API server, real or fake, and an API of the test's namespace.
async fn server_api<K: NamespacedKind>() -> (Option<ApiServer>, Api<K>) {
    let (api, client) = server().await;
    (api, Api::default_namespaced(client))
}

/// Returns a fake API server, for tests that change its settings, and an API of its namespace.
async fn sim_api<K: NamespacedKind>() -> (ApiServer, Api<K>) {
    let (api, client) = sim().await;
    (api, Api::default_namespaced(client))
}

async fn real(kubeconfig: &Path) -> Client {
    // The choice fails if a provider is already installed, which is fine.
    drop(rustls::crypto::ring::default_provider().install_default());
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let mut config =
        Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.default_namespace = format!("test-{}", uuid::Uuid::new_v4().simple());
    let client = Client::try_from(config.clone()).unwrap();
    let everything = (DeleteParams::default().grace_period(0), ListParams::default());
    Api::<Node>::all(client.clone()).delete_collection(&everything.0, &everything.1).await.unwrap();
    Api::<ResourceSlice>::all(client.clone())
        .delete_collection(&everything.0, &everything.1)
        .await
        .unwrap();
    let namespace = typed(json!({"metadata": {"name": config.default_namespace}}));
    created(&Api::<Namespace>::all(client.clone()), namespace).await;
    client
}

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn pod(name: &str) -> Pod {
    typed(json!({
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "tessera/probe:e2e"}]},
    }))
}

fn config_map(name: &str) -> ConfigMap {
    typed(json!({"metadata": {"name": name}, "data": {"a": "1"}}))
}

fn claim(name: &str) -> ResourceClaim {
    typed(json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}}]}},
    }))
}

fn allocation(driver: &str, node: &str) -> Value {
    json!({
        "devices": {"results": [{"request": "gpu", "driver": driver, "pool": node, "device": "gpu-0"}]},
        "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
        ]},
        "allocationTimestamp": "2026-11-21T04:00:00Z",
    })
}

fn slice(name: &str, node: &str) -> ResourceSlice {
    typed(json!({
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "gpu-0", "allowMultipleAllocations": true,
                "attributes": {"productName": {"string": "H100"}, "driverVersion": {"version": "580.95.5"}},
                "capacity": {"memory": {
                    "value": "81559Mi",
                    "requestPolicy": {"default": "81559Mi", "validRange": {"min": "1Mi", "step": "1Mi"}},
                }},
                "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
            }],
        },
    }))
}

/// Returns code, reason and message of an error response.
fn refusal<T: std::fmt::Debug>(answer: Result<T, Error>) -> (u16, String, String) {
    match answer {
        Err(Error::Api(status)) => (status.code, status.reason.clone(), status.message.clone()),
        other => panic!("expected an error from the API, got {other:?}"),
    }
}

async fn created<K>(api: &Api<K>, object: K) -> K
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    api.create(&PostParams::default(), &object).await.unwrap()
}
