//! Faults that tests inject: a hook sees every request before it is served.

use std::sync::{Arc, PoisonError, RwLock};

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
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// It is served.
    None,
    /// It is not served; the client gets this answer.
    Refuse(ApiError),
    /// It is served, but the client gets this answer instead of the real one.
    LoseAnswer(ApiError),
}

/// Decides over requests.
pub type FaultHook = Arc<dyn Fn(&RequestInfo) -> Fault + Send + Sync>;

#[derive(Default)]
pub(crate) struct Faults {
    hook: RwLock<Option<FaultHook>>,
}

impl Faults {
    pub(crate) fn set(&self, hook: Option<FaultHook>) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    pub(crate) fn decide(&self, request: &RequestInfo) -> Fault {
        let hook = self.hook.read().unwrap_or_else(PoisonError::into_inner).clone();
        hook.map_or(Fault::None, |hook| hook(request))
    }
}
