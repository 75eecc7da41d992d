//! A hundred pods at once: every one lands, and no GPU is ever over-committed.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;

use super::bench::{Bench, phase};
use super::overcommit;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::{Figure, Outcome};
use crate::wait::{self, Verdict};

const PODS: usize = 100;

/// A hundred real sandboxes on two cores take their time.
const PATIENCE: Duration = Duration::from_secs(600);

pub(super) async fn hundred(bench: Bench) -> TrialOutcome {
    bench.node_with("h100", 8).await?;
    bench.node_with("a100", 4).await?;
    // Nine fit an H100 and ten an A100, 112 in all: little room to waste.
    bench.template("share", DRIVER, json!({"memory": "8Gi", "cores": "10"})).await?;
    overcommit::never_during(&bench, crowd(&bench)).await
}

async fn crowd(bench: &Bench) -> TrialOutcome {
    let began = Instant::now();
    let names: Vec<_> = (1..=PODS).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        bench.holder(name, "share").await?;
    }
    let judge = |pods: &[Pod]| {
        let running = pods.iter().filter(|pod| phase(pod) == "Running").count();
        if let Some(failed) = pods.iter().find(|pod| phase(pod) == "Failed") {
            return Verdict::Hopeless(json!(failed.status).to_string());
        }
        if running == PODS {
            Verdict::Done(())
        } else {
            Verdict::NotYet(format!("{running} of {PODS}"))
        }
    };
    wait::until(bench.pods(), Default::default(), "all pods to run", PATIENCE, judge).await?;
    let took = began.elapsed();
    for name in &names {
        bench.pods().delete(name, &DeleteParams::default()).await?;
    }
    let judge = |pods: &[Pod]| match pods.len() {
        0 => Verdict::Done(()),
        left => Verdict::NotYet(format!("{left} left")),
    };
    wait::until(bench.pods(), Default::default(), "all pods to be gone", PATIENCE, judge).await?;
    Ok(Outcome::Held(vec![Figure { of: "100 pods created -> all running".into(), took }]))
}
