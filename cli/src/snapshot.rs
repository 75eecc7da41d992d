//! What is known of a cluster at one moment: read from the API server, or from a file that was
//! saved before.
//!
//! Whatever is read passes an allow-list of fields, so that a live cluster and a file say the same,
//! and a file holds nothing but what planning looks at. docs/reference/kubectl-plugin.md has the format.

mod file;
mod trim;

pub use file::{FileError, VERSION};
pub use trim::{
    trimmed_claim, trimmed_class, trimmed_lease, trimmed_node, trimmed_pod, trimmed_rule,
    trimmed_slice, trimmed_template,
};

use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tessera_index::Index;
use tessera_runtime::error_chain::chain;

/// The objects that planning depends on, each trimmed to what it looks at.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Snapshot {
    /// When it was read, by the clock of the machine that read it.
    pub taken_at: Timestamp,
    /// Version of the API server, as `v1.37.1`.
    pub kubernetes: String,
    /// Kinds that could not be read, each with what that means.
    pub not_read: Vec<NotRead>,
    /// ResourceSlices of our driver.
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
    /// Pods, but for those that have ended and used no claims.
    pub pods: Vec<Pod>,
    /// The controller's Lease; several where it runs in several namespaces.
    pub leases: Vec<Lease>,
}

/// A kind that could not be read although a complete picture needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRead {
    /// The resource, as `leases.coordination.k8s.io`.
    pub resource: String,
    /// Why not.
    pub because: String,
}

/// A snapshot as the controller sees the cluster.
pub struct Picture {
    /// The controller's own index, fed with the snapshot.
    pub index: Index,
    /// Objects that the index could not use, in its words.
    pub unusable: Vec<String>,
}

impl Snapshot {
    /// Feeds the index.
    pub fn picture(&self) -> Picture {
        let mut index = Index::new();
        let mut unusable = Vec::new();
        let mut note = |result: Result<(), tessera_index::convert::ConvertError>| {
            unusable.extend(result.err().map(|error| chain(&error)));
        };
        self.device_taint_rules.iter().for_each(|rule| index.apply_taint_rule(rule));
        self.resource_slices.iter().for_each(|slice| note(index.apply_slice(slice)));
        self.device_classes.iter().for_each(|class| note(index.apply_class(class.clone())));
        self.nodes.iter().for_each(|node| note(index.apply_node(node).map(drop)));
        self.resource_claims
            .iter()
            .for_each(|claim| note(index.apply_claim(&Arc::new(claim.clone()))));
        for pod in &self.pods {
            index.apply_pod(pod);
        }
        Picture { index, unusable }
    }

    /// Why the resource could not be read; none if it was.
    pub fn not_read(&self, resource: &str) -> Option<&str> {
        self.not_read.iter().find(|not| not.resource == resource).map(|not| not.because.as_str())
    }
}
