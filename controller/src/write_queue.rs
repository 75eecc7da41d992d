//! Queues of writes that may follow each other in any order: nominations, claim templates,
//! placeholder pods, evictions, statuses of quotas and resizes.

use futures::{Stream, StreamExt, stream};
use kube::Client;
use tessera_runtime::supervisor::Supervisor;
use tokio::sync::mpsc;

use crate::core::event::Event;
use crate::leadership::Tenure;

/// The most requests of one queue under way: fewer than those of claims, which they must not
/// delay.
const REQUESTS: usize = 16;

/// The supervisor of the tasks of queues, and where they report.
pub(crate) struct QueueTasks<'a> {
    pub(crate) tasks: &'a mut Supervisor,
    /// Receives the event of each write.
    pub(crate) reports: mpsc::UnboundedSender<Event>,
}

/// A queue whose length the core bounds: each of its objects has one open write.
pub(crate) struct WriteQueue<W>(mpsc::UnboundedSender<(Tenure, W)>);

impl<W: Send + 'static> WriteQueue<W> {
    /// Starts a queue with a task of that name. `write` performs a write and returns its event.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub(crate) fn start<F>(
        QueueTasks { tasks, reports }: &mut QueueTasks<'_>,
        name: &'static str,
        client: Client,
        write: fn(Client, Tenure, W) -> F,
    ) -> Self
    where
        F: Future<Output = Event> + Send + 'static,
    {
        let (sender, mut queue) = mpsc::unbounded_channel();
        let queue = stream::poll_fn(move |context| queue.poll_recv(context));
        tasks.spawn(name, write_queued(queue, reports.clone(), client, write));
        Self(sender)
    }

    /// Appends a write, which is performed unless the tenure is over by then.
    pub(crate) fn push(&self, tenure: &Tenure, write: W) {
        // Where the task has ended, the process ends too.
        let _ = self.0.send((tenure.clone(), write));
    }
}

/// A queue of limited length.
pub(crate) struct BoundedWriteQueue<W>(mpsc::Sender<(Tenure, W)>);

impl<W: Send + 'static> BoundedWriteQueue<W> {
    /// Starts a queue of that length, as [`WriteQueue::start`] does.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub(crate) fn start<F>(
        QueueTasks { tasks, reports }: &mut QueueTasks<'_>,
        (name, length): (&'static str, usize),
        client: Client,
        write: fn(Client, Tenure, W) -> F,
    ) -> Self
    where
        F: Future<Output = Event> + Send + 'static,
    {
        let (sender, mut queue) = mpsc::channel(length);
        let queue = stream::poll_fn(move |context| queue.poll_recv(context));
        tasks.spawn(name, write_queued(queue, reports.clone(), client, write));
        Self(sender)
    }

    /// Appends a write, as [`WriteQueue::push`] does. Returns it if the queue is full.
    pub(crate) fn push(&self, tenure: &Tenure, write: W) -> Result<(), W> {
        let pushed = self.0.try_send((tenure.clone(), write));
        pushed.map_err(|error| error.into_inner().1)
    }
}

/// Performs the writes of a queue until it ends, and reports the event of each.
async fn write_queued<W, F: Future<Output = Event>>(
    queue: impl Stream<Item = (Tenure, W)>,
    reports: mpsc::UnboundedSender<Event>,
    client: Client,
    write: fn(Client, Tenure, W) -> F,
) {
    let perform = async |(tenure, next): (Tenure, W)| {
        let ended = write(client.clone(), tenure, next).await;
        // Only a core that has ended does not receive it.
        let _ = reports.send(ended);
    };
    queue.for_each_concurrent(REQUESTS, perform).await;
}
