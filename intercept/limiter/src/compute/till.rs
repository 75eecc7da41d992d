//! What launches are paid from without a lock.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::compute::estimates::{Estimates, Key};

/// GPU-ns are in the low bits: 18 minutes.
const LEASE: u64 = (1 << 40) - 1;
/// One launch, in the bits above.
const LAUNCH: u64 = 1 << 40;
/// Somebody has put a lease in. Without it, nothing is paid from here, also what costs nothing.
const OPEN: u64 = 1 << 63;

/// A process's lease on one GPU, for all its threads: one word, so that a launch is one
/// compare-and-swap.
///
/// It is put in and taken out under the [`Meter`](crate::compute::Meter)'s lock; whoever comes in
/// between finds it empty and asks the meter. All zeroes is the beginning.
#[derive(Debug, Default)]
pub struct Till {
    word: AtomicU64,
    pub(super) estimates: Estimates,
}

/// What was in a till.
#[derive(Debug, Clone, Copy)]
pub(super) struct Takings {
    /// GPU-ns that are left.
    pub(super) left: u64,
    /// Launches that were paid.
    pub(super) launches: u64,
}

/// What was paid for a launch, to give it back should the launch fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paid(u64);

impl Till {
    /// The most GPU-ns that fit in.
    pub(super) const ROOM: u64 = LEASE;

    /// Empty, and no kernel is known.
    #[must_use]
    pub const fn new() -> Self {
        Self { word: AtomicU64::new(0), estimates: Estimates::new() }
    }

    /// Pays for a launch from what the meter took before. `None`: ask
    /// [`Meter::admit`](crate::compute::Meter::admit).
    #[inline]
    pub fn spend(&self, key: Key) -> Option<Paid> {
        let cost = self.estimates.known(key)?;
        let mut word = self.word.load(Ordering::Relaxed);
        while word & LEASE >= cost && word & OPEN != 0 {
            let paid = word - cost + LAUNCH;
            match self.word.compare_exchange_weak(word, paid, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Some(Paid(cost)),
                Err(other) => word = other,
            }
        }
        None
    }

    /// The launch failed. Where the meter has been at the till since, it is not worth the trouble.
    pub fn give_back(&self, paid: Paid) {
        let undo = |word: u64| {
            (word & OPEN != 0 && word & !OPEN >= LAUNCH)
                .then(|| word.wrapping_add(paid.0).wrapping_sub(LAUNCH))
        };
        // The closure refuses where nothing is to be done.
        let _ = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, undo);
    }

    /// A graph is gone: another may get its address.
    pub fn forget(&self, key: Key) {
        self.estimates.forget(key);
    }

    /// A module is gone, and functions with it: others may get their addresses. The next sample of
    /// each kernel is believed alone.
    pub fn doubt(&self) {
        self.estimates.doubt();
    }

    /// Puts a lease in.
    pub(super) fn fill(&self, lease: u64) {
        self.word.store(OPEN | lease.min(LEASE), Ordering::Relaxed);
    }

    /// Takes everything out. `None` where nothing was put in.
    pub(super) fn empty(&self) -> Option<Takings> {
        let word = self.word.swap(0, Ordering::Relaxed);
        (word & OPEN != 0)
            .then_some(Takings { left: word & LEASE, launches: (word & !OPEN) / LAUNCH })
    }
}
