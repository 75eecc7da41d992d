//! Containers of an image whose programs are never started: everything up to the first process is
//! done and checked, and nothing after it. For thousands of pods, of which it only matters what is
//! made for them on the node and unmade again.

use std::fs;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;

use super::runtime::State;
use super::spec::{InitSpec, Order};

/// A probe that only says what it sees ends after this time.
const LOOK: Duration = Duration::from_millis(20);

/// Says what of the container's files is not there, as making its mounts would.
pub(super) fn check(spec: &InitSpec) -> Result<(), String> {
    let devices = spec.devices.iter().map(|device| &device.source);
    let mounts = spec.mounts.iter().map(|mount| &mount.source);
    mounts.chain(devices).try_for_each(|source| readable(source))
}

/// A grant whose file is there but empty is as bad as none.
fn readable(source: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("failed to mount `{}`: {error}", source.display());
    let found = fs::metadata(source).map_err(failed)?;
    if source.ends_with("grant") && found.len() == 0 {
        return Err(format!("the grant `{}` is empty", source.display()));
    }
    Ok(())
}

/// Resolves with the container's end: by itself, where its program would end, or by order.
pub(super) async fn end(
    spec: &InitSpec,
    started_at: Timestamp,
    mut orders: mpsc::UnboundedReceiver<Order>,
) -> State {
    let by_itself = async {
        match spec.command.iter().any(|word| word == "see") {
            true => tokio::time::sleep(LOOK).await,
            false => std::future::pending().await,
        }
    };
    let (code, signal) = tokio::select! {
        () = by_itself => (0, None),
        order = orders.recv() => match order {
            // The probe takes SIGTERM for a wish and ends well.
            Some(Order::Terminate) => (0, None),
            Some(Order::Kill) | None => (137, Some(9)),
        },
    };
    let (started_at, finished_at) = (Some(started_at), Timestamp::now());
    State::Exited { code, signal, started_at, finished_at, message: None }
}
