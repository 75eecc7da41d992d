//! Selectors that are legal and take long: their tenant's pods wait, and nobody else's.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use serde_json::{Value, json};

use crate::rig::{Rig, create, pod};

/// Pods of the tenant. All of them together keep a debug build of the planner for minutes, an
/// optimised one for ten seconds.
const PODS: usize = 8;

/// What the API server estimates for one of these selectors is a fifth of its limit.
fn selector(number: usize) -> Value {
    let all = format!("lists.range(170).all(x, lists.range(170).all(y, x + y >= -{number}))");
    json!({"cel": {"expression": format!("{all} && device.attributes['gpu.tessera.dev'].index >= 0")}})
}

/// A claim that fits nowhere, with eight alternatives of four selectors each, all different.
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
async fn tenant_of_expensive_selectors_delays_nobody_else() {
    let rig = Rig::with_nodes(&[8, 8]).await;
    let (claims, pods) = (rig.tenants::<ResourceClaim>(), rig.tenants::<Pod>());
    for number in 0..PODS {
        let name = format!("expensive-{number}");
        create(&claims, claim(&name, number)).await;
        create(&pods, pod(&name)).await;
    }
    let mut controller = rig.controller("a", true);
    let lease = rig.led_by("a").await;
    rig.pod("neighbor", "19Gi").await;
    rig.allocated("neighbor").await;
    let now = rig.leases().get("tessera-controller").await.unwrap();
    let terms = [lease, now].map(|lease| lease.spec.unwrap().lease_transitions);
    assert_eq!(terms[0], terms[1], "the first leader leads");
    assert!(controller.runs(), "{}", controller.log());
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_claims_without_a_pod_cost_a_neighbor_nothing() {
    let rig = Rig::with_nodes(&[1]).await;
    let claims: Api<ResourceClaim> = rig.tenants();
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
    let mut controller = rig.controller("a", true);
    rig.led_by("a").await;
    rig.pod("neighbor", "19Gi").await;
    rig.allocated("neighbor").await;
    assert!(controller.runs(), "{}", controller.log());
    // Compiled they take 190 MiB, and in a debug build more than a minute.
    let resident = controller.resident_mib();
    assert!(resident < 128, "{resident} MiB");
    rig.finish().await;
}
