//! Taking the admission policies of Tessera away and putting them back.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::bench::Bench;
use crate::inventory::DRIVER;

/// It allocates claims of other drivers, and only the policy keeps it from ours.
const SCHEDULER: &str = "system:kube-scheduler";

/// API servers learn of policies by a watch of their own, so that a change is in force some time after it is made.
const PATIENCE: Duration = Duration::from_secs(30);

/// Nothing tells when a policy is in force, so it is tried.
const TRY_EVERY: Duration = Duration::from_millis(200);

/// Runs `work` without the policies; they are in force again afterwards, whatever came of it.
pub(super) async fn without<T>(
    bench: &Bench,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let outcome = match switch(bench, "off").await {
        Ok(()) => work.await,
        Err(error) => Err(error),
    };
    let restored = switch(bench, "on").await;
    let outcome = outcome?;
    restored?;
    Ok(outcome)
}

async fn switch(bench: &Bench, to: &str) -> anyhow::Result<()> {
    bench.hands()?.run(&["policies", "control-plane", to]).await?;
    let in_force = async {
        let mut ticks = tokio::time::interval(TRY_EVERY);
        loop {
            ticks.tick().await;
            if scheduler_may_allocate(bench).await? == (to == "off") {
                return Ok::<_, anyhow::Error>(());
            }
        }
    };
    let waited = tokio::time::timeout(PATIENCE, in_force).await;
    waited.map_err(|_| anyhow::anyhow!("the policies are not {to} after {PATIENCE:?}"))?
}

/// Allocates, as kube-scheduler, a device that does not exist. It is reserved at once, so that nobody takes it back first.
async fn scheduler_may_allocate(bench: &Bench) -> anyhow::Result<bool> {
    const NAME: &str = "may-scheduler-allocate";
    let claim = json!({"metadata": {"name": NAME},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}}});
    bench.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    let status = json!({"status": {
        "reservedFor": [{"apiGroup": "e2e.tessera.dev", "resource": "trials", "name": "policies", "uid": "policies"}],
        "allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": [
            {"request": "gpu", "driver": DRIVER, "pool": "nowhere", "device": "none"},
        ]}},
    }});
    let claims: Api<ResourceClaim> = Api::namespaced(bench.client_of(SCHEDULER)?, bench.namespace());
    let written = claims.patch_status(NAME, &PatchParams::default(), &Patch::Merge(status)).await;
    bench.claims().delete(NAME, &DeleteParams::default()).await?;
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 403 || status.code == 422 => Ok(false),
        Err(error) => Err(error.into()),
    }
}
