//! The values that the fields of a `GpuConfig` take.

use std::fmt;

/// Defines a field's values: an enum, its words, and how a word is read.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// All values, as the documentation lists them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The value as it is written.
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

words! {
    /// `placement.node`, `placement.device`: which of the places that fit is taken.
    PlacementPolicy {
        /// The one that leaves the rest most useful for the claims to come.
        LeastFragmentation = "LeastFragmentation",
        /// The fullest: keep whole ones free.
        Binpack = "Binpack",
        /// The emptiest: share as little as possible.
        Spread = "Spread",
        /// Any.
        Random = "Random",
    }
}

words! {
    /// `topology[].scope`: what the GPUs of a request are to have in common.
    TopologyScope {
        /// All joined by NVLink.
        NvLink = "NVLink",
        /// One PCIe root.
        Pcie = "PCIe",
        /// One NUMA node.
        Numa = "NUMA",
    }
}

words! {
    /// `topology[].mode`.
    TopologyMode {
        /// As far as possible.
        Prefer = "Prefer",
        /// Or the claim waits.
        Require = "Require",
    }
}

words! {
    /// `compute.policy`: when a claim's `cores` are a cap.
    ComputePolicy {
        /// Always.
        Fixed = "Fixed",
        /// While others need the GPU.
        Balance = "Balance",
        /// Never.
        None = "None",
    }
}

words! {
    /// `compute.priority`: who yields first.
    ComputePriority {
        /// Last.
        High = "High",
        /// As everybody.
        Normal = "Normal",
        /// First.
        Low = "Low",
    }
}

words! {
    /// `sharing`: what enforces the shares.
    Sharing {
        /// Tessera's library inside the container.
        Intercept = "Intercept",
        /// The GPU's own time slices; memory is not limited. Not in this version.
        TimeSlicing = "TimeSlicing",
        /// NVIDIA's multi-process service, with Tessera's library beside it for memory.
        Mps = "MPS",
    }
}

/// A share in percent, 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percent(u8);

impl Percent {
    /// The share; `None` outside 1 to 100.
    pub const fn new(percent: u64) -> Option<Self> {
        if percent >= 1 && percent <= 100 { Some(Self(percent as u8)) } else { None }
    }

    /// As a number, 1 to 100.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// That share of an amount of memory, in whole MiB: rounded down, so that shares that add up to
    /// 100 always fit together, but at least one.
    pub const fn of_mib(self, mib: u64) -> u64 {
        let share = (mib as u128 * self.0 as u128 / 100) as u64;
        if share == 0 { 1 } else { share }
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}
