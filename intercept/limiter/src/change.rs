//! One change of the total.
//!
//! ```text
//!  next_used, begun := n      announces the change               killed before the next step: nothing happened
//!  total := (used, slot, n)   applies it, with slot and number   the commit
//!  applied := n               also written by the process that changes the total next, before its own change
//!  used, settled := n         completes the slot                 killed before this step: recover() completes it
//! ```
//!
//! A slot has one change at a time: its owner holds the slot's lock, and its threads a lock of the
//! process.

use tessera_intercept_abi::ledger::Total;

use crate::ledger_words::{LedgerWords, SlotWords, Word};

/// Takes as many bytes as are free below `limit`, at least `least` and at most `most`. Returns
/// `None` if `least` bytes are not free.
pub(crate) fn take<B: LedgerWords>(
    ledger: &B,
    slot: usize,
    least: u64,
    most: u64,
    limit: u64,
) -> Option<u64> {
    let words = ledger.slot(slot)?;
    let limit = limit.min(Total::MAX_USED);
    run(ledger, slot, &words, |total| {
        let bytes = most.min(limit.saturating_sub(total));
        (bytes >= least).then_some(Step::Take(bytes))
    })
}

/// Releases bytes, never more than the slot has. Returns their number.
pub(crate) fn give<B: LedgerWords>(ledger: &B, slot: usize, bytes: u64) -> u64 {
    let Some(words) = ledger.slot(slot) else { return 0 };
    let bytes = bytes.min(words.used.load());
    run(ledger, slot, &words, |_| Some(Step::Give(bytes))).unwrap_or(0)
}

/// Completes or drops the unfinished change of a slot whose owner has ended, and releases all that
/// the slot has. Returns the number of bytes. The caller holds the slot's lock. It may be killed in
/// here too: then the next caller does it again.
pub(crate) fn recover<B: LedgerWords>(ledger: &B, slot: usize) -> u64 {
    let Some(words) = ledger.slot(slot) else { return 0 };
    let begun = words.begun.load();
    if begun != words.settled.load() {
        // In this order: a process that overwrites this change in the total has noted it in
        // `applied` before.
        let total = Total::unpack(ledger.total().load());
        let last = total.slot == slot && total.change == begun & Total::CHANGE_MASK;
        if last || words.applied.load() == begun {
            settle(&words, begun);
        } else {
            drop_change(&words);
        }
    }
    give(ledger, slot, u64::MAX)
}

/// Effect of a change on the total.
#[derive(Clone, Copy)]
enum Step {
    Take(u64),
    Give(u64),
}

impl Step {
    fn bytes(self) -> u64 {
        match self {
            Self::Take(bytes) | Self::Give(bytes) => bytes,
        }
    }

    /// Saturates: the tenant may have written any value into the words.
    fn of(self, bytes: u64) -> u64 {
        match self {
            Self::Take(more) => bytes.saturating_add(more),
            Self::Give(less) => bytes.saturating_sub(less),
        }
    }
}

/// Applies the change that `decide` returns for the current total, or none.
fn run<B: LedgerWords>(
    ledger: &B,
    slot: usize,
    words: &SlotWords<'_, B::Word>,
    decide: impl Fn(u64) -> Option<Step>,
) -> Option<u64> {
    let used = words.used.load();
    let number = words.settled.load().wrapping_add(1);
    let mut word = ledger.total().load();
    loop {
        let total = Total::unpack(word);
        let Some(step) = decide(total.used_bytes) else {
            drop_change(words);
            return None;
        };
        words.next_used.store(step.of(used));
        words.begun.store(number);
        note_last(ledger, word, total);
        let next = Total { used_bytes: step.of(total.used_bytes), slot, change: number };
        match ledger.total().replace(word, next.pack()) {
            Ok(()) => {
                settle(words, number);
                return Some(step.bytes());
            }
            Err(now) => word = now,
        }
    }
}

/// Notes in the slot of the last change that it was applied, because the next change overwrites
/// that in the total.
fn note_last<B: LedgerWords>(ledger: &B, word: u64, total: Total) {
    let Some(words) = ledger.slot(total.slot) else { return };
    let applied = words.applied.load();
    if applied & Total::CHANGE_MASK == total.change {
        return;
    }
    let begun = words.begun.load();
    // While the total is unchanged, that slot's last change is the one it had begun, or the one
    // before.
    let number =
        if begun & Total::CHANGE_MASK == total.change { begun } else { begun.wrapping_sub(1) };
    if number & Total::CHANGE_MASK == total.change && ledger.total().load() == word {
        // Fails if another process has noted this change or a later one.
        let _ = words.applied.replace(applied, number);
    }
}

/// Completes the slot after the change was applied. Idempotent.
fn settle<W: Word>(words: &SlotWords<'_, W>, number: u64) {
    words.applied.store(number);
    words.used.store(words.next_used.load());
    words.settled.store(number);
}

/// Drops a change that was not applied: its number is free again.
fn drop_change<W: Word>(words: &SlotWords<'_, W>) {
    words.begun.store(words.settled.load());
}
