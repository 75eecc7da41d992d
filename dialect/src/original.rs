//! The annotation that keeps what a conversion removed from a pod.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::dialects::Names;
use crate::name::Dialect;
use crate::pod::{Amounts, Pod};

/// Annotation of a converted pod: what the conversion removed, as JSON.
pub const CONVERTED_ANNOTATION: &str = "gpu.tessera.dev/converted";

/// Fields that a conversion removed from a pod, from which the claim template can be computed
/// again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Original {
    /// The dialect.
    pub dialect: Dialect,
    /// Amounts by container. By name, since other webhooks insert containers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub containers: BTreeMap<String, OriginalAmounts>,
    /// Annotations that the dialect reads.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The scheduler, if it was replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
}

/// Amounts of the dialect's resources in a container.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OriginalAmounts {
    /// `resources.limits`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
    /// `resources.requests`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
}

/// An annotation that is not what a conversion writes.
#[derive(Debug, thiserror::Error)]
#[error("annotation {CONVERTED_ANNOTATION}: not written by a conversion")]
pub struct OriginalError(#[source] serde_json::Error);

impl Original {
    /// Returns the content of a pod's annotation; `None` if it has none.
    ///
    /// # Errors
    /// [`OriginalError`] if it does not parse.
    pub fn of(pod: &Value) -> Option<Result<Self, OriginalError>> {
        let text = pod["metadata"]["annotations"].get(CONVERTED_ANNOTATION)?.as_str()?;
        Some(serde_json::from_str(text).map_err(OriginalError))
    }

    pub(crate) fn removed_from(
        pod: &Pod<'_>,
        dialect: Dialect,
        names: &Names,
        replaces_scheduler: bool,
    ) -> Self {
        let mut containers = BTreeMap::new();
        for container in &pod.containers {
            let of = |amounts: Amounts| -> BTreeMap<String, String> {
                let named = names.resources.iter();
                named.filter_map(|n| Some((n.clone(), container.amount(amounts, n)?))).collect()
            };
            let own =
                OriginalAmounts { limits: of(Amounts::Limits), requests: of(Amounts::Requests) };
            if own != OriginalAmounts::default() {
                containers.insert(container.name.to_owned(), own);
            }
        }
        let annotation = |name: &String| Some((name.clone(), pod.annotation(name)?.to_owned()));
        Self {
            dialect,
            containers,
            annotations: names.annotations.iter().filter_map(annotation).collect(),
            scheduler_name: replaces_scheduler.then(|| pod.scheduler().to_owned()),
        }
    }

    /// Returns the pod as it was before the conversion, as far as its claim depends on it: with the
    /// amounts, annotations and scheduler that were removed. Containers that the pod does not have
    /// are left out.
    #[must_use]
    pub fn restored(&self, pod: &Value) -> Value {
        let mut pod = pod.clone();
        if let Some(annotations) = annotations_of(&mut pod) {
            annotations.remove(CONVERTED_ANNOTATION);
            let added = self.annotations.iter();
            annotations.extend(added.map(|(name, value)| (name.clone(), value.as_str().into())));
        }
        let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else { return pod };
        if let Some(scheduler) = &self.scheduler_name {
            spec.insert("schedulerName".to_owned(), scheduler.as_str().into());
        }
        for list in ["initContainers", "containers"] {
            let containers = spec.get_mut(list).and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten() {
                let name = container["name"].as_str().unwrap_or_default();
                let Some(amounts) = self.containers.get(name) else { continue };
                merge(container, "limits", &amounts.limits);
                merge(container, "requests", &amounts.requests);
            }
        }
        pod
    }
}

fn annotations_of(pod: &mut Value) -> Option<&mut Map<String, Value>> {
    pod.get_mut("metadata")?.get_mut("annotations")?.as_object_mut()
}

/// Adds amounts to a container. Only called for containers with a name, which are objects.
fn merge(container: &mut Value, field: &str, amounts: &BTreeMap<String, String>) {
    if amounts.is_empty() {
        return;
    }
    if !container["resources"].is_object() {
        container["resources"] = json!({});
    }
    let resources = &mut container["resources"];
    if !resources[field].is_object() {
        resources[field] = Value::Object(Map::new());
    }
    for (name, amount) in amounts {
        resources[field][name] = amount.as_str().into();
    }
}
