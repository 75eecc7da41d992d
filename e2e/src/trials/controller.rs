//! Without the controller nobody allocates; when it is back, everybody is served.

use serde_json::json;

use super::bench::Bench;
use super::controller_deployment::ControllerDeployment;
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::Outcome;

pub(super) async fn stopped(bench: Bench) -> TrialOutcome {
    bench.node_with("h100", 8).await?;
    bench
        .template("share", "h100.gpu.tessera.dev", json!({"memory": "10Gi", "cores": "10"}))
        .await?;
    let switch = Switch::of(&bench).await?;
    switch.off().await?;
    let waited = waits(&bench).await;
    // Whatever was seen, the cluster goes on with a controller.
    switch.on().await?;
    let pods = waited?;
    for pod in &pods {
        bench.holds(pod).await?;
    }
    bench.delete(&pods).await?;
    Ok(Outcome::Held(vec![]))
}

/// Pods come; the scheduler has had its say about each, and still no claim is allocated.
async fn waits(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let pods: Vec<_> = (1..=3).map(|number| format!("pod-{number}")).collect();
    for pod in &pods {
        bench.holder(pod, "share").await?;
    }
    bench.unschedulable(&pods).await?;
    let claims = bench.claims().list(&Default::default()).await?;
    anyhow::ensure!(
        claims.items.len() == pods.len(),
        "{} claims for {} pods",
        claims.items.len(),
        pods.len()
    );
    anyhow::ensure!(!claims.iter().any(holds_device), "a claim was allocated without a controller");
    Ok(pods)
}

/// How the controller is stopped and started: as a Deployment, or as a process.
enum Switch<'a> {
    Deployment { deployment: Box<ControllerDeployment>, replicas: i64 },
    Process(&'a Bench),
}

impl<'a> Switch<'a> {
    async fn of(bench: &'a Bench) -> anyhow::Result<Self> {
        let deployment = Box::new(ControllerDeployment::of(bench));
        match deployment.replicas().await? {
            Some(replicas) => Ok(Self::Deployment { deployment, replicas }),
            None => {
                bench.hands()?;
                Ok(Self::Process(bench))
            }
        }
    }

    async fn off(&self) -> anyhow::Result<()> {
        match self {
            Self::Deployment { deployment, .. } => deployment.scale(0).await,
            Self::Process(bench) => {
                Ok(bench.hands()?.run(&["stop", "control-plane", "controller"]).await.map(drop)?)
            }
        }
    }

    async fn on(&self) -> anyhow::Result<()> {
        match self {
            Self::Deployment { deployment, replicas } => deployment.scale(*replicas).await,
            Self::Process(bench) => {
                Ok(bench.hands()?.run(&["start", "control-plane", "controller"]).await.map(drop)?)
            }
        }
    }
}
