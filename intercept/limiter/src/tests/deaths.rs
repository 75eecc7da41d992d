//! Processes are killed between any two writes, while others go on. Every interleaving is tried
//! (loom).

use std::sync::Arc;

use core::cell::Cell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use tessera_intercept_abi::ledger::Total;

use crate::change;
use crate::ledger_words::{LedgerWords, SlotWords, Word};

const SLOTS: usize = 3;
const LIMIT: u64 = 100;
/// More writes than any sequence below makes: never dies.
const IMMORTAL: u32 = u32::MAX;

/// The shared words: the total, then five for each slot.
struct Cells(Vec<AtomicU64>);

impl Cells {
    fn new() -> Arc<Self> {
        Arc::new(Self((0..=SLOTS * 5).map(|_| AtomicU64::new(0)).collect()))
    }
}

/// Words as one process sees them. It is killed after a number of writes: later writes have no
/// effect.
struct Process {
    words: Vec<MortalWord>,
}

struct MortalWord {
    cells: Arc<Cells>,
    at: usize,
    writes_left: std::rc::Rc<Cell<u32>>,
}

impl Process {
    fn new(cells: &Arc<Cells>, writes: u32) -> Self {
        let left = std::rc::Rc::new(Cell::new(writes));
        let word = |at| MortalWord {
            cells: Arc::clone(cells),
            at,
            writes_left: std::rc::Rc::clone(&left),
        };
        Self { words: (0..=SLOTS * 5).map(word).collect() }
    }

    fn is_dead(&self) -> bool {
        self.words[0].writes_left.get() == 0
    }
}

impl MortalWord {
    fn may_write(&self) -> bool {
        let left = self.writes_left.get();
        self.writes_left.set(left.saturating_sub(1));
        left > 0
    }
}

impl Word for MortalWord {
    fn load(&self) -> u64 {
        self.cells.0[self.at].load(Ordering::SeqCst)
    }

    fn store(&self, value: u64) {
        if self.may_write() {
            self.cells.0[self.at].store(value, Ordering::Release);
        }
    }

    fn replace(&self, current: u64, new: u64) -> Result<(), u64> {
        if self.may_write() {
            self.cells.0[self.at]
                .compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
                .map(drop)
        } else {
            Ok(())
        }
    }
}

impl LedgerWords for Process {
    type Word = MortalWord;

    fn total(&self) -> &MortalWord {
        &self.words[0]
    }

    fn slot(&self, index: usize) -> Option<SlotWords<'_, MortalWord>> {
        let words = self.words.get(1 + index * 5..)?;
        let [used, next_used, begun, applied, settled, ..] = words else { return None };
        Some(SlotWords { used, next_used, begun, applied, settled })
    }

    fn slots(&self) -> usize {
        SLOTS
    }
}

fn total(process: &Process) -> u64 {
    Total::unpack(process.total().load()).used_bytes
}

fn used(process: &Process, slot: usize) -> u64 {
    process.slot(slot).map_or(0, |words| words.used.load())
}

/// Tries every interleaving with at most that many forced switches, which finds nearly every bug
/// and ends in time.
fn every_interleaving(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(run);
}

/// Steps of a process until it is killed.
fn live_and_die(process: &Process, slot: usize) {
    change::take(process, slot, 40, 40, LIMIT);
    change::give(process, slot, 10);
    change::take(process, slot, 70, 70, LIMIT);
}

#[test]
fn a_process_killed_between_any_two_writes_leaves_no_drift() {
    for writes in 0..=20 {
        every_interleaving(2, move || {
            let cells = Cells::new();
            let shared = Arc::clone(&cells);
            let victim = thread::spawn(move || live_and_die(&Process::new(&shared, writes), 0));
            let survivor = Process::new(&cells, IMMORTAL);
            let first = change::take(&survivor, 1, 50, 50, LIMIT).unwrap_or(0);
            let back = change::give(&survivor, 1, first / 2);
            assert!(total(&survivor) <= LIMIT);
            victim.join().expect("no panic");

            change::recover(&survivor, 0);
            assert_eq!(used(&survivor, 1), first - back, "the survivor's own is untouched");
            assert_eq!(total(&survivor), first - back, "killed after {writes} writes");
            assert_eq!(used(&survivor, 0), 0);
        });
    }
}

#[test]
fn a_reclaimer_killed_between_any_two_writes_leaves_no_drift() {
    for (writes, more_writes) in (0..=14).flat_map(|a| (0..=8).map(move |b| (a, b))) {
        every_interleaving(2, move || {
            let cells = Cells::new();
            live_and_die(&Process::new(&cells, writes), 0);
            let shared = Arc::clone(&cells);
            let reclaimer = thread::spawn(move || {
                change::recover(&Process::new(&shared, more_writes), 0);
            });
            let survivor = Process::new(&cells, IMMORTAL);
            let taken = change::take(&survivor, 1, 30, 30, LIMIT).unwrap_or(0);
            reclaimer.join().expect("no panic");

            change::recover(&survivor, 0);
            assert_eq!(
                total(&survivor),
                taken,
                "killed after {writes}, its reclaimer after {more_writes} writes"
            );
        });
    }
}

#[test]
fn the_next_to_change_the_total_vouches_for_the_dead() {
    // Dies right after the total took its change, before its own books did.
    every_interleaving(3, || {
        let cells = Cells::new();
        let victim = Process::new(&cells, 3);
        change::take(&victim, 0, 40, 40, LIMIT);
        assert!(victim.is_dead());
        let shared = Arc::clone(&cells);
        let other =
            thread::spawn(move || change::take(&Process::new(&shared, IMMORTAL), 2, 10, 10, LIMIT));
        let survivor = Process::new(&cells, IMMORTAL);
        assert_eq!(change::take(&survivor, 1, 10, 10, LIMIT), Some(10));
        assert_eq!(other.join().expect("no panic"), Some(10));
        assert_eq!((total(&survivor), used(&survivor, 0)), (60, 0));
        assert_eq!(change::recover(&survivor, 0), 40);
        assert_eq!(total(&survivor), 20);
    });
}
