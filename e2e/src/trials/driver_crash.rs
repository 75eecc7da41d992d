//! Calls of the kubelet are cancelled in the middle: nothing is left.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;

use super::bench::{Bench, PATIENCE, phase};
use super::driver_instances::{DriverInstances, WITH_FAULT_POINTS};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// Nothing tells when a file is gone.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What the trial works on: one node and its driver.
struct Site<'a> {
    bench: &'a Bench,
    drivers: &'a DriverInstances,
    node: String,
    driver: String,
}

/// Deletes a pod while the driver prepares its claim: before anything is done, and in the middle of it.
pub(super) async fn cancelled(bench: Bench) -> TrialOutcome {
    let drivers = DriverInstances::of(&bench.client);
    let run = async || {
        let site = Site::on(&bench, &drivers).await?;
        // Held before it acts, a Prepare keeps nobody waiting.
        site.hold("before", "prepare-claim-read").await?;
        bench.delete(&["before".to_owned()]).await?;
        drivers.release(&site.driver, "prepare-claim-read").await?;
        site.nothing_is_left().await?;

        // In the middle, Unprepare waits for it.
        site.hold("amid", "prepare-ledger").await?;
        bench.pods().delete("amid", &DeleteParams::default()).await?;
        drivers.release(&site.driver, "prepare-ledger").await?;
        site.gone("amid").await?;
        site.nothing_is_left().await
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Held(vec![]))
}

impl<'a> Site<'a> {
    async fn on(bench: &'a Bench, drivers: &'a DriverInstances) -> anyhow::Result<Self> {
        let node = bench.node_with("a100", 4).await?;
        bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
        let driver = drivers.ready(&node, WITH_FAULT_POINTS).await?.name_any();
        Ok(Self { bench, drivers, node, driver })
    }

    /// Creates a pod whose Prepare is held at that point.
    async fn hold(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        self.drivers.arm(&self.driver, point, "hold").await?;
        self.bench.holder(pod, "share").await?;
        self.drivers.held(&self.driver, point).await
    }

    async fn gone(&self, pod: &str) -> anyhow::Result<()> {
        let judge = |pod: Option<&Pod>| match pod {
            None => Verdict::Done(()),
            Some(pod) => Verdict::NotYet(phase(pod).to_owned()),
        };
        let what = format!("pod {pod} to be gone");
        Ok(wait::until_one(self.bench.pods(), pod, &what, PATIENCE, judge).await?)
    }

    async fn nothing_is_left(&self) -> anyhow::Result<()> {
        let hands = self.bench.hands()?;
        let mut last = String::new();
        let looking = async {
            let mut ticks = tokio::time::interval(LOOK_EVERY);
            loop {
                ticks.tick().await;
                last = hands.run(&["residue", &self.node]).await?;
                if last.trim().is_empty() {
                    return Ok::<_, anyhow::Error>(());
                }
            }
        };
        let looked = tokio::time::timeout(Duration::from_secs(10), looking).await;
        looked.map_err(|_| anyhow::anyhow!("left on {}:\n{last}", self.node))?
    }
}
