//! Users, identified by bearer tokens. There is no authorization; admission policies check the
//! user.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use super::error::ApiError;

/// Extra of a node-bound service account token with the name of its node.
pub const NODE_NAME_EXTRA: &str = "authentication.kubernetes.io/node-name";

/// A user as in `userInfo`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct User {
    /// User name.
    pub name: String,
    /// Objects to which the token is bound, for example a node name.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// Returns a user by name.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), extra: BTreeMap::new() }
    }

    /// Returns the administrator, the user of requests without a token. kubectl sends none over
    /// plain HTTP.
    pub fn admin() -> Self {
        Self::named("kubernetes-admin")
    }

    /// Returns a service account.
    pub fn service_account(namespace: &str, name: &str) -> Self {
        Self::named(format!("system:serviceaccount:{namespace}:{name}"))
    }

    /// Returns the user of a kubelet.
    pub fn kubelet(node: &str) -> Self {
        Self::named(format!("system:node:{node}"))
    }

    /// Returns the user with a token bound to a node.
    #[must_use]
    pub fn on_node(mut self, node: &str) -> Self {
        self.extra.insert(NODE_NAME_EXTRA.to_owned(), vec![node.to_owned()]);
        self
    }

    /// Returns the node to which the token is bound.
    pub fn node_name(&self) -> Option<&str> {
        self.extra.get(NODE_NAME_EXTRA)?.first().map(String::as_str)
    }
}

/// Issued tokens.
#[derive(Default)]
pub(crate) struct Tokens {
    users: Mutex<HashMap<String, User>>,
}

impl Tokens {
    /// Returns the token of this user. Repeated calls return the same token.
    pub(crate) fn issue(&self, user: &User) -> String {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((token, _)) = users.iter().find(|(_, known)| *known == user) {
            return token.clone();
        }
        let token = format!("sim-{}", uuid::Uuid::new_v4().simple());
        users.insert(token.clone(), user.clone());
        token
    }

    /// Returns the user of a request: of its token, the impersonated one, or the administrator
    /// without a token.
    ///
    /// # Errors
    /// Returns 401 for an unknown token.
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
            // client-go percent-encodes the slash, the only character of the used keys that is
            // invalid in a header name.
            let key = key.replace("%2f", "/").replace("%2F", "/");
            user.extra.entry(key).or_default().push(value.to_owned());
        }
    }
    user
}
