//! Paths and query parameters.

use std::collections::HashMap;

use super::kind::{self, Kind};

/// Target of a request path.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) kind: &'static Kind,
    /// `None` for cluster-scoped kinds and for lists over all namespaces.
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) subresource: Option<String>,
    /// Path after the subresource `proxy`; empty for others.
    pub(crate) path_in_pod: String,
}

impl Route {
    /// Parses a resource path. Returns `None` for unknown resources.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            // `namespaces/NAME/status` is a subresource of the namespace itself.
            ["namespaces", _, "status" | "finalize"] => (None, rest),
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (Some(*namespace), rest),
            _ => (None, rest),
        };
        let (rest, path_in_pod) = match rest {
            [_, _, "proxy", path @ ..] => (&rest[..3], path.join("/")),
            _ => (rest, String::new()),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (*plural, None, None),
            [plural, name] => (*plural, Some(*name), None),
            [plural, name, subresource] => (*plural, Some(*name), Some(*subresource)),
            _ => return None,
        };
        let kind = kind::find(group, version, plural)?;
        if kind.namespaced == namespace.is_none() && (name.is_some() || namespace.is_some()) {
            return None;
        }
        Some(Self {
            kind,
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
            subresource: subresource.map(str::to_owned),
            path_in_pod,
        })
    }

    pub(crate) fn in_namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or_default()
    }
}

/// Query parameters.
#[derive(Debug, Default)]
pub(crate) struct Query(pub(crate) HashMap<String, String>);

impl Query {
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        matches!(self.text(name), Some("true" | "1" | "True"))
    }

    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.text(name)?.parse().ok()
    }

    /// Returns true if unknown fields are refused.
    pub(crate) fn is_strict(&self) -> bool {
        self.text("fieldValidation") == Some("Strict")
    }
}
