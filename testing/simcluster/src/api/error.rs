//! Errors as the API server says them: a `Status` object with reason, code and details.

use std::fmt;

use serde_json::{Value, json};

use super::kind::Kind;

/// An answer other than success, in the shape of `meta/v1 Status`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{reason} ({code}): {message}")]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason, for example `NotFound`.
    pub reason: &'static str,
    /// The sentence a user sees.
    pub message: String,
    /// `Status.details`: group, kind, name, causes.
    pub details: Option<Value>,
}

impl ApiError {
    fn about(code: u16, reason: &'static str, kind: &Kind, name: &str, message: String) -> Self {
        Self { code, reason, message, details: Some(details(kind.group, kind.plural, name)) }
    }

    fn plain(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None }
    }

    /// 404 for an object of a kind that is served.
    pub fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", kind.qualified());
        Self::about(404, "NotFound", kind, name, message)
    }

    /// 404 for a path nobody serves.
    pub fn no_such_path() -> Self {
        Self::plain(404, "NotFound", "the server could not find the requested resource")
    }

    /// 409 because the name is taken, maybe by an object on its way out.
    pub fn already_exists(kind: &Kind, name: &str, deleting: bool) -> Self {
        let because = if deleting { "object is being deleted: " } else { "" };
        let message = format!("{because}{} \"{name}\" already exists", kind.qualified());
        Self::about(409, "AlreadyExists", kind, name, message)
    }

    /// 409 with the given explanation.
    pub fn conflict(kind: &Kind, name: &str, because: &str) -> Self {
        let message =
            format!("Operation cannot be fulfilled on {} \"{name}\": {because}", kind.qualified());
        Self::about(409, "Conflict", kind, name, message)
    }

    /// 409 because the resource version is not the current one.
    pub fn stale(kind: &Kind, name: &str) -> Self {
        Self::conflict(
            kind,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    /// 403 with the given explanation.
    pub fn forbidden(kind: &Kind, name: &str, because: &str) -> Self {
        let message = format!("{} \"{name}\" is forbidden: {because}", kind.qualified());
        Self::about(403, "Forbidden", kind, name, message)
    }

    /// 422 with one cause per field.
    pub fn invalid(kind: &Kind, name: &str, errors: &[FieldError]) -> Self {
        let said = match errors {
            [one] => one.to_string(),
            many => {
                format!("[{}]", many.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
            }
        };
        let subject = if kind.group.is_empty() {
            kind.kind.to_owned()
        } else {
            format!("{}.{}", kind.kind, kind.group)
        };
        let mut details = details(kind.group, kind.kind, name);
        details["causes"] = errors.iter().map(FieldError::cause).collect();
        Self {
            code: 422,
            reason: "Invalid",
            message: format!("{subject} \"{name}\" is invalid: {said}"),
            details: Some(details),
        }
    }

    /// 422 as an admission policy with the default reason says it.
    pub fn denied_by_policy(kind: &Kind, name: &str, policy: &str, message: &str) -> Self {
        let message = format!(
            "{} \"{name}\" is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: {message}",
            kind.qualified()
        );
        Self::about(403, "Forbidden", kind, name, message)
    }

    /// 422 for a patch that cannot be applied.
    pub fn unprocessable(message: impl Into<String>) -> Self {
        Self::plain(422, "Invalid", message)
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::plain(400, "BadRequest", message)
    }

    /// 401.
    pub fn unauthorized() -> Self {
        Self::plain(401, "Unauthorized", "Unauthorized")
    }

    /// 405.
    pub fn method_not_allowed() -> Self {
        Self::plain(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    /// 410: the asked resource version is older than what is kept.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::plain(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// 410 for a list continuation whose snapshot is gone.
    pub fn continue_expired() -> Self {
        Self::plain(
            410,
            "Expired",
            "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter.",
        )
    }

    /// 415.
    pub fn unsupported_media_type(got: &str) -> Self {
        Self::plain(
            415,
            "UnsupportedMediaType",
            format!(
                "the body of the request was in an unknown format ({got}) - accepted media types include: application/json, application/yaml"
            ),
        )
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::plain(500, "InternalError", format!("Internal error occurred: {}", message.into()))
    }

    /// 504 for a list at a resource version that has not happened yet.
    pub fn too_large_resource_version(asked: u64, current: u64) -> Self {
        Self {
            code: 504,
            reason: "Timeout",
            message: format!("Timeout: Too large resource version: {asked}, current: {current}"),
            details: Some(json!({
                "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
                "retryAfterSeconds": 1,
            })),
        }
    }

    /// 429, for faults that tests inject.
    pub fn too_many_requests(message: impl Into<String>) -> Self {
        Self::plain(429, "TooManyRequests", message)
    }

    /// 503, for faults that tests inject. Clients may retry this for minutes before they tell; 500
    /// is told at once.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::plain(503, "ServiceUnavailable", message)
    }

    /// The `Status` object sent to the client.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        });
        if let Some(details) = &self.details {
            status["details"] = details.clone();
        }
        status
    }
}

fn details(group: &str, kind: &str, name: &str) -> Value {
    let mut details = json!({"name": name, "kind": kind});
    if !group.is_empty() {
        details["group"] = group.into();
    }
    details
}

/// What is wrong with one field.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldError {
    field: String,
    what: Wrong,
}

#[derive(Clone, Debug, PartialEq)]
enum Wrong {
    Required(String),
    Invalid(Value, String),
    Forbidden(String),
    Duplicate(Value),
    NotFound(Value, String),
    TooMany { have: usize, most: usize },
    TooLong { most: usize },
    NotSupported(Value, Vec<String>),
}

impl FieldError {
    fn new(field: impl Into<String>, what: Wrong) -> Self {
        Self { field: field.into(), what }
    }

    /// A value that must be given is missing.
    pub fn required(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, Wrong::Required(detail.into()))
    }

    /// A value that is not allowed, and why.
    pub fn invalid(
        field: impl Into<String>,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(field, Wrong::Invalid(value.into(), detail.into()))
    }

    /// A field that may not be set here.
    pub fn forbidden(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, Wrong::Forbidden(detail.into()))
    }

    /// A value that occurs twice where it must be unique.
    pub fn duplicate(field: impl Into<String>, value: impl Into<Value>) -> Self {
        Self::new(field, Wrong::Duplicate(value.into()))
    }

    /// A reference to something that is not there, and what would be.
    pub fn not_found(
        field: impl Into<String>,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(field, Wrong::NotFound(value.into(), detail.into()))
    }

    /// More items than the API allows.
    pub fn too_many(field: impl Into<String>, have: usize, most: usize) -> Self {
        Self::new(field, Wrong::TooMany { have, most })
    }

    /// A string longer than the API allows.
    pub fn too_long(field: impl Into<String>, most: usize) -> Self {
        Self::new(field, Wrong::TooLong { most })
    }

    /// A value outside an enumeration.
    pub fn not_supported(
        field: impl Into<String>,
        value: impl Into<Value>,
        supported: &[&str],
    ) -> Self {
        Self::new(
            field,
            Wrong::NotSupported(
                value.into(),
                supported.iter().map(|s| format!("\"{s}\"")).collect(),
            ),
        )
    }

    fn reason(&self) -> &'static str {
        match self.what {
            Wrong::Required(_) => "FieldValueRequired",
            Wrong::Invalid(..) => "FieldValueInvalid",
            Wrong::Forbidden(_) => "FieldValueForbidden",
            Wrong::Duplicate(_) => "FieldValueDuplicate",
            Wrong::NotFound(..) => "FieldValueNotFound",
            Wrong::TooMany { .. } => "FieldValueTooMany",
            Wrong::TooLong { .. } => "FieldValueTooLong",
            Wrong::NotSupported(..) => "FieldValueNotSupported",
        }
    }

    fn said(&self) -> String {
        match &self.what {
            Wrong::Required(detail) if detail.is_empty() => "Required value".to_owned(),
            Wrong::Required(detail) => format!("Required value: {detail}"),
            Wrong::Invalid(value, detail) => format!("Invalid value: {value}: {detail}"),
            Wrong::Forbidden(detail) => format!("Forbidden: {detail}"),
            Wrong::Duplicate(value) => format!("Duplicate value: {value}"),
            Wrong::NotFound(value, detail) => format!("Not found: {value}: {detail}"),
            Wrong::TooMany { have, most } => {
                format!("Too many: {have}: must have at most {most} items")
            }
            Wrong::TooLong { most } => format!("Too long: may not be more than {most} bytes"),
            Wrong::NotSupported(value, supported) => {
                format!("Unsupported value: {value}: supported values: {}", supported.join(", "))
            }
        }
    }

    fn cause(&self) -> Value {
        json!({"reason": self.reason(), "message": self.said(), "field": self.field})
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.said())
    }
}
