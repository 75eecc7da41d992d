//! `kubectl tessera convert`: manifests of other GPU-sharing systems as manifests with claims.
//!
//! ```text
//! text --documents--> objects --kinds--> pod templates --tessera_dialect--> patches, templates
//!                                  text with the patches applied, comments and order kept
//! ```
//!
//! The conversion of a pod template is the one that the admission webhook applies to pods. Nothing
//! is read from or written to a cluster.

mod document;
mod files;
mod kinds;
mod names;
mod report;

pub use document::DocumentError;
pub use files::FileError;
pub use kinds::TemplatePath;
pub use report::{ConvertReport, ConvertResult, ObjectReport, text};

use std::collections::BTreeMap;

use serde_json::Value;
use tessera_dialect::{
    Conversion, ConversionError, Converter, LeaveReason, ManifestForm, NamespaceView, Verdict,
};

use document::Document;
use names::TemplateNames;

/// Conversion of manifests.
#[derive(Debug)]
pub struct Conversions<'c> {
    /// The conversion of a pod template.
    pub converter: &'c Converter,
    /// Namespace of objects that name none.
    pub namespace: &'c str,
    /// Places of pod templates in objects of kinds that the program does not know.
    pub template_paths: &'c [TemplatePath],
    /// True if pods shall tolerate taints named as their resources.
    pub add_tolerations: bool,
}

/// A file: its name for messages, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestFile {
    /// The name.
    pub name: String,
    /// The text.
    pub text: String,
}

/// Converted manifests.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// All documents. Not to be used if an object was refused.
    pub manifests: String,
    /// Results by object.
    pub report: ConvertReport,
}

impl Conversions<'_> {
    /// Converts all documents of the files.
    ///
    /// # Errors
    /// [`DocumentError`] if a document is not YAML. An object that is refused is no error; the
    /// report has it.
    pub fn convert(&self, files: &[ManifestFile]) -> Result<Converted, DocumentError> {
        let mut documents = Vec::new();
        for file in files {
            for document in Document::all(file)? {
                documents.push((file.name.as_str(), document));
            }
        }
        let values: Vec<_> =
            documents.iter().flat_map(|(_, document)| document.objects()).collect();
        let labels = namespace_labels(&values);
        let mut names = TemplateNames::taken_by(&values, self.namespace);
        let mut report = ConvertReport::default();
        let mut pieces = Vec::new();
        for (file, mut document) in documents {
            let mut run = Run { conversions: self, labels: &labels, names: &mut names };
            let (objects, templates) = run.document(file, &mut document);
            report.objects.extend(objects);
            pieces.extend(templates);
            pieces.push(document.into_text());
        }
        Ok(Converted { manifests: joined(pieces), report })
    }
}

/// One run over the documents.
struct Run<'r> {
    conversions: &'r Conversions<'r>,
    labels: &'r BTreeMap<String, BTreeMap<String, String>>,
    names: &'r mut TemplateNames,
}

impl Run<'_> {
    /// Converts the objects of a document. Returns their reports and the new templates.
    fn document(
        &mut self,
        file: &str,
        document: &mut Document,
    ) -> (Vec<ObjectReport>, Vec<String>) {
        let (mut reports, mut templates) = (Vec::new(), Vec::new());
        for (place, object) in document.places() {
            let mut report = ObjectReport::new(file, &object, self.conversions.namespace);
            for path in kinds::pod_templates(&object, self.conversions.template_paths) {
                let Some(pod) = object.pointer(&kinds::pointer(&path)) else { continue };
                match self.pod_template(&object, pod) {
                    Err(error) => report.refuse(&path, &error),
                    Ok(Verdict::Leave(LeaveReason::NothingToConvert)) => {}
                    Ok(Verdict::Leave(reason)) => report.leave(reason),
                    Ok(Verdict::Convert(conversion)) => {
                        templates.extend(self.names.manifest(&object, &conversion));
                        let full: Vec<_> = place.iter().chain(&path).cloned().collect();
                        let keeps = document.patch(&full, &conversion.patch);
                        report.convert(&path, &conversion, keeps);
                    }
                }
            }
            if report.result == ConvertResult::Unchanged {
                report.note_unknown_kind(&object, self.conversions);
            }
            reports.push(report);
        }
        (reports, templates)
    }

    fn pod_template(&mut self, object: &Value, pod: &Value) -> Result<Verdict, ConversionError> {
        let name = object["metadata"]["namespace"].as_str().unwrap_or(self.conversions.namespace);
        let none = BTreeMap::new();
        let namespace = NamespaceView { name, labels: self.labels.get(name).unwrap_or(&none) };
        let names = &mut *self.names;
        let mut template_name =
            |template: &tessera_dialect::Template| names.name(object, name, &template.spec);
        let mut form = ManifestForm {
            template_name: &mut template_name,
            add_tolerations: self.conversions.add_tolerations,
        };
        self.conversions.converter.convert_manifest(pod, namespace, &mut form)
    }
}

/// Returns the labels of the Namespaces among the objects.
fn namespace_labels(objects: &[Value]) -> BTreeMap<String, BTreeMap<String, String>> {
    let namespaces = objects.iter().filter(|object| object["kind"] == "Namespace");
    let labels = |object: &Value| {
        let labels = object["metadata"]["labels"].as_object().into_iter().flatten();
        labels
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
            .collect()
    };
    namespaces
        .filter_map(|object| {
            Some((object["metadata"]["name"].as_str()?.to_owned(), labels(object)))
        })
        .collect()
}

/// Returns the documents as one text.
fn joined(pieces: Vec<String>) -> String {
    let mut text = String::new();
    for piece in pieces {
        if !text.is_empty() {
            text.push_str("---\n");
        }
        text.push_str(&piece);
        if !text.ends_with('\n') {
            text.push('\n');
        }
    }
    text
}

/// Returns the claim of a conversion in words, a line per request.
fn requests(conversion: &Conversion) -> Vec<String> {
    let Some(template) = &conversion.template else { return vec!["no GPU".to_owned()] };
    let devices = &template.spec["spec"]["devices"];
    let requests = devices["requests"].as_array().into_iter().flatten();
    let line = |request: &Value| {
        let exactly = &request["exactly"];
        let name = request["name"].as_str().unwrap_or_default();
        let count = exactly["count"].as_u64().unwrap_or(1);
        let mut words = vec![format!("{count} GPU{}", if count == 1 { "" } else { "s" })];
        for amount in ["memory", "cores"] {
            let text = exactly["capacity"]["requests"][amount].as_str();
            words.extend(text.map(|text| format!("{amount} {text}")));
        }
        words.extend(parameters(devices, name));
        let names_memory = |word: &String| word.starts_with("memory") || word == "exclusive true";
        if !words.iter().any(names_memory) {
            words.insert(1, "all memory".to_owned());
        }
        format!("{name}: {}", words.join(", "))
    };
    requests.map(line).collect()
}

/// Returns the fields of the GpuConfig of a request, as `path value`.
fn parameters(devices: &Value, request: &str) -> Vec<String> {
    let configs = devices["config"].as_array().into_iter().flatten();
    let applies = |config: &&Value| {
        config["requests"].as_array().is_none_or(|names| names.iter().any(|name| name == request))
    };
    let mut words = Vec::new();
    for config in configs.filter(applies) {
        for (field, value) in config["opaque"]["parameters"].as_object().into_iter().flatten() {
            match value {
                _ if field == "apiVersion" || field == "kind" => {}
                Value::Object(fields) => words.extend(
                    fields.iter().map(|(name, value)| format!("{field}.{name} {}", plain(value))),
                ),
                value => words.push(format!("{field} {}", plain(value))),
            }
        }
    }
    words
}

/// Returns the values in the parameter without the punctuation of JSON.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" and "),
        // A term of `topology`, scope first.
        Value::Object(fields) => fields.values().rev().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}
