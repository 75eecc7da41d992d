//! Errors of the API server: a `Status` object with reason, code and details.

use std::fmt;

use serde_json::{Value, json};

use super::kind::Kind;

/// An error response in the form of `meta/v1 Status`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{reason} ({code}): {message}")]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason, for example `NotFound`.
    pub reason: &'static str,
    /// Human-readable message.
    pub message: String,
    /// `Status.details`: group, kind, name, causes.
    pub details: Option<Value>,
}

impl ApiError {
    fn for_object(
        code: u16,
        reason: &'static str,
        kind: &Kind,
        name: &str,
        message: String,
    ) -> Self {
        Self { code, reason, message, details: Some(details(kind.group, kind.plural, name)) }
    }

    fn plain(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None }
    }

    /// Returns 404 for an object of a served kind.
    pub fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", kind.qualified());
        Self::for_object(404, "NotFound", kind, name, message)
    }

    /// Returns 404 for an unknown path.
    pub fn no_such_path() -> Self {
        Self::plain(404, "NotFound", "the server could not find the requested resource")
    }

    /// Returns 409 because the name is taken, possibly by an object under deletion.
    pub fn already_exists(kind: &Kind, name: &str, deleting: bool) -> Self {
        let because = if deleting { "object is being deleted: " } else { "" };
        let message = format!("{because}{} \"{name}\" already exists", kind.qualified());
        Self::for_object(409, "AlreadyExists", kind, name, message)
    }

    /// Returns 409 with the given explanation.
    pub fn conflict(kind: &Kind, name: &str, because: &str) -> Self {
        let message =
            format!("Operation cannot be fulfilled on {} \"{name}\": {because}", kind.qualified());
        Self::for_object(409, "Conflict", kind, name, message)
    }

    /// Returns 409 because the resource version is not the current one.
    pub fn stale(kind: &Kind, name: &str) -> Self {
        Self::conflict(
            kind,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    /// Returns 403 with the given explanation.
    pub fn forbidden(kind: &Kind, name: &str, because: &str) -> Self {
        let message = format!("{} \"{name}\" is forbidden: {because}", kind.qualified());
        Self::for_object(403, "Forbidden", kind, name, message)
    }

    /// Returns 422 with one cause per field.
    pub fn invalid(kind: &Kind, name: &str, errors: &[FieldError]) -> Self {
        let detail = match errors {
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
            message: format!("{subject} \"{name}\" is invalid: {detail}"),
            details: Some(details),
        }
    }

    /// Returns 403 as an admission policy with the default reason.
    pub fn denied_by_policy(kind: &Kind, name: &str, policy: &str, message: &str) -> Self {
        let message = format!(
            "{} \"{name}\" is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: {message}",
            kind.qualified()
        );
        Self::for_object(403, "Forbidden", kind, name, message)
    }

    /// Returns 422 for a patch that cannot be applied.
    pub fn unprocessable(message: impl Into<String>) -> Self {
        Self::plain(422, "Invalid", message)
    }

    /// Returns 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::plain(400, "BadRequest", message)
    }

    /// Returns 401.
    pub fn unauthorized() -> Self {
        Self::plain(401, "Unauthorized", "Unauthorized")
    }

    /// Returns 405.
    pub fn method_not_allowed() -> Self {
        Self::plain(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    /// Returns 410: the requested resource version is older than the kept changes.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::plain(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// Returns 410 for a list continuation whose snapshot is gone.
    pub fn continue_expired() -> Self {
        Self::plain(
            410,
            "Expired",
            "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter.",
        )
    }

    /// Returns 415.
    pub fn unsupported_media_type(got: &str) -> Self {
        Self::plain(
            415,
            "UnsupportedMediaType",
            format!(
                "the body of the request was in an unknown format ({got}) - accepted media types include: application/json, application/yaml"
            ),
        )
    }

    /// Returns 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::plain(500, "InternalError", format!("Internal error occurred: {}", message.into()))
    }

    /// Returns 504 for a list at a future resource version.
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

    /// Returns 429, for injected faults.
    pub fn too_many_requests(message: impl Into<String>) -> Self {
        Self::plain(429, "TooManyRequests", message)
    }

    /// Returns 503, for injected faults.
    ///
    /// Clients may retry a 503 for minutes before they report it; a 500 is reported at once.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::plain(503, "ServiceUnavailable", message)
    }

    /// Returns the `Status` object sent to the client.
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

/// A validation error of one field.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldError {
    field: String,
    kind: FieldErrorKind,
}

#[derive(Clone, Debug, PartialEq)]
enum FieldErrorKind {
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
    fn new(field: impl Into<String>, kind: FieldErrorKind) -> Self {
        Self { field: field.into(), kind }
    }

    /// Returns the error of a missing required value.
    pub fn required(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, FieldErrorKind::Required(detail.into()))
    }

    /// Returns the error of an invalid value.
    pub fn invalid(
        field: impl Into<String>,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(field, FieldErrorKind::Invalid(value.into(), detail.into()))
    }

    /// Returns the error of a field that may not be set here.
    pub fn forbidden(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, FieldErrorKind::Forbidden(detail.into()))
    }

    /// Returns the error of a value that must be unique.
    pub fn duplicate(field: impl Into<String>, value: impl Into<Value>) -> Self {
        Self::new(field, FieldErrorKind::Duplicate(value.into()))
    }

    /// Returns the error of a reference to a missing item.
    pub fn not_found(
        field: impl Into<String>,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(field, FieldErrorKind::NotFound(value.into(), detail.into()))
    }

    /// Returns the error of a list with too many items.
    pub fn too_many(field: impl Into<String>, have: usize, most: usize) -> Self {
        Self::new(field, FieldErrorKind::TooMany { have, most })
    }

    /// Returns the error of a string that is too long.
    pub fn too_long(field: impl Into<String>, most: usize) -> Self {
        Self::new(field, FieldErrorKind::TooLong { most })
    }

    /// Returns the error of a value outside an enumeration.
    pub fn not_supported(
        field: impl Into<String>,
        value: impl Into<Value>,
        supported: &[&str],
    ) -> Self {
        Self::new(
            field,
            FieldErrorKind::NotSupported(
                value.into(),
                supported.iter().map(|s| format!("\"{s}\"")).collect(),
            ),
        )
    }

    fn reason(&self) -> &'static str {
        match self.kind {
            FieldErrorKind::Required(_) => "FieldValueRequired",
            FieldErrorKind::Invalid(..) => "FieldValueInvalid",
            FieldErrorKind::Forbidden(_) => "FieldValueForbidden",
            FieldErrorKind::Duplicate(_) => "FieldValueDuplicate",
            FieldErrorKind::NotFound(..) => "FieldValueNotFound",
            FieldErrorKind::TooMany { .. } => "FieldValueTooMany",
            FieldErrorKind::TooLong { .. } => "FieldValueTooLong",
            FieldErrorKind::NotSupported(..) => "FieldValueNotSupported",
        }
    }

    fn detail(&self) -> String {
        match &self.kind {
            FieldErrorKind::Required(detail) if detail.is_empty() => "Required value".to_owned(),
            FieldErrorKind::Required(detail) => format!("Required value: {detail}"),
            FieldErrorKind::Invalid(value, detail) => format!("Invalid value: {value}: {detail}"),
            FieldErrorKind::Forbidden(detail) => format!("Forbidden: {detail}"),
            FieldErrorKind::Duplicate(value) => format!("Duplicate value: {value}"),
            FieldErrorKind::NotFound(value, detail) => format!("Not found: {value}: {detail}"),
            FieldErrorKind::TooMany { have, most } => {
                format!("Too many: {have}: must have at most {most} items")
            }
            FieldErrorKind::TooLong { most } => {
                format!("Too long: may not be more than {most} bytes")
            }
            FieldErrorKind::NotSupported(value, supported) => {
                format!("Unsupported value: {value}: supported values: {}", supported.join(", "))
            }
        }
    }

    fn cause(&self) -> Value {
        json!({"reason": self.reason(), "message": self.detail(), "field": self.field})
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.detail())
    }
}
