//! Queues of writes that may follow each other in any order: nominations, claim templates, statuses
//! of quotas.

use std::task::{Context, Poll};

use futures::{StreamExt, stream};
use tokio::sync::mpsc;

use crate::core::event::Event;
use crate::leadership::Tenure;

/// The most requests of one queue under way: fewer than those of claims, which they must not
/// delay.
const REQUESTS: usize = 16;

/// The receiving end of a queue, bounded or not.
pub(crate) trait Queue {
    /// The writes of the queue.
    type Write;

    /// Polls for the next write.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(Tenure, Self::Write)>>;
}

impl<W> Queue for mpsc::Receiver<(Tenure, W)> {
    type Write = W;

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(Tenure, W)>> {
        self.poll_recv(context)
    }
}

impl<W> Queue for mpsc::UnboundedReceiver<(Tenure, W)> {
    type Write = W;

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(Tenure, W)>> {
        self.poll_recv(context)
    }
}

/// Performs the writes of a queue until it ends, and reports the event of each.
pub(crate) async fn write_queued<Q: Queue>(
    mut queue: Q,
    reports: mpsc::UnboundedSender<Event>,
    write: impl AsyncFn(Tenure, Q::Write) -> Event,
) {
    let queue = stream::poll_fn(move |context| queue.poll_next(context));
    let perform = async |(tenure, next): (Tenure, Q::Write)| {
        let ended = write(tenure, next).await;
        // Only a core that has ended does not receive it.
        let _ = reports.send(ended);
    };
    queue.for_each_concurrent(REQUESTS, perform).await;
}
