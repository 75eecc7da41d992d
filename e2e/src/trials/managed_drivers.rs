//! Trial of managed drivers: Tessera allocates the NICs of another vendor's driver too, and a claim
//! gets a GPU and a NIC on one PCIe root. The driver is the DRA test driver of Kubernetes.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use tessera_api::names::FENCE_RULE;
use tessera_api::slice::is_fence_of;

use super::placement::wait_event_reason;
use super::release::helm;
use super::test_bed::{Skip, TestBed, from_template, wait_all, wait_deleted};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, attribute};
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const NIC: &str = "nic.example.com";
const RULE: &str = "tessera-fence.nic.example.com";
const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";

/// NICs of both nodes together.
const NICS: usize = 3;

pub(super) async fn gpu_beside_nic(test_bed: TestBed) -> TrialOutcome {
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client.clone());
    match rules.get(FENCE_RULE).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            return Err(Skip("the fence of this cluster is in its slices".into()).into());
        }
        rule => drop(rule?),
    }
    let (helm, operations) = (helm()?, test_bed.operations()?);
    let inventory = test_bed.published_gpus().await?;
    for node in inventory.nodes() {
        operations.run(&["start", node, "nic-driver"]).await?;
    }
    let outcome = async {
        create_requests(&test_bed).await?;
        let before = run_unmanaged(&test_bed).await?;
        helm.upgrade(&[&format!("managedDrivers={{{NIC}}}")]).await?;
        run_managed(&test_bed, &rules, &before).await
    };
    let outcome = outcome.await;
    // Later trials need the other configuration, in every case.
    helm.upgrade(&[]).await?;
    let outcome = match outcome {
        Ok(()) => run_unmanaged_again(&test_bed, rules).await,
        failed => failed,
    };
    // The kubelet keeps pods until their driver has unprepared their devices.
    let deleted_pods = delete_pods(&test_bed).await;
    for node in inventory.nodes() {
        operations.run(&["stop", node, "nic-driver"]).await?;
    }
    let classes: Api<DeviceClass> = Api::all(test_bed.client.clone());
    let deleted = classes.delete(NIC, &DeleteParams::default()).await;
    outcome?;
    deleted_pods?;
    deleted?;
    Ok(Outcome::Passed(vec![]))
}

async fn delete_pods(test_bed: &TestBed) -> anyhow::Result<()> {
    test_bed.pods().delete_collection(&DeleteParams::default(), &Default::default()).await?;
    wait_all(test_bed.pods(), "all pods to be deleted", CheckResult::none_left).await
}

async fn create_requests(test_bed: &TestBed) -> anyhow::Result<()> {
    let classes: Api<DeviceClass> = Api::all(test_bed.client.clone());
    let selector = json!({"cel": {"expression": format!("device.driver == '{NIC}'")}});
    let class = json!({"metadata": {"name": NIC}, "spec": {"selectors": [selector]}});
    classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
    let nic = || json!({"name": "nic", "exactly": {"deviceClassName": NIC}});
    let capacity = json!({"requests": {"memory": "10Gi"}});
    let gpu = json!({"name": "gpu", "exactly": {"deviceClassName": DRIVER, "capacity": capacity}});
    test_bed.create_template_with("nic", json!({"requests": [nic()]})).await?;
    let pair = json!({
        "requests": [gpu, nic()],
        "constraints": [{"matchAttribute": PCIE_ROOT}],
        // The driver sets an environment variable of each parameter.
        "config": [{"requests": ["nic"], "opaque": {"driver": NIC, "parameters": {"mtu": "9000"}}}],
    });
    test_bed.create_template_with("pair", pair).await?;
    let check = |slices: &[ResourceSlice]| {
        let published = slices.iter().filter(|slice| slice.spec.driver == NIC);
        let count = published.flat_map(|slice| slice.spec.devices.iter().flatten()).count();
        CheckResult::done_if(count == NICS, || format!("{count} are published"))
    };
    wait_all(Api::all(test_bed.client.clone()), "all NICs to be published", check).await
}

/// kube-scheduler allocates a NIC. A claim for a GPU and a NIC waits, and an event says why. Both
/// pods stay.
async fn run_unmanaged(test_bed: &TestBed) -> anyhow::Result<Pod> {
    let before = start_with_nic(test_bed, "before").await?;
    test_bed.create_holder("pair", "pair").await?;
    let message = wait_event_reason(test_bed, "pair", "MixedDrivers").await?;
    anyhow::ensure!(message.contains("managedDrivers"), "{message}");
    Ok(before)
}

/// Tessera allocates NICs: the waiting claim, and claims for a NIC alone until all are taken.
async fn run_managed(
    test_bed: &TestBed,
    rules: &Api<DeviceTaintRule>,
    before: &Pod,
) -> anyhow::Result<()> {
    anyhow::ensure!(is_fence_of(&rules.get(RULE).await?, NIC), "{RULE} is no fence");
    let pair = test_bed.wait_running("pair").await?;
    check_pair(test_bed, &test_bed.claim_of(&pair).await?).await?;
    start_with_nic(test_bed, "second").await?;
    test_bed.create(with_nic("third")).await?;
    wait_event_reason(test_bed, "third", "InsufficientDevices").await?;
    check_distinct_nics(test_bed).await?;
    test_bed.delete(&["second"]).await?;
    test_bed.wait_running("third").await?;
    check_distinct_nics(test_bed).await?;
    test_bed.check_undisturbed(before).await
}

/// kube-scheduler allocates NICs again once their rule is deleted.
async fn run_unmanaged_again(
    test_bed: &TestBed,
    rules: Api<DeviceTaintRule>,
) -> anyhow::Result<()> {
    wait_deleted(rules, RULE).await?;
    test_bed.delete(&["before"]).await?;
    start_with_nic(test_bed, "after").await.map(drop)
}

async fn start_with_nic(test_bed: &TestBed, name: &str) -> anyhow::Result<Pod> {
    test_bed.create(with_nic(name)).await?;
    test_bed.wait_running(name).await
}

/// Returns a pod with a NIC and no GPU. Its container runs until it is deleted.
fn with_nic(name: &str) -> Value {
    let mut pod = from_template(name, "nic");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = "tessera/pause:e2e".into();
    container["command"] = Value::Null;
    pod
}

/// GPU and NIC have the same PCIe root, and the NIC's driver gets its configuration.
async fn check_pair(test_bed: &TestBed, claim: &ResourceClaim) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    let slices = slices.list(&Default::default()).await?.items;
    let root = |driver: &str, pool: &str, name: &str| -> Option<Value> {
        let of_pool =
            |slice: &&ResourceSlice| slice.spec.driver == driver && slice.spec.pool.name == pool;
        let mut devices =
            slices.iter().filter(of_pool).flat_map(|slice| slice.spec.devices.iter().flatten());
        Some(attribute(devices.find(|device| device.name == name)?, PCIE_ROOT))
    };
    let results: Vec<_> = device_results(claim).collect();
    let roots: BTreeSet<String> = results
        .iter()
        .filter_map(|r| Some(root(&r.driver, &r.pool, &r.device)?.to_string()))
        .collect();
    anyhow::ensure!(results.len() == 2 && roots.len() == 1, "roots {roots:?} of {results:?}");
    println!("    GPU and NIC on PCIe root {}", roots.first().map_or("", String::as_str));
    let status = serde_json::to_value(&claim.status)?;
    let configs = status["allocation"]["devices"]["config"].to_string();
    anyhow::ensure!(configs.contains("9000"), "no configuration of the NIC in {configs}");
    Ok(())
}

/// No NIC is allocated twice.
async fn check_distinct_nics(test_bed: &TestBed) -> anyhow::Result<()> {
    let check = |claims: &[ResourceClaim]| {
        let all: Vec<(String, String)> = claims
            .iter()
            .flat_map(device_results)
            .filter(|result| result.driver == NIC)
            .map(|result| (result.pool.clone(), result.device.clone()))
            .collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        match (all.len() == distinct.len(), all.len() == NICS) {
            (true, true) => CheckResult::Done(()),
            (true, false) => CheckResult::Pending(format!("{all:?}")),
            (false, _) => CheckResult::Impossible(format!("a NIC is allocated twice: {all:?}")),
        }
    };
    wait_all(test_bed.claims(), "all NICs to be allocated", check).await
}
