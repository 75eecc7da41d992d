//! Check of every change of every claim while a trial runs.

use std::convert::Infallible;

use futures::StreamExt;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};

use super::test_bed::TestBed;

/// Sums over claims that are kept up to date, and checked with each change.
pub(super) trait ClaimSums {
    /// Adds the claim or replaces its earlier state. The error describes the wrong sum.
    fn update(&mut self, claim: &ResourceClaim) -> Result<(), String>;

    /// Removes a deleted claim.
    fn remove(&mut self, claim: &ResourceClaim);

    /// Removes all claims.
    fn clear(&mut self);
}

/// Error for a wrong sum.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct WrongSum(String);

/// Runs the trial, and returns [`WrongSum`] if a change of a claim leads to one before it ends.
pub(super) async fn check_during<T>(
    test_bed: &TestBed,
    sums: impl ClaimSums,
    trial: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::select! {
        Err(error) = observe(test_bed, sums) => Err(error),
        outcome = trial => outcome,
    }
}

/// Observes every change of every claim. Returns only with an error.
async fn observe(test_bed: &TestBed, mut sums: impl ClaimSums) -> anyhow::Result<Infallible> {
    let claims: Api<ResourceClaim> = Api::all(test_bed.client.clone());
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    let mut listed = Vec::new();
    while let Some(event) = stream.next().await {
        let seen = match event {
            Ok(watcher::Event::Apply(claim)) => sums.update(&claim),
            Ok(watcher::Event::Delete(claim)) => {
                sums.remove(&claim);
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
            // After a gap, the list contains the current state. Old claims go first: deleted ones
            // may have freed capacity for others.
            Ok(watcher::Event::InitDone) => {
                sums.clear();
                std::mem::take(&mut listed).iter().try_for_each(|claim| sums.update(claim))
            }
            // The watcher recovers by itself.
            Err(error) => {
                println!("    claim watch was interrupted: {error}");
                Ok(())
            }
        };
        seen.map_err(WrongSum)?;
    }
    anyhow::bail!("claim watch ended")
}
