//! Restarts of the controller during an attack.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use tessera_e2e::operations::Operations;

use super::report::Violations;

/// Restarts the controller at this interval until `end`, in turn after it was killed and after it
/// was told to stop. Returns the number of restarts.
pub(super) async fn run(
    operations: &Operations,
    interval: Duration,
    end: Instant,
    violations: &Violations,
) -> usize {
    let mut restarts = 0;
    loop {
        tokio::time::sleep(interval).await;
        if Instant::now() >= end {
            return restarts;
        }
        let is_killed = restarts % 2 == 0;
        restarts += 1;
        violations
            .add_error("the controller does not restart", restart(operations, is_killed).await);
    }
}

async fn restart(operations: &Operations, is_killed: bool) -> anyhow::Result<()> {
    let actions: &[&str] = if is_killed { &["kill", "start"] } else { &["restart"] };
    for action in actions {
        let command = [*action, "control-plane", "controller"];
        operations.run(&command).await.with_context(|| command.join(" "))?;
    }
    Ok(())
}
