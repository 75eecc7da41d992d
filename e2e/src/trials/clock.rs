//! Trial with a node whose clock is one hour off.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::test_bed::{A100, TestBed, wait_one};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const HOUR: i64 = 3600;

/// Checks that pods start on a node whose driver's clock jumps. The kubelet continues to accept the
/// driver's health reports: it counts from the arrival of a report, not from the time in it.
pub(super) async fn check_wrong_clock(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let operations = test_bed.operations()?;
    test_bed.create_template("share", A100, json!({"memory": "10Gi", "cores": "10"})).await?;
    let mut names = Vec::new();
    for (name, ahead) in [("ahead", HOUR), ("behind", -HOUR), ("correct", 0)] {
        operations.run(&["clock", &node, &ahead.to_string()]).await?;
        test_bed.create_holder(name, "share").await?;
        names.push(name.to_owned());
        for name in &names {
            wait_healthy(&test_bed, name).await?;
        }
    }
    test_bed.delete(&names).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Waits until the pod runs and its device is healthy.
async fn wait_healthy(test_bed: &TestBed, name: &str) -> anyhow::Result<()> {
    test_bed.wait_running(name).await?;
    let check = |pod: Option<&Pod>| {
        let status = json!(pod.and_then(|pod| pod.status.as_ref()));
        let resources = status["containerStatuses"][0]["allocatedResourcesStatus"].clone();
        match resources[0]["resources"][0]["health"].as_str() {
            Some("Healthy") => CheckResult::Done(()),
            _ => CheckResult::Pending(resources.to_string()),
        }
    };
    let what = format!("the device of {name} to be healthy");
    wait_one(test_bed.pods(), name, &what, check).await
}
