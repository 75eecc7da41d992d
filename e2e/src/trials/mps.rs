//! Sharing by MPS: switched on by `helm upgrade`, used by pods of different users beside each
//! other, through an update of the driver, and switched off again.

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::bench::{Bench, from_template, phase};
use super::driver_instances::DriverInstances;
use super::placement::told_of;
use super::release::{helm, unnoticed};
use crate::harness::TrialOutcome;
use crate::helm::{Helm, NAMESPACE};
use crate::inventory::DRIVER;
use crate::runner::Outcome;

const CLASS: &str = "a100.gpu.tessera.dev";

/// What each claim by MPS has of a GPU.
const GRANTED: u64 = 12 << 30;

/// A quarter of the 108 multiprocessors of an A100.
const MULTIPROCESSORS: u64 = 27;

/// Any but the first pod's.
const USER: u32 = 4242;

pub(super) async fn there_and_back(bench: Bench) -> TrialOutcome {
    let helm = helm()?;
    bench.node_with("a100", 4).await?;
    templates(&bench).await?;
    // Nobody shares by MPS before it is installed, and whoever wants to is told.
    bench.holder("first", "by-mps").await?;
    told_of(&bench, "first", &["it is not shared by MPS (mps.enabled of the chart"]).await?;

    helm.upgrade(&["mps.enabled=true"]).await?;
    DriverInstances::of(&bench.client).run_with("--mps").await?;
    let seen = shared(&bench, &helm).await;
    // Whatever was seen, the others find the cluster as it was.
    helm.upgrade(&[]).await?;
    seen?;
    Ok(Outcome::Held(vec![]))
}

async fn templates(bench: &Bench) -> anyhow::Result<()> {
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
    bench.template_of("by-mps", devices(exactly, fields)).await
}

async fn shared(bench: &Bench, helm: &Helm) -> anyhow::Result<()> {
    let first = bench.holds("first").await?;
    let gpu = gpu_of(bench, &first).await?;
    let keepers = keepers(bench).await?;

    // Of another user, beside it.
    sees_its_part(bench, "second", &gpu, Some(USER)).await?;

    // Who shares otherwise waits until the GPU is nobody's.
    let selector = format!("device.attributes[\"{DRIVER}\"].uuid == \"{gpu}\"");
    let exactly = json!({
        "deviceClassName": CLASS, "selectors": [{"cel": {"expression": selector}}],
        "capacity": {"requests": {"memory": "1Gi"}},
    });
    bench.template_of("plain", json!({"requests": [{"name": "gpu", "exactly": exactly}]})).await?;
    bench.holder("plain", "plain").await?;
    told_of(bench, "plain", &["in use with sharing MPS"]).await?;

    // A driver that is replaced replaces no daemon: neither who is there notices, nor who comes.
    let rolled = ["mps.enabled=true", "driver.podAnnotations.rolled=yes"];
    helm.upgrade(&rolled).await?;
    unnoticed(bench, &first).await?;
    sees_its_part(bench, "third", &gpu, None).await?;
    anyhow::ensure!(
        self::keepers(bench).await? == keepers,
        "the upgrade has replaced what keeps the daemons"
    );

    let plain = bench.pods().get("plain").await?;
    anyhow::ensure!(phase(&plain) == "Pending", "pod `plain` is {}", phase(&plain));
    bench.delete(&["first", "second", "third"].map(str::to_owned)).await?;
    let plain = bench.holds("plain").await?;
    anyhow::ensure!(gpu_of(bench, &plain).await? == gpu, "`plain` asked for that GPU");
    bench.delete(&["plain".to_owned()]).await?;
    Ok(())
}

/// Runs a pod that is a client of the control daemon of that GPU: it has its part of it, by MPS,
/// and its memory, by the interceptor.
async fn sees_its_part(
    bench: &Bench,
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
    bench.create(pod).await?;
    let lines = bench.output_of(name).await?;
    let lines: Vec<Value> =
        lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let event =
        |event: &str| lines.iter().find(|line| line["event"] == event).cloned().unwrap_or_default();
    let (seen, filled) = (event("see"), event("filled"));
    let device = &seen["devices"][0];
    anyhow::ensure!(device["uuid"] == gpu, "{gpu}: {seen}");
    anyhow::ensure!(
        device["multiprocessors"] == MULTIPROCESSORS,
        "{MULTIPROCESSORS} multiprocessors: {seen}"
    );
    anyhow::ensure!(filled["takenBytes"] == GRANTED, "{GRANTED} bytes: {filled}");
    Ok(())
}

/// UUID of the GPU that the pod's claim has.
async fn gpu_of(bench: &Bench, pod: &Pod) -> anyhow::Result<String> {
    let claim = bench.claim_of(pod).await?;
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    let result = results.and_then(|results| results.first());
    result
        .map(|result| result.device.replacen("gpu", "GPU", 1))
        .ok_or_else(|| anyhow::anyhow!("pod {} has no device", pod.name_any()))
}

/// The pods that keep the daemons, and how often their containers have started.
async fn keepers(bench: &Bench) -> anyhow::Result<Vec<(Option<String>, i32)>> {
    let pods: Api<Pod> = Api::namespaced(bench.client.clone(), NAMESPACE);
    let pods =
        pods.list(&ListParams::default().labels("app.kubernetes.io/name=tessera-mps")).await?;
    let mut keepers: Vec<_> = pods
        .iter()
        .map(|pod| (pod.metadata.uid.clone(), super::driver_instances::restarts_of(pod)))
        .collect();
    keepers.sort();
    anyhow::ensure!(!keepers.is_empty(), "nobody keeps daemons");
    Ok(keepers)
}
