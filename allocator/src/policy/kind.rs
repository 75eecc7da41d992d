//! Placement policies. `FirstFit` cannot be set in a GpuConfig: `simulate` has it.

use tessera_api::config::PlacementPolicy;

/// A placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Policy {
    /// Upstream's order: nodes by name, pools by driver and name, devices as published.
    FirstFit,
    /// Most utilized first, so that whole devices and nodes stay free.
    Binpack,
    /// Least utilized first, so that claims interfere least with each other.
    Spread,
    /// Pseudo-random order, by seed and pod.
    Random,
    /// Minimizes the capacity stranded for expected requests: see
    /// [`fragmentation`](crate::fragmentation).
    #[default]
    LeastFragmentation,
    /// Least measured load first: see [`DeviceLoad`](crate::model::DeviceLoad). Devices without a
    /// measurement count with their utilization.
    LeastLoaded,
}

impl Policy {
    /// Returns true if devices are tried in upstream's order.
    pub(crate) fn keeps_order(self) -> bool {
        self == Self::FirstFit
    }

    /// Returns true if the policy uses the forecast and the free CPU of nodes.
    pub(crate) fn uses_forecast(self) -> bool {
        self == Self::LeastFragmentation
    }

    /// Returns true if the policy uses the measured load of devices.
    pub(crate) fn uses_load(self) -> bool {
        self == Self::LeastLoaded
    }

    /// Returns true if each pod ranks nodes in its own pseudo-random order.
    pub(crate) fn is_randomized(self) -> bool {
        self == Self::Random
    }
}

impl From<PlacementPolicy> for Policy {
    fn from(policy: PlacementPolicy) -> Self {
        match policy {
            PlacementPolicy::Spread => Self::Spread,
            PlacementPolicy::Random => Self::Random,
            PlacementPolicy::Binpack => Self::Binpack,
            PlacementPolicy::LeastFragmentation => Self::LeastFragmentation,
            PlacementPolicy::LeastLoaded => Self::LeastLoaded,
        }
    }
}
