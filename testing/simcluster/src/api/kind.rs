//! The served kinds.

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
    /// Singular name, for discovery.
    pub singular: &'static str,
    /// Kind in objects.
    pub kind: &'static str,
    /// Short names for kubectl.
    pub short: &'static [&'static str],
    /// True if objects belong to a namespace.
    pub namespaced: bool,
    /// Type of the status subresource.
    pub status: StatusSubresource,
    /// True if the server counts `metadata.generation`.
    pub generation: bool,
    /// True if PUT and apply may create the object.
    pub create_on_update: bool,
    /// True if PUT requires a resourceVersion.
    pub versioned_update: bool,
    /// True if the response to a deletion contains the removed object.
    pub returns_deleted: bool,
    /// Field labels supported in selectors, besides metadata.name and metadata.namespace.
    pub fields: &'static [&'static str],
    /// Table of the store that holds the objects. Two group-versions of one resource share a
    /// table.
    pub table: &'static str,
    /// Decodes and prunes by the Kubernetes schema.
    pub(crate) decode: typed::Decode,
    /// Converts this version's object into the stored one, if they differ.
    pub(crate) store: Option<fn(Value) -> Value>,
    /// Converts the stored object into this version's, if they differ.
    pub(crate) present: Option<fn(Value) -> Value>,
}

/// Type of a kind's status subresource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusSubresource {
    /// No status subresource.
    None,
    /// StatusSubresource is written only through `/status`, which may also change metadata (labels,
    /// annotations).
    WithMetadata,
    /// StatusSubresource is written only through `/status`, which leaves metadata unchanged.
    StatusOnly,
}

impl Kind {
    /// Returns `group/version`, or `v1` for core.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// Returns `plural.group`, as messages name a resource.
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

/// Finds a served resource by `apiVersion` and `kind`, as in owner references.
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
                status: StatusSubresource::None,
                generation: false,
                create_on_update: false,
                versioned_update: false,
                returns_deleted: false,
                fields: &[],
                table: $plural,
                decode: typed::decode::<$type>,
                store: None,
                present: None,
            }
        }
    };
}

use k8s_openapi::api::{coordination, core, events, resource};

/// All served kinds.
pub static KINDS: &[Kind] = &[
    kind!("", "v1", "configmaps", "configmap", "ConfigMap", core::v1::ConfigMap, short: &["cm"]),
    kind!("", "v1", "events", "event", "Event", core::v1::Event,
        short: &["ev"], fields: event::CORE_FIELDS, create_on_update: true),
    kind!("", "v1", "namespaces", "namespace", "Namespace", core::v1::Namespace, returns_deleted: true,
        short: &["ns"], namespaced: false, status: StatusSubresource::WithMetadata, fields: &["status.phase"]),
    kind!("", "v1", "nodes", "node", "Node", core::v1::Node,
        short: &["no"], namespaced: false, status: StatusSubresource::WithMetadata, fields: &["spec.unschedulable"]),
    kind!("", "v1", "pods", "pod", "Pod", core::v1::Pod, returns_deleted: true,
        short: &["po"], status: StatusSubresource::WithMetadata, generation: true,
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
        status: StatusSubresource::StatusOnly),
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
    kind!(RESOURCE, "v1", "devicetaintrules", "devicetaintrule", "DeviceTaintRule", resource::v1::DeviceTaintRule, returns_deleted: true,
        namespaced: false, status: StatusSubresource::StatusOnly, generation: true),
    kind!("gpu.tessera.dev", "v1alpha1", "gpuquotas", "gpuquota", "GpuQuota", tessera_api::quota::GpuQuota,
        status: StatusSubresource::StatusOnly, generation: true),
    kind!("gpu.tessera.dev", "v1alpha1", "gpudefaults", "gpudefaults", "GpuDefaults", tessera_api::defaults::GpuDefaults,
        generation: true),
    kind!("gpu.tessera.dev", "v1alpha1", "gpuresizes", "gpuresize", "GpuResize", tessera_api::resize::GpuResize,
        status: StatusSubresource::StatusOnly, generation: true, fields: &["status.node"]),
];
