//! Controllers and scheduler of the simulated cluster, through its API.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod allocation;
mod claims;
mod garbage;
mod namespaces;
mod scheduling;

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{Condition, await_condition};
use kube::{Client, Config, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};

/// Longer than any step here takes on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Kubeconfig of a disposable control plane, to compare the fakes with the real components.
///
/// It needs an API server (without the admission plugins ServiceAccount and TaintNodesByCondition),
/// a controller-manager (without the node life cycle controllers, as there are no kubelets) and a
/// scheduler. Run the tests with `--test-threads 1`; its nodes and pods are deleted.
const REAL: &str = "TESSERA_TEST_CLUSTER_KUBECONFIG";

/// Returns a cluster, real or simulated, and its administrator in a namespace of the test's own.
async fn cluster() -> (Option<SimCluster>, Client) {
    match std::env::var_os(REAL) {
        Some(kubeconfig) => (None, real(kubeconfig.as_ref()).await),
        None => {
            let (cluster, client) = sim().await;
            (Some(cluster), client)
        }
    }
}

/// Returns a simulated cluster, for tests that change its settings.
async fn sim() -> (SimCluster, Client) {
    let cluster = SimCluster::start(ClusterOptions::default()).await.unwrap();
    let client = cluster.client();
    device_class(&client).await;
    (cluster, client)
}

async fn device_class(client: &Client) {
    let class = json!({"metadata": {"name": "gpu.tessera.dev"}, "spec": {}});
    create::<DeviceClass>(&Api::all(client.clone()), class).await;
}

async fn real(kubeconfig: &Path) -> Client {
    // The choice fails if a provider is already installed, which is fine.
    drop(rustls::crypto::ring::default_provider().install_default());
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let mut config =
        Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.default_namespace = format!("test-{}", uuid::Uuid::new_v4().simple());
    let client = Client::try_from(config.clone()).unwrap();
    let (now, all) = (DeleteParams::default().grace_period(0), ListParams::default());
    let pods: Api<Pod> = Api::all(client.clone());
    for pod in pods.list(&all).await.unwrap() {
        let inside: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap());
        drop(inside.delete(&pod.name_any(), &now).await);
    }
    Api::<Node>::all(client.clone()).delete_collection(&now, &all).await.unwrap();
    Api::<DeviceClass>::all(client.clone()).delete_collection(&now, &all).await.unwrap();
    let namespace = json!({"metadata": {"name": config.default_namespace}});
    create::<Namespace>(&Api::all(client.clone()), namespace).await;
    device_class(&client).await;
    client
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + Debug + Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

/// Watches an object until the condition holds and returns its last state.
async fn until<K>(api: &Api<K>, name: &str, condition: impl Condition<K>) -> Option<K>
where
    K: Clone + Debug + Send + DeserializeOwned + Resource + 'static,
{
    let waited = tokio::time::timeout(TIMEOUT, await_condition(api.clone(), name, condition)).await;
    if let Ok(state) = waited {
        return state.unwrap();
    }
    panic!("{name} is still {:#?}", api.get_opt(name).await);
}

fn present<K>(test: impl Fn(&K) -> bool) -> impl Condition<K> {
    move |object: Option<&K>| object.is_some_and(&test)
}

fn gone<K>() -> impl Condition<K> {
    |object: Option<&K>| object.is_none()
}

async fn patch<K>(api: &Api<K>, name: &str, patch: Value) -> K
where
    K: Clone + Debug + DeserializeOwned,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap()
}

async fn patch_status<K>(api: &Api<K>, name: &str, patch: Value) -> K
where
    K: Clone + Debug + DeserializeOwned,
{
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(json!({"status": patch})))
        .await
        .unwrap()
}

async fn node(client: &Client, name: &str, cpu: &str) -> Node {
    let nodes: Api<Node> = Api::all(client.clone());
    let node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    create(&nodes, node).await
}

async fn template(client: &Client, name: &str) -> ResourceClaimTemplate {
    let templates: Api<ResourceClaimTemplate> = Api::default_namespaced(client.clone());
    let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}}]}});
    let metadata = json!({"labels": {"team": "a"}, "annotations": {"note": "b"}});
    create(
        &templates,
        json!({"metadata": {"name": name}, "spec": {"metadata": metadata, "spec": spec}}),
    )
    .await
}

async fn claim(client: &Client, name: &str) -> ResourceClaim {
    let claims: Api<ResourceClaim> = Api::default_namespaced(client.clone());
    let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}}]}});
    create(&claims, json!({"metadata": {"name": name}, "spec": spec})).await
}

/// Returns the APIs of the namespace's pods and claims.
fn apis(client: &Client) -> (Api<Pod>, Api<ResourceClaim>) {
    (Api::default_namespaced(client.clone()), Api::default_namespaced(client.clone()))
}

/// Returns the entry of a pod that uses the claim `shared`.
fn with_claim() -> Value {
    json!({"resourceClaimName": "shared"})
}

/// Returns a pod with one claim: `claim` or `template` by name.
fn pod(name: &str, source: Value) -> Value {
    let mut entry = source;
    entry["name"] = "gpu".into();
    json!({
        "metadata": {"name": name},
        "spec": {
            "resourceClaims": [entry],
            "containers": [{
                "name": "main", "image": "tessera/probe:e2e",
                "resources": {"claims": [{"name": "gpu"}], "requests": {"cpu": "1"}},
            }],
        },
    })
}

fn plain_pod(name: &str, cpu: &str) -> Value {
    let resources = json!({"requests": {"cpu": cpu}});
    let container = json!({"name": "main", "image": "tessera/probe:e2e", "resources": resources});
    json!({"metadata": {"name": name}, "spec": {"containers": [container]}})
}

/// Allocates as the controller does: the finalizer, then only the allocation.
async fn allocate(client: &Client, name: &str, node: &str) -> ResourceClaim {
    let claims: Api<ResourceClaim> = Api::default_namespaced(client.clone());
    patch(
        &claims,
        name,
        json!({"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}}),
    )
    .await;
    let allocation = json!({
        "devices": {"results": [
            {"request": "gpu", "driver": "gpu.tessera.dev", "pool": node, "device": "gpu-0"},
        ]},
        "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
        ]},
        "allocationTimestamp": "2026-11-21T04:00:00Z",
    });
    patch_status(&claims, name, json!({"allocation": allocation})).await
}

fn allocated(claim: &ResourceClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

fn consumers(claim: &ResourceClaim) -> Vec<String> {
    let consumers = claim.status.as_ref().and_then(|status| status.reserved_for.clone());
    consumers.into_iter().flatten().map(|consumer| consumer.name).collect()
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Returns the name of the claim generated for a pod's entry.
async fn generated(pods: &Api<Pod>, pod: &str) -> String {
    let has_claim_name = |pod: &Pod| {
        pod.status.as_ref().is_some_and(|status| status.resource_claim_statuses.is_some())
    };
    let pod = until(pods, pod, present(has_claim_name)).await.unwrap();
    let status = pod.status.unwrap().resource_claim_statuses.unwrap().remove(0);
    assert_eq!(status.name, "gpu");
    status.resource_claim_name.unwrap()
}

fn unschedulable(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions.iter().find(|condition| condition.type_ == "PodScheduled")?;
    (condition.status == "False").then(|| condition.message.clone().unwrap_or_default())
}

fn names<K: ResourceExt>(objects: impl IntoIterator<Item = K>) -> Vec<String> {
    objects.into_iter().map(|object| object.name_any()).collect()
}
