//! Backoff of watches.

use futures::{Stream, StreamExt, stream};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher;

/// Returns the events of a watch, with a pause after each error.
///
/// The pauses are reset by a changed object, and by `pause` itself: use one with a timer
/// ([`DefaultBackoff`], [`ResetTimerBackoff`]). The stream ends only if `pause` or `events` end.
///
/// This replaces [`WatchStreamExt::backoff`], which any event resets. A list that is refused begins
/// with an event (`Init`, kube-runtime 5.0.0), so a kind that is not served or not permitted would
/// be listed forever with the shortest pause. A complete list is no reason for a reset either: the
/// watch after it may fail immediately, each time.
///
/// [`DefaultBackoff`]: watcher::DefaultBackoff
/// [`ResetTimerBackoff`]: kube::runtime::utils::ResetTimerBackoff
/// [`WatchStreamExt::backoff`]: kube::runtime::WatchStreamExt::backoff
pub fn with_backoff<K: Send>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
    pause: impl Backoff,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send {
    stream::unfold((Box::pin(events), pause, None), async |(mut events, mut pause, wait)| {
        if let Some(wait) = wait {
            tokio::time::sleep(wait).await;
        }
        let event = events.next().await?;
        let wait = match &event {
            Err(_) => Some(pause.next()?),
            Ok(watcher::Event::Apply(_) | watcher::Event::Delete(_)) => {
                pause.reset();
                None
            }
            Ok(_) => None,
        };
        Some((event, (events, pause, wait)))
    })
}
