//! The state of a cluster at one moment, read from the API server or from a saved file.
//!
//! Each object is reduced to an allow-list of fields, so a live cluster and its file give the same
//! results, and the file contains only fields that planning reads.
//! docs/reference/kubectl-plugin.md documents the format.

mod file;
mod trim;

pub use file::{FileError, VERSION};
pub use trim::{
    trimmed_claim, trimmed_class, trimmed_defaults, trimmed_lease, trimmed_node, trimmed_pod,
    trimmed_pod_group, trimmed_priority_class, trimmed_quota, trimmed_rule, trimmed_slice,
    trimmed_template, trimmed_volcano_pod_group,
};

use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::scheduling::v1beta1::PodGroup;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::ManagedDrivers;
use tessera_api::quota::GpuQuota;
use tessera_api::slice::fenced_driver;
use tessera_api::volcano::VolcanoPodGroup;
use tessera_index::{Index, PodGroupApi};
use tessera_runtime::error_chain::chain;

/// The objects that planning depends on, each reduced to the fields that planning reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Snapshot {
    /// Time of the snapshot, by the clock of the machine that took it.
    pub taken_at: Timestamp,
    /// Version of the API server, such as `v1.37.1`.
    pub kubernetes: String,
    /// Kinds that could not be read, each with the reason.
    pub not_read: Vec<NotRead>,
    /// ResourceSlices of managed drivers.
    pub resource_slices: Vec<ResourceSlice>,
    /// DeviceTaintRules.
    pub device_taint_rules: Vec<DeviceTaintRule>,
    /// DeviceClasses.
    pub device_classes: Vec<DeviceClass>,
    /// ResourceClaims of all drivers.
    pub resource_claims: Vec<ResourceClaim>,
    /// ResourceClaimTemplates.
    pub resource_claim_templates: Vec<ResourceClaimTemplate>,
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Pods, except completed pods without claims.
    pub pods: Vec<Pod>,
    /// GpuQuotas.
    pub gpu_quotas: Vec<GpuQuota>,
    /// GpuDefaults of namespaces.
    pub gpu_defaults: Vec<GpuDefaults>,
    /// PriorityClasses; none if they were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_classes: Option<Vec<PriorityClass>>,
    /// PodGroups of Kubernetes; none if the API server does not serve them or they were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_groups: Option<Vec<PodGroup>>,
    /// PodGroups of Volcano, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volcano_pod_groups: Option<Vec<VolcanoPodGroup>>,
    /// Leases of the controller; several if it runs in several namespaces.
    pub leases: Vec<Lease>,
}

/// A kind that could not be read, so explanations may be incomplete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRead {
    /// The resource, such as `leases.coordination.k8s.io`.
    pub resource: String,
    /// The reason.
    pub because: String,
}

/// A snapshot as the controller sees the cluster.
pub struct IndexedSnapshot {
    /// The controller's index of the objects.
    pub index: Index,
    /// Errors about objects that the index refused.
    pub refused: Vec<String>,
}

/// Returns the drivers whose devices Tessera allocates: those that have a fence.
pub fn managed_drivers(rules: &[DeviceTaintRule]) -> ManagedDrivers {
    rules.iter().filter_map(fenced_driver).collect()
}

impl Snapshot {
    /// Builds the index of the objects.
    pub fn indexed(&self) -> IndexedSnapshot {
        let mut index = Index::new(managed_drivers(&self.device_taint_rules));
        let mut refused = Vec::new();
        let mut note = |result: Result<(), tessera_index::convert::ConvertError>| {
            refused.extend(result.err().map(|error| chain(&error)));
        };
        self.device_taint_rules.iter().for_each(|rule| index.apply_taint_rule(rule));
        self.resource_slices.iter().for_each(|slice| note(index.apply_slice(slice)));
        self.device_classes.iter().for_each(|class| note(index.apply_class(class.clone())));
        self.nodes.iter().for_each(|node| note(index.apply_node(node).map(drop)));
        self.gpu_defaults.iter().for_each(|object| note(index.apply_defaults(object).map(drop)));
        self.resource_claims
            .iter()
            .for_each(|claim| note(index.apply_claim(&Arc::new(claim.clone()))));
        self.gpu_quotas.iter().for_each(|quota| note(index.apply_quota(quota).map(drop)));
        if let Some(groups) = &self.pod_groups {
            index.set_pod_groups_served(PodGroupApi::Kubernetes, true);
            for group in groups {
                index.apply_pod_group(group);
            }
        }
        if let Some(groups) = &self.volcano_pod_groups {
            index.set_pod_groups_served(PodGroupApi::Volcano, true);
            for group in groups {
                index.apply_volcano_pod_group(group);
            }
        }
        for pod in &self.pods {
            index.apply_pod(pod);
        }
        IndexedSnapshot { index, refused }
    }

    /// Returns the reason why the resource could not be read; none if it was read.
    pub fn not_read(&self, resource: &str) -> Option<&str> {
        self.not_read.iter().find(|not| not.resource == resource).map(|not| not.because.as_str())
    }
}
