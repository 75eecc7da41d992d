//! Faults that tests inject: one hook sees every request before it is served, another every event
//! of a watch before it is sent.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::user::User;

/// A request, as authorization would see it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestInfo {
    /// Who asks.
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

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It is served.
    None,
    /// It is not served; the client gets this answer.
    Refuse(ApiError),
    /// It is served, but the client gets this answer instead of the real one.
    LoseAnswer(ApiError),
    /// Somebody else writes the object first, an annotation only; then it is served. What it brings
    /// of the object is stale.
    Overtake,
    /// It is served once the token is cancelled, if the client is still there.
    Hold(CancellationToken),
    /// It is served once `serve` is cancelled, and answered once `answer` is, each if the client is
    /// still there.
    HoldAnswer {
        /// Lets it be served.
        serve: CancellationToken,
        /// Lets the client have the answer.
        answer: CancellationToken,
    },
}

/// What happens to an event of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchFault {
    /// It is sent.
    None,
    /// It is sent so long after it happened. Later events of the same watch wait for it.
    Delay(Duration),
    /// The connection breaks instead.
    Break,
    /// The watch ends with 410 instead, and its client has to list.
    Expire,
}

/// Decides over requests.
pub type FaultHook = Arc<dyn Fn(&RequestInfo) -> Fault + Send + Sync>;

/// Decides over the events of watches; it is shown the request that began the watch.
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
