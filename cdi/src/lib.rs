//! Container Device Interface specs: what is in one, whether it is valid, and a directory of them.
//!
//! ```text
//! driver -- Spec --> validate --> SpecStore::write -- rename --> <cdi-dir>/<vendor>-<class>_<id>.json
//!                                                                        |
//!                                       container runtime: devices by QualifiedName, edits applied in order
//! ```
//!
//! The models cover what this project writes (environment, device nodes, mounts, hooks, additional
//! groups) and refuse any other field, so that nothing is ever read, dropped and written back. A
//! spec declares the *lowest* version that its content needs ([`Spec::minimum_version`]): runtimes
//! refuse what is newer than they are. `container-device-interface`, the ecosystem's crate, is the
//! judge in `tests/oracle.rs`: whatever is written here must parse, validate and inject there.
#![forbid(unsafe_code)]

mod name;
mod spec;
mod store;
mod validate;
mod version;

pub use name::{DeviceName, Kind, NameError, QualifiedName};
pub use spec::{ContainerEdits, Device, DeviceNode, Hook, Mount, Spec};
pub use store::{Cleaned, SpecFile, SpecStore, StoreError, Written};
pub use validate::ValidationError;
pub use version::Version;
