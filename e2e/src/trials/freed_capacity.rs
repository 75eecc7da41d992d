//! Trial that measures the latency from freed capacity to the allocation of a pending claim.

use std::time::Instant;

use futures::TryStreamExt;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use super::test_bed::{A100, TIMEOUT, TestBed};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::{Figure, Outcome};

/// Number of measurements, enough for a meaningful p99.
const ROUNDS: usize = 25;

/// Uses whole GPUs of a node with four. Four pods run, a fifth is pending, one of the four is
/// deleted, and so on.
pub(super) async fn measure(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("a100", 4).await?;
    test_bed.create_template("whole", A100, Value::Null).await?;
    let mut holding = Vec::new();
    for number in 1..=4 {
        let name = format!("pod-{number}");
        test_bed.start_holder(&name, "whole").await?;
        holding.push(name);
    }
    let mut figures = Vec::new();
    for round in 0..ROUNDS {
        let pending = format!("pod-{}", round + 5);
        test_bed.create_holder(&pending, "whole").await?;
        test_bed.wait_unschedulable(std::slice::from_ref(&pending)).await?;
        let deleted = holding.remove(0);
        let took =
            tokio::time::timeout(TIMEOUT, measure_allocation(&test_bed, &deleted, &pending)).await;
        let took = took.map_err(|_| {
            anyhow::anyhow!("{pending} was not allocated the GPU that {deleted} released")
        })??;
        figures
            .push(Figure { name: "capacity freed -> allocation written".into(), duration: took });
        test_bed.wait_running(&pending).await?;
        holding.push(pending);
    }
    test_bed.delete(&holding).await?;
    Ok(Outcome::Passed(figures))
}

/// Measures the time between two watch events. In the first the claim of `deleted` has lost its
/// device, in the second the claim of `pending` is allocated.
async fn measure_allocation(
    test_bed: &TestBed,
    deleted: &str,
    pending: &str,
) -> anyhow::Result<std::time::Duration> {
    let of_pod = |claim: &k8s_openapi::api::resource::v1::ResourceClaim, pod: &str| {
        claim.owner_references().iter().any(|owner| owner.name == pod)
    };
    let mut stream =
        Box::pin(watcher(test_bed.claims(), watcher::Config::default()).default_backoff());
    let (mut deletion_requested, mut freed) = (false, None);
    while let Some(event) = stream.try_next().await? {
        match event {
            watcher::Event::InitDone if !deletion_requested => {
                deletion_requested = true;
                test_bed.pods().delete(deleted, &DeleteParams::default()).await?;
            }
            watcher::Event::Apply(claim) if of_pod(&claim, pending) && holds_device(&claim) => {
                return freed.map(|freed: Instant| freed.elapsed()).ok_or_else(|| {
                    anyhow::anyhow!("allocated before capacity was freed: {}", json!(claim.status))
                });
            }
            watcher::Event::Apply(claim) if of_pod(&claim, deleted) && !holds_device(&claim) => {
                freed.get_or_insert_with(Instant::now);
            }
            watcher::Event::Delete(claim) if of_pod(&claim, deleted) => {
                freed.get_or_insert_with(Instant::now);
            }
            _ => {}
        }
    }
    anyhow::bail!("claim watch ended")
}
