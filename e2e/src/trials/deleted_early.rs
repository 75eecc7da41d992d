//! Trial that deletes a pod after the allocation of its claim and before its binding. The deletion
//! releases the share.

use std::time::{Duration, Instant};

use futures::TryStreamExt;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use super::test_bed::{TIMEOUT, TestBed, from_template, holder, one_gpu};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::{Figure, Outcome};

/// Maximum time from the deletion to the release. Longer means that the controller's periodic check
/// (20 s) released it, not the deletion.
const MAX_LATENCY: Duration = Duration::from_secs(15);

/// Name of a scheduler that does not exist, so that pods stay unbound.
const NO_SCHEDULER: &str = "e2e.tessera.dev/none";

/// Returns the pod with a scheduler that does not exist, so that it is allocated and never bound.
pub(super) fn unbound(mut pod: Value) -> Value {
    pod["spec"]["schedulerName"] = NO_SCHEDULER.into();
    pod
}

/// Returns a claim for one share, as a user creates it.
pub(super) fn user_claim(name: &str) -> Value {
    let devices = one_gpu(DRIVER, &json!({"memory": "10Gi", "cores": "10"}));
    json!({"metadata": {"name": name}, "spec": {"devices": devices}})
}

pub(super) async fn released(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, check_both_claim_kinds(&test_bed)).await
}

async fn check_both_claim_kinds(test_bed: &TestBed) -> TrialOutcome {
    test_bed.create_template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    test_bed
        .claims()
        .create(&PostParams::default(), &serde_json::from_value(user_claim("own"))?)
        .await?;
    let of_template = unbound(from_template("from-template", "share"));
    let of_user = unbound(holder("own", json!({"name": "gpu", "resourceClaimName": "own"})));
    let mut figures = Vec::new();
    for (name, pod) in [("from-template", of_template), ("own", of_user)] {
        test_bed.create(pod).await?;
        let claim = placement::wait_allocated(test_bed, name, "allocated", |_| true).await?;
        anyhow::ensure!(
            !placement::is_reserved(&claim),
            "the claim of {name} is reserved for an unbound pod"
        );
        let release = tokio::time::timeout(TIMEOUT, measure_release(test_bed, name)).await;
        let took = release
            .map_err(|_| anyhow::anyhow!("the claim of deleted pod {name} stays allocated"))??;
        anyhow::ensure!(
            took <= MAX_LATENCY,
            "the share of {name} was released {took:?} after the deletion"
        );
        figures
            .push(Figure { name: "unbound pod deleted -> share released".into(), duration: took });
    }
    let own = test_bed.claims().get("own").await?;
    anyhow::ensure!(
        own.metadata.deletion_timestamp.is_none(),
        "the user's claim is being deleted with the pod"
    );
    // The claim can be allocated again, and deleted afterwards.
    test_bed
        .create(holder("own-again", json!({"name": "gpu", "resourceClaimName": "own"})))
        .await?;
    test_bed.wait_running("own-again").await?;
    test_bed.delete(&["own-again"]).await?;
    placement::delete_claim(test_bed, "own").await?;
    Ok(Outcome::Passed(figures))
}

/// Deletes the pod and measures the time until its claim is released or deleted.
async fn measure_release(test_bed: &TestBed, pod: &str) -> anyhow::Result<Duration> {
    let mut stream =
        Box::pin(watcher(test_bed.claims(), watcher::Config::default()).default_backoff());
    let mut deleted = None;
    while let Some(event) = stream.try_next().await? {
        match event {
            watcher::Event::InitDone if deleted.is_none() => {
                deleted = Some(Instant::now());
                test_bed.pods().delete(pod, &DeleteParams::default()).await?;
            }
            watcher::Event::Apply(claim)
                if placement::belongs_to(&claim, pod) && !holds_device(&claim) =>
            {
                break;
            }
            watcher::Event::Delete(claim) if placement::belongs_to(&claim, pod) => break,
            _ => {}
        }
    }
    deleted.map(|deleted| deleted.elapsed()).ok_or_else(|| anyhow::anyhow!("claim watch ended"))
}
