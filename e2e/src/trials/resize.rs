//! Trials of `kubectl tessera resize`: shares change while pods run.

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{LogParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::resize::{GpuResize, apply_sizes};

use super::controller::ControllerSwitch;
use super::placement;
use super::test_bed::{A100, TIMEOUT, TestBed, from_template, wait_one};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::{self, CheckResult};

/// Holds memory, and has a new program look at the GPU every half second. The image has no `sleep`.
const LOOK_AGAIN: &str = "coproc HOLD { tessera-probe hold --take 600Mi; }; \
                          while :; do tessera-probe see; \
                          read -rt 0.5 -u ${HOLD[0]} || (($? > 128)) || exit 1; done";

/// A share grows and shrinks while its pod runs, what does not fit is refused, and a waiting pod
/// gets what becomes free.
pub(super) async fn grows_and_shrinks(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("a100", 1).await?;
    test_bed.create_template("share", A100, json!({"memory": "2Gi", "cores": "10"})).await?;
    let plugin = test_bed.plugin()?;
    let namespace = test_bed.namespace().to_owned();
    let resize = async |size: &[&str]| {
        let command = ["resize", "pod/grows", "--namespace", &namespace];
        plugin.call(&[&command[..], size].concat(), "").await
    };
    let pod = test_bed.start_holder("grows", "share").await?;
    let claim = test_bed.claim_of(&pod).await?.name_any();
    let grown = resize(&["--memory", "4Gi", "--cores", "30"]).await?.result;
    anyhow::ensure!(grown["isApplied"] == true, "{grown}");
    let before = json!({"memory": "2Gi", "cores": "10"});
    anyhow::ensure!(grown["shares"][0]["before"] == before, "{grown}");
    wait_counted(&test_bed, &claim, "4Gi").await?;

    let refused = resize(&["--memory", "1000Gi"]).await;
    let message = refused.map_or_else(|error| error.to_string(), |output| format!("{output:?}"));
    anyhow::ensure!(message.contains("of `memory` is not allowed on the device"), "{message}");
    wait_counted(&test_bed, &claim, "4Gi").await?;

    // The size that counts is a fact of the claim: another controller knows it.
    resize(&["--memory", "60Gi"]).await?;
    let switch = ControllerSwitch::detect(&test_bed).await?;
    switch.stop().await?;
    switch.start().await?;
    let device = device_of(&test_bed.claims().get(&claim).await?)?;
    test_bed.create_template_with("rest", rest_of(&device)).await?;
    test_bed.create_holder("waits", "rest").await?;
    placement::wait_event_reason(&test_bed, "waits", "InsufficientDevices").await?;
    let shrunk = resize(&["--memory", "2Gi"]).await?.result;
    anyhow::ensure!(shrunk["isApplied"] == true, "{shrunk}");
    let waited = test_bed.wait_running("waits").await?;
    test_bed.check_undisturbed(&pod).await?;
    test_bed.delete(&[waited.name_any(), pod.name_any()]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Programs in a container see the new limit without a restart of the container, and a limit below
/// the memory in use is withdrawn.
pub(super) async fn changes_running_container(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("a100", 1).await?;
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "10"})).await?;
    let mut pod = from_template("sees", "share");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = "tessera/executables:e2e".into();
    container["command"] = json!(["bash", "-c", LOOK_AGAIN]);
    test_bed.create(pod).await?;
    let pod = test_bed.wait_running("sees").await?;
    wait_seen(&test_bed, 1).await?;
    let plugin = test_bed.plugin()?;
    let namespace = test_bed.namespace().to_owned();
    let command = ["resize", "pod/sees", "--namespace", &namespace];
    plugin.call(&[&command[..], &["--memory", "3Gi"]].concat(), "").await?;
    wait_seen(&test_bed, 3).await?;
    let below = [&command[..], &["--memory", "512Mi", "--timeout", "8s"]].concat();
    let message = match plugin.call(&below, "").await {
        Err(error) => error.to_string(),
        Ok(output) => anyhow::bail!("a limit below the memory in use was applied: {output:?}"),
    };
    anyhow::ensure!(message.contains("more than the new limit of 512Mi"), "{message}");
    plugin.call(&[&command[..], &["--memory", "2Gi"]].concat(), "").await?;
    wait_seen(&test_bed, 2).await?;
    test_bed.check_undisturbed(&pod).await?;
    test_bed.delete(&["sees"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Waits until the last program that looked has seen this number of GiB.
async fn wait_seen(test_bed: &TestBed, gib: u64) -> anyhow::Result<()> {
    let has_seen = async || {
        let logs = LogParams { tail_lines: Some(20), ..LogParams::default() };
        let text = test_bed.pods().logs("sees", &logs).await?;
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let seen = lines.rfind(|line| line["event"] == "see").unwrap_or_default();
        let is_seen = seen["devices"][0]["cudaTotalBytes"] == gib << 30;
        Ok(CheckResult::done_if(is_seen, || seen.to_string()))
    };
    wait::poll(&format!("programs to see {gib} GiB"), TIMEOUT, has_seen).await
}

/// Returns the device of a claim.
fn device_of(claim: &ResourceClaim) -> anyhow::Result<String> {
    let device = device_results(claim).next().map(|result| result.device.clone());
    device.ok_or_else(|| anyhow::anyhow!("the claim has no device"))
}

/// Returns a request for 30 GiB of one GPU of 80 GiB.
fn rest_of(device: &str) -> Value {
    let uuid = device.replacen("gpu-", "GPU-", 1);
    let expression = format!("device.attributes['gpu.tessera.dev'].uuid == '{uuid}'");
    json!({"requests": [{
        "name": "gpu",
        "exactly": {
            "deviceClassName": DRIVER,
            "selectors": [{"cel": {"expression": expression}}],
            "capacity": {"requests": {"memory": "30Gi", "cores": "10"}},
        },
    }]})
}

/// Asks for another size of the share of a claim.
pub(super) async fn request(test_bed: &TestBed, claim: &str, size: Value) -> anyhow::Result<()> {
    let mut request = size;
    request["name"] = "gpu".into();
    let resizes: Api<GpuResize> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let object = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuResize",
        "metadata": {"name": claim}, "spec": {"requests": [request]},
    });
    let parameters = PatchParams::apply("trial").force();
    resizes.patch(claim, &parameters, &Patch::Apply(object)).await?;
    Ok(())
}

/// Waits until this amount of memory counts for the share of a claim.
pub(super) async fn wait_counted(
    test_bed: &TestBed,
    claim: &str,
    memory: &str,
) -> anyhow::Result<()> {
    let check = |claim: Option<&ResourceClaim>| {
        let counted = claim.and_then(counted_memory);
        let is_it = counted.as_deref() == Some(memory);
        CheckResult::done_if(is_it, || format!("{counted:?}"))
    };
    let what = format!("the claim to count {memory}");
    wait_one(test_bed.claims(), claim, &what, check).await
}

fn counted_memory(claim: &ResourceClaim) -> Option<String> {
    let mut status = claim.status.clone()?;
    apply_sizes(&mut status);
    let results = status.allocation?.devices?.results?;
    let result = results.into_iter().find(|result| result.driver == DRIVER)?;
    Some(result.consumed_capacity?.get("memory")?.0.clone())
}
