//! The fake world: GPUs of a machine, their topology and speed, and their failures.
//!
//! ```text
//!  world.yaml ----> World (immutable)  ----+
//!  control.yaml --> Control (re-read) -----+--> Machine ---> fake libnvidia-ml.so.1
//!  state -------->  Usage  (shared memory) +            ---> fake libcuda.so.1
//!                                          `--> sysfs tree, driver root (the `tessera-fake-world` program)
//! ```
//!
//! - [`World`] is the machine's *hardware*: one YAML file, strictly decoded and validated, which
//!   does not change at run time.
//! - [`Control`] is the machine's *condition*: a GPU falls off the bus, an XID event, ECC errors,
//!   memory of foreign processes. The file is beside the world and read again after each change.
//! - [`Usage`] is the processes' *memory*: bytes per process and GPU in one shared file, which
//!   stays correct after `kill -9`.
//! - [`Machine`] combines the three; each fake library has exactly one.
//!
//! This crate is only for tests and the demo.

pub mod artifact;
pub mod control;
pub mod locate;
pub mod machine;
pub mod mig;
pub mod model;
pub mod node;
pub mod pci;
pub mod shipped;
pub mod tree;
pub mod usage;
pub mod world;

pub use control::{Control, ControlFile, Event, EventKind, ForeignProcess, GpuCondition};
pub use locate::{LocateError, Location, StateLocation};
pub use machine::Machine;
pub use mig::{MigError, MigTable};
pub use model::{Architecture, Model};
pub use node::FakeNode;
pub use pci::{PciAddress, PcieLevel};
pub use usage::{ExportedMemory, OutOfMemory, ProcessUsage, Usage};
pub use world::{Driver, Gpu, NvLink, NvLinkEnd, TimeModel, World};
