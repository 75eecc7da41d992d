//! Trials of the chart's admission policies. Each denied request has a similar one that must be
//! allowed.
//!
//! One list of requests by different users covers the real policies and the simulated ones.
//! Requests that depend on RBAC are a list of their own, because the simulated cluster has no RBAC.

mod allocation;
mod controller;
mod finalizer;
mod harness;
mod managed_taint;
mod mounts;
mod nomination;
mod rbac;
mod slices;

use super::test_bed::TestBed;
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use harness::AdmissionHarness;

/// Checks the policies with requests that any cluster supports.
pub(super) async fn enforce_policies(test_bed: TestBed) -> TrialOutcome {
    let harness = AdmissionHarness::new(&test_bed).await?;
    allocation::check(&harness).await?;
    controller::check(&harness).await;
    finalizer::check(&harness).await?;
    managed_taint::check(&harness).await?;
    slices::check(&harness).await?;
    mounts::check(&harness).await?;
    nomination::check(&harness).await;
    harness.finish()?;
    Ok(Outcome::Passed(vec![]))
}

/// Checks requests that need a real API server, with RBAC and all subresources.
pub(super) async fn enforce_rbac(test_bed: TestBed) -> TrialOutcome {
    let harness = AdmissionHarness::new(&test_bed).await?;
    rbac::check(&harness).await;
    mounts::check_ephemeral_containers(&harness).await?;
    harness.finish()?;
    Ok(Outcome::Passed(vec![]))
}
