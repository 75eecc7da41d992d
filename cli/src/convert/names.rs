//! Names of the ResourceClaimTemplates of converted manifests.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tessera_dialect::Conversion;

/// Longest part of an object's name in the name of its template, so that the name with a number is
/// a DNS subdomain.
const MAX_BASE: usize = 240;

/// Names in use, by namespace and name, with the spec of each template.
#[derive(Debug, Default)]
pub(super) struct TemplateNames {
    specs: BTreeMap<(String, String), Value>,
    /// True if the last name is that of a template without a document.
    is_new: bool,
}

impl TemplateNames {
    /// Returns the names of the templates among the objects.
    pub(super) fn taken_by(objects: &[Value], namespace: &str) -> Self {
        let templates = objects.iter().filter(|object| object["kind"] == "ResourceClaimTemplate");
        let key = |object: &Value| {
            let metadata = &object["metadata"];
            let namespace = metadata["namespace"].as_str().unwrap_or(namespace);
            Some((namespace.to_owned(), metadata["name"].as_str()?.to_owned()))
        };
        let specs = templates.filter_map(|object| Some((key(object)?, object["spec"].clone())));
        Self { specs: specs.collect(), is_new: false }
    }

    /// Returns the name of a template with this spec for the object: that of the object with
    /// `-gpu`, numbered if another template has it.
    pub(super) fn name(&mut self, object: &Value, namespace: &str, spec: &Value) -> String {
        let base = base(object);
        let mut number = 1;
        self.is_new = false;
        loop {
            let name = match number {
                1 => format!("{base}-gpu"),
                number => format!("{base}-gpu-{number}"),
            };
            let key = (namespace.to_owned(), name.clone());
            match self.specs.get(&key) {
                Some(other) if other == spec => return name,
                Some(_) => number += 1,
                None => {
                    self.specs.insert(key, spec.clone());
                    self.is_new = true;
                    return name;
                }
            }
        }
    }

    /// Returns the document of the conversion's template, whose name is the last one, if it is new.
    pub(super) fn manifest(&self, object: &Value, conversion: &Conversion) -> Option<String> {
        let template = conversion.template.as_ref().filter(|_| self.is_new)?;
        let mut metadata = json!({"name": template.name});
        if let Some(namespace) = object["metadata"]["namespace"].as_str() {
            metadata["namespace"] = namespace.into();
        }
        let manifest = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": metadata,
            "spec": template.spec,
        });
        super::document::to_yaml(&manifest)
    }
}

fn base(object: &Value) -> String {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().or_else(|| metadata["generateName"].as_str());
    let name = name.or_else(|| object["kind"].as_str()).unwrap_or("pod").to_ascii_lowercase();
    let end = name.floor_char_boundary(MAX_BASE);
    name[..end].trim_end_matches(['-', '.']).to_owned()
}
