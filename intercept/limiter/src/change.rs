//! One change of the total.
//!
//! ```text
//!  next_used, begun := n      what is about to happen                   killed before here: nothing happened
//!  total := (used, slot, n)   it happens, and says who did it           the one step that counts
//!  applied := n               also written by whoever changes the total next, before it does
//!  used, settled := n         it is in the books                        killed before here: recover() finishes it
//! ```
//!
//! A slot has one change at a time: its owner holds the slot's lock, and its threads a lock of the
//! process.

use tessera_intercept_abi::ledger::Total;

use crate::book::{Book, SlotWords, Word};

/// Takes as many bytes as are free below `limit`, at least `least` and at most `most`. `None` where
/// `least` are not free.
pub(crate) fn take<B: Book>(
    book: &B,
    slot: usize,
    least: u64,
    most: u64,
    limit: u64,
) -> Option<u64> {
    let words = book.slot(slot)?;
    let limit = limit.min(Total::MAX_USED);
    run(book, slot, &words, |total| {
        let bytes = most.min(limit.saturating_sub(total));
        (bytes >= least).then_some(Step::Take(bytes))
    })
}

/// Gives bytes back; never more than the slot has. Answers how many.
pub(crate) fn give<B: Book>(book: &B, slot: usize, bytes: u64) -> u64 {
    let Some(words) = book.slot(slot) else { return 0 };
    let bytes = bytes.min(words.used.load());
    run(book, slot, &words, |_| Some(Step::Give(bytes))).unwrap_or(0)
}

/// Finishes or drops the change that the slot's dead owner was at, and gives back all it had.
/// Answers how much that was. The caller holds the slot's lock; it may be killed in here too, and
/// somebody else does it again.
pub(crate) fn recover<B: Book>(book: &B, slot: usize) -> u64 {
    let Some(words) = book.slot(slot) else { return 0 };
    let begun = words.begun.load();
    if begun != words.settled.load() {
        // In this order: whoever overwrites our change in the total has noted it in `applied`
        // before.
        let total = Total::unpack(book.total().load());
        let last = total.slot == slot && total.change == begun & Total::CHANGE_MASK;
        if last || words.applied.load() == begun {
            settle(&words, begun);
        } else {
            drop_change(&words);
        }
    }
    give(book, slot, u64::MAX)
}

/// What a change does to the total.
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

    /// Saturating: the tenant may have written anything over the words.
    fn of(self, bytes: u64) -> u64 {
        match self {
            Self::Take(more) => bytes.saturating_add(more),
            Self::Give(less) => bytes.saturating_sub(less),
        }
    }
}

/// Makes the change that `decide` finds right for the total as it is, or none.
fn run<B: Book>(
    book: &B,
    slot: usize,
    words: &SlotWords<'_, B::Word>,
    decide: impl Fn(u64) -> Option<Step>,
) -> Option<u64> {
    let used = words.used.load();
    let number = words.settled.load().wrapping_add(1);
    let mut word = book.total().load();
    loop {
        let total = Total::unpack(word);
        let Some(step) = decide(total.used_bytes) else {
            drop_change(words);
            return None;
        };
        words.next_used.store(step.of(used));
        words.begun.store(number);
        note_last(book, word, total);
        let next = Total { used_bytes: step.of(total.used_bytes), slot, change: number };
        match book.total().replace(word, next.pack()) {
            Ok(()) => {
                settle(words, number);
                return Some(step.bytes());
            }
            Err(now) => word = now,
        }
    }
}

/// Notes in the slot of the last change that it happened, since the next change wipes that out of
/// the total.
fn note_last<B: Book>(book: &B, word: u64, total: Total) {
    let Some(words) = book.slot(total.slot) else { return };
    let applied = words.applied.load();
    if applied & Total::CHANGE_MASK == total.change {
        return;
    }
    let begun = words.begun.load();
    // While the total stands, that slot's last change is the one it had begun, or the one before.
    let number =
        if begun & Total::CHANGE_MASK == total.change { begun } else { begun.wrapping_sub(1) };
    if number & Total::CHANGE_MASK == total.change && book.total().load() == word {
        // Fails where somebody else, or the owner, has noted it or a later one.
        let _ = words.applied.replace(applied, number);
    }
}

/// The change happened: puts it into the books. Doing it twice does no harm.
fn settle<W: Word>(words: &SlotWords<'_, W>, number: u64) {
    words.applied.store(number);
    words.used.store(words.next_used.load());
    words.settled.store(number);
}

/// The change did not happen: its number is free again.
fn drop_change<W: Word>(words: &SlotWords<'_, W>) {
    words.begun.store(words.settled.load());
}
