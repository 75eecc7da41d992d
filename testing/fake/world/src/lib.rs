//! The fake world: which GPUs a machine has, how they hang together, how fast they are, and what
//! goes wrong.
//!
//! ```text
//!  world.yaml ----> World (immutable)  ----+
//!  control.yaml --> Control (re-read) -----+--> Machine ---> fake libnvidia-ml.so.1
//!  state -------->  Usage  (shared memory) +            ---> fake libcuda.so.1
//!                                          `--> sysfs tree, driver root (the `tessera-fake-world` program)
//! ```
//!
//! - [`World`] is what the machine *is*; one YAML file, strictly decoded and validated, never
//!   changing while it is used.
//! - [`Control`] is what *happens*: a GPU falls off the bus, an XID event, ECC errors, a foreign
//!   process's memory. The file beside the world is re-read whenever it changes.
//! - [`Usage`] is what processes *hold*: bytes per process and GPU in one shared file, right also
//!   after a kill -9.
//! - [`Machine`] joins the three; the fake libraries hold exactly one each.
//!
//! Nothing in here is shipped; it exists for tests and the demo.

pub mod artifact;
pub mod control;
pub mod locate;
pub mod machine;
pub mod model;
pub mod node;
pub mod pci;
pub mod shipped;
pub mod tree;
pub mod usage;
pub mod world;

pub use control::{Control, ControlFile, Event, EventKind, ForeignProcess, GpuCondition};
pub use locate::{LocateError, Location, StatePlace};
pub use machine::Machine;
pub use model::{Architecture, Model};
pub use node::FakeNode;
pub use pci::{PciAddress, PcieLevel};
pub use usage::{OutOfMemory, ProcessUse, Usage, UsageError};
pub use world::{Driver, Gpu, NvLink, NvLinkEnd, TimeModel, World, WorldError};
