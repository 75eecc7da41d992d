//! How a daemon is told to stop.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that SIGTERM and SIGINT cancel; `said` is logged then.
///
/// # Errors
/// The kernel lets nobody wait for them.
pub fn stop_on_signal(said: &'static str) -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("{said}");
        stopping.cancel();
    });
    Ok(stop)
}
