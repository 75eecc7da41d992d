//! Kubernetes objects of any kind, as written in scenario files.

use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde_json::Value;

/// Kinds that scenario files may use without an `apiVersion`: kind, API version, namespaced.
const KINDS: [(&str, &str, bool); 7] = [
    ("Pod", "v1", true),
    ("ConfigMap", "v1", true),
    ("Namespace", "v1", false),
    ("Node", "v1", false),
    ("ResourceClaim", "resource.k8s.io/v1", true),
    ("ResourceClaimTemplate", "resource.k8s.io/v1", true),
    ("DeviceClass", "resource.k8s.io/v1", false),
];

/// Error for a kind that scenario files cannot use.
#[derive(Debug, thiserror::Error)]
#[error("unsupported kind `{kind}`; supported in scenario files: {}", KINDS.map(|(kind, ..)| kind).join(", "))]
pub struct UnknownKind {
    kind: String,
}

/// Returns the API for that kind; in the namespace if the kind is namespaced.
///
/// # Errors
/// Returns an error if the kind is not in the list.
pub fn api(
    client: &Client,
    kind: &str,
    namespace: &str,
) -> Result<Api<DynamicObject>, UnknownKind> {
    let (api_version, namespaced) = look_up(kind)?;
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    Ok(if namespaced {
        Api::namespaced_with(client.clone(), namespace, &resource)
    } else {
        Api::all_with(client.clone(), &resource)
    })
}

fn look_up(kind: &str) -> Result<(&'static str, bool), UnknownKind> {
    KINDS
        .iter()
        .find(|(known, ..)| *known == kind)
        .map(|(_, api_version, namespaced)| (*api_version, *namespaced))
        .ok_or_else(|| UnknownKind { kind: kind.to_owned() })
}

/// Returns true if objects of that kind are cluster-scoped and outlive the scenario's namespace.
pub fn is_cluster_scoped(kind: &str) -> bool {
    look_up(kind).is_ok_and(|(_, namespaced)| !namespaced)
}

/// Returns the object with its `apiVersion` and with `${i}` replaced by `number`.
///
/// # Errors
/// Returns an error if the kind is not in the list.
pub fn complete(object: &Value, number: u32) -> Result<Value, UnknownKind> {
    let mut object = numbered(object, &number.to_string());
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    let (api_version, _) = look_up(&kind)?;
    if object["apiVersion"].is_null() {
        object["apiVersion"] = api_version.into();
    }
    Ok(object)
}

fn numbered(value: &Value, number: &str) -> Value {
    match value {
        Value::String(text) => text.replace("${i}", number).into(),
        Value::Array(values) => values.iter().map(|value| numbered(value, number)).collect(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| (name.clone(), numbered(value, number)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn replaces_number_in_every_string_of_object() {
        let object = json!({"kind": "Pod", "metadata": {"name": "pod-${i}"}, "spec": {"containers": [{"name": "c${i}"}]}});
        let object = complete(&object, 3).unwrap();
        assert_eq!(object["metadata"]["name"], "pod-3");
        assert_eq!(object["spec"]["containers"][0]["name"], "c3");
        assert_eq!(object["apiVersion"], "v1");
    }

    #[test]
    fn unknown_kind_error_lists_supported_kinds() {
        let error = complete(&json!({"kind": "Deployment"}), 1).unwrap_err().to_string();
        assert!(
            error.contains("`Deployment`") && error.contains("ResourceClaimTemplate"),
            "{error}"
        );
    }
}
