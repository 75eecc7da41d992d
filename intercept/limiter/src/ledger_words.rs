//! Words of a ledger that a change reads and writes.

use core::sync::atomic::{AtomicU64, Ordering};

use tessera_intercept_abi::LedgerPage;

/// One shared word.
pub trait Word {
    /// Reads it.
    fn load(&self) -> u64;
    /// Writes it.
    fn store(&self, value: u64);
    /// Writes `new` if the word is `current`.
    ///
    /// # Errors
    /// Returns the value if it is another one.
    fn replace(&self, current: u64, new: u64) -> Result<(), u64>;
}

/// Words of one slot that a change reads and writes; `SlotPage` documents them.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are those of SlotPage")]
pub struct SlotWords<'a, W> {
    pub used: &'a W,
    pub next_used: &'a W,
    pub begun: &'a W,
    pub applied: &'a W,
    pub settled: &'a W,
}

/// A ledger as changes use it.
pub trait LedgerWords {
    /// Type of its words.
    type Word: Word;

    /// Returns the total with its last change.
    fn total(&self) -> &Self::Word;

    /// Returns the words of a slot; `None` if there is no such slot.
    fn slot(&self, index: usize) -> Option<SlotWords<'_, Self::Word>>;

    /// Returns the number of slots.
    fn slots(&self) -> usize;
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        AtomicU64::load(self, Ordering::SeqCst)
    }

    // Release is enough: stores stay in order among themselves and with the replacements of the
    // total, and no process writes one word and then relies on another one being unchanged. A
    // sequentially consistent store takes as long as a replacement, and a change makes five.
    fn store(&self, value: u64) {
        AtomicU64::store(self, value, Ordering::Release);
    }

    fn replace(&self, current: u64, new: u64) -> Result<(), u64> {
        self.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
    }
}

impl LedgerWords for LedgerPage {
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
