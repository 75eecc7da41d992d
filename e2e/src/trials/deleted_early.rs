//! A pod that goes away between the allocation of its claim and its binding: the share is free
//! again in answer to that.

use std::time::{Duration, Instant};

use futures::TryStreamExt;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE, from_template, holder};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::{Figure, Outcome};

/// More would be the controller's timer for pods without news (20 s), not an answer to the
/// deletion.
const AT_MOST: Duration = Duration::from_secs(15);

/// Nobody binds pods for it, so that they stay allocated and unbound.
const NO_SCHEDULER: &str = "e2e.tessera.dev/nobody";

/// The pod, whose claim is allocated and which nobody binds.
pub(super) fn unbound(mut pod: Value) -> Value {
    pod["spec"]["schedulerName"] = NO_SCHEDULER.into();
    pod
}

/// A claim of a user's own, for one share.
pub(super) fn own_claim(name: &str) -> Value {
    let exactly = json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": "10Gi", "cores": "10"}}});
    json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}})
}

pub(super) async fn freed(bench: Bench) -> TrialOutcome {
    overcommit::never_during(&bench, both(&bench)).await
}

async fn both(bench: &Bench) -> TrialOutcome {
    bench.template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    bench
        .claims()
        .create(&PostParams::default(), &serde_json::from_value(own_claim("own"))?)
        .await?;
    let of_template = unbound(from_template("from-template", "share"));
    let of_user = unbound(holder("own", json!({"name": "gpu", "resourceClaimName": "own"})));
    let mut figures = Vec::new();
    for (name, pod) in [("from-template", of_template), ("own", of_user)] {
        bench.create(pod).await?;
        let claim = placement::allocated(bench, name, "allocated", |_| true).await?;
        anyhow::ensure!(
            !placement::is_reserved(&claim),
            "the claim of {name} is reserved for an unbound pod"
        );
        let freeing = tokio::time::timeout(PATIENCE, freed_by_deleting(bench, name)).await;
        let took = freeing.map_err(|_| {
            anyhow::anyhow!("the claim of {name}, which is deleted, stays allocated")
        })??;
        anyhow::ensure!(
            took <= AT_MOST,
            "the share of {name} was free only {took:?} after the deletion"
        );
        figures.push(Figure { of: "unbound pod deleted -> share free".into(), took });
    }
    let own = bench.claims().get("own").await?;
    anyhow::ensure!(
        own.metadata.deletion_timestamp.is_none(),
        "the user's claim is being deleted with the pod"
    );
    // It is as good as new, and once the user deletes it nothing holds it.
    bench.create(holder("own-again", json!({"name": "gpu", "resourceClaimName": "own"}))).await?;
    bench.holds("own-again").await?;
    bench.delete(&["own-again".to_owned()]).await?;
    placement::delete_claim(bench, "own").await?;
    Ok(Outcome::Held(figures))
}

/// From the deletion of the pod to the watch event in which its claim holds nothing or is gone.
async fn freed_by_deleting(bench: &Bench, pod: &str) -> anyhow::Result<Duration> {
    let mut stream =
        Box::pin(watcher(bench.claims(), watcher::Config::default()).default_backoff());
    let mut deleted = None;
    while let Some(event) = stream.try_next().await? {
        match event {
            watcher::Event::InitDone if deleted.is_none() => {
                deleted = Some(Instant::now());
                bench.pods().delete(pod, &DeleteParams::default()).await?;
            }
            watcher::Event::Apply(claim)
                if placement::is_of(&claim, pod) && !holds_device(&claim) =>
            {
                break;
            }
            watcher::Event::Delete(claim) if placement::is_of(&claim, pod) => break,
            _ => {}
        }
    }
    deleted.map(|deleted| deleted.elapsed()).ok_or_else(|| anyhow::anyhow!("the watch ended"))
}
