//! What GPU hardware is there.
//!
//! ```text
//!  libnvidia-ml.so.1 --nvml--+
//!                            +--> Inventory, health events, memory, processes   (GpuLibrary, HealthWatch)
//!  sysfs ------------sysfs---+
//! ```
//!
//! [`GpuLibrary`] is the seam: the driver knows hardware by it only. [`NvmlLibrary`] is the
//! implementation; the library that it loads is NVIDIA's or, in tests and the demo, a fake with the
//! same symbols and layouts. There is no third path.
//!
//! This crate has no tasks and no threads: calls block, and [`HealthWatch::wait`] blocks as long as
//! it is told to.

pub mod library;
pub mod nvml;
pub mod recovery;
pub mod search;
pub mod sysfs;
pub mod xid;

pub use library::{
    GpuLibrary, GpuMemory, GpuProcess, HealthEvent, HealthEventKind, HealthWatch, LibraryError,
};
pub use nvml::{NvmlLibrary, NvmlOptions};
pub use recovery::RecoveryAction;
pub use xid::{Verdict, Xid};
