//! More memory than the GPUs have: `helm upgrade` there and back, with a pod that may spill and one
//! that may not.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE, from_template, phase};
use super::driver_instances::DriverInstances;
use super::placement::told_of;
use super::release::{helm, unnoticed};
use crate::harness::TrialOutcome;
use crate::helm::Helm;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// More than an A100 has (80 GiB), and less than twice that.
const GRANTED: u64 = 100 << 30;

/// What a pod that may not spill is told.
const REASON: &str = "memory is oversubscribed; the claim must say memory.oversubscribe: true";

pub(super) async fn there_and_back(bench: Bench) -> TrialOutcome {
    let helm = helm()?;
    bench.node_with("a100", 4).await?;
    templates(&bench).await?;
    bench.holder("before", "whole").await?;
    let before = bench.holds("before").await?;

    publish(&bench, &helm, &["driver.memoryPercent=200"], 200).await?;
    let seen = oversubscribed(&bench).await;
    // Whatever was seen, the others find the cluster as it was.
    publish(&bench, &helm, &[], 100).await?;
    seen?;
    unnoticed(&bench, &before).await?;
    // It has waited, and now all that it gets is there.
    bench.holds("plain").await?;
    bench.delete(&["before", "plain", "spills"].map(str::to_owned)).await?;
    Ok(Outcome::Held(vec![]))
}

async fn templates(bench: &Bench) -> anyhow::Result<()> {
    bench.template("whole", "a100.gpu.tessera.dev", json!({"memory": "80Gi"})).await?;
    bench.template("plain", "a100.gpu.tessera.dev", json!({"memory": "1Gi"})).await?;
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"oversubscribe": true},
    });
    let exactly = json!({
        "deviceClassName": "a100.gpu.tessera.dev", "capacity": {"requests": {"memory": GRANTED.to_string()}},
    });
    let devices = json!({
        "requests": [{"name": "gpu", "exactly": exactly}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
    });
    bench.template_of("spilling", devices).await
}

/// Has the drivers publish so many percent of the GPUs' memory, and waits until they do.
async fn publish(
    bench: &Bench,
    helm: &Helm,
    settings: &[&str],
    percent: u32,
) -> anyhow::Result<()> {
    helm.upgrade(settings).await?;
    DriverInstances::of(&bench.client).run_with(&format!("--memory-percent={percent}")).await?;
    let judge = |slices: &[ResourceSlice]| {
        let ours = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let devices: Vec<_> = ours.flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
        let told = devices.iter().filter(|device| {
            device
                .attributes
                .as_ref()
                .is_some_and(|attributes| attributes.contains_key("physicalMemory"))
        });
        // One is somebody's whose memory may not spill.
        let expected = if percent > 100 { devices.len().saturating_sub(1) } else { 0 };
        let told = told.count();
        if devices.len() > 1 && told == expected {
            Verdict::Done(())
        } else {
            Verdict::NotYet(format!("{told} of {}", devices.len()))
        }
    };
    let what = format!(
        "all GPUs but the one in use to be published with {percent} percent of their memory"
    );
    Ok(wait::until(Api::all(bench.client.clone()), Default::default(), &what, PATIENCE, judge)
        .await?)
}

async fn oversubscribed(bench: &Bench) -> anyhow::Result<()> {
    bench.holder("plain", "plain").await?;
    let mut spills = from_template("spills", "spilling");
    spills["spec"]["containers"][0]["command"] = json!(["tessera-probe", "fill"]);
    bench.create(spills).await?;

    let lines = bench.output_of("spills").await?;
    let lines: Vec<Value> =
        lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let filled = lines.iter().find(|line| line["event"] == "filled").cloned().unwrap_or_default();
    for field in ["takenBytes", "nvmlUsedBytes", "nvmlTotalBytes"] {
        anyhow::ensure!(filled[field] == GRANTED, "{field} of {GRANTED}: {filled}");
    }
    told_of(bench, "plain", &[REASON]).await?;
    let plain = bench.pods().get("plain").await?;
    anyhow::ensure!(phase(&plain) == "Pending", "pod `plain` is {}", phase(&plain));
    Ok(())
}
