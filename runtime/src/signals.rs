//! Signals that stop a daemon.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that SIGTERM and SIGINT cancel. `message` is logged then.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn stop_on_signal(message: &'static str) -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("{message}");
        stopping.cancel();
    });
    Ok(stop)
}
