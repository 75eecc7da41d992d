//! Requests and free capacity in terms of the fragmentation model.

/// A fraction of one GPU in thousandths, from 0 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GpuFraction(u16);

impl GpuFraction {
    /// No part of a GPU.
    pub const NONE: Self = Self(0);
    /// One whole GPU.
    pub const WHOLE: Self = Self(1000);

    /// Creates a fraction from thousandths; values above 1000 count as a whole GPU.
    #[must_use]
    pub const fn new(thousandths: u32) -> Self {
        if thousandths >= 1000 { Self::WHOLE } else { Self(thousandths as u16) }
    }

    /// Returns `part` of `whole` as a fraction, rounded up; 0 if both are 0.
    #[must_use]
    pub fn of(part: u64, whole: u64) -> Self {
        let thousandths = (u128::from(part) * 1000).div_ceil(u128::from(whole.max(1)));
        Self::new(u32::try_from(thousandths).unwrap_or(u32::MAX))
    }

    /// Returns the thousandths.
    #[must_use]
    pub const fn thousandths(self) -> u32 {
        self.0 as u32
    }

    /// Returns the difference; 0 if `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// A GPU type, by a number that the caller assigns (for example one per product name).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuType(pub u16);

/// Set of GPU types that a request accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuTypes(u128);

/// Types from this number on are treated as one.
const LAST_TYPE: u16 = 127;

impl GpuTypes {
    /// All types, including future ones.
    pub const ANY: Self = Self(u128::MAX);

    /// Creates a set of types.
    #[must_use]
    pub fn of(types: impl IntoIterator<Item = GpuType>) -> Self {
        Self(types.into_iter().fold(0, |set, kind| set | 1 << kind.0.min(LAST_TYPE)))
    }

    /// Returns true if the set contains the type.
    #[must_use]
    pub fn contains(self, kind: GpuType) -> bool {
        self.0 >> kind.0.min(LAST_TYPE) & 1 == 1
    }
}

/// Request of one pod. Equal requests form a class of the [`RequestMix`](super::RequestMix).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuRequest {
    /// CPU request, in millicores.
    pub cpu_milli: u64,
    /// Number of GPUs; 0 if the pod needs none.
    pub gpus: u32,
    /// Share of each GPU: the larger of its fractions of memory and compute.
    pub share: GpuFraction,
    /// Accepted GPU types.
    pub types: GpuTypes,
}

impl GpuRequest {
    /// Returns the total GPU share, in thousandths.
    #[must_use]
    pub fn total_milli(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.share.thousandths())
    }
}

/// A GPU of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuState {
    /// GPU type.
    pub gpu_type: GpuType,
    /// Free share: the smaller of the free fractions of memory and compute.
    pub free: GpuFraction,
}

/// Free capacity of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeCapacity<'a> {
    /// Free CPU, in millicores.
    pub cpu_milli: u64,
    /// GPUs of the node, in any order.
    pub gpus: &'a [GpuState],
}
