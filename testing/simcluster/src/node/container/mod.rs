//! A fake container runtime: starts, signals, observes and records containers.
//!
//! ```text
//! kubelet -- ContainerConfig --> Runtime::start: image, CDI edits (pure) -> InitSpec
//!                                  |  one task per container
//!                                  v
//!                                supervisor (a process)  -> program
//! kubelet <- subscribe(), containers() -- states
//! ```
//!
//! Containers belong to the runtime and not to a kubelet, so a new kubelet finds them here.

mod cdi;
mod identity;
mod image;
mod rootfs;
mod runtime;
mod spec;
mod supervisor;
mod unstarted;

pub use cdi::CdiError;
pub use image::{Image, ImageFile, ImageStore};
pub use rootfs::SetupError;
pub use runtime::{
    Container, ContainerConfig, ContainerId, ContainerState, Runtime, RuntimeOptions, StartError,
};
pub use spec::{BindMount, DeviceNode, RunAs};
pub use supervisor::{ENTER, INIT, enter, supervise};
