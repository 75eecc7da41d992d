//! A pod or pod template as JSON, read by field.
//!
//! Only the fields that dialects read are looked at; all others pass through unseen, so that a pod
//! of a newer Kubernetes keeps fields that this version does not know.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// A pod or pod template.
#[derive(Debug, Clone)]
pub(crate) struct Pod<'p> {
    root: &'p Value,
    /// Init containers in order, then regular containers in order.
    pub(crate) containers: Vec<Container<'p>>,
}

/// Kind of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Runs before the regular containers, and ends.
    Init,
    /// An init container that runs as long as the pod (`restartPolicy: Always`).
    Sidecar,
    /// A regular container.
    Regular,
}

/// A container.
#[derive(Debug, Clone)]
pub(crate) struct Container<'p> {
    root: &'p Value,
    pub(crate) kind: Kind,
    /// List that holds it: `containers` or `initContainers`.
    pub(crate) list: &'static str,
    /// Index in the list.
    pub(crate) index: usize,
    pub(crate) name: &'p str,
}

/// `limits` or `requests`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amounts {
    Limits,
    Requests,
}

impl Amounts {
    pub(crate) const BOTH: [Self; 2] = [Self::Limits, Self::Requests];

    pub(crate) const fn field(self) -> &'static str {
        match self {
            Self::Limits => "limits",
            Self::Requests => "requests",
        }
    }
}

/// A pod whose structure is not that of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotAPod {
    pub(crate) field: String,
    pub(crate) expected: &'static str,
}

impl<'p> Pod<'p> {
    /// Reads the structure of a pod.
    ///
    /// # Errors
    /// [`NotAPod`] if a list of containers is no list, or a container has no name.
    pub(crate) fn new(root: &'p Value) -> Result<Self, NotAPod> {
        let mut containers = Vec::new();
        let mut names = BTreeSet::new();
        for list in ["initContainers", "containers"] {
            let entries = match &root["spec"][list] {
                Value::Null => continue,
                Value::Array(entries) => entries,
                _ => return Err(NotAPod { field: format!("spec.{list}"), expected: "a list" }),
            };
            for (index, root) in entries.iter().enumerate() {
                let name = root["name"].as_str().ok_or_else(|| NotAPod {
                    field: format!("spec.{list}[{index}].name"),
                    expected: "a name",
                })?;
                // What was removed is kept by name.
                if !names.insert(name) {
                    let field = format!("spec.{list}[{index}].name");
                    let expected = "a name that no other container of the pod has";
                    return Err(NotAPod { field, expected });
                }
                let kind = match (list, root["restartPolicy"].as_str()) {
                    ("containers", _) => Kind::Regular,
                    (_, Some("Always")) => Kind::Sidecar,
                    _ => Kind::Init,
                };
                containers.push(Container { root, kind, list, index, name });
            }
        }
        Ok(Self { root, containers })
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&'p str> {
        self.root["metadata"]["annotations"].get(name)?.as_str()
    }

    pub(crate) fn label(&self, name: &str) -> Option<&'p str> {
        self.root["metadata"]["labels"].get(name)?.as_str()
    }

    /// Returns the number of annotations.
    pub(crate) fn annotations(&self) -> usize {
        self.root["metadata"]["annotations"].as_object().map_or(0, serde_json::Map::len)
    }

    pub(crate) fn has_annotations(&self) -> bool {
        self.root["metadata"]["annotations"].is_object()
    }

    pub(crate) fn scheduler(&self) -> &'p str {
        self.root["spec"]["schedulerName"].as_str().unwrap_or_default()
    }

    pub(crate) fn has_scheduler(&self) -> bool {
        self.root["spec"]["schedulerName"].is_string()
    }

    pub(crate) fn node_name(&self) -> Option<&'p str> {
        self.root["spec"]["nodeName"].as_str().filter(|name| !name.is_empty())
    }

    pub(crate) fn node_selector(&self, label: &str) -> Option<&'p str> {
        self.root["spec"]["nodeSelector"].get(label)?.as_str()
    }

    pub(crate) fn uses_host_ipc(&self) -> bool {
        self.root["spec"]["hostIPC"] == true
    }

    /// Returns those of the resources that a container names with an amount other than 0.
    pub(crate) fn resources_of(&self, resources: &[String]) -> Vec<String> {
        let is_named = |resource: &&String| {
            let amount = |c: &Container<'_>| c.amount(Amounts::Limits, resource);
            self.containers.iter().filter_map(amount).any(|amount| amount != "0")
        };
        resources.iter().filter(is_named).cloned().collect()
    }

    /// Returns the keys of `spec.tolerations`; `None` if there is no list.
    pub(crate) fn tolerated_keys(&self) -> Option<Vec<&'p str>> {
        let tolerations = self.root["spec"]["tolerations"].as_array()?;
        Some(tolerations.iter().filter_map(|toleration| toleration["key"].as_str()).collect())
    }

    /// Returns the names of `spec.resourceClaims`; `None` if there is no list.
    pub(crate) fn claim_names(&self) -> Option<Vec<&'p str>> {
        let claims = self.root["spec"]["resourceClaims"].as_array()?;
        Some(claims.iter().filter_map(|claim| claim["name"].as_str()).collect())
    }
}

impl<'p> Container<'p> {
    /// Path of a field, for messages.
    pub(crate) fn path(&self, field: &str) -> String {
        format!("spec.{}[{}].{field}", self.list, self.index)
    }

    /// Returns an amount of `limits` or `requests` as text.
    pub(crate) fn amount(&self, amounts: Amounts, resource: &str) -> Option<String> {
        match self.amounts(amounts)?.get(resource)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }

    pub(crate) fn amounts(&self, amounts: Amounts) -> Option<&'p Map<String, Value>> {
        self.root["resources"][amounts.field()].as_object()
    }

    /// Returns true if the resource is in `limits` or `requests`.
    pub(crate) fn names(&self, resource: &str) -> bool {
        Amounts::BOTH.into_iter().any(|amounts| self.amount(amounts, resource).is_some())
    }

    pub(crate) fn has_claims(&self) -> bool {
        self.root["resources"]["claims"].is_array()
    }

    pub(crate) fn has_resources(&self) -> bool {
        self.root["resources"].is_object()
    }

    pub(crate) fn has_env(&self) -> bool {
        self.root["env"].is_array()
    }

    /// Returns the value of an environment variable; the last one counts.
    pub(crate) fn env(&self, name: &str) -> Option<&'p str> {
        let variables = self.root["env"].as_array()?;
        let named = variables.iter().rfind(|variable| variable["name"] == name)?;
        Some(named["value"].as_str().unwrap_or_default())
    }

    pub(crate) fn is_privileged(&self) -> bool {
        self.root["securityContext"]["privileged"] == true
    }
}
