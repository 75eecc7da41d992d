//! Container Device Interface (CDI) specs: model, validation and a directory store.
//!
//! ```text
//! driver -- Spec --> validate --> SpecStore::write -- rename --> <cdi-dir>/<vendor>-<class>_<id>.json
//!                                                                        |
//!                                       container runtime: devices by QualifiedName, edits applied in order
//! ```
//!
//! The models cover the fields that this project writes (environment, device nodes, mounts, hooks,
//! additional groups) and refuse any other field, so that no field is read, dropped and written
//! back. A spec declares the *lowest* version that its content needs ([`Spec::minimum_version`]),
//! because runtimes refuse specs that are newer than they support. `tests/oracle.rs` checks that
//! `container-device-interface`, the ecosystem's crate, parses, validates and injects these specs.
#![forbid(unsafe_code)]

mod name;
mod spec;
mod store;
mod validate;
mod version;

pub use name::{CdiKind, CdiNameError, DeviceName, QualifiedName};
pub use spec::{CdiDevice, ContainerEdits, DeviceNode, Hook, Mount, Spec};
pub use store::{RetainOutcome, SpecFile, SpecStore, SpecWriteOutcome, StoreError};
pub use validate::ValidationError;
pub use version::Version;
