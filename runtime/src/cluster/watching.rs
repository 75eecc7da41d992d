//! Pauses between attempts of a watch.

use futures::{Stream, StreamExt, stream};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher;

/// The events of a watch, which pauses after each error. The pauses begin anew when the watch tells
/// of a change, and when those of `pause` do by themselves: let it have a timer
/// ([`DefaultBackoff`], [`ResetTimerBackoff`]). Ends only where `pause` or `events` do.
///
/// In the place of [`WatchStreamExt::backoff`], for which any event is a reason to begin anew. A
/// list that is refused begins with one (`Init`, kube-runtime 5.0.0), so a kind that is not served,
/// or not permitted, is listed for ever after the shortest pause. Nor does a whole list say that
/// all is well: after it, the watch may be cut off at once, each time.
///
/// [`DefaultBackoff`]: watcher::DefaultBackoff
/// [`ResetTimerBackoff`]: kube::runtime::utils::ResetTimerBackoff
/// [`WatchStreamExt::backoff`]: kube::runtime::WatchStreamExt::backoff
pub fn patiently<K: Send>(
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
