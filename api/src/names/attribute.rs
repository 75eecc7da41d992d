//! Names of the attributes that devices carry. Without a domain they belong to
//! [`DRIVER_NAME`](super::DRIVER_NAME).

macro_rules! attributes {
    ($($(#[doc = $meaning:literal])+ $constant:ident = $name:literal, $kind:literal;)+) => {
        $(
            $(#[doc = $meaning])+
            pub const $constant: &str = $name;
        )+

        /// All attributes: name, type in the API, and meaning.
        pub const ALL: &[(&str, &str, &str)] = &[$(($name, $kind, concat!($($meaning),+))),+];
    };
}

attributes! {
    /// Kind of device: `gpu`, or `mig` for a MIG device.
    TYPE = "type", "string";
    /// UUID of the GPU as NVML prints it.
    UUID = "uuid", "string";
    /// UUID of the GPU of a MIG device.
    PARENT_UUID = "parentUUID", "string";
    /// Profile of a MIG device, such as `1g.10gb`.
    PROFILE = "profile", "string";
    /// Product name, cut to 64 bytes.
    PRODUCT_NAME = "productName", "string";
    /// Architecture, such as `Hopper`.
    ARCHITECTURE = "architecture", "string";
    /// CUDA compute capability, such as `9.0.0`.
    CUDA_COMPUTE_CAPABILITY = "cudaComputeCapability", "version";
    /// Version of NVIDIA's kernel driver, normalized to semantic versioning.
    DRIVER_VERSION = "driverVersion", "version";
    /// Highest CUDA version that the driver supports.
    CUDA_DRIVER_VERSION = "cudaDriverVersion", "version";
    /// NVML's index on the node. It may change at a reboot: select GPUs by `uuid`.
    INDEX = "index", "int";
    /// `<hash of the node's name>/<clique>`: equal on GPUs that are all connected to one another by
    /// NVLink.
    NVLINK_CLIQUE = "nvlinkClique", "string";
    /// Quantity: memory of the GPU, on nodes that publish more than that.
    PHYSICAL_MEMORY = "physicalMemory", "string";
    /// `true` on GPUs that claims can share by MPS; absent on others.
    MPS = "mps", "bool";
    /// PCI address; a standard attribute of Kubernetes.
    PCI_BUS_ID = "resource.kubernetes.io/pciBusID", "string";
    /// PCIe root complex; a standard attribute of Kubernetes.
    PCIE_ROOT = "resource.kubernetes.io/pcieRoot", "string";
    /// NUMA node; a standard attribute of Kubernetes (KEP-6072).
    NUMA_NODE = "resource.kubernetes.io/numaNode", "int";
}

/// The value of [`TYPE`] for a whole GPU.
pub const TYPE_GPU: &str = "gpu";
/// The value of [`TYPE`] for a MIG device.
pub const TYPE_MIG: &str = "mig";
