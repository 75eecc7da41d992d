//! In which order a pool lists its devices. Upstream's allocator takes the first that fits, so the
//! order is a policy.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::gpu::{Gpu, NvlinkClique};
use crate::names::GpuUuid;

/// The order of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceOrder {
    /// By NVML's index.
    #[default]
    Index,
    /// GPUs in use before free ones, the fullest first: first fit packs.
    FreeLast,
    /// The emptiest first: first fit spreads.
    FreeFirst,
    /// GPUs of one NVLink clique side by side, then by NUMA node: first fit of several GPUs stays
    /// together.
    Clique,
}

impl DeviceOrder {
    /// All orders.
    pub const ALL: [Self; 4] = [Self::Index, Self::FreeLast, Self::FreeFirst, Self::Clique];

    /// The word used on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Index => "index",
            Self::FreeLast => "free-last",
            Self::FreeFirst => "free-first",
            Self::Clique => "clique",
        }
    }

    /// Puts GPUs, which come by index, in this order; ties stay by index.
    pub(super) fn sort(
        self,
        gpus: &mut [&Gpu],
        in_use: &BTreeMap<GpuUuid, u64>,
        cliques: &[NvlinkClique],
    ) {
        let used = |gpu: &Gpu| in_use.get(&gpu.uuid).copied().unwrap_or(0);
        let clique = |gpu: &Gpu| {
            let own = cliques.iter().find(|clique| clique.members.contains(&gpu.uuid));
            own.map_or(u32::MAX, |clique| clique.number)
        };
        match self {
            Self::Index => {}
            Self::FreeLast => gpus.sort_by_key(|gpu| Reverse(used(gpu))),
            Self::FreeFirst => gpus.sort_by_key(|gpu| used(gpu)),
            Self::Clique => gpus.sort_by_key(|gpu| (clique(gpu), gpu.numa_node)),
        }
    }
}

impl fmt::Display for DeviceOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A text that is no order of devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an order of devices; known are index, free-last, free-first and clique")]
pub struct UnknownDeviceOrder(String);

impl FromStr for DeviceOrder {
    type Err = UnknownDeviceOrder;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|order| order.word() == text)
            .ok_or_else(|| UnknownDeviceOrder(text.to_owned()))
    }
}
