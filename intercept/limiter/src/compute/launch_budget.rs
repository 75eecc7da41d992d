//! Budget from which launches are charged without a lock.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::compute::estimates::{Estimates, Key};

/// GPU-ns are in the low bits: 18 minutes.
const LEASE: u64 = (1 << 40) - 1;
/// One launch, in the bits above.
const LAUNCH: u64 = 1 << 40;
/// The meter has filled the budget. Without this bit nothing is charged here, not even a launch
/// that costs nothing.
const OPEN: u64 = 1 << 63;

/// Lease of a process on one GPU's time, for all its threads: one word, so that a launch is one
/// compare-and-swap.
///
/// [`Meter`](crate::compute::Meter) fills and drains it under its lock. A launch in between finds
/// it empty and asks the meter. All zeroes is a new one.
#[derive(Debug, Default)]
pub struct LaunchBudget {
    word: AtomicU64,
    pub(super) estimates: Estimates,
}

/// Content of a drained budget.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrainedBudget {
    /// GPU-ns that are left.
    pub(super) left: u64,
    /// Launches that were charged.
    pub(super) launches: u64,
}

/// GPU-ns charged for a launch, to be refunded if it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchCharge(u64);

impl LaunchBudget {
    /// The most GPU-ns that the budget can hold.
    pub(super) const CAPACITY: u64 = LEASE;

    /// Creates an empty budget without estimates.
    #[must_use]
    pub const fn new() -> Self {
        Self { word: AtomicU64::new(0), estimates: Estimates::new() }
    }

    /// Charges a launch from the lease. `None`: ask
    /// [`Meter::admit`](crate::compute::Meter::admit).
    #[inline]
    pub fn charge(&self, key: Key) -> Option<LaunchCharge> {
        let cost = self.estimates.known(key)?;
        let mut word = self.word.load(Ordering::Relaxed);
        while word & LEASE >= cost && word & OPEN != 0 {
            let charged = word - cost + LAUNCH;
            match self.word.compare_exchange_weak(
                word,
                charged,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(LaunchCharge(cost)),
                Err(other) => word = other,
            }
        }
        None
    }

    /// Refunds a launch that failed, unless the meter has drained the budget since: then the cost
    /// stays charged.
    pub fn refund(&self, charge: LaunchCharge) {
        let undo = |word: u64| {
            (word & OPEN != 0 && word & !OPEN >= LAUNCH)
                .then(|| word.wrapping_add(charge.0).wrapping_sub(LAUNCH))
        };
        // An error says that the closure found nothing to undo.
        let _ = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, undo);
    }

    /// Forgets the estimate of a graph that was destroyed: another one may get its address.
    pub fn forget(&self, key: Key) {
        self.estimates.forget(key);
    }

    /// Invalidates the estimates after a module was unloaded: other functions may get its
    /// addresses. The next sample of each kernel replaces its estimate.
    pub fn invalidate(&self) {
        self.estimates.invalidate();
    }

    /// Puts a lease in.
    pub(super) fn fill(&self, lease: u64) {
        self.word.store(OPEN | lease.min(LEASE), Ordering::Relaxed);
    }

    /// Takes everything out. `None` if the budget was not filled.
    pub(super) fn drain(&self) -> Option<DrainedBudget> {
        let word = self.word.swap(0, Ordering::Relaxed);
        (word & OPEN != 0)
            .then_some(DrainedBudget { left: word & LEASE, launches: (word & !OPEN) / LAUNCH })
    }
}
