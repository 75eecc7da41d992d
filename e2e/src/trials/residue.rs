//! After all pods are gone, no node has a CDI file, grant, ledger, mount or journal entry of
//! theirs.

use std::time::Duration;

use super::bench::Bench;
use crate::harness::TrialOutcome;
use crate::inventory::GpuInventory;
use crate::operations::Operations;
use crate::runner::Outcome;

/// Far more than it takes: pods are gone only after their claims are unprepared, so there is next
/// to nothing to wait for.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// Nothing tells when a directory is empty, so it is looked at again and again.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub(super) async fn none(bench: Bench) -> TrialOutcome {
    nowhere(&bench, PATIENCE).await?;
    Ok(Outcome::Held(vec![]))
}

/// No node has anything of a claim, or has not any more within that time.
pub(super) async fn nowhere(bench: &Bench, within: Duration) -> anyhow::Result<()> {
    let hands = bench.hands()?;
    for node in GpuInventory::read(&bench.client).await?.nodes() {
        gone_within(hands, node, within).await?;
    }
    Ok(())
}

/// Waits until nothing is left on the node.
pub(super) async fn gone(hands: &Operations, node: &str) -> anyhow::Result<()> {
    gone_within(hands, node, PATIENCE).await
}

/// The same, for longer than a pod that was deleted in the ordinary way needs.
pub(super) async fn gone_within(
    hands: &Operations,
    node: &str,
    within: Duration,
) -> anyhow::Result<()> {
    let mut last = String::new();
    let look = async {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        loop {
            ticks.tick().await;
            last = hands.run(&["residue", node]).await?;
            if last.trim().is_empty() {
                return Ok(());
            }
        }
    };
    tokio::time::timeout(within, look)
        .await
        .map_err(|_| anyhow::anyhow!("left on {node}:\n{last}"))?
}
