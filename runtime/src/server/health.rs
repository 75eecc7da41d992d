//! A socket in the file system that reports health, for probes that run a command in the container.
//!
//! A probe over TCP shares its port with every pod that can reach it. This socket is reached only
//! from within the container, so the load of other ports does not fail a probe. A connection gets
//! `ok`, or the reason why the program is not healthy, and is closed.

use std::{
    io::{self, Read},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::AsyncWriteExt,
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::single_flight::SingleFlight;

/// The answer of a healthy program.
const HEALTHY: &str = "ok\n";

/// Connections that are answered at a time. Further ones wait.
const MAX_CONNECTIONS: usize = 16;

/// Time for which the answer may be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The longest reason that [`probe`] reads.
const MAX_REASON_BYTES: u64 = 64 << 10;

/// A health socket that is bound and not served yet.
#[derive(Debug)]
pub struct HealthSocket(UnixListener);

impl HealthSocket {
    /// Binds the socket `path`, in place of one that an earlier process has left.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    /// Answers with the result of `check`, on the calling thread, until `stop`.
    ///
    /// # Errors
    /// The runtime of the thread cannot be built.
    pub fn run(
        self,
        check: &SingleFlight<Result<(), String>>,
        stop: &CancellationToken,
    ) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let served = runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(self.0)?;
            stop.run_until_cancelled(accept(&listener, check)).await;
            Ok(())
        });
        // A check may block in a read of a file system.
        runtime.shutdown_background();
        served
    }
}

async fn accept(listener: &tokio::net::UnixListener, check: &SingleFlight<Result<(), String>>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let mut stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "cannot accept connection of health probe");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let check = check.clone();
        tokio::spawn(async move {
            let _place = place;
            let answer = match check.get().await {
                Some(Ok(())) => HEALTHY.to_owned(),
                Some(Err(reason)) => format!("{reason}\n"),
                None => "the health check panicked\n".to_owned(),
            };
            // The probe may have exited.
            let _ = timeout(WRITE_TIMEOUT, stream.write_all(answer.as_bytes())).await;
        });
    }
}

/// Errors of a probe.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No program answers at the socket.
    #[error("no answer at health socket")]
    NoAnswer(#[source] io::Error),
    /// The program answers that it is not healthy.
    #[error("not healthy: {0}")]
    Unhealthy(String),
}

/// Asks the program that serves the health socket `path`.
///
/// # Errors
/// The program is not healthy, or does not answer. Waits without bound: the kubelet has a time
/// limit.
pub fn probe(path: &Path) -> Result<(), ProbeError> {
    let stream = UnixStream::connect(path).map_err(ProbeError::NoAnswer)?;
    let mut answer = String::new();
    stream.take(MAX_REASON_BYTES).read_to_string(&mut answer).map_err(ProbeError::NoAnswer)?;
    match answer.as_str() {
        HEALTHY => Ok(()),
        reason => Err(ProbeError::Unhealthy(reason.trim_end().to_owned())),
    }
}
