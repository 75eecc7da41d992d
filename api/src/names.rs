//! Names, parsed once at the edge.
//!
//! Each type holds text that is known to obey a rule of the Kubernetes API or of NVIDIA's driver;
//! the rule is cited at the type. Cloning is cheap (the text is shared).

pub mod attribute;
pub mod capacity;
mod claim;
mod error;
mod gpu;
mod kubernetes;
mod macros;
mod managed_drivers;
mod mig;
mod syntax;

#[cfg(test)]
mod tests;

pub use claim::{ClaimDeviceName, ClaimUid, ResultId, ShareId};
pub use error::NameError;
pub use gpu::{GpuUuid, PciBusId};
pub use kubernetes::{
    ClaimName, DeviceClassName, DeviceName, DriverName, ExtendedResourceName, Namespace,
    NodeGroupName, NodeName, PodName, PoolName, QuotaName, RequestName,
};
pub use managed_drivers::ManagedDrivers;
pub use mig::{MigDeviceName, MigUuid};

/// The driver's name: in ResourceSlices, claims and the kubelet's registration, and the API group
/// of [`GpuConfig`](crate::GpuConfig).
pub const DRIVER_NAME: &str = "gpu.tessera.dev";

/// The Lease that the leading controller holds, in the namespace it runs in.
pub const CONTROLLER_LEASE: &str = "tessera-controller";

/// The name that the API server records for the controller's writes, in `managedFields`.
pub const CONTROLLER_FIELD_MANAGER: &str = "tessera-controller";

/// The Service of the admission webhook.
pub const WEBHOOK_SERVICE: &str = "tessera-webhook";

/// The Secret with the certificates of the admission webhook.
pub const WEBHOOK_SECRET: &str = "tessera-webhook";

/// The MutatingWebhookConfiguration of the admission webhook, if there are dialects.
pub const WEBHOOK_CONFIGURATION: &str = "tessera-dialects";

/// The ValidatingWebhookConfiguration of the admission webhook.
pub const VALIDATING_CONFIGURATION: &str = "tessera-configs";

/// Label of a namespace whose GpuConfigs the admission webhook does not validate, with the value
/// `none`: for objects of a newer version.
pub const VALIDATION_LABEL: &str = "gpu.tessera.dev/validation";

/// The ConfigMap with the names that the policy `tessera-unconverted` looks for.
pub const GUARD_CONFIG_MAP: &str = "tessera-unconverted";

/// Beginning of the extended resource by which kube-scheduler serves a DeviceClass (KEP-5004).
pub const CLASS_RESOURCE_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// DeviceClass of all MIG devices, which the chart has if drivers publish them.
pub const MIG_CLASS: &str = "mig.gpu.tessera.dev";

/// Taint of every managed device, effect `NoSchedule`: kube-scheduler does not allocate the device,
/// and still honours allocations by the controller. It is in the slices or in [`FENCE_RULE`].
pub const MANAGED_TAINT_KEY: &str = "gpu.tessera.dev/managed";

/// Taint of a device whose health check failed, effect `NoSchedule`: it gets no new claims, and
/// running pods stay.
pub const UNHEALTHY_TAINT_KEY: &str = "gpu.tessera.dev/unhealthy";

/// Taint of a device with an orphaned claim, effect `NoSchedule`: a prepared claim that the API no
/// longer has, or has with another device. The share looks free and is in use.
pub const ORPHANED_TAINT_KEY: &str = "gpu.tessera.dev/orphaned-claim";

/// Taint of a device that was published without the managed taint a while ago, effect `NoSchedule`:
/// kube-scheduler may still write allocations that it began then. The device gets no claims,
/// whatever they tolerate.
pub const LEAVING_STOCK_TAINT_KEY: &str = "gpu.tessera.dev/leaving-stock";

/// Taint of a GPU that an operator took out of service, effect `NoSchedule`, in a DeviceTaintRule
/// of `kubectl tessera cordon gpu`.
pub const CORDONED_TAINT_KEY: &str = "gpu.tessera.dev/cordoned";

/// The taint effect that keeps new claims away and leaves running pods alone.
pub const NO_SCHEDULE: &str = "NoSchedule";

/// The DeviceTaintRule that has the managed taint for all devices of the driver, on Kubernetes 1.37
/// and newer; see [`slice::Fence`](crate::slice::Fence).
pub const FENCE_RULE: &str = "tessera-fence";

/// The ValidatingAdmissionPolicy that protects [`FENCE_RULE`], and owns it once the controller has
/// restored it. That of another managed driver has `.` and the driver's name after it.
pub const FENCE_POLICY: &str = "tessera-fence-rule";

/// Annotation of a ResourceSlice whose devices [`FENCE_RULE`] keeps from kube-scheduler in place of
/// the managed taint. The value is [`FENCE_BY_RULE`].
pub const FENCE_ANNOTATION: &str = "gpu.tessera.dev/fence";

/// Value of [`FENCE_ANNOTATION`].
pub const FENCE_BY_RULE: &str = "DeviceTaintRule";

/// Annotation of a ResourceSlice that carries the link matrix of its devices; see
/// [`slice::Topology`](crate::slice::Topology).
pub const TOPOLOGY_ANNOTATION: &str = "gpu.tessera.dev/topology";

/// Finalizer without which kube-controller-manager never clears an allocation. Set before the
/// allocation is written.
pub const DELETE_PROTECTION_FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Annotation of pods that the kubelet makes from files of its node: the mirrors of static pods.
pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// Annotation of a pod: the name of its group in its namespace. The pods of a group get their
/// devices together.
pub const POD_GROUP_ANNOTATION: &str = "gpu.tessera.dev/pod-group";

/// Annotation of a pod: the number of pods of its group.
pub const POD_GROUP_SIZE_ANNOTATION: &str = "gpu.tessera.dev/pod-group-size";

/// Annotation of a pod: a label of nodes that has one value on the nodes of all pods of its group,
/// or the group gets no devices.
pub const POD_GROUP_REQUIRED_TOPOLOGY_ANNOTATION: &str =
    "gpu.tessera.dev/pod-group-required-topology";

/// Annotation of a pod: a label of nodes that has one value on the nodes of all pods of its group,
/// if that is possible.
pub const POD_GROUP_PREFERRED_TOPOLOGY_ANNOTATION: &str =
    "gpu.tessera.dev/pod-group-preferred-topology";

/// Binding condition of the devices of a pod group: kube-scheduler has a node for all of its pods.
pub const GROUP_COMPLETE_CONDITION: &str = "gpu.tessera.dev/group-complete";

/// Binding failure condition of the devices of a pod group: not all of its pods have got a node.
pub const GROUP_FAILED_CONDITION: &str = "gpu.tessera.dev/group-failed";

/// Annotation of a pod: the name of its PodGroup of Volcano.
pub const VOLCANO_GROUP_ANNOTATION: &str = "scheduling.k8s.io/group-name";

/// Label of a pod in a pod group of Kueue.
pub const KUEUE_GROUP_LABEL: &str = "kueue.x-k8s.io/pod-group-name";

/// Annotation of a pod: the number of pods of its Kueue pod group.
pub const KUEUE_GROUP_SIZE_ANNOTATION: &str = "kueue.x-k8s.io/pod-group-total-count";

/// Annotation of a pod whose Kueue pod group is admitted before all of its pods exist.
pub const KUEUE_FAST_ADMISSION_ANNOTATION: &str = "kueue.x-k8s.io/pod-group-fast-admission";

/// Label of a pod of a LeaderWorkerSet: its group of a leader and workers.
pub const LEADER_WORKER_GROUP_LABEL: &str = "leaderworkerset.sigs.k8s.io/group-key";

/// Label of a pod of a JobSet: the name of the JobSet.
pub const JOB_SET_LABEL: &str = "jobset.sigs.k8s.io/jobset-name";

/// Annotation by which kube-controller-manager ties a generated claim to the claim entry of its
/// pod.
pub const POD_CLAIM_NAME_ANNOTATION: &str = "resource.kubernetes.io/pod-claim-name";

/// Label of a node with its host name, one value for each node.
pub const HOST_NAME_LABEL: &str = "kubernetes.io/hostname";

/// Label of a placeholder pod: the group of nodes of which it asks a cluster autoscaler for one.
pub const NODE_GROUP_LABEL: &str = "gpu.tessera.dev/node-group";

/// The field by which a node-local allocation selects its node (`nodeSelectorTerms[].matchFields`).
pub const NODE_NAME_FIELD: &str = "metadata.name";

/// CDI vendor and class of the devices made for one claim.
pub const CDI_CLAIM_KIND: &str = "k8s.gpu.tessera.dev/claim";

/// CDI vendor and class of the devices that bring the NVIDIA driver's files and device nodes; named
/// by full GPU UUID.
pub const CDI_DRIVER_KIND: &str = "k8s.gpu.tessera.dev/driver";

/// Taints that devices carry, with their meaning for users.
pub const TAINTS: &[(&str, &str)] = &[
    (
        MANAGED_TAINT_KEY,
        "tessera-controller allocates the device; kube-scheduler does not. In the slices, or in the DeviceTaintRule `tessera-fence`.",
    ),
    (UNHEALTHY_TAINT_KEY, "A health check failed: no new claims; running pods stay."),
    (
        ORPHANED_TAINT_KEY,
        "A prepared claim is gone from the API: the share looks free and is in use.",
    ),
    (
        CORDONED_TAINT_KEY,
        "An operator took the GPU out of service (`kubectl tessera cordon gpu`): no new claims.",
    ),
    (
        LEAVING_STOCK_TAINT_KEY,
        "The mode changed from stock to managed: no claims until kube-scheduler's are written.",
    ),
];
