//! Allocation mode: `managed` (tessera-controller) or `stock` (kube-scheduler).

use clap::ValueEnum;
use tessera_api::slice::Fence;

/// The allocator of the GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DriverMode {
    /// tessera-controller: every device has the managed taint.
    #[default]
    Managed,
    /// kube-scheduler, by first fit: no managed taint, and no feature that needs the controller.
    Stock,
}

impl DriverMode {
    /// Returns the taint policy of devices.
    #[must_use]
    pub const fn fence(self) -> Fence {
        match self {
            Self::Managed => Fence::Managed,
            Self::Stock => Fence::Stock,
        }
    }
}
