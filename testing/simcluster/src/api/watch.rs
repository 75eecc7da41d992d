//! Watches: initial events, changes, bookmarks, 410.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::fault::{Faults, RequestInfo, WatchFault};
use super::kind::Kind;
use super::selector::Selector;
use super::store::{Change, ChangeType, Store};
use super::view::View;

/// Number of lines buffered for a slow client before the watch blocks.
const LINE_BUFFER: usize = 64;

/// Signals to all watches.
pub(crate) struct Signals {
    /// Incremented to close every running watch like a broken connection.
    pub(crate) close: watch::Sender<u64>,
    /// Incremented to send every running watch a bookmark.
    pub(crate) bookmark: watch::Sender<u64>,
    /// Cancelled when the server stops.
    pub(crate) stop: CancellationToken,
    /// Oldest revision in the watch cache: resuming from before it gets 410.
    pub(crate) oldest_cached: AtomicU64,
    /// Number of watches that could not be resumed for that reason.
    pub(crate) expired: AtomicU64,
}

/// Parameters of a watch request.
pub(crate) struct WatchRequest {
    pub(crate) kind: &'static Kind,
    pub(crate) selector: Selector,
    pub(crate) view: View,
    /// Revision after which to resume; `None` or zero begins with the existing objects.
    pub(crate) resource_version: Option<u64>,
    pub(crate) send_initial_events: bool,
    pub(crate) bookmarks: bool,
    pub(crate) bookmark_every: Duration,
    pub(crate) timeout: Duration,
    /// Fault hooks and the request passed to them; `None` for observers.
    pub(crate) faults: Option<(Arc<Faults>, RequestInfo)>,
}

/// Starts a watch. Its lines are sent to the receiver until either side is dropped.
pub(crate) fn start(
    store: Arc<Store>,
    signals: &Arc<Signals>,
    request: WatchRequest,
) -> mpsc::Receiver<Bytes> {
    let (lines, receiver) = mpsc::channel(LINE_BUFFER);
    let oldest_cached = signals.oldest_cached.load(Ordering::Relaxed);
    let watcher =
        Watcher { lines, position: 0, store, request, oldest_cached, signals: signals.clone() };
    let mut close = signals.close.subscribe();
    let bookmark = signals.bookmark.subscribe();
    let stop = signals.stop.clone();
    tokio::spawn(async move {
        let lines = watcher.lines.clone();
        tokio::select! {
            // An error means that the client has disconnected, so nothing is left to do.
            _ = watcher.run(bookmark) => {}
            _ = close.changed() => {}
            () = lines.closed() => {}
            () = stop.cancelled() => {}
        }
    });
    receiver
}

/// The client has disconnected, or its connection broke.
struct Disconnected;

struct Watcher {
    lines: mpsc::Sender<Bytes>,
    /// Everything up to this revision was sent.
    position: u64,
    store: Arc<Store>,
    request: WatchRequest,
    oldest_cached: u64,
    signals: Arc<Signals>,
}

impl Watcher {
    async fn run(mut self, mut bookmark: watch::Receiver<u64>) -> Result<(), Disconnected> {
        let mut revisions = self.store.subscribe();
        if !self.send_initial().await? {
            return Ok(());
        }
        let end = Instant::now() + self.request.timeout;
        let mut ticks = tokio::time::interval(self.request.bookmark_every);
        ticks.tick().await;
        loop {
            revisions.mark_unchanged();
            if !self.send_changes().await? {
                return Ok(());
            }
            tokio::select! {
                changed = revisions.changed() => if changed.is_err() { return Ok(()) },
                _ = ticks.tick() => self.send_bookmark().await?,
                _ = bookmark.changed() => self.send_bookmark().await?,
                () = tokio::time::sleep_until(end) => return self.send_bookmark().await,
            }
        }
    }

    /// Sends the existing objects if requested. Returns false when the watch is over.
    async fn send_initial(&mut self) -> Result<bool, Disconnected> {
        let from_start = matches!(self.request.resource_version, None | Some(0));
        if !from_start && !self.request.send_initial_events {
            self.position = self.request.resource_version.unwrap_or_default();
            if self.request.faults.is_some() && self.position < self.oldest_cached {
                self.signals.expired.fetch_add(1, Ordering::Relaxed);
                self.send("ERROR", &ApiError::expired(self.position, self.oldest_cached).status())
                    .await?;
                return Ok(false);
            }
            return Ok(true);
        }
        let listed =
            self.store.list(self.request.kind.table, self.request.selector.namespace.as_deref());
        for object in listed.objects.iter().filter(|object| self.request.selector.matches(object)) {
            let object = self.request.view.object(self.request.kind, object);
            self.send("ADDED", &object).await?;
        }
        self.position = listed.revision;
        if self.request.send_initial_events && self.request.bookmarks {
            let bookmark = self.request.view.bookmark(self.request.kind, self.position, true);
            self.send("BOOKMARK", &bookmark).await?;
        }
        Ok(true)
    }

    /// Sends the changes since `position`. Returns false when the watch is over.
    async fn send_changes(&mut self) -> Result<bool, Disconnected> {
        match self.store.changes_after(self.request.kind.table, self.position) {
            Ok((changes, position)) => {
                for change in changes {
                    let Some((what, object)) = self.visible(&change) else { continue };
                    match self.fault() {
                        WatchFault::None => {}
                        WatchFault::Delay(lag) => tokio::time::sleep_until(change.at + lag).await,
                        WatchFault::Break => return Err(Disconnected),
                        WatchFault::Expire => {
                            self.send(
                                "ERROR",
                                &ApiError::expired(self.position, change.revision).status(),
                            )
                            .await?;
                            return Ok(false);
                        }
                    }
                    let object = self.request.view.object(self.request.kind, object);
                    self.send(what, &object).await?;
                }
                self.position = position;
                Ok(true)
            }
            Err(error) => {
                self.send("ERROR", &error.status()).await?;
                Ok(false)
            }
        }
    }

    fn fault(&self) -> WatchFault {
        let faults = self.request.faults.as_ref();
        faults.map_or(WatchFault::None, |(faults, request)| faults.decide_event(request))
    }

    /// Returns a change as seen through the selector.
    ///
    /// An object that stops matching is deleted for this client, one that starts to match is added.
    fn visible<'a>(&self, change: &'a Change) -> Option<(&'static str, &'a Value)> {
        let selector = &self.request.selector;
        let before = change.previous.as_ref().is_some_and(|previous| selector.matches(previous));
        let after = change.what != ChangeType::Deleted && selector.matches(&change.object);
        match (before, after) {
            (false, true) => Some(("ADDED", &change.object)),
            (true, true) => Some(("MODIFIED", &change.object)),
            (true, false) => Some(("DELETED", &change.object)),
            (false, false) => None,
        }
    }

    async fn send_bookmark(&self) -> Result<(), Disconnected> {
        if !self.request.bookmarks {
            return Ok(());
        }
        let bookmark = self.request.view.bookmark(self.request.kind, self.position, false);
        self.send("BOOKMARK", &bookmark).await
    }

    async fn send(&self, what: &str, object: &Value) -> Result<(), Disconnected> {
        let mut line =
            serde_json::to_vec(&json!({"type": what, "object": object})).unwrap_or_else(|error| {
                ApiError::internal(error.to_string()).status().to_string().into_bytes()
            });
        line.push(b'\n');
        self.lines.send(line.into()).await.map_err(|_| Disconnected)
    }
}
