//! Allocation mode: `managed` (tessera-controller) or `stock` (kube-scheduler).

use clap::ValueEnum;
use tessera_api::slice::Fence;

/// The allocator of the GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DriverMode {
    /// tessera-controller: kube-scheduler is kept from the devices.
    #[default]
    Managed,
    /// kube-scheduler, by first fit: no fence, and no feature that needs the controller.
    Stock,
}

/// The object that has the managed taint, in mode `managed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum FenceKind {
    /// Every device of the slices.
    #[default]
    Taint,
    /// The DeviceTaintRule `tessera-fence` (Kubernetes 1.37 and newer).
    Rule,
}

impl DriverMode {
    /// Returns the fence of published devices.
    #[must_use]
    pub const fn fence(self, kind: FenceKind) -> Fence {
        match (self, kind) {
            (Self::Managed, FenceKind::Taint) => Fence::Taint,
            (Self::Managed, FenceKind::Rule) => Fence::Rule,
            (Self::Stock, _) => Fence::Stock,
        }
    }
}
