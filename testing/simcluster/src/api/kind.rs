//! The table of what is served.

use serde_json::Value;

use super::{event, typed};

/// One resource of the API.
#[derive(Debug)]
pub struct Kind {
    /// API group, empty for core.
    pub group: &'static str,
    /// API version inside the group.
    pub version: &'static str,
    /// Resource name in paths.
    pub plural: &'static str,
    /// Singular name, as discovery tells it.
    pub singular: &'static str,
    /// Kind in objects.
    pub kind: &'static str,
    /// Short names for kubectl.
    pub short: &'static [&'static str],
    /// Whether objects live in namespaces.
    pub namespaced: bool,
    /// How the status subresource works.
    pub status: Status,
    /// Whether the server counts `metadata.generation`.
    pub generation: bool,
    /// Whether PUT and apply may create the object.
    pub create_on_update: bool,
    /// Whether PUT needs a resourceVersion.
    pub versioned_update: bool,
    /// Whether the answer to a deletion shows the object that is gone.
    pub returns_deleted: bool,
    /// Field labels a selector may use, besides metadata.name and metadata.namespace.
    pub fields: &'static [&'static str],
    /// Which shelf of the store holds the objects. Two group-versions of one resource share a
    /// shelf.
    pub shelf: &'static str,
    /// Decodes and prunes by the Kubernetes schema.
    pub(crate) decode: typed::Decode,
    /// Turns this version's object into the stored one, where they differ.
    pub(crate) store: Option<fn(Value) -> Value>,
    /// Turns the stored object into this version's, where they differ.
    pub(crate) present: Option<fn(Value) -> Value>,
}

/// What a kind does with its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// There is no status subresource.
    None,
    /// Status only through `/status`, which leaves metadata mutable (labels, annotations).
    WithMetadata,
    /// Status only through `/status`, which resets metadata to what it was.
    StatusOnly,
}

impl Kind {
    /// `group/version`, or `v1` for core.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// `plural.group`, as messages name a resource.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }
}

/// Finds a served resource by the three parts of its path.
pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Kind> {
    KINDS
        .iter()
        .find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
}

/// Finds a served resource by `apiVersion` and `kind`, as owner references name it.
pub(crate) fn find_by_kind(api_version: &str, name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.kind == name && kind.api_version() == api_version)
}

const RESOURCE: &str = "resource.k8s.io";

macro_rules! kind {
    ($group:expr, $version:literal, $plural:literal, $singular:literal, $kind:literal, $type:ty $(, $field:ident: $value:expr)*) => {
        Kind {
            $($field: $value,)*
            ..Kind {
                group: $group,
                version: $version,
                plural: $plural,
                singular: $singular,
                kind: $kind,
                short: &[],
                namespaced: true,
                status: Status::None,
                generation: false,
                create_on_update: false,
                versioned_update: false,
                returns_deleted: false,
                fields: &[],
                shelf: $plural,
                decode: typed::decode::<$type>,
                store: None,
                present: None,
            }
        }
    };
}

use k8s_openapi::api::{coordination, core, events, resource};

/// Everything that is served.
pub static KINDS: &[Kind] = &[
    kind!("", "v1", "configmaps", "configmap", "ConfigMap", core::v1::ConfigMap, short: &["cm"]),
    kind!("", "v1", "events", "event", "Event", core::v1::Event,
        short: &["ev"], fields: event::CORE_FIELDS, create_on_update: true),
    kind!("", "v1", "namespaces", "namespace", "Namespace", core::v1::Namespace, returns_deleted: true,
        short: &["ns"], namespaced: false, status: Status::WithMetadata, fields: &["status.phase"]),
    kind!("", "v1", "nodes", "node", "Node", core::v1::Node,
        short: &["no"], namespaced: false, status: Status::WithMetadata, fields: &["spec.unschedulable"]),
    kind!("", "v1", "pods", "pod", "Pod", core::v1::Pod, returns_deleted: true,
        short: &["po"], status: Status::WithMetadata, generation: true,
        fields: &["spec.nodeName", "spec.schedulerName", "spec.restartPolicy", "spec.serviceAccountName",
            "spec.hostNetwork", "status.phase", "status.podIP", "status.nominatedNodeName"]),
    kind!("", "v1", "serviceaccounts", "serviceaccount", "ServiceAccount", core::v1::ServiceAccount, returns_deleted: true, short: &["sa"]),
    kind!("events.k8s.io", "v1", "events", "event", "Event", events::v1::Event,
        short: &["ev"], fields: event::EVENTS_FIELDS, create_on_update: true,
        store: Some(event::to_core), present: Some(event::from_core)),
    kind!("coordination.k8s.io", "v1", "leases", "lease", "Lease", coordination::v1::Lease,
        create_on_update: true, versioned_update: true),
    kind!(RESOURCE, "v1", "deviceclasses", "deviceclass", "DeviceClass", resource::v1::DeviceClass, returns_deleted: true,
        namespaced: false, generation: true),
    kind!(RESOURCE, "v1", "resourceclaims", "resourceclaim", "ResourceClaim", resource::v1::ResourceClaim, returns_deleted: true,
        status: Status::StatusOnly),
    kind!(
        RESOURCE,
        "v1",
        "resourceclaimtemplates",
        "resourceclaimtemplate",
        "ResourceClaimTemplate",
        resource::v1::ResourceClaimTemplate, returns_deleted: true
    ),
    kind!(RESOURCE, "v1", "resourceslices", "resourceslice", "ResourceSlice", resource::v1::ResourceSlice, returns_deleted: true,
        namespaced: false, generation: true, fields: &["spec.nodeName", "spec.driver", "spec.pool.name"]),
];
