//! Trial of partitions with shared counters. Partitions are allocated only while counters remain,
//! and an event on the pending pod names them.
//!
//! The driver publishes no counters, so the trial publishes them in its name, in a pool for all
//! nodes. No driver can prepare such a partition; only its allocation is tested.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::placement::{belongs_to, wait_allocated, wait_event_text};
use super::policies;
use super::test_bed::{TestBed, from_template};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;

const COUNTERS: &str = "trial-counters-counters";
const PARTITIONS: &str = "trial-counters-partitions";

pub(super) async fn limit_partitions(test_bed: TestBed) -> TrialOutcome {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    // Left by an interrupted run.
    unpublish(&slices).await;
    // A counter of 7, and partitions that consume 3 each.
    policies::without(&test_bed, publish(&slices)).await?;
    let outcome = allocates_two_of_three(&test_bed).await;
    policies::without(&test_bed, async {
        unpublish(&slices).await;
        Ok(())
    })
    .await?;
    outcome
}

async fn allocates_two_of_three(test_bed: &TestBed) -> TrialOutcome {
    let select = json!([{"cel": {"expression": format!("\"partition\" in device.attributes[\"{DRIVER}\"]")}}]);
    let exactly = json!({"deviceClassName": "gpu.tessera.dev", "selectors": select});
    test_bed
        .create_template_with(
            "partition",
            json!({"requests": [{"name": "gpu", "exactly": exactly}]}),
        )
        .await?;
    for name in ["first", "second"] {
        test_bed.create(partition_pod(name)).await?;
        wait_allocated(test_bed, name, "allocated", |_| true).await?;
    }
    test_bed.create(partition_pod("third")).await?;
    wait_event_text(test_bed, "third", &["insufficient shared counters"]).await?;
    let claims = test_bed.claims().list(&Default::default()).await?;
    let allocated = claims.iter().find(|claim| belongs_to(claim, "third") && holds_device(claim));
    anyhow::ensure!(allocated.is_none(), "a third partition was allocated");
    test_bed.delete(&["first"]).await?;
    wait_allocated(test_bed, "third", "allocated", |_| true).await?;
    test_bed.delete(&["second", "third"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Returns a pod that is bound and never runs, because no node can prepare its partition.
fn partition_pod(name: &str) -> Value {
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
            "attributes": {"partition": {"bool": true}, "type": {"string": "gpu"}},
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

async fn unpublish(slices: &Api<ResourceSlice>) {
    for name in [PARTITIONS, COUNTERS] {
        let _ = slices.delete(name, &DeleteParams::default()).await;
    }
}
