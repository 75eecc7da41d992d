//! The words that changes work on.

use core::sync::atomic::{AtomicU64, Ordering};

use tessera_intercept_abi::LedgerPage;

/// One shared word.
pub trait Word {
    /// Reads it.
    fn load(&self) -> u64;
    /// Writes it.
    fn store(&self, value: u64);
    /// Writes `new` if it is `current`.
    ///
    /// # Errors
    /// What it is instead.
    fn replace(&self, current: u64, new: u64) -> Result<(), u64>;
}

/// The words of one slot that a change touches; see `SlotPage` for what they mean.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are those of SlotPage")]
pub struct SlotWords<'a, W> {
    pub used: &'a W,
    pub next_used: &'a W,
    pub begun: &'a W,
    pub applied: &'a W,
    pub settled: &'a W,
}

/// A ledger as far as changes are concerned.
pub trait Book {
    /// What its words are.
    type Word: Word;

    /// The total with its last change.
    fn total(&self) -> &Self::Word;

    /// The words of a slot; `None` where there is no such slot.
    fn slot(&self, index: usize) -> Option<SlotWords<'_, Self::Word>>;

    /// How many slots there are.
    fn slots(&self) -> usize;
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        AtomicU64::load(self, Ordering::SeqCst)
    }

    // In order among themselves and with the replacements of the total, which is all that a change
    // needs: nobody writes one word and then goes by another not having changed. A stronger
    // store takes as long as a replacement, and a change makes five.
    fn store(&self, value: u64) {
        AtomicU64::store(self, value, Ordering::Release);
    }

    fn replace(&self, current: u64, new: u64) -> Result<(), u64> {
        self.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
    }
}

impl Book for LedgerPage {
    type Word = AtomicU64;

    fn total(&self) -> &AtomicU64 {
        &self.total
    }

    fn slot(&self, index: usize) -> Option<SlotWords<'_, AtomicU64>> {
        let slot = self.slot.get(index)?;
        Some(SlotWords {
            used: &slot.used_bytes,
            next_used: &slot.next_used_bytes,
            begun: &slot.begun,
            applied: &slot.applied,
            settled: &slot.settled,
        })
    }

    fn slots(&self) -> usize {
        self.slot.len()
    }
}
