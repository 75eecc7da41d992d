//! Trials of oversubscription, which `helm upgrade` enables and disables. Of memory: one pod allows
//! it and one does not. Of cores: two pods are guaranteed a whole GPU each.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use serde_json::{Value, json};

use super::driver_instances::DriverInstances;
use super::placement::wait_event_text;
use super::release::helm;
use super::test_bed::{A100, TestBed, from_template, phase, wait_all};
use crate::harness::TrialOutcome;
use crate::helm::Helm;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Memory of the claim: more than an A100 has (80 GiB), and less than twice that.
const GRANTED: u64 = 100 << 30;

/// Text of the event on the pod that does not allow oversubscription.
const REASON: &str = "oversubscribed (the claim must set memory.oversubscribe: true)";

pub(super) async fn switched_and_restored(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    test_bed.node_with("a100", 4).await?;
    templates(&test_bed).await?;
    let before = test_bed.start_holder("before", "whole").await?;

    publish_percent(&test_bed, &helm, &["driver.memoryPercent=200"], 200).await?;
    let outcome = oversubscribe(&test_bed).await;
    // Disable oversubscription in every case; later trials need that.
    publish_percent(&test_bed, &helm, &[], 100).await?;
    outcome?;
    test_bed.check_undisturbed(&before).await?;
    // The pending pod runs once its memory is not oversubscribed.
    test_bed.wait_running("plain").await?;
    test_bed.delete(&["before", "plain", "oversubscribed"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Two claims of all cores share a GPU while it is published with twice its cores, and keep it.
pub(super) async fn cores(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    test_bed.node_with("a100", 4).await?;
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig",
        "placement": {"node": "Binpack", "device": "Binpack"}, "compute": {"policy": "Fixed"},
    });
    let exactly = json!({
        "deviceClassName": A100, "capacity": {"requests": {"memory": "10Gi", "cores": "100"}},
    });
    let devices = json!({
        "requests": [{"name": "gpu", "exactly": exactly}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
    });
    test_bed.create_template_with("cores", devices).await?;
    publish_cores(&test_bed, &helm, &["driver.coresPercent=200"], "200").await?;
    let outcome = async {
        let mut pods = vec![];
        for name in ["first", "second"] {
            pods.push(test_bed.start_holder(name, "cores").await?);
        }
        let mut devices = vec![];
        for pod in &pods {
            let claim = json!(test_bed.claim_of(pod).await?.status);
            let result = &claim["allocation"]["devices"]["results"][0];
            devices.push(json!([result["pool"], result["device"]]));
        }
        anyhow::ensure!(devices[0] == devices[1], "on different GPUs: {devices:?}");
        Ok(pods)
    };
    let outcome = outcome.await;
    publish_cores(&test_bed, &helm, &[], "100").await?;
    for pod in &outcome? {
        test_bed.check_undisturbed(pod).await?;
    }
    test_bed.delete(&["first", "second"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Sets the cores that the drivers publish, and waits until they are published.
async fn publish_cores(
    test_bed: &TestBed,
    helm: &Helm,
    settings: &[&str],
    cores: &str,
) -> anyhow::Result<()> {
    helm.upgrade(settings).await?;
    let argument = format!("--cores-percent={cores}");
    DriverInstances::new(&test_bed.client).wait_argument(&argument).await?;
    let check = |slices: &[ResourceSlice]| {
        let slices_of_driver = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let devices = slices_of_driver.flat_map(|slice| slice.spec.devices.iter().flatten());
        let published: Vec<_> =
            devices.map(|device| json!(device)["capacity"]["cores"]["value"].clone()).collect();
        let is_done = !published.is_empty() && published.iter().all(|value| value == cores);
        CheckResult::done_if(is_done, || format!("{published:?}"))
    };
    let what = format!("all GPUs to be published with {cores} cores");
    wait_all(Api::all(test_bed.client.clone()), &what, check).await
}

async fn templates(test_bed: &TestBed) -> anyhow::Result<()> {
    test_bed.create_template("whole", A100, json!({"memory": "80Gi"})).await?;
    test_bed.create_template("plain", A100, json!({"memory": "1Gi"})).await?;
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
    test_bed.create_template_with("oversubscribed", devices).await
}

/// Sets the percentage of the GPUs' memory that the drivers publish, and waits until it is
/// published.
async fn publish_percent(
    test_bed: &TestBed,
    helm: &Helm,
    settings: &[&str],
    percent: u32,
) -> anyhow::Result<()> {
    helm.upgrade(settings).await?;
    DriverInstances::new(&test_bed.client)
        .wait_argument(&format!("--memory-percent={percent}"))
        .await?;
    let check = |slices: &[ResourceSlice]| {
        let slices_of_driver = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let devices: Vec<_> =
            slices_of_driver.flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
        let oversubscribed = devices.iter().filter(|device| {
            device
                .attributes
                .as_ref()
                .is_some_and(|attributes| attributes.contains_key("physicalMemory"))
        });
        // One GPU is used by a claim that does not allow oversubscription.
        let expected = if percent > 100 { devices.len().saturating_sub(1) } else { 0 };
        let oversubscribed = oversubscribed.count();
        CheckResult::done_if(devices.len() > 1 && oversubscribed == expected, || {
            format!("{oversubscribed} of {}", devices.len())
        })
    };
    let what = format!(
        "all GPUs but the one in use to be published with {percent} percent of their memory"
    );
    wait_all(Api::all(test_bed.client.clone()), &what, check).await
}

async fn oversubscribe(test_bed: &TestBed) -> anyhow::Result<()> {
    test_bed.create_holder("plain", "plain").await?;
    let mut pod = from_template("oversubscribed", "oversubscribed");
    pod["spec"]["containers"][0]["command"] = json!(["tessera-probe", "fill"]);
    test_bed.create(pod).await?;

    let lines = test_bed.output_of("oversubscribed").await?;
    let lines: Vec<Value> =
        lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let filled = lines.iter().find(|line| line["event"] == "filled").cloned().unwrap_or_default();
    for field in ["takenBytes", "nvmlUsedBytes", "nvmlTotalBytes"] {
        anyhow::ensure!(filled[field] == GRANTED, "expected {field} {GRANTED}: {filled}");
    }
    wait_event_text(test_bed, "plain", &[REASON]).await?;
    let plain = test_bed.pods().get("plain").await?;
    anyhow::ensure!(phase(&plain) == "Pending", "pod `plain` is {}", phase(&plain));
    Ok(())
}
