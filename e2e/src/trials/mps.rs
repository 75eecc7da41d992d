//! Trial of sharing by MPS. It is enabled by `helm upgrade`, used by pods of different users on one
//! GPU, kept during a driver update, and disabled again.

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::driver_instances::DriverInstances;
use super::placement::wait_event_text;
use super::release::helm;
use super::test_bed::{TestBed, from_template, phase};
use crate::harness::TrialOutcome;
use crate::helm::{Helm, NAMESPACE};
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::Outcome;

const CLASS: &str = "a100.gpu.tessera.dev";

/// Memory of each claim with MPS.
const GRANTED: u64 = 12 << 30;

/// A quarter of the 108 multiprocessors of an A100.
const MULTIPROCESSORS: u64 = 27;

/// User that differs from the first pod's.
const USER: u32 = 4242;

pub(super) async fn switched_and_restored(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    test_bed.node_with("a100", 4).await?;
    templates(&test_bed).await?;
    // Before MPS is enabled, a claim for it is pending with an event.
    test_bed.create_holder("first", "by-mps").await?;
    wait_event_text(&test_bed, "first", &["without MPS (needs mps.enabled of the chart"]).await?;

    helm.upgrade(&["mps.enabled=true"]).await?;
    DriverInstances::new(&test_bed.client).wait_argument("--mps").await?;
    let outcome = share_gpu(&test_bed, &helm).await;
    // Disable MPS in every case; later trials need that.
    helm.upgrade(&[]).await?;
    outcome?;
    Ok(Outcome::Passed(vec![]))
}

async fn templates(test_bed: &TestBed) -> anyhow::Result<()> {
    let devices = |exactly: Value, fields: Value| {
        let mut parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"});
        parameters
            .as_object_mut()
            .into_iter()
            .for_each(|all| all.extend(fields.as_object().cloned().unwrap_or_default()));
        json!({
            "requests": [{"name": "gpu", "exactly": exactly}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
        })
    };
    let capacity = json!({"requests": {"memory": GRANTED.to_string(), "cores": "25"}});
    let exactly = json!({"deviceClassName": CLASS, "capacity": capacity});
    let fields = json!({
        "sharing": "MPS", "compute": {"policy": "Fixed"}, "placement": {"node": "Binpack", "device": "Binpack"},
    });
    test_bed.create_template_with("by-mps", devices(exactly, fields)).await
}

async fn share_gpu(test_bed: &TestBed, helm: &Helm) -> anyhow::Result<()> {
    let first = test_bed.wait_running("first").await?;
    let gpu = gpu_of(test_bed, &first).await?;
    let supervisors = supervisors(test_bed).await?;

    // A second client of another user on the same GPU.
    check_mps_limits(test_bed, "second", &gpu, Some(USER)).await?;

    // A claim without MPS is pending until the GPU is unused.
    let selector = format!("device.attributes[\"{DRIVER}\"].uuid == \"{gpu}\"");
    let exactly = json!({
        "deviceClassName": CLASS, "selectors": [{"cel": {"expression": selector}}],
        "capacity": {"requests": {"memory": "1Gi"}},
    });
    test_bed
        .create_template_with("plain", json!({"requests": [{"name": "gpu", "exactly": exactly}]}))
        .await?;
    test_bed.create_holder("plain", "plain").await?;
    wait_event_text(test_bed, "plain", &["allocated with sharing MPS"]).await?;

    // A driver update restarts no MPS daemon: existing and new clients continue.
    let rolled = ["mps.enabled=true", "driver.podAnnotations.rolled=yes"];
    helm.upgrade(&rolled).await?;
    test_bed.check_undisturbed(&first).await?;
    check_mps_limits(test_bed, "third", &gpu, None).await?;
    anyhow::ensure!(
        self::supervisors(test_bed).await? == supervisors,
        "the upgrade restarted MPS supervisors"
    );

    let plain = test_bed.pods().get("plain").await?;
    anyhow::ensure!(phase(&plain) == "Pending", "pod `plain` is {}", phase(&plain));
    test_bed.delete(&["first", "second", "third"]).await?;
    let plain = test_bed.wait_running("plain").await?;
    anyhow::ensure!(gpu_of(test_bed, &plain).await? == gpu, "pod `plain` requested GPU {gpu}");
    test_bed.delete(&["plain"]).await?;
    Ok(())
}

/// Runs a pod as a client of the GPU's control daemon. Checks its multiprocessors (limited by MPS)
/// and memory (limited by the interceptor).
async fn check_mps_limits(
    test_bed: &TestBed,
    name: &str,
    gpu: &str,
    user: Option<u32>,
) -> anyhow::Result<()> {
    let mut pod = from_template(name, "by-mps");
    let container = &mut pod["spec"]["containers"][0];
    container["command"] = json!(["tessera-probe", "fill"]);
    if let Some(user) = user {
        container["securityContext"] = json!({"runAsUser": user});
    }
    test_bed.create(pod).await?;
    let lines = test_bed.output_of(name).await?;
    let lines: Vec<Value> =
        lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let event =
        |event: &str| lines.iter().find(|line| line["event"] == event).cloned().unwrap_or_default();
    let (seen, filled) = (event("see"), event("filled"));
    let device = &seen["devices"][0];
    anyhow::ensure!(device["uuid"] == gpu, "expected GPU {gpu}: {seen}");
    anyhow::ensure!(
        device["multiprocessors"] == MULTIPROCESSORS,
        "expected {MULTIPROCESSORS} multiprocessors: {seen}"
    );
    anyhow::ensure!(filled["takenBytes"] == GRANTED, "expected {GRANTED} bytes: {filled}");
    Ok(())
}

/// Returns the UUID of the GPU allocated to the pod's claim.
async fn gpu_of(test_bed: &TestBed, pod: &Pod) -> anyhow::Result<String> {
    let claim = test_bed.claim_of(pod).await?;
    device_results(&claim)
        .next()
        .map(|result| result.device.replacen("gpu", "GPU", 1))
        .ok_or_else(|| anyhow::anyhow!("pod {} has no device", pod.name_any()))
}

/// Returns the UIDs of the MPS supervisor pods and the restart counts of their containers.
async fn supervisors(test_bed: &TestBed) -> anyhow::Result<Vec<(Option<String>, i32)>> {
    let pods: Api<Pod> = Api::namespaced(test_bed.client.clone(), NAMESPACE);
    let pods =
        pods.list(&ListParams::default().labels("app.kubernetes.io/name=tessera-mps")).await?;
    let mut supervisors: Vec<_> = pods
        .iter()
        .map(|pod| (pod.metadata.uid.clone(), super::driver_instances::restarts_of(pod)))
        .collect();
    supervisors.sort();
    anyhow::ensure!(!supervisors.is_empty(), "no MPS supervisor pods");
    Ok(supervisors)
}
