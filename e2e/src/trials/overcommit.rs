//! Looking at every change of every claim while a trial goes on: no device may ever give more than
//! it has.

use std::convert::Infallible;

use futures::StreamExt;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};

use super::bench::Bench;
use super::ledger::DeviceLedger;
use crate::inventory::GpuInventory;

/// A device gave more than it has.
#[derive(Debug, thiserror::Error)]
#[error("over-committed: {0}")]
pub(super) struct Overcommitted(String);

/// The trial's outcome, or what over-commitment was seen before it had one ([`Overcommitted`]).
pub(super) async fn never_during<T>(
    bench: &Bench,
    trial: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let ledger = DeviceLedger::new(&GpuInventory::read(&bench.client).await?);
    tokio::select! {
        Err(error) = watch_over(bench, ledger) => Err(error),
        outcome = trial => outcome,
    }
}

/// Looks at every change of every claim. Ends only with an error.
async fn watch_over(bench: &Bench, mut ledger: DeviceLedger) -> anyhow::Result<Infallible> {
    let claims: Api<ResourceClaim> = Api::all(bench.client.clone());
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    let mut listed = Vec::new();
    while let Some(event) = stream.next().await {
        let seen = match event {
            Ok(watcher::Event::Apply(claim)) => ledger.see(&claim),
            Ok(watcher::Event::Delete(claim)) => {
                ledger.forget(&claim);
                Ok(())
            }
            Ok(watcher::Event::Init) => {
                listed.clear();
                Ok(())
            }
            Ok(watcher::Event::InitApply(claim)) => {
                listed.push(claim);
                Ok(())
            }
            // After an interruption that lost changes, this is what they came to.
            Ok(watcher::Event::InitDone) => ledger.replace(&std::mem::take(&mut listed)),
            // The watcher goes on by itself.
            Err(error) => {
                println!("    the watch over the devices was interrupted: {error}");
                Ok(())
            }
        };
        seen.map_err(Overcommitted)?;
    }
    anyhow::bail!("the watch over the devices ended")
}
