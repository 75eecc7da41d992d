//! What a pod asks for and what a node has left, as far as fragmentation is concerned.

/// Thousandths of one GPU, from 0 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GpuMilli(u16);

impl GpuMilli {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// One whole GPU.
    pub const WHOLE: Self = Self(1000);

    /// So many thousandths; more than a GPU counts as a whole one.
    #[must_use]
    pub const fn new(thousandths: u32) -> Self {
        if thousandths >= 1000 { Self::WHOLE } else { Self(thousandths as u16) }
    }

    /// How much of a GPU `part` of `whole` is, rounded up; nothing of nothing.
    #[must_use]
    pub fn of(part: u64, whole: u64) -> Self {
        let thousandths = (u128::from(part) * 1000).div_ceil(u128::from(whole.max(1)));
        Self::new(u32::try_from(thousandths).unwrap_or(u32::MAX))
    }

    /// The number.
    #[must_use]
    pub const fn thousandths(self) -> u32 {
        self.0 as u32
    }

    /// What is left without `other`; nothing where that is more.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// A type of GPU, by a number that the caller gives to each (say, to each product name that it
/// meets).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuType(pub u16);

/// The types of GPU that a request accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuTypes(u128);

/// Types from this number on are not told apart.
const LAST_TYPE: u16 = 127;

impl GpuTypes {
    /// Every type, those to come included.
    pub const ANY: Self = Self(u128::MAX);

    /// These types.
    #[must_use]
    pub fn of(types: impl IntoIterator<Item = GpuType>) -> Self {
        Self(types.into_iter().fold(0, |set, kind| set | 1 << kind.0.min(LAST_TYPE)))
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(self, kind: GpuType) -> bool {
        self.0 >> kind.0.min(LAST_TYPE) & 1 == 1
    }
}

/// What one pod asks for. Equal requests form a class of the [`RequestMix`](super::RequestMix).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Request {
    /// CPU of the node, in thousandths of a core.
    pub cpu_milli: u64,
    /// How many GPUs; 0 = the pod needs none.
    pub gpus: u32,
    /// How much of each: the larger of its parts of memory and of compute.
    pub share: GpuMilli,
    /// On which types.
    pub types: GpuTypes,
}

impl Request {
    /// All that it takes of GPUs, in thousandths.
    #[must_use]
    pub fn total_milli(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.share.thousandths())
    }
}

/// One GPU of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpu {
    /// Its type.
    pub kind: GpuType,
    /// What is left of it: the smaller of what is left of its memory and of its compute.
    pub left: GpuMilli,
}

/// What a node has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeView<'a> {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Its GPUs, in any order.
    pub gpus: &'a [Gpu],
}
