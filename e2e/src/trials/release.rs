//! The chart upgraded, and removed and installed again, while claims are alive.

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use serde_json::json;

use super::bench::{Bench, PATIENCE, Skip, container_ids, phase, uid};
use super::residue;
use crate::harness::TrialOutcome;
use crate::helm::{Helm, NAMESPACE};
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// What the chart's objects are labelled with.
const CHART_LABEL: &str = "app.kubernetes.io/part-of=tessera";

/// Values that roll driver and controller.
const ROLLED: [&str; 2] =
    ["driver.podAnnotations.rolled=yes", "controller.podAnnotations.rolled=yes"];

pub(super) async fn upgraded(bench: Bench) -> TrialOutcome {
    let helm = helm()?;
    share(&bench).await?;
    bench.holder("before", "share").await?;
    let before = bench.holds("before").await?;
    let during = during(&bench, helm.upgrade(&ROLLED)).await?;
    let old = of_the_chart(&bench).await?.into_iter().filter(|pod| {
        let annotations = pod.metadata.annotations.as_ref();
        !annotations.is_some_and(|annotations| annotations.contains_key("rolled"))
    });
    anyhow::ensure!(old.count() == 0, "the upgrade has rolled nothing");
    unnoticed(&bench, &before).await?;
    bench.holder("after", "share").await?;
    bench.holds("after").await?;
    helm.upgrade(&[]).await?;
    unnoticed(&bench, &before).await?;
    let all: Vec<_> = during.into_iter().chain(["before".to_owned(), "after".to_owned()]).collect();
    bench.delete(&all).await?;
    Ok(Outcome::Held(vec![]))
}

/// Starts one pod after the other for as long as something goes on; returns their names.
async fn during(
    bench: &Bench,
    going_on: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut going_on = std::pin::pin!(going_on);
    let mut ended = false;
    while !ended {
        let name = format!("during-{}", names.len());
        names.push(name.clone());
        bench.holder(&name, "share").await?;
        let starting = bench.holds(&name);
        let mut starting = std::pin::pin!(starting);
        tokio::select! {
            done = &mut going_on => {
                done?;
                ended = true;
                starting.await?;
            }
            started = &mut starting => drop(started?),
        }
    }
    Ok(names)
}

pub(super) async fn removed(bench: Bench) -> TrialOutcome {
    let helm = helm()?;
    share(&bench).await?;
    for name in ["stays", "deleted"] {
        bench.holder(name, "share").await?;
    }
    let stays = bench.holds("stays").await?;
    let deleted = bench.holds("deleted").await?;
    helm.uninstall().await?;
    let without = without_tessera(&bench, &stays, &deleted).await;
    // Also after a failure: what comes next needs it.
    helm.install().await?;
    without?;
    gone(&bench, "deleted").await?;
    bench.holds("waits").await?;
    unnoticed(&bench, &stays).await?;
    bench.delete(&["stays".to_owned(), "waits".to_owned()]).await?;
    residue::nowhere(&bench, residue::PATIENCE).await?;
    Ok(Outcome::Held(vec![]))
}

/// What README.md says of a cluster from which Tessera was removed with claims alive.
async fn without_tessera(bench: &Bench, stays: &Pod, deleted: &Pod) -> anyhow::Result<()> {
    let chart = ListParams::default().labels(CHART_LABEL);
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(bench.client.clone());
    let policies = policies.list(&chart).await?.items.len();
    let classes: Api<DeviceClass> = Api::all(bench.client.clone());
    let classes = classes.list(&chart).await?.items.len();
    anyhow::ensure!((policies, classes) == (0, 0), "left: {policies} policies, {classes} classes");
    bench.holder("waits", "share").await?;
    bench.pods().delete("deleted", &DeleteParams::default()).await?;
    // The kubelet does, half a minute after the driver went.
    let ours = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
    let judge = |slices: &[ResourceSlice]| match slices.len() {
        0 => Verdict::Done(()),
        left => Verdict::NotYet(format!("{left} slices")),
    };
    wait::until(Api::all(bench.client.clone()), ours, "the slices to go", PATIENCE, judge).await?;
    unnoticed(bench, stays).await?;
    // Its containers have ended, but nobody can unprepare its claim: the share stays taken, and
    // nothing is half undone.
    let still = bench.pods().get("deleted").await?;
    anyhow::ensure!(uid(&still) == uid(deleted), "another pod `deleted`");
    let held = bench.claims().list(&ListParams::default()).await?;
    let held = held.iter().filter(|claim| holds_device(claim)).count();
    anyhow::ensure!(held == 2, "{held} of 2 claims hold their share");
    let waits = bench.pods().get("waits").await?;
    anyhow::ensure!(phase(&waits) == "Pending", "pod `waits` is {}", phase(&waits));
    Ok(())
}

/// The hands on the release, or a reason to skip.
pub(super) fn helm() -> Result<Helm, Skip> {
    Helm::from_environment().ok_or_else(|| Skip("TESSERA_E2E_HELM_VALUES is not set".into()))
}

async fn share(bench: &Bench) -> anyhow::Result<()> {
    bench.template("share", DRIVER, json!({"memory": "2Gi", "cores": "5"})).await
}

/// Pods of the chart that are not on their way out.
async fn of_the_chart(bench: &Bench) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(bench.client.clone(), NAMESPACE);
    let pods = pods.list(&ListParams::default()).await?;
    Ok(pods.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
}

/// A pod that runs on as it was.
pub(super) async fn unnoticed(bench: &Bench, before: &Pod) -> anyhow::Result<()> {
    let name = before.metadata.name.as_deref().unwrap_or_default();
    let now = bench.pods().get(name).await?;
    anyhow::ensure!(
        container_ids(&now) == container_ids(before) && phase(&now) == "Running",
        "pod {name} noticed: {:?}, then {} {:?}",
        container_ids(before),
        phase(&now),
        container_ids(&now)
    );
    Ok(())
}

async fn gone(bench: &Bench, name: &str) -> anyhow::Result<()> {
    let judge = |pod: Option<&Pod>| match pod {
        None => Verdict::Done(()),
        Some(pod) => Verdict::NotYet(phase(pod).to_owned()),
    };
    Ok(wait::until_one(bench.pods(), name, &format!("pod {name} to be gone"), PATIENCE, judge)
        .await?)
}
