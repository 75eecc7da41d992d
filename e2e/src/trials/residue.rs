//! Check that no node has CDI specs, grants, ledgers, mounts or journal entries of deleted pods.

use std::time::Duration;

use super::test_bed::TestBed;
use crate::harness::TrialOutcome;
use crate::inventory::GpuInventory;
use crate::operations::Operations;
use crate::runner::Outcome;

/// Time limit. Pods are deleted only after their claims are unprepared, so files should be removed
/// already.
pub(super) const TIMEOUT: Duration = Duration::from_secs(300);

/// Interval between checks; no watch reports that a directory is empty.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn check(test_bed: TestBed) -> TrialOutcome {
    check_all_nodes(&test_bed, TIMEOUT).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Waits until no node has files of a claim.
pub(super) async fn check_all_nodes(test_bed: &TestBed, within: Duration) -> anyhow::Result<()> {
    let operations = test_bed.operations()?;
    for node in GpuInventory::read(&test_bed.client).await?.nodes() {
        wait_removed_within(operations, node, within).await?;
    }
    Ok(())
}

/// Waits until the node has no files of a claim.
pub(super) async fn wait_removed(operations: &Operations, node: &str) -> anyhow::Result<()> {
    wait_removed_within(operations, node, TIMEOUT).await
}

/// Waits as [`wait_removed`] does, with a longer time limit, for pods that were not deleted in the
/// ordinary way.
pub(super) async fn wait_removed_within(
    operations: &Operations,
    node: &str,
    within: Duration,
) -> anyhow::Result<()> {
    let mut last = String::new();
    let check = async {
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        loop {
            ticks.tick().await;
            last = operations.run(&["residue", node]).await?;
            if last.trim().is_empty() {
                return Ok(());
            }
        }
    };
    tokio::time::timeout(within, check)
        .await
        .map_err(|_| anyhow::anyhow!("files left on {node}:\n{last}"))?
}
