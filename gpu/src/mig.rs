//! Interface between the driver and MIG: instances of GPUs in MIG mode.

use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::MigInstance;
use tessera_api::names::{GpuUuid, MigUuid};

use crate::library::LibraryError;

/// Creates and destroys MIG devices. All calls block; creating and destroying take about a second.
///
/// MIG mode itself is never changed: on some machines that needs a reset of the GPU, which may be
/// refused until the node is rebooted (dra-driver-nvidia-gpu issue 883).
pub trait MigLibrary: Send + Sync {
    /// Returns the GPU instances of a profile, with their compute instances. None if MIG mode is
    /// off, or the GPU does not have the profile.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn gpu_instances(
        &self,
        gpu: &GpuUuid,
        profile: u32,
    ) -> Result<Vec<GpuInstance>, MigLibraryError>;

    /// Creates a GPU instance of a profile that starts at a memory slice. Returns its ID.
    ///
    /// # Errors
    /// [`MigLibraryError::Taken`] if memory slices or engines are in use by another instance.
    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: u32,
        start: u32,
    ) -> Result<u32, MigLibraryError>;

    /// Creates the compute instance that has all of a GPU instance.
    ///
    /// # Errors
    /// The GPU instance does not exist, has a compute instance, or the library fails.
    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
    ) -> Result<ComputeInstance, MigLibraryError>;

    /// Destroys a GPU instance with its compute instances. No error if it does not exist.
    ///
    /// # Errors
    /// [`MigLibraryError::InUse`] if a process uses it, or the library fails. Some of its compute
    /// instances may be destroyed.
    fn destroy_gpu_instance(&self, gpu: &GpuUuid, gpu_instance: u32)
    -> Result<(), MigLibraryError>;

    /// Returns the device nodes that a container needs for an instance, besides those of the GPU.
    ///
    /// # Errors
    /// The kernel driver has no files for the instance, or they are malformed.
    fn capability_nodes(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<[CapabilityNode; 2], MigLibraryError>;
}

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInstance {
    /// ID. It is used again after the instance was destroyed.
    pub id: u32,
    /// Profile and placement.
    pub instance: MigInstance,
    /// Its compute instances.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance, which is a MIG device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeInstance {
    /// ID, unique in its GPU instance.
    pub id: u32,
    /// UUID of the MIG device, new after each creation.
    pub uuid: MigUuid,
}

/// A character device `/dev/nvidia-caps/nvidia-cap<minor>`, which gives a process access to an
/// instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapabilityNode {
    /// Major number, which the kernel assigns when the driver is loaded.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// Errors of MIG calls.
#[derive(Debug, thiserror::Error)]
pub enum MigLibraryError {
    /// The GPU or the library failed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Memory slices or engines are in use by another instance.
    #[error(
        "no free resources on GPU {gpu} for MIG profile {profile} at memory slice {start}: another \
         instance has them (nvidia-smi mig -lgi lists all)"
    )]
    Taken {
        /// The GPU.
        gpu: GpuUuid,
        /// ID of the profile.
        profile: u32,
        /// First memory slice.
        start: u32,
    },
    /// A process uses the instance.
    #[error(
        "GPU instance {gpu_instance} of GPU {gpu} is in use by a process (nvidia-smi lists it); it \
         is destroyed after the process has ended"
    )]
    InUse {
        /// The GPU.
        gpu: GpuUuid,
        /// ID of the GPU instance.
        gpu_instance: u32,
    },
    /// The process may not change instances.
    #[error(
        "not permitted to change MIG instances of GPU {gpu}: the driver must run privileged, or \
         have the capability device mig/config"
    )]
    NotPermitted {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// MIG mode is off.
    #[error(
        "MIG mode of GPU {gpu} is off: enable it (nvidia-smi -i {gpu} -mig 1), or delete the pod"
    )]
    ModeOff {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// A call on an instance failed.
    #[error("NVML call {call} failed on an instance of {gpu}")]
    Call {
        /// The GPU.
        gpu: GpuUuid,
        /// Name of the function.
        call: &'static str,
        /// Error of NVML.
        source: NvmlError,
    },
    /// An answer does not have the documented format.
    #[error("NVML call {call} gave a malformed UUID")]
    Format {
        /// Name of the function.
        call: &'static str,
        /// Cause.
        source: tessera_api::names::NameError,
    },
    /// A file of the kernel driver is missing or malformed.
    #[error("cannot read capability device from `{path}`: {reason}")]
    Capability {
        /// Path of the file.
        path: String,
        /// Reason.
        reason: String,
    },
}
