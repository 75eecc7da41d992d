//! Queues of writes that may follow each other in any order: nominations, claim templates, statuses
//! of quotas and resizes.

use futures::{Stream, StreamExt};
use tokio::sync::mpsc;

use crate::core::event::Event;
use crate::leadership::Tenure;

/// The most requests of one queue under way: fewer than those of claims, which they must not
/// delay.
const REQUESTS: usize = 16;

/// Performs the writes of a queue until it ends, and reports the event of each.
pub(crate) async fn write_queued<W>(
    queue: impl Stream<Item = (Tenure, W)>,
    reports: mpsc::UnboundedSender<Event>,
    write: impl AsyncFn(Tenure, W) -> Event,
) {
    let perform = async |(tenure, next): (Tenure, W)| {
        let ended = write(tenure, next).await;
        // Only a core that has ended does not receive it.
        let _ = reports.send(ended);
    };
    queue.for_each_concurrent(REQUESTS, perform).await;
}
