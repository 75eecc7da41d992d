//! Without the controller nobody allocates; when it is back, everybody is served.

use kube::Api;
use kube::api::{DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::json;

use super::bench::{Bench, PATIENCE};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

const NAMESPACE: &str = "tessera-system";
const DEPLOYMENT: &str = "tessera-controller";

pub(super) async fn stopped(bench: Bench) -> TrialOutcome {
    bench.node_with("h100", 8).await?;
    bench.template("share", "h100.gpu.tessera.dev", json!({"memory": "10Gi", "cores": "10"})).await?;
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
    Deployment { api: Box<Api<DynamicObject>>, replicas: i64 },
    Process(&'a Bench),
}

impl<'a> Switch<'a> {
    async fn of(bench: &'a Bench) -> anyhow::Result<Self> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("apps", "v1", "Deployment"));
        let api: Api<DynamicObject> = Api::namespaced_with(bench.client.clone(), NAMESPACE, &resource);
        match api.get_opt(DEPLOYMENT).await? {
            Some(deployment) => {
                let replicas = deployment.data["spec"]["replicas"].as_i64().unwrap_or(1);
                Ok(Self::Deployment { api: Box::new(api), replicas })
            }
            None => {
                bench.hands()?;
                Ok(Self::Process(bench))
            }
        }
    }

    async fn off(&self) -> anyhow::Result<()> {
        match self {
            Self::Deployment { api, .. } => scale(api, 0).await,
            Self::Process(bench) => {
                Ok(bench.hands()?.run(&["stop", "control-plane", "controller"]).await.map(drop)?)
            }
        }
    }

    async fn on(&self) -> anyhow::Result<()> {
        match self {
            Self::Deployment { api, replicas } => scale(api, *replicas).await,
            Self::Process(bench) => {
                Ok(bench.hands()?.run(&["start", "control-plane", "controller"]).await.map(drop)?)
            }
        }
    }
}

async fn scale(api: &Api<DynamicObject>, replicas: i64) -> anyhow::Result<()> {
    let patch = json!({"spec": {"replicas": replicas}});
    api.patch(DEPLOYMENT, &PatchParams::default(), &Patch::Merge(patch)).await?;
    let judge = |deployment: Option<&DynamicObject>| {
        let status = deployment.map(|deployment| deployment.data["status"].clone()).unwrap_or_default();
        let count = |field: &str| status[field].as_i64().unwrap_or(0);
        // Pods that are on their way out are no replicas any more, but may still write.
        let done = count("replicas") == replicas
            && count("readyReplicas") == replicas
            && count("terminatingReplicas") == 0;
        if done { Verdict::Done(()) } else { Verdict::NotYet(status.to_string()) }
    };
    let what = format!("{DEPLOYMENT} to have {replicas} replicas");
    Ok(wait::until_one(api.clone(), DEPLOYMENT, &what, PATIENCE, judge).await?)
}
