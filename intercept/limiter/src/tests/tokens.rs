//! Tokens under every interleaving (loom): none is lost, none is given twice, and the dead hold
//! none.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::compute::{BURST_GPU_NS, Bucket, Contention, Rate, charge_exited};
use crate::ledger_words::Word;

struct Cell(AtomicU64);

impl Cell {
    fn new(value: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(value)))
    }
}

impl Word for Cell {
    fn load(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn store(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    fn replace(&self, current: u64, new: u64) -> Result<(), u64> {
        self.0.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
    }
}

const NOW: u64 = 10_000_000_000;
const HALF: Rate = Rate::from_percent(50);
const FLOOR: u64 = NOW - HALF.wall_ns(BURST_GPU_NS);

#[test]
fn of_two_who_take_the_last_token_one_gets_it() {
    loom::model(|| {
        let due = Cell::new(NOW);
        let shared = Arc::clone(&due);
        let other = thread::spawn(move || Bucket::new(&*shared).take(NOW, 0, 7, HALF).is_ok());
        let first = Bucket::new(&*due).take(NOW, 0, 7, HALF).is_ok();
        let second = other.join().expect("no panic");
        assert!(first != second, "one and not both");
        assert_eq!(due.load(), NOW + 14);
    });
}

#[test]
fn what_is_taken_charged_and_refunded_at_once_adds_up() {
    loom::model(|| {
        let due = Cell::new(0);
        let (one, two) = (Arc::clone(&due), Arc::clone(&due));
        let takes = thread::spawn(move || Bucket::new(&*one).take(NOW, 0, 100, HALF));
        let settles = thread::spawn(move || {
            let bucket = Bucket::new(&*two);
            bucket.charge(NOW, 50, HALF);
            bucket.refund(20, HALF);
        });
        assert_eq!(Bucket::new(&*due).take(NOW, 0, 10, HALF), Ok(()));
        assert_eq!(takes.join().expect("no panic"), Ok(()));
        settles.join().expect("no panic");
        assert_eq!(due.load(), FLOOR + 2 * (100 + 50 - 20 + 10));
    });
}

#[test]
fn ended_process_is_charged_once_by_concurrent_reclaims() {
    loom::model(|| {
        let (due, since, outstanding) = (Cell::new(NOW), Cell::new(NOW), Cell::new(300));
        let (d, s, o) = (Arc::clone(&due), Arc::clone(&since), Arc::clone(&outstanding));
        // The lock keeps two reclaimers apart; one that was killed may be followed by another, and
        // then both have run.
        let reclaims = thread::spawn(move || {
            charge_exited(&*d, &*s, &*o, NOW + 1_000, HALF, Contention::NONE)
        });
        charge_exited(&*due, &*since, &*outstanding, NOW + 1_000, HALF, Contention::NONE);
        reclaims.join().expect("no panic");
        // It ran for 1000, of which 300 were prepaid; a reclaimer that comes between may see
        // nothing prepaid any more.
        assert!([2 * 700, 2 * 1_000].contains(&(due.load() - NOW)), "{}", due.load() - NOW);
        assert_eq!((since.load(), outstanding.load()), (0, 0));
    });
}

#[test]
fn a_container_that_comes_back_later_owes_nothing_for_its_dead() {
    let (due, since, outstanding) = (
        core::sync::atomic::AtomicU64::new(NOW),
        core::sync::atomic::AtomicU64::new(NOW),
        core::sync::atomic::AtomicU64::new(0),
    );
    let later = NOW + 3_600_000_000_000;
    charge_exited(&due, &since, &outstanding, later, Rate::from_percent(10), Contention::NONE);
    assert_eq!(Bucket::new(&due).take(later, 0, 1, Rate::from_percent(10)), Ok(()));
}
