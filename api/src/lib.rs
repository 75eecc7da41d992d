//! Types shared by the programs of Tessera: names, quantities, GPUs, configuration, defaults and
//! quotas of namespaces, changes of shares, slices,
//! reasons, events, metrics.
//!
//! ```text
//!  gpu::Inventory --slice::build--> ResourceSlice --slice::Topology--> the index's snapshot
//!  GpuConfig (class, claim) --config::effective_config--> EffectiveConfig --> allocator, driver
//!  allocator --reason::Explanation--> text of events, the command line, metrics
//! ```
//!
//! Everything here is pure: no I/O, no clock, no client. Callers pass the objects. Text from
//! outside is parsed once, into the types of [`names`] and [`quantity`]; no other code handles a
//! bare string as an identifier.

#![forbid(unsafe_code)]

pub mod config;
pub mod defaults;
pub mod events;
pub mod gpu;
pub mod load;
pub mod metrics;
pub mod names;
pub mod quantity;
pub mod quota;
pub mod reason;
pub mod resize;
pub mod slice;
pub mod volcano;

mod custom_resource;
#[cfg(test)]
mod machines;

pub use config::{ConfigError, EffectiveConfig, GpuConfig};
pub use gpu::{Gpu, Inventory, Link};
pub use quantity::Quantity;
