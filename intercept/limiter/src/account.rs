//! One process's part of one ledger.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::{MAGIC, Total};
use tessera_intercept_abi::{ABI_VERSION, LedgerPage};

use crate::change;

/// Reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The limit is reached.
    Limit,
    /// The ledger does not contain what this process has written into it: no more memory is
    /// granted.
    Tampered,
}

/// Memory that this process holds of one ledger. It keeps its own count, in memory that no other
/// process can write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    slot: usize,
    held: u64,
    /// Bytes charged for its contexts, once they are charged; part of `held`.
    contexts: Option<u64>,
}

impl Account {
    /// Creates the account of an attached slot.
    #[must_use]
    pub const fn new(slot: usize) -> Self {
        Self { slot, held: 0, contexts: None }
    }

    /// Returns the index of its slot.
    #[must_use]
    pub const fn slot(&self) -> usize {
        self.slot
    }

    /// Returns true after [`Account::charge_contexts`].
    #[must_use]
    pub const fn has_charged_contexts(&self) -> bool {
        self.contexts.is_some()
    }

    /// Returns the bytes that this process holds, those of its contexts included.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.held
    }

    /// Takes at least `least` and at most `most` bytes, so that all processes together hold no more
    /// than `limit`. Returns the number of bytes.
    ///
    /// # Errors
    /// `least` bytes are not free, or the ledger was tampered with.
    pub fn take(
        &mut self,
        ledger: &LedgerPage,
        least: u64,
        most: u64,
        limit: u64,
    ) -> Result<u64, Refused> {
        self.check(ledger)?;
        let taken = change::take(ledger, self.slot, least, most, limit).ok_or(Refused::Limit)?;
        self.held = self.held.saturating_add(taken);
        let now = Total::unpack(ledger.total.load(Ordering::Relaxed)).used_bytes;
        if ledger.peak_bytes.load(Ordering::Relaxed) < now {
            ledger.peak_bytes.fetch_max(now, Ordering::Relaxed);
        }
        Ok(taken)
    }

    /// Charges the contexts of this process. They are held until the process ends.
    ///
    /// # Errors
    /// As [`Account::take`].
    pub fn charge_contexts(
        &mut self,
        ledger: &LedgerPage,
        bytes: u64,
        limit: u64,
    ) -> Result<(), Refused> {
        if bytes > 0 {
            self.take(ledger, bytes, bytes, limit)?;
        }
        self.contexts = Some(bytes);
        Ok(())
    }

    /// Releases at most the bytes that are held beside contexts. Returns their number.
    pub fn give(&mut self, ledger: &LedgerPage, bytes: u64) -> u64 {
        let bytes = bytes.min(self.held.saturating_sub(self.contexts.unwrap_or(0)));
        self.held -= bytes;
        change::give(ledger, self.slot, bytes);
        bytes
    }

    /// Counts launches.
    pub fn count_launches(&self, ledger: &LedgerPage, launches: u64) {
        if let Some(slot) = ledger.slot.get(self.slot) {
            slot.launches.fetch_add(launches, Ordering::Relaxed);
        }
    }

    fn check(&self, ledger: &LedgerPage) -> Result<(), Refused> {
        let whole = ledger.magic.load(Ordering::Relaxed) == MAGIC
            && ledger.abi_version.load(Ordering::Relaxed) == ABI_VERSION;
        let own = ledger
            .slot
            .get(self.slot)
            .is_some_and(|slot| slot.used_bytes.load(Ordering::Relaxed) == self.held);
        let total = Total::unpack(ledger.total.load(Ordering::Relaxed)).used_bytes;
        if whole && own && total >= self.held { Ok(()) } else { Err(Refused::Tampered) }
    }
}
