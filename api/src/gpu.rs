//! GPUs of a node.
//!
//! An [`Inventory`] is the hardware at one moment: GPUs that are published, GPUs that are not with
//! the reason, and the links between the published ones.
//! [`slice::build`](crate::slice::build) turns it into ResourceSlices.

mod clique;
mod inventory;
mod link;
mod mig;
mod version;

#[cfg(test)]
mod tests;

pub use clique::{NvlinkClique, nvlink_cliques};
pub use inventory::{Inventory, Unpublished, UnpublishedReason};
pub use link::{Link, LinkKind, PcieLevel, UnknownPcieLevel};
pub use mig::{Mig, MigEngines, MigInstance, MigPlacement, MigProfile};
pub use version::{ComputeCapability, CudaVersion, normalise_version};

use crate::names::{DeviceName, GpuUuid, PciBusId};

/// One physical GPU.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Gpu {
    /// Its identity.
    pub uuid: GpuUuid,
    /// NVML's index: the order of PCI addresses, different after a GPU vanished. For people only.
    pub index: u32,
    /// Minor number of its device node, `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Marketing name as NVML prints it, such as `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    /// Architecture as NVIDIA names it, such as `Hopper`. Empty where the driver does not know it.
    pub architecture: String,
    /// All of its memory, bytes, as NVML's total says.
    pub memory_bytes: u64,
    /// CUDA compute capability.
    pub cuda_compute_capability: ComputeCapability,
    /// Version of the kernel driver as it names itself, such as `580.95.05`.
    pub driver_version: String,
    /// Highest CUDA version of the driver.
    pub cuda_driver_version: CudaVersion,
    /// PCI address.
    pub pci_bus_id: PciBusId,
    /// The PCIe root complex that it hangs on, such as `pci0000:16`; `None` where sysfs does not
    /// tell.
    pub pcie_root: Option<String>,
    /// The NUMA node; `None` where the machine has no such notion (sysfs says -1).
    pub numa_node: Option<i32>,
    /// MIG, if its mode is on. Such a GPU is not shared; it is published as MIG devices, if it has
    /// profiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Health: unhealthy GPUs get no new claims.
    pub health: Health,
}

/// Health of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Health {
    /// Nothing is known against it.
    #[default]
    Healthy,
    /// Something failed. It stays published, with a taint that keeps new claims away.
    Unhealthy {
        /// One CamelCase word for machines, such as `Xid79`: letters, digits, `-`, `_` and `.`, at
        /// most 63.
        code: String,
        /// A sentence for people.
        message: String,
    },
}

impl Gpu {
    /// Its name as a device of a slice.
    pub fn device_name(&self) -> DeviceName {
        self.uuid.device_name()
    }

    /// Memory that it has, as far as it is published: whole MiB, rounded down, since the API
    /// refuses values off the step.
    pub fn memory_mib(&self) -> u64 {
        self.memory_bytes >> 20
    }

    /// Returns true if managed memory may exceed the GPU's: since Pascal (CUDA C++ Programming
    /// Guide, "Unified Memory Programming").
    pub fn memory_can_spill(&self) -> bool {
        const PASCAL: u32 = 6;
        self.cuda_compute_capability.major >= PASCAL
    }

    /// Returns true if no health check failed.
    pub fn is_healthy(&self) -> bool {
        self.health == Health::Healthy
    }
}
