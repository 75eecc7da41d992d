//! Check that no node has CDI specs, grants, ledgers, mounts or journal entries of deleted pods,
//! and that the namespaces of all tests could be deleted.

use std::time::Duration;

use super::test_bed::TestBed;
use crate::harness::TrialOutcome;
use crate::leftovers;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::{self, CheckResult};

/// Time limit. Pods are deleted only after their claims are unprepared, so files should be removed
/// already.
pub(super) const TIMEOUT: Duration = Duration::from_secs(300);

pub(super) async fn check(test_bed: TestBed) -> TrialOutcome {
    leftovers::none_but(&test_bed.client, test_bed.namespace()).await?;
    check_all_nodes(&test_bed, TIMEOUT).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Waits until no node has files of a claim.
pub(super) async fn check_all_nodes(test_bed: &TestBed, within: Duration) -> anyhow::Result<()> {
    let operations = test_bed.operations()?;
    for node in test_bed.published_gpus().await?.nodes() {
        wait_removed_within(operations, node, within).await?;
    }
    Ok(())
}

/// Waits until the node has no files of a claim.
pub(super) async fn wait_removed(operations: &Operations, node: &str) -> anyhow::Result<()> {
    wait_removed_within(operations, node, TIMEOUT).await
}

/// Waits as [`wait_removed`] does, with a given time limit. For pods that were force-deleted.
pub(super) async fn wait_removed_within(
    operations: &Operations,
    node: &str,
    within: Duration,
) -> anyhow::Result<()> {
    wait_residue(operations, node, within, |residue| !residue.trim().is_empty()).await
}

/// Waits until the files of claims on the node are not left any more.
pub(super) async fn wait_residue(
    operations: &Operations,
    node: &str,
    within: Duration,
    is_left: impl Fn(&str) -> bool,
) -> anyhow::Result<()> {
    let is_removed = async || {
        let residue = operations.run(&["residue", node]).await?;
        Ok(CheckResult::done_if(!is_left(&residue), || residue))
    };
    wait::poll(&format!("files on {node} to be removed"), within, is_removed).await
}
