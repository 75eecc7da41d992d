//! Trials that upgrade, uninstall and reinstall the chart while claims are allocated.

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use serde_json::json;
use tessera_api::names::FENCE_RULE;

use super::residue;
use super::test_bed::{Skip, TestBed, phase, uid, wait_deleted, wait_selected};
use crate::harness::TrialOutcome;
use crate::helm::{Helm, NAMESPACE};
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Label of the chart's objects.
const CHART_LABEL: &str = "app.kubernetes.io/part-of=tessera";

/// Values that restart driver and controller.
const ROLLED: [&str; 2] =
    ["driver.podAnnotations.rolled=yes", "controller.podAnnotations.rolled=yes"];

pub(super) async fn upgraded(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    create_template(&test_bed).await?;
    let before = test_bed.start_holder("before", "share").await?;
    let during = start_pods_during(&test_bed, helm.upgrade(&ROLLED)).await?;
    let old = chart_pods(&test_bed).await?.into_iter().filter(|pod| {
        let annotations = pod.metadata.annotations.as_ref();
        !annotations.is_some_and(|annotations| annotations.contains_key("rolled"))
    });
    anyhow::ensure!(old.count() == 0, "the upgrade did not restart all pods of the chart");
    test_bed.check_undisturbed(&before).await?;
    test_bed.start_holder("after", "share").await?;
    helm.upgrade(&[]).await?;
    test_bed.check_undisturbed(&before).await?;
    let all: Vec<_> = during.into_iter().chain(["before".to_owned(), "after".to_owned()]).collect();
    test_bed.delete(&all).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Starts one pod after the other until `operation` ends; returns their names.
async fn start_pods_during(
    test_bed: &TestBed,
    operation: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut operation = std::pin::pin!(operation);
    let mut ended = false;
    while !ended {
        let name = format!("during-{}", names.len());
        names.push(name.clone());
        test_bed.create_holder(&name, "share").await?;
        let starting = test_bed.wait_running(&name);
        let mut starting = std::pin::pin!(starting);
        tokio::select! {
            done = &mut operation => {
                done?;
                ended = true;
                starting.await?;
            }
            started = &mut starting => drop(started?),
        }
    }
    Ok(names)
}

pub(super) async fn removed(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    create_template(&test_bed).await?;
    for name in ["stays", "deleted"] {
        test_bed.create_holder(name, "share").await?;
    }
    let stays = test_bed.wait_running("stays").await?;
    let deleted = test_bed.wait_running("deleted").await?;
    helm.uninstall().await?;
    let checked = check_uninstalled(&test_bed, &stays, &deleted).await;
    // Also after a failure; later trials need Tessera.
    helm.install().await?;
    checked?;
    wait_deleted(test_bed.pods(), "deleted").await?;
    test_bed.wait_running("pending").await?;
    test_bed.check_undisturbed(&stays).await?;
    test_bed.delete(&["stays", "pending"]).await?;
    residue::check_all_nodes(&test_bed, residue::TIMEOUT).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Checks the state after an uninstall with allocated claims, as README.md describes it.
async fn check_uninstalled(test_bed: &TestBed, stays: &Pod, deleted: &Pod) -> anyhow::Result<()> {
    let chart = ListParams::default().labels(CHART_LABEL);
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(test_bed.client.clone());
    let policies = policies.list(&chart).await?.items.len();
    let classes: Api<DeviceClass> = Api::all(test_bed.client.clone());
    let classes = classes.list(&chart).await?.items.len();
    anyhow::ensure!((policies, classes) == (0, 0), "left: {policies} policies, {classes} classes");
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client.clone());
    if rules.get_opt(FENCE_RULE).await?.is_some() {
        // The controller restored it at the last moment; it goes with the policy that owns it.
        wait_deleted(rules, FENCE_RULE).await?;
    }
    test_bed.create_holder("pending", "share").await?;
    test_bed.pods().delete("deleted", &DeleteParams::default()).await?;
    // The kubelet deletes them 30 s after the driver has exited.
    let selector = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    wait_selected(slices, selector, "the slices to be deleted", CheckResult::none_left).await?;
    test_bed.check_undisturbed(stays).await?;
    // The pod's containers have exited, but no driver can unprepare its claim: it stays allocated.
    let still = test_bed.pods().get("deleted").await?;
    anyhow::ensure!(uid(&still) == uid(deleted), "pod `deleted` was replaced");
    let held = test_bed.claims().list(&ListParams::default()).await?;
    let held = held.iter().filter(|claim| holds_device(claim)).count();
    anyhow::ensure!(held == 2, "{held} of 2 claims are allocated");
    let pending = test_bed.pods().get("pending").await?;
    anyhow::ensure!(phase(&pending) == "Pending", "pod `pending` is {}", phase(&pending));
    Ok(())
}

/// Returns the Helm client, or a reason to skip the trial.
pub(super) fn helm() -> Result<Helm, Skip> {
    Helm::from_environment().ok_or_else(|| Skip("TESSERA_E2E_HELM_VALUES is not set".into()))
}

async fn create_template(test_bed: &TestBed) -> anyhow::Result<()> {
    test_bed.create_template("share", DRIVER, json!({"memory": "2Gi", "cores": "5"})).await
}

/// Returns the chart's pods that are not terminating.
async fn chart_pods(test_bed: &TestBed) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(test_bed.client.clone(), NAMESPACE);
    let pods = pods.list(&ListParams::default()).await?;
    Ok(pods.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
}
