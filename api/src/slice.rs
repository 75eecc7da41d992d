//! From an inventory to the ResourceSlices that publish it, and back where something is read from a
//! slice.
//!
//! ```text
//! Inventory + SliceOptions --build--> desired slices --same_pool?--> published slices
//!                                    annotation --Topology::of_slices--> links, for the index
//! ```

mod build;
mod compare;
mod device;
mod fence;
mod mig;
mod options;
mod order;
mod topology;

#[cfg(test)]
mod tests;

pub use build::build;
pub use compare::{keep_server_fields, same_content, same_pool};
pub use device::{MAX_STRING_BYTES, truncated};
pub use fence::{Fence, fenced_driver, is_fence_of, is_fenced_by_rule};
pub use options::{CoresRatio, InvalidMaxShares, MaxShares, MemoryRatio, NodeOwner, SliceOptions};
pub use order::{DeviceOrder, UnknownDeviceOrder};
pub use topology::{MAX_ANNOTATION_BYTES, Topology, TopologyError};

/// Most devices in a slice of which none has a taint (API limit `ResourceSliceMaxDevices`).
pub const MAX_DEVICES: usize = 128;
/// Most devices in a slice of which any has a taint (API limit
/// `ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
pub const MAX_TAINTED_DEVICES: usize = 64;
/// Most counter sets in a slice (API limit `ResourceSliceMaxCounterSets`).
pub const MAX_COUNTER_SETS: usize = 8;
