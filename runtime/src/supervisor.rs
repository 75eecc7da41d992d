//! Supervision of the tasks and threads that a program needs as long as it runs.
//!
//! A detached task that panics or returns early is not noticed: the program continues with a part
//! missing. A [`Supervisor`] owns such tasks, each with a name, and [`Supervisor::failed`] returns
//! as soon as one of them ends before the program stops:
//!
//! ```
//! # use tessera_runtime::supervisor::Supervisor;
//! # use tokio_util::sync::CancellationToken;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let stop = CancellationToken::new();
//! let mut tasks = Supervisor::new(stop.clone());
//! tasks.spawn("heartbeat", async { /* returns early */ });
//! let failure = tasks.failed().await;
//! assert_eq!(failure.to_string(), "task heartbeat ended unexpectedly: it returned");
//! # }
//! ```

use std::{
    any::Any,
    collections::HashMap,
    future::Future,
    io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    thread,
    time::Duration,
};

use tokio::{
    sync::oneshot,
    task::{Id, JoinError, JoinSet},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Time for which further failures are collected after the first one. A task that panics drops its
/// channels first, and tasks at their other ends may return before the panic is seen.
const SETTLE: Duration = Duration::from_millis(100);

/// An unexpected end of a task.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("task {name} ended unexpectedly: {reason}")]
pub struct TaskFailure {
    /// The name of the task.
    pub name: &'static str,
    /// The cause of its end: `it returned`, `it panicked: ...`, or an error.
    pub reason: String,
    /// True if the task panicked.
    is_panic: bool,
}

impl TaskFailure {
    /// Returns the failure of a task that ended with an error.
    #[must_use]
    pub fn new(name: &'static str, reason: impl Into<String>) -> Self {
        Self { name, reason: reason.into(), is_panic: false }
    }

    /// Returns the failure of a task with this result of its join handle.
    #[must_use]
    pub fn from_join(name: &'static str, result: Result<(), JoinError>) -> Self {
        match result {
            Ok(()) => Self::new(name, "it returned"),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => Self {
                    name,
                    reason: format!("it panicked: {}", panic_message(&*panic)),
                    is_panic: true,
                },
                Err(error) => Self::new(name, error.to_string()),
            },
        }
    }
}

/// Tasks and threads that run until the program stops.
///
/// Dropping it aborts the tasks. Threads are never joined: one may block in a library for ever.
#[derive(Debug)]
pub struct Supervisor {
    tasks: JoinSet<()>,
    names: HashMap<Id, &'static str>,
    stop: CancellationToken,
}

impl Supervisor {
    /// Returns a supervisor without tasks. Once `stop` is cancelled, tasks are expected to end.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { tasks: JoinSet::new(), names: HashMap::new(), stop }
    }

    /// Returns the token whose cancellation ends the tasks.
    #[must_use]
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Starts a task, which must run until the token is cancelled.
    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let id = self.tasks.spawn(task).id();
        self.names.insert(id, name);
    }

    /// Starts a thread of this name, which must run until the token is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn spawn_thread(
        &mut self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let (sender, ended) = oneshot::channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // The receiver is gone if the supervisor was dropped.
            let _ = sender.send(catch_unwind(AssertUnwindSafe(work)));
        })?;
        let stop = self.stop.clone();
        self.spawn(name, async move {
            tokio::select! {
                () = stop.cancelled() => {}
                result = ended => if let Ok(Err(panic)) = result { resume_unwind(panic) },
            }
        });
        Ok(())
    }

    /// Waits until a task ends before the token is cancelled. Never returns without tasks.
    ///
    /// Of several tasks that end within 100 ms, one that panicked is returned: the others mostly
    /// end because of it, and are logged.
    pub async fn failed(&mut self) -> TaskFailure {
        let mut first = self.next_failure().await;
        let mut others = Vec::new();
        let settle = sleep(SETTLE);
        let mut settle = std::pin::pin!(settle);
        loop {
            tokio::select! {
                biased;
                next = self.next_failure() => others.push(next),
                () = &mut settle => break,
            }
        }
        if !first.is_panic
            && let Some(at) = others.iter().position(|other| other.is_panic)
        {
            std::mem::swap(&mut first, &mut others[at]);
        }
        for other in others {
            tracing::warn!(task = other.name, reason = other.reason, "another task ended, too");
        }
        first
    }

    /// Waits until all tasks have ended, at most for `grace`, and aborts the rest. Panics meanwhile
    /// are logged. Threads are not waited for.
    ///
    /// The token must have been cancelled.
    pub async fn shut_down(mut self, grace: Duration) {
        let all_ended = async {
            while let Some(ended) = self.tasks.join_next_with_id().await {
                let (id, result) = split(ended);
                if let Err(error) = result {
                    let failure = TaskFailure::from_join(self.name(id), Err(error));
                    tracing::warn!(%failure, "task failed while the program stops");
                }
            }
        };
        if timeout(grace, all_ended).await.is_err() {
            let tasks: Vec<_> = self.names.values().collect();
            tracing::warn!(?tasks, "tasks did not end in time and are aborted");
            self.tasks.shutdown().await;
        }
    }

    async fn next_failure(&mut self) -> TaskFailure {
        loop {
            let Some(ended) = self.tasks.join_next_with_id().await else {
                return std::future::pending().await;
            };
            let (id, result) = split(ended);
            let name = self.name(id);
            // A task may be the first to see that the program stops.
            if result.is_ok() && self.stop.is_cancelled() {
                continue;
            }
            return TaskFailure::from_join(name, result);
        }
    }

    fn name(&mut self, id: Id) -> &'static str {
        self.names.remove(&id).unwrap_or("unknown")
    }
}

fn split(ended: Result<(Id, ()), JoinError>) -> (Id, Result<(), JoinError>) {
    match ended {
        Ok((id, ())) => (id, Ok(())),
        Err(error) => (error.id(), Err(error)),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Runs `work` on a thread that may block and returns its result. A panic of `work` continues in
/// the calling task, so that its supervisor reports it.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down: so is the caller.
            Err(_) => std::future::pending().await,
        },
    }
}
