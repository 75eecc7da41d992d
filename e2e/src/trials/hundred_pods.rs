//! Trial that creates 100 pods at the same time: all run, and no GPU is ever overcommitted.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;

use super::overcommit;
use super::test_bed::{TestBed, phase};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::{Figure, Outcome};
use crate::wait::{self, CheckResult};

const PODS: usize = 100;

/// Time limit for 100 real pod sandboxes on two cores.
const TIMEOUT: Duration = Duration::from_secs(600);

pub(super) async fn run_pods(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("h100", 8).await?;
    test_bed.node_with("a100", 4).await?;
    // Nine fit on an H100 and ten on an A100: 112 in total, close to the 100 needed.
    test_bed.create_template("share", DRIVER, json!({"memory": "8Gi", "cores": "10"})).await?;
    overcommit::check_during(&test_bed, create_pods(&test_bed)).await
}

async fn create_pods(test_bed: &TestBed) -> TrialOutcome {
    let began = Instant::now();
    let names: Vec<_> = (1..=PODS).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        test_bed.create_holder(name, "share").await?;
    }
    let check = |pods: &[Pod]| {
        let running = pods.iter().filter(|pod| phase(pod) == "Running").count();
        if let Some(failed) = pods.iter().find(|pod| phase(pod) == "Failed") {
            return CheckResult::Impossible(json!(failed.status).to_string());
        }
        CheckResult::done_if(running == PODS, || format!("{running} of {PODS}"))
    };
    wait::until(test_bed.pods(), Default::default(), "all pods to run", TIMEOUT, check).await?;
    let took = began.elapsed();
    for name in &names {
        test_bed.pods().delete(name, &DeleteParams::default()).await?;
    }
    let check = CheckResult::none_left;
    wait::until(test_bed.pods(), Default::default(), "all pods to be deleted", TIMEOUT, check)
        .await?;
    Ok(Outcome::Passed(vec![Figure {
        name: "100 pods created -> all running".into(),
        duration: took,
    }]))
}
