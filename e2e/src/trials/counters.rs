//! Partitions that draw on shared counters: no more of them are handed out than the counters allow,
//! and who waits is told so.
//!
//! The driver publishes no counters, so the trial does it in its name, for a pool that every node
//! reaches. Nobody prepares such a partition: what is shown is who gets one.

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE, from_template};
use super::placement::told_of;
use super::policies;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

const COUNTERS: &str = "trial-counters-counters";
const PARTITIONS: &str = "trial-counters-partitions";

pub(super) async fn bound(bench: Bench) -> TrialOutcome {
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    // What an interrupted run left.
    withdraw(&slices).await;
    // A counter of 7, and partitions that take 3 of it each.
    policies::without(&bench, publish(&slices)).await?;
    let outcome = two_of_three(&bench).await;
    policies::without(&bench, async {
        withdraw(&slices).await;
        Ok(())
    })
    .await?;
    outcome
}

async fn two_of_three(bench: &Bench) -> TrialOutcome {
    let select = json!([{"cel": {"expression": format!("\"partition\" in device.attributes[\"{DRIVER}\"]")}}]);
    let exactly = json!({"deviceClassName": "gpu.tessera.dev", "selectors": select});
    bench
        .template_of("partition", json!({"requests": [{"name": "gpu", "exactly": exactly}]}))
        .await?;
    for name in ["first", "second"] {
        bench.create(of_a_partition(name)).await?;
        allocated(bench, name).await?;
    }
    bench.create(of_a_partition("third")).await?;
    told_of(bench, "third", &["shared counters spent"]).await?;
    let third = claim_of(&bench.claims().list(&Default::default()).await?.items, "third").cloned();
    anyhow::ensure!(
        third.is_none_or(|claim| !holds_device(&claim)),
        "a third partition was handed out"
    );
    bench.delete(&["first".to_owned()]).await?;
    allocated(bench, "third").await?;
    bench.delete(&["second".to_owned(), "third".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// A pod that is bound and never runs: no node could prepare its partition.
fn of_a_partition(name: &str) -> Value {
    let mut pod = from_template(name, "partition");
    pod["spec"]["terminationGracePeriodSeconds"] = 0.into();
    pod
}

async fn publish(slices: &Api<ResourceSlice>) -> anyhow::Result<()> {
    let pool = json!({"name": "trial-counters", "generation": 1, "resourceSliceCount": 2});
    let take =
        |amount: &str| json!([{"counterSet": "gpu", "counters": {"slices": {"value": amount}}}]);
    let partition = |n: usize| {
        json!({
            "name": format!("partition-{n}"),
            "attributes": {"partition": {"bool": true}},
            "taints": [{"key": format!("{DRIVER}/managed"), "effect": "NoSchedule"}],
            "consumesCounters": take("3"),
        })
    };
    let counters = json!({
        "metadata": {"name": COUNTERS},
        "spec": {"driver": DRIVER, "allNodes": true, "pool": pool, "sharedCounters": [
            {"name": "gpu", "counters": {"slices": {"value": "7"}}},
        ]},
    });
    let partitions = json!({
        "metadata": {"name": PARTITIONS},
        "spec": {"driver": DRIVER, "allNodes": true, "pool": pool, "devices": (0..3).map(partition).collect::<Vec<_>>()},
    });
    for slice in [counters, partitions] {
        slices.create(&PostParams::default(), &serde_json::from_value(slice)?).await?;
    }
    Ok(())
}

async fn withdraw(slices: &Api<ResourceSlice>) {
    for name in [PARTITIONS, COUNTERS] {
        let _ = slices.delete(name, &DeleteParams::default()).await;
    }
}

fn claim_of<'c>(claims: &'c [ResourceClaim], pod: &str) -> Option<&'c ResourceClaim> {
    claims.iter().find(|claim| claim.owner_references().iter().any(|owner| owner.name == pod))
}

async fn allocated(bench: &Bench, pod: &str) -> anyhow::Result<()> {
    let judge = |claims: &[ResourceClaim]| match claim_of(claims, pod) {
        Some(claim) if holds_device(claim) => Verdict::Done(()),
        claim => Verdict::NotYet(json!(claim.map(|claim| &claim.status)).to_string()),
    };
    let what = format!("{pod} to be given a partition");
    Ok(wait::until(bench.claims(), Default::default(), &what, PATIENCE, judge).await?)
}
