//! Manifests: YAML or JSON documents in the form that kubectl accepts.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod, PodTemplateSpec};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::scheduling::v1beta1::PodGroup;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tessera_api::config::API_VERSION;
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::{ClaimName, NameError, Namespace, PodName};
use tessera_api::quota::GpuQuota;
use tessera_api::volcano::VolcanoPodGroup;

/// An object of a manifest.
#[derive(Debug, Clone)]
pub(super) enum Object {
    Pod(Box<Pod>),
    Claim(Box<ResourceClaim>),
    Template(Box<ResourceClaimTemplate>),
    Class(Box<DeviceClass>),
    Node(Box<Node>),
    Slice(Box<ResourceSlice>),
    TaintRule(Box<DeviceTaintRule>),
    Quota(Box<GpuQuota>),
    PriorityClass(Box<PriorityClass>),
    PodGroup(Box<PodGroup>),
    VolcanoPodGroup(Box<VolcanoPodGroup>),
    Defaults(Box<GpuDefaults>),
    Workload(Box<Workload>),
}

/// An object that creates pods.
#[derive(Debug, Clone)]
pub(super) struct Workload {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) replicas: usize,
    pub(super) template: PodTemplateSpec,
}

/// The objects of manifests.
#[derive(Debug, Clone, Default)]
pub(super) struct Manifests {
    pub(super) objects: Vec<Object>,
    pub(super) notes: Vec<String>,
}

/// Error returned when manifests cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The text is not YAML.
    #[error("neither YAML nor JSON")]
    Yaml(#[from] Box<serde_saphyr::Error>),
    /// A document has no kind.
    #[error("document {document} is no Kubernetes manifest: it has no `kind` or no `apiVersion`")]
    NoKind {
        /// Number of the document, from 1.
        document: usize,
    },
    /// The version is not supported.
    #[error("{kind} `{name}` has apiVersion `{found}`; convert it to `{expected}`")]
    Version {
        /// Kind of the object.
        kind: String,
        /// Name of the object.
        name: String,
        /// Version of the object.
        found: String,
        /// Supported version.
        expected: &'static str,
    },
    /// A field has the wrong type.
    #[error("{kind} `{name}` is invalid")]
    Object {
        /// Kind of the object.
        kind: String,
        /// Name of the object.
        name: String,
        /// The cause, with the field.
        source: serde_json::Error,
    },
    /// A name is invalid.
    #[error("{kind} has an invalid `{field}`")]
    Name {
        /// Kind of the object.
        kind: &'static str,
        /// The field.
        field: &'static str,
        /// The cause.
        source: NameError,
    },
    /// The API server refuses a pod without its PriorityClass.
    #[error(
        "Pod `{pod}` has the priorityClassName `{class}`, and no such PriorityClass exists (list \
         them with `kubectl get priorityclasses`, or add the class to the files)"
    )]
    PriorityClass {
        /// Name of the pod.
        pod: String,
        /// Name of the class.
        class: String,
    },
    /// No object creates pods.
    #[error("nothing to simulate: found no Pod, Deployment, StatefulSet, ReplicaSet or Job")]
    NoPods,
}

/// Reads all documents. Objects without a namespace get `namespace`.
pub(super) fn read(text: &str, namespace: &Namespace) -> Result<Manifests, ManifestError> {
    let documents: Vec<Value> = crate::yaml::from_multiple(text).map_err(Box::new)?;
    let mut manifests = Manifests::default();
    for (number, document) in documents.into_iter().enumerate() {
        manifests.document(document, number + 1, namespace)?;
    }
    let creates_pods = |object: &Object| matches!(object, Object::Pod(_) | Object::Workload(_));
    if !manifests.objects.iter().any(creates_pods) {
        return Err(ManifestError::NoPods);
    }
    Ok(manifests)
}

impl Manifests {
    fn document(
        &mut self,
        mut value: Value,
        number: usize,
        namespace: &Namespace,
    ) -> Result<(), ManifestError> {
        if value.is_null() {
            return Ok(());
        }
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let (Some(version), Some(kind)) = (text("apiVersion"), text("kind")) else {
            return Err(ManifestError::NoKind { document: number });
        };
        if kind == "List" {
            let items = value.get_mut("items").and_then(Value::as_array_mut).map(std::mem::take);
            return items
                .into_iter()
                .flatten()
                .try_for_each(|item| self.document(item, number, namespace));
        }
        quote_amounts(&mut value);
        let mut reader = Reader { notes: &mut self.notes, version: &version, kind: &kind, value };
        if let Some(object) = reader.object(namespace)? {
            self.objects.push(object);
        }
        Ok(())
    }
}

/// Reads one object.
struct Reader<'r> {
    notes: &'r mut Vec<String>,
    version: &'r str,
    kind: &'r str,
    value: Value,
}

impl Reader<'_> {
    fn object(&mut self, namespace: &Namespace) -> Result<Option<Object>, ManifestError> {
        const RESOURCE: &str = "resource.k8s.io/v1";
        let set_namespace = |metadata: &mut ObjectMeta| {
            metadata.namespace.get_or_insert_with(|| namespace.to_string());
        };
        Ok(Some(match self.kind {
            "Pod" => {
                let mut pod: Pod = self.typed("v1")?;
                set_namespace(&mut pod.metadata);
                named(&mut pod.metadata, "Pod", |name| PodName::new(name).map(drop))?;
                Object::Pod(Box::new(pod))
            }
            "ResourceClaim" => {
                let mut claim: ResourceClaim = self.typed(RESOURCE)?;
                set_namespace(&mut claim.metadata);
                named(&mut claim.metadata, "ResourceClaim", |name| ClaimName::new(name).map(drop))?;
                Object::Claim(Box::new(claim))
            }
            "ResourceClaimTemplate" => {
                let mut template: ResourceClaimTemplate = self.typed(RESOURCE)?;
                set_namespace(&mut template.metadata);
                Object::Template(Box::new(template))
            }
            "DeviceClass" => Object::Class(Box::new(self.typed(RESOURCE)?)),
            "ResourceSlice" => Object::Slice(Box::new(self.typed(RESOURCE)?)),
            "DeviceTaintRule" => Object::TaintRule(Box::new(self.typed(RESOURCE)?)),
            "GpuDefaults" => {
                let mut defaults: GpuDefaults = self.typed(API_VERSION)?;
                set_namespace(&mut defaults.metadata);
                Object::Defaults(Box::new(defaults))
            }
            "GpuQuota" => {
                let mut quota: GpuQuota = self.typed(API_VERSION)?;
                set_namespace(&mut quota.metadata);
                Object::Quota(Box::new(quota))
            }
            "PodGroup" if self.version.starts_with("scheduling.k8s.io/") => {
                let mut group: PodGroup = self.typed("scheduling.k8s.io/v1beta1")?;
                set_namespace(&mut group.metadata);
                Object::PodGroup(Box::new(group))
            }
            "PodGroup" if self.version.starts_with("scheduling.volcano.sh/") => {
                let mut group: VolcanoPodGroup = self.typed("scheduling.volcano.sh/v1beta1")?;
                set_namespace(&mut group.metadata);
                Object::VolcanoPodGroup(Box::new(group))
            }
            "PriorityClass" => Object::PriorityClass(Box::new(self.typed("scheduling.k8s.io/v1")?)),
            "Node" => Object::Node(Box::new(self.typed("v1")?)),
            "Deployment" | "ReplicaSet" | "StatefulSet" | "Job" => {
                let mut workload = self.workload()?;
                workload.namespace.get_or_insert_with(|| namespace.to_string());
                Object::Workload(Box::new(workload))
            }
            kind => {
                self.notes.push(format!(
                    "{kind} {} is skipped: simulate creates no pods from this kind",
                    name_of(&self.value)
                ));
                return Ok(None);
            }
        }))
    }

    fn workload(&mut self) -> Result<Workload, ManifestError> {
        let missing = PodTemplateSpec::default;
        let (metadata, replicas, template) = match self.kind {
            "Deployment" => {
                let Deployment { metadata, spec, .. } = self.typed("apps/v1")?;
                (metadata, spec.replicas, spec.template)
            }
            "StatefulSet" => {
                let StatefulSet { metadata, spec, .. } = self.typed("apps/v1")?;
                (metadata, spec.replicas, spec.template)
            }
            "ReplicaSet" => {
                let ReplicaSet { metadata, spec, .. } = self.typed("apps/v1")?;
                (metadata, spec.replicas, spec.template.unwrap_or_else(missing))
            }
            _ => {
                let Job { metadata, spec, .. } = self.typed("batch/v1")?;
                let spec = spec.unwrap_or_default();
                let parallelism = spec.parallelism.unwrap_or(1);
                (
                    metadata,
                    Some(spec.completions.map_or(parallelism, |all| all.min(parallelism))),
                    spec.template,
                )
            }
        };
        let name = metadata.name.or(metadata.generate_name).unwrap_or_default();
        let replicas = usize::try_from(replicas.unwrap_or(1)).unwrap_or(0);
        Ok(Workload {
            namespace: metadata.namespace,
            name: name.trim_end_matches('-').to_owned(),
            replicas,
            template,
        })
    }

    /// Returns the typed object, with a note for each unknown field.
    fn typed<T: DeserializeOwned + Serialize>(
        &mut self,
        expected: &'static str,
    ) -> Result<T, ManifestError> {
        let (kind, name) = (self.kind.to_owned(), name_of(&self.value));
        if self.version != expected {
            return Err(ManifestError::Version {
                kind,
                name,
                found: self.version.to_owned(),
                expected,
            });
        }
        let failed =
            |source| ManifestError::Object { kind: kind.clone(), name: name.clone(), source };
        let typed: T = serde_json::from_value(self.value.clone()).map_err(failed)?;
        let kept = serde_json::to_value(&typed).map_err(failed)?;
        let mut unknown = Vec::new();
        unknown_fields(&self.value, &kept, String::new(), &mut unknown);
        self.notes.extend(
            unknown.iter().map(|field| format!("{kind} {name}: unknown field {field} is ignored")),
        );
        Ok(typed)
    }
}

fn name_of(value: &Value) -> String {
    let name = value.pointer("/metadata/name").or_else(|| value.pointer("/metadata/generateName"));
    name.and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Checks the name. A generated name gets `0` in place of its random suffix.
fn named(
    metadata: &mut ObjectMeta,
    kind: &'static str,
    check: impl Fn(&str) -> Result<(), NameError>,
) -> Result<(), ManifestError> {
    if metadata.name.is_none() {
        metadata.name = metadata.generate_name.as_ref().map(|prefix| format!("{prefix}0"));
    }
    let failed = |field| move |source| ManifestError::Name { kind, field, source };
    check(metadata.name.as_deref().unwrap_or_default()).map_err(failed("metadata.name"))?;
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    Namespace::new(namespace).map(drop).map_err(failed("metadata.namespace"))
}

/// Converts numbers to quantities, as the API server does: users write `cores: 25`.
fn quote_amounts(value: &mut Value) {
    const MAPS_OF_AMOUNTS: [&str; 5] =
        ["requests", "limits", "overhead", "allocatable", "capacity"];
    match value {
        Value::Array(items) => items.iter_mut().for_each(quote_amounts),
        Value::Object(fields) => {
            for (key, inner) in fields.iter_mut() {
                if let (true, Value::Object(amounts)) =
                    (MAPS_OF_AMOUNTS.contains(&key.as_str()), &mut *inner)
                {
                    for amount in amounts.values_mut().filter(|amount| amount.is_number()) {
                        *amount = Value::String(amount.to_string());
                    }
                }
                quote_amounts(inner);
            }
        }
        _ => {}
    }
}

/// Collects the paths that are in `given` and not in `kept`.
fn unknown_fields(given: &Value, kept: &Value, path: String, unknown: &mut Vec<String>) {
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => {
            for (key, value) in given.iter().filter(|(_, value)| !value.is_null()) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                match kept.get(key) {
                    Some(kept) => unknown_fields(value, kept, path, unknown),
                    // Serialization may drop empty lists and maps.
                    None if is_empty(value) => {}
                    None => unknown.push(path),
                }
            }
        }
        (Value::Array(given), Value::Array(kept)) => {
            for (i, (given, kept)) in given.iter().zip(kept).enumerate() {
                unknown_fields(given, kept, format!("{path}[{i}]"), unknown);
            }
        }
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
        || value.as_object().is_some_and(serde_json::Map::is_empty)
}
