//! Faults injected by tests.
//!
//! One hook is called with every request before it is served, another with every watch event before
//! it is sent.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::user::User;

/// A request as seen by authorization.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestInfo {
    /// Requesting user.
    pub user: User,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: &'static str,
    /// API group, empty for core.
    pub group: &'static str,
    /// Plural resource name.
    pub resource: &'static str,
    /// Subresource, or empty.
    pub subresource: String,
    /// Namespace, or empty.
    pub namespace: String,
    /// Name, or empty.
    pub name: String,
}

/// Fault of a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The request is served.
    None,
    /// The request is not served; the client gets this error.
    Refuse(ApiError),
    /// The request is served, but the client gets this error as the response.
    DropResponse(ApiError),
    /// Another client writes an annotation of the object first; then the request is served with a
    /// stale version.
    ConflictingWrite,
    /// The request is served once the token is cancelled, unless the client has disconnected.
    Hold(CancellationToken),
    /// The request is served once `serve` is cancelled, and the response sent once `answer` is,
    /// unless the client has disconnected.
    HoldResponse {
        /// Cancelled to serve the request.
        serve: CancellationToken,
        /// Cancelled to send the response.
        answer: CancellationToken,
    },
}

/// Fault of a watch event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchFault {
    /// The event is sent.
    None,
    /// The event is sent this long after it happened. Later events of the same watch wait for it.
    Delay(Duration),
    /// The connection breaks instead.
    Break,
    /// The watch ends with 410 instead, and its client must list again.
    Expire,
}

/// Hook that decides on requests.
pub type FaultHook = Arc<dyn Fn(&RequestInfo) -> Fault + Send + Sync>;

/// Hook that decides on watch events; it gets the request that started the watch.
pub type WatchFaultHook = Arc<dyn Fn(&RequestInfo) -> WatchFault + Send + Sync>;

#[derive(Default)]
pub(crate) struct Faults {
    hook: RwLock<Option<FaultHook>>,
    watch_hook: RwLock<Option<WatchFaultHook>>,
}

impl Faults {
    pub(crate) fn set(&self, hook: Option<FaultHook>) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    pub(crate) fn decide(&self, request: &RequestInfo) -> Fault {
        let hook = self.hook.read().unwrap_or_else(PoisonError::into_inner).clone();
        hook.map_or(Fault::None, |hook| hook(request))
    }

    pub(crate) fn set_for_watches(&self, hook: Option<WatchFaultHook>) {
        *self.watch_hook.write().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    pub(crate) fn decide_event(&self, watch: &RequestInfo) -> WatchFault {
        let hook = self.watch_hook.read().unwrap_or_else(PoisonError::into_inner).clone();
        hook.map_or(WatchFault::None, |hook| hook(watch))
    }
}
