//! Leading: the Lease is renewed on one thread and the core runs on another, so that neither waits
//! for the other, and health, metrics, watches and writes wait for none of them.
//!
//! ```text
//!  thread "lease"    its own runtime and client: Candidate::acquire, then hold
//!  thread "core"     its own runtime: Shell::run
//!  runtime of main   watches, writes, events, /metrics, /healthz
//! ```
//!
//! A plan that takes longer than the Lease is valid costs time, not leadership. Where the Lease is
//! lost, [`Tenure`] blocks writes whatever the other threads do.

use std::io;
use std::thread;

use anyhow::Context;
use futures::future::BoxFuture;
use kube::Client;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::leadership::{Candidate, LeadershipError, Tenure};
use crate::shell::Shell;
use crate::watch::Arrival;

/// Creates a client in the runtime that uses it: a connection belongs to the runtime that created
/// it.
pub type Connect = Box<dyn FnOnce() -> BoxFuture<'static, anyhow::Result<Client>> + Send>;

/// A candidate for leadership on a thread of its own.
#[derive(Debug)]
pub struct Leadership {
    acquired: oneshot::Receiver<anyhow::Result<Tenure>>,
    ended: oneshot::Receiver<Result<(), LeadershipError>>,
    release: CancellationToken,
    stop: CancellationToken,
}

impl Leadership {
    /// Starts to compete for the Lease in `namespace` until `stop`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        connect: Connect,
        namespace: String,
        identity: String,
        stop: CancellationToken,
    ) -> io::Result<Self> {
        let (send_acquired, acquired) = oneshot::channel();
        let (send_ended, ended) = oneshot::channel();
        let release = CancellationToken::new();
        let (released, stopped) = (release.clone(), stop.clone());
        on_thread("lease", async move {
            let mut candidate = match connect().await {
                Ok(client) => Candidate::new(client, &namespace, identity),
                Err(error) => return drop(send_acquired.send(Err(error))),
            };
            tokio::select! {
                () = candidate.acquire() => {}
                () = stopped.cancelled() => return,
            }
            // Without a receiver the process is ending, and the Lease expires by itself.
            if send_acquired.send(Ok(candidate.tenure())).is_ok() {
                let _ = send_ended.send(candidate.hold(released).await);
            }
        })?;
        Ok(Self { acquired, ended, release, stop })
    }

    /// Waits until this process leads. Returns none if it was stopped before.
    ///
    /// # Errors
    /// There is no client, or the thread has ended unexpectedly.
    pub async fn acquired(&mut self) -> anyhow::Result<Option<Tenure>> {
        match (&mut self.acquired).await {
            Ok(acquired) => acquired.map(Some),
            Err(_) if self.stop.is_cancelled() => Ok(None),
            Err(_) => anyhow::bail!("the thread that renews the Lease has ended"),
        }
    }

    /// Waits until leadership is lost. The process has to end at once.
    async fn lost(&mut self) -> anyhow::Error {
        match (&mut self.ended).await {
            Ok(Err(error)) => anyhow::Error::new(error).context("leadership lost"),
            Ok(Ok(())) | Err(_) => anyhow::anyhow!("the thread that renews the Lease has ended"),
        }
    }

    /// Releases the Lease. Nothing may be written any more.
    async fn release(self) -> anyhow::Result<()> {
        self.release.cancel();
        self.ended
            .await
            .context("the thread that renews the Lease has ended")?
            .context("leadership lost")
    }
}

/// Runs the shell until `stop`, or until leadership is lost if there is an election. Then waits for
/// the open writes and releases the Lease.
///
/// # Errors
/// Leadership is lost, or a thread has ended unexpectedly: the process has to end at once.
pub async fn lead(
    leadership: Option<Leadership>,
    shell: Shell,
    changes: mpsc::Receiver<Arrival>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let (send_ended, ended) = oneshot::channel();
    on_thread("core", async move {
        let _ = send_ended.send(shell.run(changes, stop).await);
    })
    .context("cannot start the thread of the core")?;
    let planned = async { ended.await.context("the thread of the core has ended unexpectedly") };
    let Some(mut leadership) = leadership else {
        planned.await?;
        return Ok(());
    };
    let all_written = tokio::select! {
        // Open writes are not awaited: they time out before another process can lead.
        lost = leadership.lost() => return Err(lost),
        ended = planned => ended?,
    };
    if !all_written {
        tracing::warn!("not releasing the Lease: a write is still without an answer");
        return Ok(());
    }
    leadership.release().await
}

/// Runs a task on a thread with a runtime of its own.
fn on_thread(name: &str, task: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name(name.to_owned()).spawn(move || runtime.block_on(task))?;
    Ok(())
}
