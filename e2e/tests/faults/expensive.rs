//! Expensive but valid selectors: they delay only the pods of their tenant.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use serde_json::{Value, json};

use crate::harness::{FaultHarness, create, pod};

/// Number of the tenant's pods. Together they occupy a debug build of the planner for minutes, an
/// optimised build for ten seconds.
const PODS: usize = 8;

/// Returns a selector whose estimated cost is a fifth of the API server's limit.
fn selector(number: usize) -> Value {
    let all = format!("lists.range(170).all(x, lists.range(170).all(y, x + y >= -{number}))");
    json!({"cel": {"expression": format!("{all} && device.attributes['gpu.tessera.dev'].index >= 0")}})
}

/// Returns a claim that fits nowhere, with eight alternatives of four different selectors each.
fn claim(name: &str, number: usize) -> Value {
    let alternative = |i: usize| {
        json!({
            "name": format!("r{i}"), "deviceClassName": "gpu.tessera.dev",
            "selectors": (0..4).map(|s| selector(number * 100 + i * 10 + s)).collect::<Vec<_>>(),
            "capacity": {"requests": {"memory": "900Gi"}},
        })
    };
    let request =
        json!({"name": "gpu", "firstAvailable": (0..8).map(alternative).collect::<Vec<_>>()});
    json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expensive_selectors_delay_only_their_tenant() {
    let harness = FaultHarness::with_nodes(&[8, 8]).await;
    let (claims, pods) = (harness.tenant_api::<ResourceClaim>(), harness.tenant_api::<Pod>());
    for number in 0..PODS {
        let name = format!("expensive-{number}");
        create(&claims, claim(&name, number)).await;
        create(&pods, pod(&name)).await;
    }
    let mut controller = harness.controller("a", true);
    let lease = harness.wait_leader("a").await;
    harness.pod("other-tenant", "19Gi").await;
    harness.wait_allocated("other-tenant").await;
    let now = harness.leases().get("tessera-controller").await.unwrap();
    let terms = [lease, now].map(|lease| lease.spec.unwrap().lease_transitions);
    assert_eq!(terms[0], terms[1], "the first leader still leads");
    assert!(controller.check_running(), "{}", controller.log());
    harness.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_claims_without_pods_delay_no_other_tenant() {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let claims: Api<ResourceClaim> = harness.tenant_api();
    let large = |number: usize| {
        let expression = |s: usize| format!("[{}{number}, {s}].size() > 0", "1,".repeat(5000));
        let selectors: Vec<Value> =
            (0..16).map(|s| json!({"cel": {"expression": expression(s)}})).collect();
        json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev", "selectors": selectors}})
    };
    for number in 0..20 {
        let name = format!("large-{number}");
        create(
            &claims,
            json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [large(number)]}}}),
        )
        .await;
    }
    let mut controller = harness.controller("a", true);
    harness.wait_leader("a").await;
    harness.pod("other-tenant", "19Gi").await;
    harness.wait_allocated("other-tenant").await;
    assert!(controller.check_running(), "{}", controller.log());
    // Compiled, the selectors take 190 MiB, and more than a minute in a debug build.
    let resident = controller.resident_mib();
    assert!(resident < 128, "{resident} MiB");
    harness.finish().await;
}
