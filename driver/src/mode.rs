//! Who allocates the GPUs.

use clap::ValueEnum;
use tessera_api::slice::Fence;

/// Who allocates the GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Our controller: every device is fenced for it.
    #[default]
    Managed,
    /// kube-scheduler, by first fit: no fence, and nothing that needs our controller.
    Stock,
}

impl Mode {
    /// Whether devices carry the fence.
    #[must_use]
    pub const fn fence(self) -> Fence {
        match self {
            Self::Managed => Fence::Managed,
            Self::Stock => Fence::Stock,
        }
    }
}
