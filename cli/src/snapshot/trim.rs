//! Reduction of each kind to the fields that planning reads. Left out are images, commands and
//! environment of pods, most annotations, addresses and images of nodes, and configurations for
//! other drivers.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    Affinity, Container, Node, NodeAffinity, NodeSpec, NodeStatus, Pod, PodSpec, PodStatus,
    ResourceRequirements,
};
use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, AllocationResult, DeviceAllocationResult, DeviceClaim, DeviceClass,
    DeviceClassSpec, DeviceTaintRule, OpaqueDeviceConfiguration, ResourceClaim, ResourceClaimSpec,
    ResourceClaimStatus, ResourceClaimTemplate, ResourceClaimTemplateSpec, ResourceSlice,
};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::scheduling::v1beta1::{PodGroup, PodGroupSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::{
    DRIVER_NAME, FENCE_ANNOTATION, MIRROR_ANNOTATION, POD_CLAIM_NAME_ANNOTATION,
    POD_GROUP_SIZE_ANNOTATION, TOPOLOGY_ANNOTATION,
};
use tessera_api::quota::GpuQuota;
use tessera_api::volcano::VolcanoPodGroup;
use tessera_index::{GROUP_ANNOTATIONS, GROUP_LABELS};

/// Keeps names and times.
fn metadata(from: ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: from.name,
        namespace: from.namespace,
        uid: from.uid,
        resource_version: from.resource_version,
        creation_timestamp: from.creation_timestamp,
        deletion_timestamp: from.deletion_timestamp,
        ..ObjectMeta::default()
    }
}

/// Keeps some annotations.
fn annotations(metadata: &ObjectMeta, names: &[&str]) -> Option<BTreeMap<String, String>> {
    let mut kept = metadata.annotations.clone()?;
    kept.retain(|name, _| names.contains(&name.as_str()));
    (!kept.is_empty()).then_some(kept)
}

/// Keeps the spec, the link matrix and the fence of a ResourceSlice.
#[must_use]
pub fn trimmed_slice(slice: ResourceSlice) -> ResourceSlice {
    let annotations = annotations(&slice.metadata, &[TOPOLOGY_ANNOTATION, FENCE_ANNOTATION]);
    ResourceSlice {
        metadata: ObjectMeta { annotations, ..metadata(slice.metadata) },
        spec: slice.spec,
    }
}

/// Keeps the spec of a DeviceTaintRule.
#[must_use]
pub fn trimmed_rule(rule: DeviceTaintRule) -> DeviceTaintRule {
    DeviceTaintRule {
        metadata: metadata(rule.metadata),
        spec: rule.spec,
        ..DeviceTaintRule::default()
    }
}

/// Keeps the selectors of a DeviceClass, and its configurations for `gpu.tessera.dev`.
#[must_use]
pub fn trimmed_class(class: DeviceClass) -> DeviceClass {
    let spec = class.spec.map(|spec| DeviceClassSpec {
        selectors: spec.selectors,
        config: own_configs(spec.config, |config| &config.opaque),
        extended_resource_name: spec.extended_resource_name,
    });
    DeviceClass { metadata: metadata(class.metadata), spec }
}

/// Keeps owners, pod entry, requests, allocation and reservations of a ResourceClaim.
#[must_use]
pub fn trimmed_claim(claim: ResourceClaim) -> ResourceClaim {
    let annotations = annotations(&claim.metadata, &[POD_CLAIM_NAME_ANNOTATION]);
    let owners = claim
        .metadata
        .owner_references
        .clone()
        .map(|owners| owners.into_iter().map(owner).collect());
    let status = claim.status.map(|status| ResourceClaimStatus {
        allocation: status.allocation.map(allocation),
        reserved_for: status.reserved_for,
        devices: status.devices.map(|devices| devices.into_iter().filter_map(size).collect()),
    });
    ResourceClaim {
        metadata: ObjectMeta { annotations, owner_references: owners, ..metadata(claim.metadata) },
        spec: claim.spec.map(claim_spec),
        status,
    }
}

/// Keeps the requests of a ResourceClaimTemplate.
#[must_use]
pub fn trimmed_template(template: ResourceClaimTemplate) -> ResourceClaimTemplate {
    let spec = template
        .spec
        .map(|spec| ResourceClaimTemplateSpec { metadata: None, spec: spec.spec.map(claim_spec) });
    ResourceClaimTemplate { metadata: metadata(template.metadata), spec }
}

/// Keeps the size of a share of `gpu.tessera.dev`.
fn size(from: AllocatedDeviceStatus) -> Option<AllocatedDeviceStatus> {
    (from.driver == DRIVER_NAME && from.data.is_some()).then_some(AllocatedDeviceStatus {
        conditions: None,
        network_data: None,
        ..from
    })
}

fn owner(from: OwnerReference) -> OwnerReference {
    OwnerReference { block_owner_deletion: None, ..from }
}

fn claim_spec(spec: ResourceClaimSpec) -> ResourceClaimSpec {
    let devices = spec.devices.map(|devices| DeviceClaim {
        config: own_configs(devices.config, |config| &config.opaque),
        constraints: devices.constraints,
        requests: devices.requests,
    });
    ResourceClaimSpec { devices }
}

fn allocation(from: AllocationResult) -> AllocationResult {
    let devices = from.devices.map(|devices| DeviceAllocationResult {
        config: own_configs(devices.config, |config| &config.opaque),
        results: devices.results,
    });
    AllocationResult { devices, ..from }
}

/// Keeps the configurations for `gpu.tessera.dev`.
fn own_configs<C>(
    configs: Option<Vec<C>>,
    opaque: impl Fn(&C) -> &Option<OpaqueDeviceConfiguration>,
) -> Option<Vec<C>> {
    let is_own =
        |config: &C| opaque(config).as_ref().is_some_and(|opaque| opaque.driver == DRIVER_NAME);
    let own: Vec<C> = configs?.into_iter().filter(is_own).collect();
    (!own.is_empty()).then_some(own)
}

/// Keeps labels, taints, cordon, readiness and allocatable resources of a Node.
#[must_use]
pub fn trimmed_node(node: Node) -> Node {
    let labels = node.metadata.labels.clone();
    let status = node.status.map(|status| NodeStatus {
        allocatable: status.allocatable,
        conditions: status.conditions.map(|conditions| {
            let ready = conditions.into_iter().filter(|c| c.type_ == "Ready");
            ready
                .map(|c| k8s_openapi::api::core::v1::NodeCondition { message: None, ..c })
                .collect()
        }),
        ..NodeStatus::default()
    });
    let spec = node.spec.map(|spec| NodeSpec {
        taints: spec.taints,
        unschedulable: spec.unschedulable,
        ..NodeSpec::default()
    });
    Node { metadata: ObjectMeta { labels, ..metadata(node.metadata) }, spec, status }
}

/// Keeps node, scheduling constraints, requests, claims and group of a Pod. None for a completed
/// pod without claims.
#[must_use]
pub fn trimmed_pod(pod: Pod) -> Option<Pod> {
    let spec = pod.spec?;
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    let uses_claims = spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty());
    (!ended || uses_claims).then(|| Pod {
        metadata: pod_metadata(pod.metadata),
        spec: Some(pod_spec(spec)),
        status: pod.status.map(pod_status),
    })
}

/// Keeps names and times, and what states the pod's group.
fn pod_metadata(from: ObjectMeta) -> ObjectMeta {
    let names: Vec<&str> = GROUP_ANNOTATIONS.into_iter().chain([MIRROR_ANNOTATION]).collect();
    let annotations = annotations(&from, &names);
    let mut labels = from.labels.clone();
    if let Some(labels) = &mut labels {
        labels.retain(|name, _| GROUP_LABELS.contains(&name.as_str()));
    }
    let is_of_group =
        annotations.as_ref().is_some_and(|kept| kept.contains_key(POD_GROUP_SIZE_ANNOTATION));
    let owners = from.owner_references.clone().filter(|_| is_of_group);
    ObjectMeta {
        annotations,
        labels: labels.filter(|labels| !labels.is_empty()),
        owner_references: owners.map(|owners| owners.into_iter().map(owner).collect()),
        ..metadata(from)
    }
}

fn pod_spec(spec: PodSpec) -> PodSpec {
    let required = spec
        .affinity
        .and_then(|affinity| affinity.node_affinity)
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution);
    let affinity = required.map(|required| Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(required),
            ..NodeAffinity::default()
        }),
        ..Affinity::default()
    });
    PodSpec {
        node_name: spec.node_name,
        node_selector: spec.node_selector,
        affinity,
        tolerations: spec.tolerations,
        priority: spec.priority,
        preemption_policy: spec.preemption_policy,
        scheduling_gates: spec.scheduling_gates,
        resource_claims: spec.resource_claims,
        scheduling_group: spec.scheduling_group,
        containers: spec.containers.into_iter().map(container).collect(),
        init_containers: spec.init_containers.map(|list| list.into_iter().map(container).collect()),
        resources: spec.resources.map(requests),
        overhead: spec.overhead,
        ..PodSpec::default()
    }
}

fn container(from: Container) -> Container {
    Container {
        name: from.name,
        resources: from.resources.map(requests),
        restart_policy: from.restart_policy,
        ..Container::default()
    }
}

fn requests(from: ResourceRequirements) -> ResourceRequirements {
    ResourceRequirements {
        requests: from.requests,
        claims: from.claims,
        ..ResourceRequirements::default()
    }
}

fn pod_status(status: PodStatus) -> PodStatus {
    let scheduled = |conditions: Vec<_>| {
        let mut conditions: Vec<k8s_openapi::api::core::v1::PodCondition> = conditions;
        conditions.retain(|condition| condition.type_ == "PodScheduled");
        conditions
    };
    PodStatus {
        phase: status.phase,
        nominated_node_name: status.nominated_node_name,
        resource_claim_statuses: status.resource_claim_statuses,
        conditions: status.conditions.map(scheduled),
        ..PodStatus::default()
    }
}

/// Keeps the limits of a GpuQuota.
#[must_use]
pub fn trimmed_quota(quota: GpuQuota) -> GpuQuota {
    GpuQuota { metadata: metadata(quota.metadata), spec: quota.spec, status: None }
}

/// Keeps the parameters of a GpuDefaults.
#[must_use]
pub fn trimmed_defaults(defaults: GpuDefaults) -> GpuDefaults {
    GpuDefaults { metadata: metadata(defaults.metadata), spec: defaults.spec }
}

/// Keeps all of a PriorityClass but its description.
#[must_use]
pub fn trimmed_priority_class(class: PriorityClass) -> PriorityClass {
    PriorityClass { metadata: metadata(class.metadata), description: None, ..class }
}

/// Keeps policy and topology of a PodGroup.
#[must_use]
pub fn trimmed_pod_group(group: PodGroup) -> PodGroup {
    let spec = PodGroupSpec {
        scheduling_policy: group.spec.scheduling_policy,
        scheduling_constraints: group.spec.scheduling_constraints,
        ..PodGroupSpec::default()
    };
    PodGroup { metadata: metadata(group.metadata), spec, status: None }
}

/// Keeps the minimum of a PodGroup of Volcano.
#[must_use]
pub fn trimmed_volcano_pod_group(group: VolcanoPodGroup) -> VolcanoPodGroup {
    VolcanoPodGroup { metadata: metadata(group.metadata), spec: group.spec }
}

/// Keeps holder, duration and times of a Lease.
#[must_use]
pub fn trimmed_lease(lease: Lease) -> Lease {
    let spec = lease.spec.map(|spec| LeaseSpec {
        holder_identity: spec.holder_identity,
        lease_duration_seconds: spec.lease_duration_seconds,
        renew_time: spec.renew_time,
        ..LeaseSpec::default()
    });
    Lease { metadata: metadata(lease.metadata), spec }
}
