//! Who speaks: bearer tokens stand for users. There is no authorization; admission policies look at
//! the user.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use super::error::ApiError;

/// The extra of a node-bound service account token that names its node.
pub const NODE_NAME_EXTRA: &str = "authentication.kubernetes.io/node-name";

/// A user as `userInfo` describes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct User {
    /// User name.
    pub name: String,
    /// What the token is bound to, for example a node name.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// A user by name.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), extra: BTreeMap::new() }
    }

    /// Whoever brings no token. kubectl sends none over plain HTTP, so this is the administrator.
    pub fn admin() -> Self {
        Self::named("kubernetes-admin")
    }

    /// A service account.
    pub fn service_account(namespace: &str, name: &str) -> Self {
        Self::named(format!("system:serviceaccount:{namespace}:{name}"))
    }

    /// A kubelet.
    pub fn kubelet(node: &str) -> Self {
        Self::named(format!("system:node:{node}"))
    }

    /// The same user with a token bound to a node.
    #[must_use]
    pub fn on_node(mut self, node: &str) -> Self {
        self.extra.insert(NODE_NAME_EXTRA.to_owned(), vec![node.to_owned()]);
        self
    }

    /// The node that the token is bound to.
    pub fn node_name(&self) -> Option<&str> {
        self.extra.get(NODE_NAME_EXTRA)?.first().map(String::as_str)
    }
}

/// Tokens handed out so far.
#[derive(Default)]
pub(crate) struct Tokens {
    users: Mutex<HashMap<String, User>>,
}

impl Tokens {
    /// A token for this user; the same one each time.
    pub(crate) fn issue(&self, user: &User) -> String {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((token, _)) = users.iter().find(|(_, known)| *known == user) {
            return token.clone();
        }
        let token = format!("sim-{}", uuid::Uuid::new_v4().simple());
        users.insert(token.clone(), user.clone());
        token
    }

    /// The user of a request: its token's, or whom it impersonates, or the administrator without a
    /// token.
    ///
    /// # Errors
    /// 401 for a token that was never issued.
    pub(crate) fn identify(&self, headers: &HeaderMap) -> Result<User, ApiError> {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(name) = header("impersonate-user") {
            return Ok(impersonated(name, headers));
        }
        let Some(authorization) = header(AUTHORIZATION.as_str()) else { return Ok(User::admin()) };
        let token = authorization.strip_prefix("Bearer ").ok_or_else(ApiError::unauthorized)?;
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.get(token.trim()).cloned().ok_or_else(ApiError::unauthorized)
    }
}

fn impersonated(name: &str, headers: &HeaderMap) -> User {
    let mut user = User::named(name);
    for (header, value) in headers {
        if let (Some(key), Ok(value)) =
            (header.as_str().strip_prefix("impersonate-extra-"), value.to_str())
        {
            // client-go percent-encodes the slash, the only character of the keys in use that a
            // header name lacks.
            let key = key.replace("%2f", "/").replace("%2F", "/");
            user.extra.entry(key).or_default().push(value.to_owned());
        }
    }
    user
}
