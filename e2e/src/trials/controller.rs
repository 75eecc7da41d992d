//! Trial without a controller: claims stay unallocated, and are allocated when it runs again.

use serde_json::json;

use super::controller_deployment::ControllerDeployment;
use super::test_bed::{H100, TestBed};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::Outcome;

pub(super) async fn stopped(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("h100", 8).await?;
    test_bed.create_template("share", H100, json!({"memory": "10Gi", "cores": "10"})).await?;
    let switch = ControllerSwitch::detect(&test_bed).await?;
    switch.stop().await?;
    let checked = stay_unallocated(&test_bed).await;
    // Restart the controller in every case; later trials need it.
    switch.start().await?;
    let pods = checked?;
    for pod in &pods {
        test_bed.wait_running(pod).await?;
    }
    test_bed.delete(&pods).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Creates pods. Checks that the scheduler reports each as unschedulable and that no claim is
/// allocated.
async fn stay_unallocated(test_bed: &TestBed) -> anyhow::Result<Vec<String>> {
    let pods: Vec<_> = (1..=3).map(|number| format!("pod-{number}")).collect();
    for pod in &pods {
        test_bed.create_holder(pod, "share").await?;
    }
    test_bed.wait_unschedulable(&pods).await?;
    let claims = test_bed.claims().list(&Default::default()).await?;
    anyhow::ensure!(
        claims.items.len() == pods.len(),
        "{} claims for {} pods",
        claims.items.len(),
        pods.len()
    );
    anyhow::ensure!(!claims.iter().any(holds_device), "a claim was allocated without a controller");
    Ok(pods)
}

/// Stops and starts the controller, which is a Deployment or a process.
pub(super) enum ControllerSwitch<'a> {
    Deployment { deployment: Box<ControllerDeployment>, replicas: i64 },
    Process(&'a TestBed),
}

impl<'a> ControllerSwitch<'a> {
    pub(super) async fn detect(test_bed: &'a TestBed) -> anyhow::Result<Self> {
        let deployment = Box::new(ControllerDeployment::new(test_bed));
        match deployment.replicas().await? {
            Some(replicas) => Ok(Self::Deployment { deployment, replicas }),
            None => {
                test_bed.operations()?;
                Ok(Self::Process(test_bed))
            }
        }
    }

    pub(super) async fn stop(&self) -> anyhow::Result<()> {
        match self {
            Self::Deployment { deployment, .. } => deployment.scale(0).await,
            Self::Process(test_bed) => {
                test_bed.operations()?.run(&["stop", "control-plane", "controller"]).await.map(drop)
            }
        }
    }

    pub(super) async fn start(&self) -> anyhow::Result<()> {
        match self {
            Self::Deployment { deployment, replicas } => deployment.scale(*replicas).await,
            Self::Process(test_bed) => test_bed
                .operations()?
                .run(&["start", "control-plane", "controller"])
                .await
                .map(drop),
        }
    }
}
