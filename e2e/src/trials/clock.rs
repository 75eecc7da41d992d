//! A node whose clock is an hour off.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::bench::{Bench, PATIENCE};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

const HOUR: i64 = 3600;

/// Pods start on a node whose driver's clock jumps, and kubelet goes on to believe what the driver
/// says of its devices: it counts from when a report came, not from the time that the report names.
pub(super) async fn of_a_node(bench: Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    let hands = bench.hands()?;
    bench
        .template("share", "a100.gpu.tessera.dev", json!({"memory": "10Gi", "cores": "10"}))
        .await?;
    let mut names = Vec::new();
    for (name, ahead) in [("ahead", HOUR), ("behind", -HOUR), ("right", 0)] {
        hands.run(&["clock", &node, &ahead.to_string()]).await?;
        bench.holder(name, "share").await?;
        names.push(name.to_owned());
        for name in &names {
            healthy(&bench, name).await?;
        }
    }
    bench.delete(&names).await?;
    Ok(Outcome::Held(vec![]))
}

/// Waits until the pod runs and its device is healthy.
async fn healthy(bench: &Bench, name: &str) -> anyhow::Result<()> {
    bench.holds(name).await?;
    let judge = |pod: Option<&Pod>| {
        let status = json!(pod.and_then(|pod| pod.status.as_ref()));
        let resources = status["containerStatuses"][0]["allocatedResourcesStatus"].clone();
        match resources[0]["resources"][0]["health"].as_str() {
            Some("Healthy") => Verdict::Done(()),
            _ => Verdict::NotYet(resources.to_string()),
        }
    };
    let what = format!("the device of {name} to be healthy");
    Ok(wait::until_one(bench.pods(), name, &what, PATIENCE, judge).await?)
}
