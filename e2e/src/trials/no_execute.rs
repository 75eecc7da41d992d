//! Trial of a DeviceTaintRule with the effect `NoExecute` on one GPU: Kubernetes evicts its pods by
//! the tolerations that the allocations have from the requests, and others get other GPUs.

use std::time::Duration;

use k8s_openapi::api::resource::v1::DeviceTaintRule;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::placement::binpack;
use super::refused_node::on_node;
use super::test_bed::{
    H100, TestBed, configured, delete_if_exists, from_template, one_gpu, wait_deleted,
};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

/// The rules, which later runs replace.
const RULES: [&str; 2] = ["e2e-broken", "e2e-missing"];
const KEY: &str = "e2e.tessera.dev/broken";

/// The time for which the pod `brief` tolerates the taint.
const TOLERATED: Duration = Duration::from_secs(15);

pub(super) async fn evicts_by_toleration(test_bed: TestBed) -> TrialOutcome {
    let rules = test_bed.taint_rules().await?;
    let node = test_bed.node_with("h100", 2).await?;
    let seconds = TOLERATED.as_secs();
    let tolerated = json!({"key": KEY, "operator": "Exists", "effect": "NoExecute"});
    let mut brief = tolerated.clone();
    brief["tolerationSeconds"] = json!(seconds);
    // Without an effect, it holds for NoSchedule only.
    let vague = json!({"key": KEY, "operator": "Exists"});
    let pods = [
        ("none", json!([])),
        ("vague", json!([vague])),
        ("brief", json!([brief])),
        ("lasting", json!([tolerated])),
    ];
    let mut running = Vec::new();
    for (name, tolerations) in pods {
        test_bed.create_template_with(name, packed(tolerations)).await?;
        test_bed.create(on_node(from_template(name, name), &node)).await?;
        running.push(test_bed.wait_running(name).await?);
    }
    let gpu = test_bed.common_gpu(&running).await?;
    let evicted = evict(&test_bed, &rules, &gpu).await;
    for rule in RULES {
        delete_if_exists(&rules, rule, &DeleteParams::default()).await?;
    }
    evicted?;
    test_bed.delete(&["lasting", "next"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Returns a request for a share, which is placed beside the others.
fn packed(tolerations: Value) -> Value {
    let mut devices = one_gpu(H100, &json!({"memory": "5Gi"}));
    devices["requests"][0]["exactly"]["tolerations"] = tolerations;
    configured(devices, binpack())
}

async fn evict(test_bed: &TestBed, rules: &Api<DeviceTaintRule>, gpu: &str) -> anyhow::Result<()> {
    let (pool, device) = gpu.split_once('/').unwrap_or_default();
    let lasting = test_bed.pods().get("lasting").await?;
    let started = Instant::now();
    for (rule, device) in RULES.iter().zip([device, "gpu-missing"]) {
        delete_if_exists(rules, rule, &DeleteParams::default()).await?;
        let rule = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule",
            "metadata": {"name": rule},
            "spec": {
                "deviceSelector": {"driver": DRIVER, "pool": pool, "device": device},
                "taint": {"key": KEY, "effect": "NoExecute"},
            },
        });
        rules.create(&PostParams::default(), &serde_json::from_value(rule)?).await?;
    }
    for name in ["none", "vague", "brief"] {
        wait_deleted(test_bed.pods(), name).await?;
    }
    // The time of the taint has whole seconds.
    let tolerated = started.elapsed() + Duration::from_secs(1);
    anyhow::ensure!(tolerated >= TOLERATED, "`brief` was evicted after {tolerated:?}");
    test_bed.check_undisturbed(&lasting).await?;
    test_bed.create(on_node(from_template("next", "none"), pool)).await?;
    let next = test_bed.wait_running("next").await?;
    let other = test_bed.common_gpu(&[next]).await?;
    anyhow::ensure!(other != gpu, "a new pod got {gpu}");
    Ok(())
}
