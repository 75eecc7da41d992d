//! Check during a trial that no change of a claim overcommits a device.

use std::convert::Infallible;

use futures::StreamExt;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};

use super::device_usage::DeviceUsage;
use super::test_bed::TestBed;
use crate::inventory::GpuInventory;

/// Error for an overcommitted device.
#[derive(Debug, thiserror::Error)]
#[error("overcommitted: {0}")]
pub(super) struct Overcommitted(String);

/// Runs the trial, and returns [`Overcommitted`] if a device is overcommitted before it ends.
pub(super) async fn check_during<T>(
    test_bed: &TestBed,
    trial: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let usage = DeviceUsage::new(&GpuInventory::read(&test_bed.client).await?);
    tokio::select! {
        Err(error) = observe_claims(test_bed, usage) => Err(error),
        outcome = trial => outcome,
    }
}

/// Observes every change of every claim. Returns only with an error.
async fn observe_claims(test_bed: &TestBed, mut usage: DeviceUsage) -> anyhow::Result<Infallible> {
    let claims: Api<ResourceClaim> = Api::all(test_bed.client.clone());
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    let mut listed = Vec::new();
    while let Some(event) = stream.next().await {
        let seen = match event {
            Ok(watcher::Event::Apply(claim)) => usage.update(&claim),
            Ok(watcher::Event::Delete(claim)) => {
                usage.remove(&claim);
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
            // After a gap, the list contains the current state.
            Ok(watcher::Event::InitDone) => usage.replace(&std::mem::take(&mut listed)),
            // The watcher recovers by itself.
            Err(error) => {
                println!("    claim watch was interrupted: {error}");
                Ok(())
            }
        };
        seen.map_err(Overcommitted)?;
    }
    anyhow::bail!("claim watch ended")
}
