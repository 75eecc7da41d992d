//! Containers whose programs are never started, although everything before that is done and
//! checked.
//!
//! Used for thousands of pods in tests of what is created and removed for them on the node.

use std::fs;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;

use super::runtime::ContainerState;
use super::spec::{InitSpec, SupervisorOrder};

/// Run time of a probe that only prints what it sees.
const PROBE_RUN_TIME: Duration = Duration::from_millis(20);

/// Returns an error if a file of the container is missing, as its mounts would.
pub(super) fn check(spec: &InitSpec) -> Result<(), String> {
    let devices = spec.devices.iter().map(|device| &device.source);
    let mounts = spec.mounts.iter().map(|mount| &mount.source);
    mounts.chain(devices).try_for_each(|source| readable(source))
}

/// Checks that the file can be read. An empty grant is as bad as a missing one.
fn readable(source: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot mount `{}`: {error}", source.display());
    let found = fs::metadata(source).map_err(failed)?;
    if source.ends_with("grant") && found.len() == 0 {
        return Err(format!("grant `{}` is empty", source.display()));
    }
    Ok(())
}

/// Resolves when the container ends: by itself, when its program would end, or by order.
pub(super) async fn end(
    spec: &InitSpec,
    started_at: Timestamp,
    mut orders: mpsc::UnboundedReceiver<SupervisorOrder>,
) -> ContainerState {
    let by_itself = async {
        match spec.command.iter().any(|word| word == "see") {
            true => tokio::time::sleep(PROBE_RUN_TIME).await,
            false => std::future::pending().await,
        }
    };
    let (code, signal) = tokio::select! {
        () = by_itself => (0, None),
        order = orders.recv() => match order {
            // The probe exits with success on SIGTERM.
            Some(SupervisorOrder::Terminate) => (0, None),
            Some(SupervisorOrder::Kill) | None => (137, Some(9)),
        },
    };
    let (started_at, finished_at) = (Some(started_at), Timestamp::now());
    ContainerState::Exited { code, signal, started_at, finished_at, message: None }
}
