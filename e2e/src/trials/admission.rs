//! What the chart's admission policies deny, and beside each the nearest thing that they must let
//! through.
//!
//! One list of attempts, by whoever makes them on a cluster, for the real policies and for the
//! stand-ins' copy of them. What RBAC says comes in a list of its own: the stand-ins have none.

mod allocation;
mod desk;
mod fence;
mod finalizer;
mod mounts;
mod rights;
mod slices;

use super::bench::Bench;
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use desk::Desk;

/// Attempts on any cluster.
pub(super) async fn held(bench: Bench) -> TrialOutcome {
    let desk = Desk::open(&bench).await?;
    allocation::check(&desk).await?;
    finalizer::check(&desk).await?;
    fence::check(&desk).await?;
    slices::check(&desk).await?;
    mounts::check(&desk).await?;
    desk.close()?;
    Ok(Outcome::Held(vec![]))
}

/// Attempts that only a real API server answers as it should: it has RBAC, and all subresources.
pub(super) async fn held_with_rights(bench: Bench) -> TrialOutcome {
    let desk = Desk::open(&bench).await?;
    rights::check(&desk).await;
    mounts::check_ephemeral_containers(&desk).await?;
    desk.close()?;
    Ok(Outcome::Held(vec![]))
}
