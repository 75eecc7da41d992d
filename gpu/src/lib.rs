//! Discovers GPUs, their links and their health through NVML and sysfs.
//!
//! ```text
//!  libnvidia-ml.so.1 --nvml--+
//!                            +--> Inventory, health events, memory, processes   (GpuLibrary, HealthWatch)
//!  sysfs ------------sysfs---+
//! ```
//!
//! [`MigLibrary`] creates and destroys MIG devices.
//!
//! [`GpuLibrary`] is the interface between the driver and the hardware. [`NvmlLibrary`] is the only
//! implementation. It loads NVIDIA's library or, in tests and the demo, a fake with the same
//! symbols and layouts.
//!
//! This crate has no tasks and no threads: calls block, and [`HealthWatch::wait`] blocks up to its
//! timeout.

mod capabilities;
pub mod device_nodes;
mod library;
mod mig;
pub mod nvml;
pub mod recovery;
pub mod search;
pub mod sysfs;
pub mod xid;

pub use library::{
    GpuLibrary, GpuMemory, GpuProcess, HealthEvent, HealthEventKind, HealthWatch, LibraryError,
    ProcessUtilization,
};
pub use mig::{CapabilityNode, ComputeInstance, GpuInstance, MigLibrary, MigLibraryError};
pub use nvml::{NvmlLibrary, NvmlOptions};
pub use recovery::RecoveryAction;
pub use xid::{HealthImpact, Xid};
