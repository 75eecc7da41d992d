//! Room that appears, many times: how soon the waiting claim has it.

use std::time::Instant;

use futures::TryStreamExt;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::{Figure, Outcome};

/// Enough for a p99 that is not just the largest of a handful.
const ROUNDS: usize = 25;

/// Whole GPUs of a node with four of them: four pods hold, a fifth waits, one of the four goes, and
/// so on.
pub(super) async fn measured(bench: Bench) -> TrialOutcome {
    bench.node_with("a100", 4).await?;
    bench.template("whole", "a100.gpu.tessera.dev", Value::Null).await?;
    let mut holding = Vec::new();
    for number in 1..=4 {
        let name = format!("pod-{number}");
        bench.holder(&name, "whole").await?;
        bench.holds(&name).await?;
        holding.push(name);
    }
    let mut figures = Vec::new();
    for round in 0..ROUNDS {
        let waiting = format!("pod-{}", round + 5);
        bench.holder(&waiting, "whole").await?;
        bench.unschedulable(std::slice::from_ref(&waiting)).await?;
        let going = holding.remove(0);
        let took = tokio::time::timeout(PATIENCE, room_for(&bench, &going, &waiting)).await;
        let took =
            took.map_err(|_| anyhow::anyhow!("{waiting} did not get the room that {going} left"))??;
        figures.push(Figure { of: "room appears -> allocation written".into(), took });
        bench.holds(&waiting).await?;
        holding.push(waiting);
    }
    bench.delete(&holding).await?;
    Ok(Outcome::Held(figures))
}

/// From the watch event in which the claim of `going` has lost its device to the one in which that
/// of `waiting` has one.
async fn room_for(
    bench: &Bench,
    going: &str,
    waiting: &str,
) -> anyhow::Result<std::time::Duration> {
    let of_pod = |claim: &k8s_openapi::api::resource::v1::ResourceClaim, pod: &str| {
        claim.owner_references().iter().any(|owner| owner.name == pod)
    };
    let mut stream =
        Box::pin(watcher(bench.claims(), watcher::Config::default()).default_backoff());
    let (mut asked, mut freed) = (false, None);
    while let Some(event) = stream.try_next().await? {
        match event {
            watcher::Event::InitDone if !asked => {
                asked = true;
                bench.pods().delete(going, &DeleteParams::default()).await?;
            }
            watcher::Event::Apply(claim) if of_pod(&claim, waiting) && holds_device(&claim) => {
                return freed.map(|freed: Instant| freed.elapsed()).ok_or_else(|| {
                    anyhow::anyhow!("allocated before there was room: {}", json!(claim.status))
                });
            }
            watcher::Event::Apply(claim) if of_pod(&claim, going) && !holds_device(&claim) => {
                freed.get_or_insert_with(Instant::now);
            }
            watcher::Event::Delete(claim) if of_pod(&claim, going) => {
                freed.get_or_insert_with(Instant::now);
            }
            _ => {}
        }
    }
    anyhow::bail!("the watch ended")
}
