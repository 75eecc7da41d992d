//! Taking the admission policies of Tessera away and putting them back.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use super::bench::Bench;
use crate::inventory::DRIVER;

/// API servers learn of policies by a watch of their own, so that a change is in force some time
/// after it is made.
const PATIENCE: Duration = Duration::from_secs(300);

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
            if anybody_may_publish(bench).await? == (to == "off") {
                return Ok::<_, anyhow::Error>(());
            }
        }
    };
    let waited = tokio::time::timeout(PATIENCE, in_force).await;
    waited.map_err(|_| anyhow::anyhow!("the policies are not {to} after {PATIENCE:?}"))?
}

/// Publishes a slice of our driver, of a node that does not exist, and takes it back. The policy
/// against that has the binding that is last by name, and bindings go and come in that order: API
/// servers see them in it, and take in at once what they have seen.
async fn anybody_may_publish(bench: &Bench) -> anyhow::Result<bool> {
    const NAME: &str = "may-anybody-publish";
    let pool = json!({"name": "nowhere", "generation": 1, "resourceSliceCount": 1});
    let slice = json!({
        "metadata": {"name": NAME},
        "spec": {"driver": DRIVER, "nodeName": "nowhere", "pool": pool, "devices": []},
    });
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    match slices.create(&PostParams::default(), &serde_json::from_value(slice)?).await {
        Ok(_) => {}
        // Of a try that was interrupted before it took it back.
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        Err(kube::Error::Api(status)) if status.code == 403 || status.code == 422 => {
            return Ok(false);
        }
        Err(error) => return Err(error.into()),
    }
    slices.delete(NAME, &DeleteParams::default()).await?;
    Ok(true)
}
