//! Removal and restoration of Tessera's admission policies during a trial.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use super::test_bed::TestBed;
use crate::inventory::DRIVER;

/// Time limit for a change of the policies to be in force. API servers observe policies by their
/// own watch.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Interval between requests that test whether the policies are in force; no watch reports that.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Runs `work` without the policies, and waits in every case until they are in force again.
pub(super) async fn without<T>(
    test_bed: &TestBed,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let outcome = match switch(test_bed, "off").await {
        Ok(()) => work.await,
        Err(error) => Err(error),
    };
    let restored = switch(test_bed, "on").await;
    let outcome = outcome?;
    restored?;
    Ok(outcome)
}

async fn switch(test_bed: &TestBed, to: &str) -> anyhow::Result<()> {
    test_bed.operations()?.run(&["policies", "control-plane", to]).await?;
    let in_force = async {
        let mut ticks = tokio::time::interval(RETRY_INTERVAL);
        loop {
            ticks.tick().await;
            if is_publishing_allowed(test_bed).await? == (to == "off") {
                return Ok::<_, anyhow::Error>(());
            }
        }
    };
    let waited = tokio::time::timeout(TIMEOUT, in_force).await;
    waited.map_err(|_| anyhow::anyhow!("the policies are not switched {to} after {TIMEOUT:?}"))?
}

/// Tries to create a slice of the driver on a node that does not exist, and deletes it. The policy
/// that denies it has the last binding by name. Bindings are created and deleted in that order, and
/// API servers apply them in the order in which they observe them.
async fn is_publishing_allowed(test_bed: &TestBed) -> anyhow::Result<bool> {
    const NAME: &str = "policy-check";
    let pool = json!({"name": "nowhere", "generation": 1, "resourceSliceCount": 1});
    let slice = json!({
        "metadata": {"name": NAME},
        "spec": {"driver": DRIVER, "nodeName": "nowhere", "pool": pool, "devices": []},
    });
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    match slices.create(&PostParams::default(), &serde_json::from_value(slice)?).await {
        Ok(_) => {}
        // Left by an interrupted check.
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        Err(kube::Error::Api(status)) if status.code == 403 || status.code == 422 => {
            return Ok(false);
        }
        Err(error) => return Err(error.into()),
    }
    slices.delete(NAME, &DeleteParams::default()).await?;
    Ok(true)
}
