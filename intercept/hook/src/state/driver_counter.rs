//! Counters of memory by the CUDA driver: of pools, of graphs, and of context limits.

/// A counter of the CUDA driver, and the bytes charged for what it counts.
#[derive(Clone, Copy, Default)]
pub(crate) struct DriverCounter {
    /// Bytes charged for the memory that it counts.
    pub(crate) charged: u64,
    /// Bytes charged for calls that are under way: the counter may or may not contain their
    /// memory.
    pub(crate) pending: u64,
    /// Ticket of the last reading.
    pub(crate) ticket: u64,
    /// Bytes of the last reading.
    pub(crate) reading: u64,
    /// The GPU, by its index in the state.
    pub(crate) gpu: u32,
    /// Readings that are under way.
    pub(crate) readers: u32,
    /// Of a pool: allocations from it.
    pub(crate) pieces: u64,
    /// Of a limit: its value when the context was created.
    pub(crate) first: u64,
    /// Handle of the driver's object; 0: the counter cannot be read any more.
    pub(crate) handle: usize,
    /// Of a pool: true while the driver may be destroying it. No reading begins then.
    pub(crate) is_leaving: bool,
}

/// Kind of a counter, in the upper bits of its key: handles have none there.
pub(crate) const POOL: u64 = 1 << 60;
/// As [`POOL`]: a context, and one of its limits in the lower bits.
pub(crate) const LIMIT: u64 = 2 << 60;
/// As [`POOL`]: a GPU, and the memory of its graphs.
pub(crate) const GRAPH: u64 = 3 << 60;

/// Returns the kind of a counter.
pub(crate) const fn kind(key: u64) -> u64 {
    key & 0xf << 60
}
