//! Looking at every change of every claim while a trial goes on: no device may ever give more than it has.

use futures::TryStreamExt;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};

use super::bench::Bench;
use super::ledger::DeviceLedger;
use crate::harness::TrialOutcome;
use crate::inventory::GpuInventory;

/// The trial's outcome, or what over-commitment was seen before it had one.
pub(super) async fn never_during(bench: &Bench, trial: impl Future<Output = TrialOutcome>) -> TrialOutcome {
    let ledger = DeviceLedger::new(&GpuInventory::read(&bench.client).await?);
    tokio::select! {
        seen = watch_over(bench, ledger) => {
            seen?;
            anyhow::bail!("the watch over the devices ended")
        }
        outcome = trial => outcome,
    }
}

/// Looks at every change of every claim. Ends only with an error.
async fn watch_over(bench: &Bench, mut ledger: DeviceLedger) -> anyhow::Result<()> {
    let claims: Api<ResourceClaim> = Api::all(bench.client.clone());
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    while let Some(event) = stream.try_next().await? {
        match event {
            watcher::Event::Apply(claim) | watcher::Event::InitApply(claim) => {
                ledger.see(&claim).map_err(|error| anyhow::anyhow!("over-committed: {error}"))?;
            }
            watcher::Event::Delete(claim) => ledger.forget(&claim),
            // A second listing would have missed moments.
            watcher::Event::Init if ledger.holding() > 0 => {
                anyhow::bail!("the watch over the devices was interrupted")
            }
            watcher::Event::Init | watcher::Event::InitDone => {}
        }
    }
    Ok(())
}
