//! Names, parsed once at the edge.
//!
//! Each type holds text that is known to obey a rule of the Kubernetes API or of NVIDIA's driver;
//! the rule is cited at the type. Cloning is cheap (the text is shared).

mod claim;
mod error;
mod gpu;
mod kubernetes;
mod macros;
mod syntax;

#[cfg(test)]
mod tests;

pub use claim::{ClaimDeviceName, ClaimUid, ResultId, ShareId};
pub use error::NameError;
pub use gpu::{GpuUuid, PciBusId};
pub use kubernetes::{
    ClaimName, DeviceClassName, DeviceName, DriverName, Namespace, NodeName, PodName, PoolName,
    RequestName,
};

/// The driver's name: in ResourceSlices, claims and the kubelet's registration, and the API group
/// of [`GpuConfig`](crate::GpuConfig).
pub const DRIVER_NAME: &str = "gpu.tessera.dev";

/// The Lease that the leading controller holds, in the namespace it runs in.
pub const CONTROLLER_LEASE: &str = "tessera-controller";

/// Taint that every managed device carries, with effect `NoSchedule`: the fence that keeps
/// kube-scheduler from allocating our devices while it still honours what our controller allocated.
pub const MANAGED_TAINT_KEY: &str = "gpu.tessera.dev/managed";

/// Taint of a device whose health check failed, effect `NoSchedule`: nothing new is put on it, what
/// runs there stays.
pub const UNHEALTHY_TAINT_KEY: &str = "gpu.tessera.dev/unhealthy";

/// Taint of a device on which a claim is prepared that the API no longer has, or not with this
/// device; effect `NoSchedule`. The share looks free and is in use.
pub const ORPHANED_TAINT_KEY: &str = "gpu.tessera.dev/orphaned-claim";

/// Taint of a device that was published without the fence a while ago, effect `NoSchedule`: what
/// kube-scheduler had begun to allocate then may still be written. Nobody gets it, whatever a claim
/// tolerates.
pub const LEAVING_STOCK_TAINT_KEY: &str = "gpu.tessera.dev/leaving-stock";

/// The taint effect that keeps new claims away and leaves running pods alone.
pub const NO_SCHEDULE: &str = "NoSchedule";

/// Annotation of a ResourceSlice that carries the link matrix of its devices; see
/// [`slice::Topology`](crate::slice::Topology).
pub const TOPOLOGY_ANNOTATION: &str = "gpu.tessera.dev/topology";

/// Finalizer without which kube-controller-manager never clears an allocation. Set before the
/// allocation is written.
pub const DELETE_PROTECTION_FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Annotation by which kube-controller-manager ties a generated claim to the claim entry of its
/// pod.
pub const POD_CLAIM_NAME_ANNOTATION: &str = "resource.kubernetes.io/pod-claim-name";

/// The field by which a node-local allocation selects its node (`nodeSelectorTerms[].matchFields`).
pub const NODE_NAME_FIELD: &str = "metadata.name";

/// CDI vendor and class of the devices made for one claim.
pub const CDI_CLAIM_KIND: &str = "k8s.gpu.tessera.dev/claim";

/// CDI vendor and class of the devices that bring the NVIDIA driver's files and device nodes; named
/// by full GPU UUID.
pub const CDI_DRIVER_KIND: &str = "k8s.gpu.tessera.dev/driver";

/// Names of the attributes that devices carry. Without a domain they belong to [`DRIVER_NAME`].
pub mod attribute {
    /// `string`: what kind of device; always [`TYPE_GPU`].
    pub const TYPE: &str = "type";
    /// The value of [`TYPE`] for a whole GPU.
    pub const TYPE_GPU: &str = "gpu";
    /// `string`: the GPU's UUID as NVML prints it.
    pub const UUID: &str = "uuid";
    /// `string`: the marketing name, cut to 64 bytes.
    pub const PRODUCT_NAME: &str = "productName";
    /// `string`: the architecture, such as `Hopper`.
    pub const ARCHITECTURE: &str = "architecture";
    /// `version`: CUDA compute capability, such as `9.0.0`.
    pub const CUDA_COMPUTE_CAPABILITY: &str = "cudaComputeCapability";
    /// `version`: the NVIDIA kernel driver's version, normalised to semver.
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// `version`: the highest CUDA version that the driver supports.
    pub const CUDA_DRIVER_VERSION: &str = "cudaDriverVersion";
    /// `int`: NVML's index on the node. For people; never used as an identity.
    pub const INDEX: &str = "index";
    /// `string`: `<hash of the node's name>/<clique>`: equal on GPUs that are all joined to one
    /// another by NVLink.
    pub const NVLINK_CLIQUE: &str = "nvlinkClique";
    /// `string` (a quantity): the memory that is really there, on nodes that publish more than
    /// that.
    pub const PHYSICAL_MEMORY: &str = "physicalMemory";
    /// `bool`: `true` where claims can share the GPU by MPS; left out elsewhere.
    pub const MPS: &str = "mps";
    /// `string`: the PCI address; a standard attribute of Kubernetes.
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// `string`: the PCIe root complex; a standard attribute of Kubernetes.
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
    /// `int`: the NUMA node; a standard attribute of Kubernetes (KEP-6072).
    pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
}

/// Names of the capacities that devices carry. Published without a domain, because up to 1.37 a
/// request must name them literally as the slice does.
pub mod capacity {
    /// Device memory, whole MiB.
    pub const MEMORY: &str = "memory";
    /// Percent of the GPU's compute, 0 to 100.
    pub const CORES: &str = "cores";
}
