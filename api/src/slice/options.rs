//! Inputs of the slices other than the hardware.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use super::{DeviceOrder, Fence};
use crate::gpu::Gpu;
use crate::names::{GpuUuid, NodeName, PoolName};

/// Options for publishing the devices of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceOptions {
    /// The node.
    pub node: NodeName,
    /// The Node object that owns the slices, so that they go when it goes; `None` = no owner.
    pub owner: Option<NodeOwner>,
    /// The pool's generation.
    pub generation: i64,
    /// Allocator of the devices, and what keeps kube-scheduler from them.
    pub fence: Fence,
    /// The order of the devices: upstream's first fit takes them as they come.
    pub order: DeviceOrder,
    /// Memory in use per GPU, bytes, for the orders that look at it; what is missing is unused.
    pub in_use: BTreeMap<GpuUuid, u64>,
    /// GPUs that a claim uses of which the API does not know: nothing new is put on them.
    pub orphaned: BTreeSet<GpuUuid>,
    /// GPUs that were published without the fence a while ago.
    pub leaving_stock: BTreeSet<GpuUuid>,
    /// Published memory in percent of the GPU's.
    pub memory_ratio: MemoryRatio,
    /// Published cores of each GPU.
    pub cores_ratio: CoresRatio,
    /// Maximum number of shares of each GPU.
    pub max_shares: MaxShares,
    /// GPUs with a share that may not spill to the host: they are published with the memory that
    /// they have.
    pub fixed: BTreeSet<GpuUuid>,
    /// The node runs MPS control daemons for claims that ask for them.
    pub mps: bool,
}

impl SliceOptions {
    /// The defaults for a node: fenced, by index, memory as it is, first generation, no owner.
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            owner: None,
            generation: 1,
            fence: Fence::Taint,
            order: DeviceOrder::Index,
            in_use: BTreeMap::new(),
            orphaned: BTreeSet::new(),
            leaving_stock: BTreeSet::new(),
            memory_ratio: MemoryRatio::WHOLE,
            cores_ratio: CoresRatio::WHOLE,
            max_shares: MaxShares::default(),
            fixed: BTreeSet::new(),
            mps: false,
        }
    }

    /// The pool: named as the node.
    pub fn pool(&self) -> PoolName {
        PoolName::of_node(&self.node)
    }
}

/// The Node object that owns the slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOwner {
    /// `metadata.uid` of the Node.
    pub uid: String,
}

/// Published memory in percent of the physical memory; 100 or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryRatio(u32);

impl MemoryRatio {
    /// Memory as it is.
    pub const WHOLE: Self = Self(100);
    /// The most that is published: eight times what is there.
    pub const MAX_PERCENT: u32 = 800;

    /// A ratio in percent; `None` below 100 or above [`MAX_PERCENT`](Self::MAX_PERCENT).
    pub const fn from_percent(percent: u32) -> Option<Self> {
        if percent >= 100 && percent <= Self::MAX_PERCENT { Some(Self(percent)) } else { None }
    }

    /// In percent.
    pub const fn percent(self) -> u32 {
        self.0
    }

    /// Returns true if more is published than the GPU has.
    pub const fn is_oversubscribed(self) -> bool {
        self.0 > 100
    }

    /// Returns the published part of `mib` in MiB, rounded down.
    pub const fn of_mib(self, mib: u64) -> u64 {
        (mib as u128 * self.0 as u128 / 100) as u64
    }

    /// Returns the published memory of `gpu` in MiB: more than it has only if its memory can spill
    /// to the host and no share forbids that (`is_fixed`). Memory of shares that may spill cannot
    /// always be moved away for one that may not.
    pub fn of_gpu(self, gpu: &Gpu, is_fixed: bool) -> u64 {
        if gpu.memory_can_spill() && !is_fixed {
            self.of_mib(gpu.memory_mib())
        } else {
            gpu.memory_mib()
        }
    }
}

impl Default for MemoryRatio {
    fn default() -> Self {
        Self::WHOLE
    }
}

/// Published cores in percent of a GPU, 100 to [`MAX_PERCENT`](Self::MAX_PERCENT).
///
/// Above 100, guarantees are scaled down while shares that are guaranteed more than the GPU have
/// work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoresRatio(u8);

impl CoresRatio {
    /// The cores of one GPU.
    pub const WHOLE: Self = Self(100);
    /// The most that is published: those of two GPUs.
    pub const MAX_PERCENT: u8 = 200;

    /// Returns a ratio in percent; `None` below 100 or above [`MAX_PERCENT`](Self::MAX_PERCENT).
    pub const fn from_percent(percent: u8) -> Option<Self> {
        if percent >= 100 && percent <= Self::MAX_PERCENT { Some(Self(percent)) } else { None }
    }

    /// Returns the percentage.
    pub const fn percent(self) -> u8 {
        self.0
    }
}

impl Default for CoresRatio {
    fn default() -> Self {
        Self::WHOLE
    }
}

/// Maximum number of shares of a GPU, 1 to [`LIMIT`](Self::LIMIT).
///
/// It is published as a capacity of which each request takes 1 unless it says more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MaxShares(u32);

impl MaxShares {
    /// Number of shares of one GPU whose compute the driver balances, and the default.
    pub const LIMIT: u32 = 128;

    /// Returns that number; `None` for 0 or above [`LIMIT`](Self::LIMIT).
    pub const fn new(number: u32) -> Option<Self> {
        if number >= 1 && number <= Self::LIMIT { Some(Self(number)) } else { None }
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl Default for MaxShares {
    fn default() -> Self {
        Self(Self::LIMIT)
    }
}

impl fmt::Display for MaxShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for MaxShares {
    type Err = InvalidMaxShares;

    fn from_str(text: &str) -> Result<Self, InvalidMaxShares> {
        text.parse().ok().and_then(Self::new).ok_or(InvalidMaxShares)
    }
}

/// Error of an invalid maximum number of shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a whole number from 1 to {limit}", limit = MaxShares::LIMIT)]
pub struct InvalidMaxShares;
