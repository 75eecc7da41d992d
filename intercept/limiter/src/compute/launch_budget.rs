//! Budget from which launches are charged without a lock.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::compute::estimates::{Estimates, Key};

/// GPU-ns are in the low bits: 18 minutes.
const LEASE: u64 = (1 << 40) - 1;
/// One launch, in the bits above.
const LAUNCH: u64 = 1 << 40;
/// One wait; launches up to it are in the bits below.
const ONE_WAIT: u64 = 1 << 32;
/// The last wait was for all work.
const FOR_ALL: u64 = 1 << 31;
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
    /// Waits of the program for its work since the budget was filled: their number from bit
    /// [`ONE_WAIT`] on, below it [`FOR_ALL`] of the last one and one more than the launches before.
    waits: AtomicU64,
    pub(super) estimates: Estimates,
}

/// Content of a drained budget.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrainedBudget {
    /// GPU-ns that are left.
    pub(super) left: u64,
    /// Launches that were charged.
    pub(super) launches: u64,
    /// Times that the program waited for work, of all threads about.
    pub(super) waits: u64,
    /// True if the program has launched nothing since the last of them.
    pub(super) is_after_wait: bool,
    /// True if it has waited for all work then.
    pub(super) is_done: bool,
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
        Self { word: AtomicU64::new(0), waits: AtomicU64::new(0), estimates: Estimates::new() }
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

    /// Counts that the program has waited for work; `for_all`: for all of it. Of two threads at
    /// once, one may not be counted: a program that waits often loses little by that.
    #[inline]
    pub fn waited(&self, for_all: bool) {
        let waits = self.waits.load(Ordering::Relaxed);
        let launches = (self.word.load(Ordering::Relaxed) & !OPEN) / LAUNCH;
        let for_all = if for_all { FOR_ALL } else { 0 };
        let number = (waits - waits % ONE_WAIT).wrapping_add(ONE_WAIT);
        self.waits.store(number | for_all | (launches + 1), Ordering::Relaxed);
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
        if word & OPEN == 0 {
            return None;
        }
        let waits = self.waits.swap(0, Ordering::Relaxed);
        let launches = (word & !OPEN) / LAUNCH;
        let is_after_wait = waits % FOR_ALL == launches + 1;
        Some(DrainedBudget {
            left: word & LEASE,
            launches,
            waits: waits / ONE_WAIT,
            is_after_wait,
            is_done: is_after_wait && waits & FOR_ALL != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a budget that covers two launches of a kernel.
    fn budget(key: Key) -> LaunchBudget {
        let budget = LaunchBudget::new();
        budget.estimates.learn(key, 100_000);
        budget.fill(250_000);
        budget
    }

    #[test]
    fn waits_are_known_until_the_next_launch() {
        let key = Key::kernel(1, [1; 3], [1; 3]);
        let budget = budget(key);
        assert!(budget.charge(key).is_some());
        budget.waited(false);
        budget.waited(true);
        let drained = budget.drain();
        let drained =
            drained.map(|drained| (drained.waits, drained.is_after_wait, drained.is_done));
        assert_eq!(drained, Some((2, true, true)));
        budget.fill(250_000);
        budget.waited(true);
        assert!(budget.charge(key).is_some());
        let drained = budget.drain();
        let drained =
            drained.map(|drained| (drained.waits, drained.is_after_wait, drained.is_done));
        assert_eq!(drained, Some((1, false, false)));
    }

    #[test]
    fn wait_for_one_stream_is_not_one_for_all() {
        let budget = budget(Key::graph(1));
        budget.waited(false);
        let drained = budget.drain();
        assert!(drained.is_some_and(|drained| drained.is_after_wait && !drained.is_done));
        budget.fill(1);
        assert!(budget.drain().is_some_and(|drained| drained.waits == 0 && !drained.is_after_wait));
    }
}
