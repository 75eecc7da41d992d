//! Label and field selectors.

use serde_json::Value;

use super::error::ApiError;
use super::kind::Kind;
use super::meta;

/// Objects selected by a list or watch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Selector {
    pub(crate) namespace: Option<String>,
    labels: Vec<Requirement>,
    fields: Vec<FieldRequirement>,
}

#[derive(Clone, Debug, PartialEq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

#[derive(Clone, Debug, PartialEq)]
struct FieldRequirement {
    path: String,
    value: String,
    equal: bool,
}

impl Selector {
    /// Parses the query parameters.
    ///
    /// # Errors
    /// Returns 400 for an invalid selector or a field label that the kind does not support.
    pub(crate) fn parse(
        kind: &Kind,
        namespace: Option<&str>,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Self, ApiError> {
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            labels: parse_labels(labels.unwrap_or_default())?,
            fields: parse_fields(kind, fields.unwrap_or_default())?,
        })
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.namespace.as_ref().is_none_or(|namespace| namespace == meta::namespace(object))
            && self.labels.iter().all(|requirement| requirement.matches(object))
            && self.fields.iter().all(|requirement| requirement.matches(object))
    }
}

impl Requirement {
    fn matches(&self, object: &Value) -> bool {
        let value = meta::label(object, &self.key);
        match &self.test {
            Test::In(values) => value.is_some_and(|value| values.iter().any(|v| v == value)),
            Test::NotIn(values) => value.is_none_or(|value| values.iter().all(|v| v != value)),
            Test::Exists => value.is_some(),
            Test::Absent => value.is_none(),
        }
    }
}

impl FieldRequirement {
    fn matches(&self, object: &Value) -> bool {
        let mut value = object;
        for step in self.path.split('.') {
            value = &value[step];
        }
        // `source` of an event is an object; the selector refers to its component.
        if value.is_object() {
            value = &value["component"];
        }
        let found = match value {
            Value::String(text) => text.clone(),
            Value::Null if self.path == "spec.unschedulable" || self.path == "spec.hostNetwork" => {
                "false".to_owned()
            }
            Value::Null => String::new(),
            other => other.to_string(),
        };
        (found == self.value) == self.equal
    }
}

fn parse_fields(kind: &Kind, text: &str) -> Result<Vec<FieldRequirement>, ApiError> {
    text.split(',').filter(|part| !part.is_empty()).map(|part| parse_field(kind, part)).collect()
}

fn parse_field(kind: &Kind, part: &str) -> Result<FieldRequirement, ApiError> {
    let (path, value, equal) = if let Some((path, value)) = part.split_once("!=") {
        (path, value, false)
    } else if let Some((path, value)) = part.split_once("==") {
        (path, value, true)
    } else if let Some((path, value)) = part.split_once('=') {
        (path, value, true)
    } else {
        return Err(ApiError::bad_request(format!(
            "invalid field selector: '{part}'; can't understand '{part}'"
        )));
    };
    let known = path == "metadata.name"
        || (path == "metadata.namespace" && kind.namespaced)
        || kind.fields.contains(&path);
    if !known {
        return Err(ApiError::bad_request(format!("field label not supported: {path}")));
    }
    // Stored events have the core form, whatever version is requested.
    let path = path.replacen("regarding.", "involvedObject.", 1);
    let path = if path == "reportingController" { "reportingComponent".to_owned() } else { path };
    Ok(FieldRequirement { path, value: value.to_owned(), equal })
}

fn parse_labels(text: &str) -> Result<Vec<Requirement>, ApiError> {
    split_outside_parentheses(text).into_iter().map(parse_label).collect()
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

fn parse_label(part: &str) -> Result<Requirement, ApiError> {
    let requirement = |key: &str, test| Ok(Requirement { key: key.trim().to_owned(), test });
    let one = |value: &str| vec![value.trim().to_owned()];
    if let Some(head) = part.strip_suffix(')') {
        let (head, values) = head.split_once('(').ok_or_else(|| parse_error(part))?;
        let values = values.split(',').map(|value| value.trim().to_owned()).collect();
        let (key, operator) =
            head.trim().rsplit_once(char::is_whitespace).ok_or_else(|| parse_error(part))?;
        return match operator {
            "in" => requirement(key, Test::In(values)),
            "notin" => requirement(key, Test::NotIn(values)),
            _ => Err(parse_error(part)),
        };
    }
    if let Some((key, value)) = part.split_once("!=") {
        return requirement(key, Test::NotIn(one(value)));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return requirement(key, Test::In(one(value)));
    }
    if let Some(key) = part.strip_prefix('!') {
        return requirement(key, Test::Absent);
    }
    if part.contains(char::is_whitespace) {
        return Err(parse_error(part));
    }
    requirement(part, Test::Exists)
}

fn parse_error(part: &str) -> ApiError {
    ApiError::bad_request(format!("unable to parse requirement: {part}"))
}
