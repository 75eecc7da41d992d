//! Cordons and drains of GPUs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;
mod live;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fixture::device;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use live::{Live, errors};
use serde_json::{Value, json};
use tessera_simcluster::api::{ApiError, Fault, KINDS, RequestInfo};

const GPU: &str = "node-a/0";

/// Returns a cluster in which pods with these names each have a claim on the first GPU of node-a.
async fn cluster(pods: &[&str]) -> Live {
    let live = Live::with_controllers(true).await;
    for name in pods {
        live.claim(name, "10Gi").await;
        live.pod(name, name).await;
        let pods: Api<Pod> = Api::namespaced(live.cluster.client(), "team-a");
        let uid = pods.get(name).await.unwrap().uid();
        let result = json!({
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": device("aa"),
            "consumedCapacity": {"memory": "10Gi", "cores": "0", "shares": "1"},
            "shareID": uid,
        });
        let status = json!({
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": uid}],
        });
        let finalizers =
            json!({"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}});
        let parameters = PatchParams::default();
        claims(&live).patch(name, &parameters, &Patch::Merge(finalizers)).await.unwrap();
        let status = Patch::Merge(json!({"status": status}));
        claims(&live).patch_status(name, &parameters, &status).await.unwrap();
    }
    live
}

fn claims(live: &Live) -> Api<ResourceClaim> {
    Api::namespaced(live.cluster.client(), "team-a")
}

async fn rules(live: &Live) -> Vec<Value> {
    let rules: Api<DeviceTaintRule> = Api::all(live.cluster.client());
    rules.list(&Default::default()).await.unwrap().iter().map(|rule| json!(rule.spec)).collect()
}

fn output(output: &std::process::Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Has requests answered by this function; those of which it returns none are served.
fn answer(live: &Live, refuse: impl Fn(&RequestInfo) -> Option<ApiError> + Send + Sync + 'static) {
    let hook = move |request: &RequestInfo| refuse(request).map_or(Fault::None, Fault::Refuse);
    live.cluster.api().set_fault_hook(Some(Arc::new(hook)));
}

fn budget() -> ApiError {
    ApiError::too_many_requests("Cannot evict pod as it would violate the pod's disruption budget.")
}

#[tokio::test]
async fn cordon_taints_the_gpu_until_uncordon() {
    let live = cluster(&[]).await;
    let tried = live.call(&["cordon", "gpu", GPU, "--dry-run"]).await;
    assert_eq!(output(&tried), format!("gpu node-a/{} cordoned (dry run)\n", device("aa")));
    assert!(rules(&live).await.is_empty());

    let cordoned = live.call(&["cordon", "gpu", GPU]).await;
    assert_eq!(output(&cordoned), format!("gpu node-a/{} cordoned\n", device("aa")));
    let selector = json!({"driver": "gpu.tessera.dev", "pool": "node-a", "device": device("aa")});
    let taint = json!({"key": "gpu.tessera.dev/cordoned", "effect": "NoSchedule"});
    assert_eq!(rules(&live).await, [json!({"deviceSelector": selector, "taint": taint})]);
    let tree = live.call(&["tree", "-o", "json"]).await;
    let tree: Value = serde_json::from_slice(&tree.stdout).unwrap();
    let gpu = &tree["nodes"][0]["gpus"][0];
    assert_eq!(gpu["state"], json!(["Cordoned"]), "{gpu}");

    // By the device's name: it is the same GPU.
    let by_name = format!("node-a/{}", device("aa"));
    let again = live.call(&["cordon", "gpu", &by_name, GPU]).await;
    assert_eq!(output(&again), format!("gpu {by_name} already cordoned\n"));
    let back = live.json(&["uncordon", "gpu", GPU]).await;
    assert_eq!(back, json!([{"node": "node-a", "device": device("aa"), "change": "uncordoned"}]));
    assert!(rules(&live).await.is_empty());
    let none = live.call(&["uncordon", "gpu", GPU]).await;
    assert_eq!(output(&none), format!("gpu {by_name} not cordoned\n"));
    live.cluster.stop().await;
}

#[tokio::test]
async fn cordon_with_another_content_is_corrected() {
    let live = cluster(&[]).await;
    live.call(&["cordon", "gpu", GPU]).await;
    let rules_api: Api<DeviceTaintRule> = Api::all(live.cluster.client());
    let name = format!("tessera-cordon-{}", device("aa"));
    let edit = Patch::Merge(json!({"spec": {"taint": {"effect": "None"}}}));
    rules_api.patch(&name, &PatchParams::default(), &edit).await.unwrap();
    let again = live.call(&["cordon", "gpu", GPU]).await;
    assert!(output(&again).ends_with(" cordoned\n"), "{}", output(&again));
    assert_eq!(rules(&live).await[0]["taint"]["effect"], "NoSchedule");
    live.cluster.stop().await;
}

#[tokio::test]
async fn wrong_names_and_missing_rights_say_what_to_do() {
    let live = cluster(&[]).await;
    let cases = [
        ("node-a", "must be NODE/GPU"),
        ("node-z/0", "node `node-z` publishes no GPUs"),
        ("node-a/7", "node node-a has no GPU `7`; it has 0 (gpu-"),
    ];
    for (gpu, text) in cases {
        let refused = live.call(&["drain", "gpu", gpu]).await;
        assert_eq!(refused.status.code(), Some(1));
        assert!(errors(&refused).contains(text), "{}", errors(&refused));
    }
    let kind = KINDS.iter().find(|kind| kind.plural == "devicetaintrules").unwrap();
    answer(&live, |request| {
        (request.resource == "devicetaintrules" && request.verb == "create")
            .then(|| ApiError::forbidden(kind, "", "not allowed"))
    });
    let refused = live.call(&["cordon", "gpu", GPU]).await;
    assert!(errors(&refused).contains("ClusterRole tessera-operator"), "{}", errors(&refused));
    answer(&live, |request| (request.resource == "devicetaintrules").then(ApiError::no_such_path));
    let refused = live.call(&["cordon", "gpu", GPU]).await;
    assert!(errors(&refused).contains("needs Kubernetes 1.37"), "{}", errors(&refused));
    live.cluster.stop().await;
}

#[tokio::test]
async fn drain_waits_for_budgets_and_for_released_claims() {
    let live = cluster(&["one", "two"]).await;
    let refusals = AtomicUsize::new(2);
    answer(&live, move |request| {
        let is_two = request.subresource == "eviction" && request.name == "two";
        let refuses = is_two
            && refusals
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok();
        refuses.then(budget)
    });
    let drained = live.call(&["drain", "gpu", GPU, "--force"]).await;
    let (text, progress) = (output(&drained), errors(&drained));
    assert!(drained.status.success(), "{progress}");
    let gpu = format!("gpu node-a/{}", device("aa"));
    assert_eq!(text, format!("{gpu} drained\n2 pods evicted\n  team-a/one\n  team-a/two\n"));
    let lines: Vec<&str> = progress.lines().collect();
    assert_eq!(lines[..2], [&format!("{gpu} cordoned"), "pod team-a/one evicted"]);
    // Once, though it was refused twice.
    assert!(lines[2].starts_with("pod team-a/two: Cannot evict pod"), "{progress}");
    assert_eq!(lines[3..], ["pod team-a/two evicted"], "{progress}");
    assert_eq!(rules(&live).await.len(), 1, "it stays cordoned");
    for claim in claims(&live).list(&Default::default()).await.unwrap() {
        assert!(claim.status.and_then(|status| status.allocation).is_none());
    }
    live.cluster.stop().await;
}

#[tokio::test]
async fn drain_goes_on_after_failed_requests() {
    let live = cluster(&["one"]).await;
    let failures = AtomicUsize::new(2);
    answer(&live, move |request| {
        let fails = request.subresource == "eviction"
            && failures
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok();
        fails.then(|| ApiError::internal("etcd is away"))
    });
    let drained = live.call(&["drain", "gpu", GPU, "--force"]).await;
    assert!(drained.status.success(), "{}", errors(&drained));
    let progress = errors(&drained);
    assert_eq!(progress.matches("etcd is away").count(), 1, "{progress}");
    live.cluster.stop().await;
}

#[tokio::test]
async fn drain_that_times_out_names_what_is_left() {
    let live = cluster(&["one"]).await;
    answer(&live, |request| (request.subresource == "eviction").then(budget));
    let failed = live.call(&["drain", "gpu", GPU, "--force", "--timeout", "1s"]).await;
    assert_eq!(failed.status.code(), Some(1));
    let text = errors(&failed);
    assert!(text.contains("not drained within 1s; still there: pod team-a/one: Cannot"), "{text}");
    assert_eq!(rules(&live).await.len(), 1);
    live.cluster.stop().await;
}

#[tokio::test]
async fn pods_without_controller_stop_a_drain_at_once() {
    let live = cluster(&["alone"]).await;
    let before = live.cluster.api().revision();
    let refused = live.call(&["drain", "gpu", GPU]).await;
    assert_eq!(refused.status.code(), Some(1));
    let text = errors(&refused);
    assert!(text.contains("creates these pods again: team-a/alone;"), "{text}");
    let tried = live.call(&["drain", "gpu", GPU, "--force", "--dry-run"]).await;
    assert!(
        output(&tried).contains("1 pod would be evicted\n  team-a/alone"),
        "{}",
        output(&tried)
    );
    assert_eq!(live.cluster.api().revision(), before, "nothing was changed");
    live.cluster.stop().await;
}

#[tokio::test]
async fn pods_of_a_deleted_claim_are_evicted() {
    let live = cluster(&["user"]).await;
    let parameters = PatchParams::default();
    let unprotected = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims(&live).patch("user", &parameters, &unprotected).await.unwrap();
    // A bound pod holds the devices of its deleted claim.
    let pods: Api<Pod> = Api::namespaced(live.cluster.client(), "team-a");
    let spec = json!({"spec": {"nodeName": "node-a"}});
    let _ = pods.patch("user", &parameters, &Patch::Merge(spec)).await;
    claims(&live).delete("user", &Default::default()).await.unwrap();
    let drained = live.call(&["drain", "gpu", GPU, "--force", "--timeout", "20s"]).await;
    assert!(drained.status.success(), "{}", errors(&drained));
    live.cluster.stop().await;
}

#[tokio::test]
async fn times_and_grace_periods_are_checked() {
    let live = cluster(&[]).await;
    for (flag, value, text) in [
        ("--timeout", "soon", "must be a time above zero"),
        ("--timeout", "0s", "must be a time above zero"),
        ("--grace-period", "0", "0 is not in 1.."),
    ] {
        let refused = live.call(&["drain", "gpu", GPU, flag, value]).await;
        assert!(errors(&refused).contains(text), "{}", errors(&refused));
    }
    live.cluster.stop().await;
}
