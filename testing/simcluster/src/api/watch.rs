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

/// Lines of a watch that wait for a slow client before the watch itself waits.
const WAITING_LINES: usize = 64;

/// What ends or wakes all watches at once.
pub(crate) struct Signals {
    /// Counted up to close every running watch as a broken connection would.
    pub(crate) close: watch::Sender<u64>,
    /// Counted up to send every running watch a bookmark.
    pub(crate) bookmark: watch::Sender<u64>,
    /// The server stops.
    pub(crate) stop: CancellationToken,
    /// The watch cache knows nothing of what happened up to this revision: who continues from
    /// before it gets 410.
    pub(crate) forgotten: AtomicU64,
    /// How many watches could not be continued for that reason.
    pub(crate) expired: AtomicU64,
}

/// What a client asked for.
pub(crate) struct Wanted {
    pub(crate) kind: &'static Kind,
    pub(crate) selector: Selector,
    pub(crate) view: View,
    /// Continue after this; none or zero begins with what is there.
    pub(crate) resource_version: Option<u64>,
    pub(crate) send_initial_events: bool,
    pub(crate) bookmarks: bool,
    pub(crate) bookmark_every: Duration,
    pub(crate) timeout: Duration,
    /// What may happen to its events, and the request that it is told by; none for observers.
    pub(crate) faults: Option<(Arc<Faults>, RequestInfo)>,
}

/// Starts a watch; its lines arrive on the receiver until either side goes away.
pub(crate) fn start(
    store: Arc<Store>,
    signals: &Arc<Signals>,
    wanted: Wanted,
) -> mpsc::Receiver<Bytes> {
    let (lines, receiver) = mpsc::channel(WAITING_LINES);
    let forgotten = signals.forgotten.load(Ordering::Relaxed);
    let watcher =
        Watcher { lines, position: 0, store, wanted, forgotten, signals: signals.clone() };
    let mut close = signals.close.subscribe();
    let bookmark = signals.bookmark.subscribe();
    let stop = signals.stop.clone();
    tokio::spawn(async move {
        let lines = watcher.lines.clone();
        tokio::select! {
            // An error means that the client went away: nothing is left to do.
            _ = watcher.run(bookmark) => {}
            _ = close.changed() => {}
            () = lines.closed() => {}
            () = stop.cancelled() => {}
        }
    });
    receiver
}

/// The client went away, or its connection broke.
struct Gone;

struct Watcher {
    lines: mpsc::Sender<Bytes>,
    /// Everything up to this revision was sent.
    position: u64,
    store: Arc<Store>,
    wanted: Wanted,
    forgotten: u64,
    signals: Arc<Signals>,
}

impl Watcher {
    async fn run(mut self, mut bookmark: watch::Receiver<u64>) -> Result<(), Gone> {
        let mut revisions = self.store.subscribe();
        if !self.begin().await? {
            return Ok(());
        }
        let end = Instant::now() + self.wanted.timeout;
        let mut ticks = tokio::time::interval(self.wanted.bookmark_every);
        ticks.tick().await;
        loop {
            revisions.mark_unchanged();
            if !self.follow().await? {
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

    /// Sends what is there already, where the client wants that; false when the watch is over.
    async fn begin(&mut self) -> Result<bool, Gone> {
        let from_start = matches!(self.wanted.resource_version, None | Some(0));
        if !from_start && !self.wanted.send_initial_events {
            self.position = self.wanted.resource_version.unwrap_or_default();
            if self.wanted.faults.is_some() && self.position < self.forgotten {
                self.signals.expired.fetch_add(1, Ordering::Relaxed);
                self.send("ERROR", &ApiError::expired(self.position, self.forgotten).status())
                    .await?;
                return Ok(false);
            }
            return Ok(true);
        }
        let listed =
            self.store.list(self.wanted.kind.shelf, self.wanted.selector.namespace.as_deref());
        for object in listed.objects.iter().filter(|object| self.wanted.selector.matches(object)) {
            let object = self.wanted.view.object(self.wanted.kind, object);
            self.send("ADDED", &object).await?;
        }
        self.position = listed.revision;
        if self.wanted.send_initial_events && self.wanted.bookmarks {
            let bookmark = self.wanted.view.bookmark(self.wanted.kind, self.position, true);
            self.send("BOOKMARK", &bookmark).await?;
        }
        Ok(true)
    }

    /// Sends what changed since; false when the watch is over.
    async fn follow(&mut self) -> Result<bool, Gone> {
        match self.store.changes_after(self.wanted.kind.shelf, self.position) {
            Ok((changes, position)) => {
                for change in changes {
                    let Some((what, object)) = self.visible(&change) else { continue };
                    match self.fault() {
                        WatchFault::None => {}
                        WatchFault::Delay(lag) => tokio::time::sleep_until(change.at + lag).await,
                        WatchFault::Break => return Err(Gone),
                        WatchFault::Expire => {
                            self.send(
                                "ERROR",
                                &ApiError::expired(self.position, change.revision).status(),
                            )
                            .await?;
                            return Ok(false);
                        }
                    }
                    let object = self.wanted.view.object(self.wanted.kind, object);
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
        let faults = self.wanted.faults.as_ref();
        faults.map_or(WatchFault::None, |(faults, request)| faults.decide_event(request))
    }

    /// How a change looks through the selector: an object that stops matching is deleted for this
    /// client, one that starts to match is added.
    fn visible<'a>(&self, change: &'a Change) -> Option<(&'static str, &'a Value)> {
        let selector = &self.wanted.selector;
        let before = change.previous.as_ref().is_some_and(|previous| selector.matches(previous));
        let after = change.what != ChangeType::Deleted && selector.matches(&change.object);
        match (before, after) {
            (false, true) => Some(("ADDED", &change.object)),
            (true, true) => Some(("MODIFIED", &change.object)),
            (true, false) => Some(("DELETED", &change.object)),
            (false, false) => None,
        }
    }

    async fn send_bookmark(&self) -> Result<(), Gone> {
        if !self.wanted.bookmarks {
            return Ok(());
        }
        let bookmark = self.wanted.view.bookmark(self.wanted.kind, self.position, false);
        self.send("BOOKMARK", &bookmark).await
    }

    async fn send(&self, what: &str, object: &Value) -> Result<(), Gone> {
        let mut line =
            serde_json::to_vec(&json!({"type": what, "object": object})).unwrap_or_else(|error| {
                ApiError::internal(error.to_string()).status().to_string().into_bytes()
            });
        line.push(b'\n');
        self.lines.send(line.into()).await.map_err(|_| Gone)
    }
}
