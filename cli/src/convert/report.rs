//! The report of a conversion.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::Value;
use tessera_dialect::{Conversion, ConversionError, LeaveReason, Trigger};

use super::{Conversions, kinds, requests};

/// Results by object, in the order of the files.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConvertReport {
    /// The objects.
    pub objects: Vec<ObjectReport>,
}

/// Result of one object.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectReport {
    /// The file.
    pub file: String,
    /// Kind of the object.
    pub kind: String,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// The result, in one word.
    pub result: ConvertResult,
    /// Dialect of its pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// Its ResourceClaimTemplates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub templates: Vec<String>,
    /// Its requests, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<String>,
    /// Fields that a claim does not express, and other changes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Reasons of a refusal, with the field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

/// Result of one object, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ConvertResult {
    /// The object changed.
    Converted,
    /// The object stays as it is.
    Unchanged,
    /// A pod template of it cannot be converted as written.
    Refused,
}

impl ConvertReport {
    /// Returns true if an object was refused.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.number(ConvertResult::Refused) > 0
    }

    fn number(&self, result: ConvertResult) -> usize {
        self.objects.iter().filter(|object| object.result == result).count()
    }
}

impl ObjectReport {
    pub(super) fn new(file: &str, object: &Value, namespace: &str) -> Self {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let metadata = &object["metadata"];
        let name = text(&metadata["name"]).or_else(|| text(&metadata["generateName"]));
        Self {
            file: file.to_owned(),
            kind: text(&object["kind"]).unwrap_or_default(),
            namespace: text(&metadata["namespace"]).unwrap_or_else(|| namespace.to_owned()),
            name: name.unwrap_or_default(),
            result: ConvertResult::Unchanged,
            dialect: None,
            templates: Vec::new(),
            requests: Vec::new(),
            warnings: Vec::new(),
            errors: Vec::new(),
        }
    }

    pub(super) fn refuse(&mut self, path: &[String], error: &ConversionError) {
        self.result = ConvertResult::Refused;
        self.errors.push(below(path, &error.to_string()));
    }

    pub(super) fn leave(&mut self, reason: LeaveReason) {
        let text = match reason {
            LeaveReason::NothingToConvert => return,
            LeaveReason::OptedOut => "a label of the pod or its namespace opts out",
            LeaveReason::OtherScheduler => "the old system does not look at pods of its scheduler",
            LeaveReason::Converted => "it was converted before",
            LeaveReason::MirrorPod => "mirror pods cannot have claims",
            LeaveReason::SystemNamespace => "pods of kube-system are never converted",
        };
        self.warnings.push(format!("left as it is: {text}"));
    }

    pub(super) fn convert(&mut self, path: &[String], conversion: &Conversion, keeps: bool) {
        if self.result != ConvertResult::Refused {
            self.result = ConvertResult::Converted;
        }
        self.dialect = Some(conversion.dialect.to_string());
        self.requests.extend(requests(conversion));
        if let Some(template) = &conversion.template
            && !self.templates.contains(&template.name)
        {
            self.templates.push(template.name.clone());
        }
        self.warnings.extend(conversion.warnings.iter().map(|warning| below(path, warning)));
        let lost = "comments of the document are lost: it cannot be edited in place";
        if !keeps && !self.warnings.iter().any(|warning| warning == lost) {
            self.warnings.push(lost.to_owned());
        }
    }

    /// Warns about an object that names resources of a dialect in a kind that is not known.
    pub(super) fn note_unknown_kind(&mut self, object: &Value, conversions: &Conversions<'_>) {
        if kinds::is_known(object) {
            return;
        }
        let triggers = conversions.converter.triggers();
        let resource = triggers.iter().find(|trigger| match trigger {
            Trigger::Resource(name) => names_key(object, name),
            Trigger::Annotation(_) => false,
        });
        if let Some(trigger) = resource {
            self.warnings.push(format!(
                "names `{}`, and the place of pod templates in this kind is not known; \
                 --pod-template-path names it",
                trigger.name()
            ));
        }
    }
}

/// Returns true if a mapping anywhere in the value has the key.
fn names_key(value: &Value, key: &str) -> bool {
    match value {
        Value::Object(fields) => {
            fields.contains_key(key) || fields.values().any(|value| names_key(value, key))
        }
        Value::Array(values) => values.iter().any(|value| names_key(value, key)),
        _ => false,
    }
}

/// Returns a message about a field of the pod template with the template's path in front.
fn below(path: &[String], message: &str) -> String {
    let begins_with_field = ["spec.", "metadata."].iter().any(|field| message.starts_with(field));
    if path.is_empty() || !begins_with_field {
        return message.to_owned();
    }
    format!("{}.{message}", path.join("."))
}

/// Returns the report as text: a paragraph per object that changes or needs attention, and the
/// totals.
#[must_use]
pub fn text(report: &ConvertReport) -> String {
    let mut text = String::new();
    for object in &report.objects {
        let has_news = !object.warnings.is_empty() || object.result != ConvertResult::Unchanged;
        if has_news {
            paragraph(object, &mut text);
        }
    }
    let number = |result| report.number(result);
    let _ = writeln!(
        text,
        "{} converted, {} refused, {} unchanged",
        number(ConvertResult::Converted),
        number(ConvertResult::Refused),
        number(ConvertResult::Unchanged)
    );
    text
}

fn paragraph(object: &ObjectReport, text: &mut String) {
    let ObjectReport { file, kind, namespace, name, .. } = object;
    let result = match (object.result, object.templates.as_slice()) {
        (ConvertResult::Refused, _) => "refused".to_owned(),
        (ConvertResult::Unchanged, _) => "unchanged".to_owned(),
        (ConvertResult::Converted, []) => "no GPU".to_owned(),
        (ConvertResult::Converted, names) => {
            format!("ResourceClaimTemplate {}", names.join(", "))
        }
    };
    let _ = writeln!(text, "{kind} {namespace}/{name} ({file}): {result}");
    let requests = object.requests.iter().filter(|_| !object.templates.is_empty());
    for request in requests {
        let _ = writeln!(text, "  {request}");
    }
    for warning in &object.warnings {
        let _ = writeln!(text, "  warning: {warning}");
    }
    for error in &object.errors {
        let _ = writeln!(text, "  error: {error}");
    }
}
