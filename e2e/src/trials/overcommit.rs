//! Check during a trial that no change of a claim overcommits a device.

use k8s_openapi::api::resource::v1::ResourceClaim;

use super::claim_watch::{self, ClaimSums};
use super::device_usage::DeviceUsage;
use super::test_bed::TestBed;

/// Runs the trial, and returns an error if a device is overcommitted before it ends.
pub(super) async fn check_during<T>(
    test_bed: &TestBed,
    trial: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let usage = DeviceUsage::new(&test_bed.published_gpus().await?);
    claim_watch::check_during(test_bed, usage, trial).await
}

impl ClaimSums for DeviceUsage {
    fn update(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        Self::update(self, claim).map_err(overcommitted)
    }

    fn remove(&mut self, claim: &ResourceClaim) {
        Self::remove(self, claim);
    }

    fn clear(&mut self) {
        Self::clear(self);
    }
}

fn overcommitted(what: String) -> String {
    format!("overcommitted: {what}")
}
