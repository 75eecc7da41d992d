//! Leading: the Lease is renewed on one thread and the core runs on another, so that neither waits
//! for the other, and health, metrics, watches and writes wait for none of them.
//!
//! ```text
//!  thread "lease"     its own runtime and client: Candidate::acquire, then hold
//!  thread "core"      its own runtime: Shell::run
//!  threads of server  /metrics, /healthz and the health socket
//!  runtime of main    watches, writes, events
//! ```
//!
//! A plan that takes longer than the Lease is valid costs time, not leadership. Where the Lease is
//! lost, [`Tenure`] blocks writes whatever the other threads do.
//!
//! Both threads and all long-running tasks belong to one [`Supervisor`]. One that ends before the
//! process stops ends the process, with its name and the cause.

use std::io;

use anyhow::Context;
use futures::future::BoxFuture;
use kube::Client;
use tessera_runtime::supervisor::{Supervisor, TaskFailure};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::leadership::{Candidate, LeadershipError, Tenure};
use crate::shell::Shell;
use crate::watch::Arrival;

/// Creates a client in the runtime that uses it: a connection belongs to the runtime that created
/// it.
pub type Connect = Box<dyn FnOnce() -> BoxFuture<'static, anyhow::Result<Client>> + Send>;

/// The thread that renews the Lease.
const LEASE: &str = "lease";

/// The thread that decides.
const CORE: &str = "core";

/// A candidate for leadership on a thread of its own.
#[derive(Debug)]
pub struct Leadership {
    acquired: oneshot::Receiver<anyhow::Result<Tenure>>,
    ended: oneshot::Receiver<Result<(), LeadershipError>>,
    release: CancellationToken,
    stop: CancellationToken,
}

impl Leadership {
    /// Starts to compete for the Lease in `namespace`, until the token of `tasks` is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        connect: Connect,
        namespace: String,
        identity: String,
        tasks: &mut Supervisor,
    ) -> io::Result<Self> {
        let (send_acquired, acquired) = oneshot::channel();
        let (send_ended, ended) = oneshot::channel();
        let (release, stop) = (CancellationToken::new(), tasks.stop_token());
        let (released, stopped) = (release.clone(), stop.clone());
        on_thread(tasks, LEASE, async move {
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
    /// If the thread panics, this waits until the process stops: its supervisor reports the cause.
    ///
    /// # Errors
    /// There is no client.
    pub async fn acquired(&mut self) -> anyhow::Result<Option<Tenure>> {
        match (&mut self.acquired).await {
            Ok(acquired) => acquired.map(Some),
            Err(_) => {
                self.stop.cancelled().await;
                Ok(None)
            }
        }
    }

    /// Waits until leadership is lost. The process has to end at once.
    async fn lost(&mut self) -> anyhow::Error {
        match (&mut self.ended).await {
            Ok(Err(error)) => anyhow::Error::new(error).context("leadership lost"),
            Ok(Ok(())) | Err(_) => panicked(LEASE, &self.stop).await,
        }
    }

    /// Releases the Lease. Nothing may be written any more.
    async fn release(self) -> anyhow::Result<()> {
        self.release.cancel();
        match self.ended.await {
            Ok(released) => released.context("leadership lost"),
            Err(_) => Err(panicked(LEASE, &self.stop).await),
        }
    }
}

/// Runs the shell until the token of `tasks` is cancelled, then waits for the open writes and
/// releases the Lease.
///
/// # Errors
/// Leadership is lost, or a task or thread has ended unexpectedly: the process has to end at once.
pub async fn lead(
    leadership: Option<Leadership>,
    shell: Shell,
    changes: mpsc::Receiver<Arrival>,
    tasks: &mut Supervisor,
) -> anyhow::Result<()> {
    let (send_ended, ended) = oneshot::channel();
    let stop = tasks.stop_token();
    let of_shell = stop.clone();
    on_thread(tasks, CORE, async move {
        let _ = send_ended.send(shell.run(changes, of_shell).await);
    })
    .context("cannot start the thread of the core")?;
    let planned = async {
        match ended.await {
            Ok(all_written) => Ok(all_written),
            Err(_) => Err(panicked(CORE, &stop).await),
        }
    };
    let Some(mut leadership) = leadership else {
        return tokio::select! {
            biased;
            ended = planned => ended.map(drop),
            failure = tasks.failed() => Err(failure.into()),
        };
    };
    let all_written = tokio::select! {
        biased;
        // Open writes are not awaited: they time out before another process can lead.
        lost = leadership.lost() => return Err(lost),
        ended = planned => ended?,
        failure = tasks.failed() => return Err(failure.into()),
    };
    if !all_written {
        tracing::warn!("not releasing the Lease: a write is still without an answer");
        return Ok(());
    }
    leadership.release().await
}

/// Returns the error of a thread that has panicked, once the process stops: before, the supervisor
/// reports the panic itself.
async fn panicked(name: &'static str, stop: &CancellationToken) -> anyhow::Error {
    stop.cancelled().await;
    TaskFailure::new(name, "it panicked while the process stopped").into()
}

/// Runs a task on a thread with a runtime of its own.
fn on_thread(
    tasks: &mut Supervisor,
    name: &'static str,
    task: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tasks.spawn_thread(name, move || runtime.block_on(task))
}
