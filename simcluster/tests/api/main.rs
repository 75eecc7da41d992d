//! The API server stand-in, as kube-rs clients and kubectl see it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod deletion;
mod kubectl;
mod objects;
mod patches;
mod policies;
mod status;
mod validation;
mod watches;

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, PostParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tessera_simcluster::api::{ApiOptions, ApiServer, User};

/// A server and its administrator.
async fn server() -> (ApiServer, Client) {
    let api = ApiServer::start(ApiOptions::default()).await.unwrap();
    let client = api.client(&User::admin());
    (api, client)
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

/// The code and reason of an answer that is an error.
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
