//! Memory that the CUDA driver takes by itself, as the host measures it.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::PublishedPage;

/// Memory that the CUDA driver holds for the processes of a share beyond what their slots say, in
/// bytes: contexts, code of kernels, local memory, heaps. Negative if they were charged more for
/// their contexts than these take.
///
/// Valid until the host publishes another value: without the host's driver, processes keep the
/// last one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overhead(pub i64);

impl Overhead {
    /// Returns the published overhead; 0 if none was published.
    #[must_use]
    pub fn read(page: &PublishedPage) -> Self {
        Self(page.overhead_bytes.load(Ordering::Relaxed))
    }

    /// Returns the part of a limit that is left for allocations.
    #[must_use]
    pub const fn limit_of(self, limit_bytes: u64) -> u64 {
        limit_bytes.saturating_add_signed(self.0.saturating_neg())
    }

    /// Returns the used bytes with the overhead.
    #[must_use]
    pub const fn used_of(self, used_bytes: u64) -> u64 {
        used_bytes.saturating_add_signed(self.0)
    }
}
