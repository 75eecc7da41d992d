use std::collections::HashSet;
use std::sync::Mutex;
use std::thread;

use core::sync::atomic::Ordering;
use proptest::prelude::*;
use tessera_intercept_abi::LedgerPage;
use tessera_intercept_abi::ledger::{SLOT_FREE, SLOT_LIVE, SLOTS, Total};

use crate::compute::{Contention, Rate};
use crate::*;

fn fresh() -> Box<LedgerPage> {
    Box::new(LedgerPage::empty())
}

/// Locks within one process.
#[derive(Default)]
struct Locks(Mutex<HashSet<usize>>);

impl SlotLocks for Locks {
    fn try_lock(&self, slot: usize) -> bool {
        self.0.lock().expect("not poisoned").insert(slot)
    }

    fn unlock(&self, slot: usize) {
        self.0.lock().expect("not poisoned").remove(&slot);
    }
}

const UNLIMITED: ReclaimContext =
    ReclaimContext { now_ns: 0, rate: None, contention: Contention::NONE };

const ME: Identity = Identity { pid: 1, start_ticks: 2, pid_namespace: 3 };

fn used(ledger: &LedgerPage) -> u64 {
    Total::unpack(ledger.total.load(Ordering::Relaxed)).used_bytes
}

fn account(ledger: &LedgerPage, locks: &Locks) -> Account {
    Account::new(attach(ledger, locks, ME, &UNLIMITED).expect("a slot is free"))
}

#[test]
fn a_process_gets_memory_up_to_the_limit_and_not_one_byte_more() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut account = account(&ledger, &locks);
    assert_eq!(account.take(&ledger, 60, 60, 100), Ok(60));
    assert_eq!(account.take(&ledger, 41, 41, 100), Err(Refused::Limit));
    assert_eq!(account.take(&ledger, 40, 40, 100), Ok(40));
    assert_eq!(account.take(&ledger, 1, 1, 100), Err(Refused::Limit));
    assert_eq!(account.give(&ledger, 1000), 100);
    assert_eq!((used(&ledger), account.held()), (0, 0));
    assert_eq!(ledger.peak_bytes.load(Ordering::Relaxed), 100);
}

#[test]
fn contexts_are_paid_for_once_and_held_for_life() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut account = account(&ledger, &locks);
    assert_eq!(account.charge_contexts(&ledger, 30, 100), Ok(()));
    assert_eq!(account.take(&ledger, 71, 71, 100), Err(Refused::Limit));
    assert_eq!(account.take(&ledger, 70, 70, 100), Ok(70));
    assert_eq!(account.give(&ledger, 1000), 70);
    assert_eq!(used(&ledger), 30);
}

#[test]
fn a_limit_below_what_is_held_refuses_more_and_takes_nothing_away() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut account = account(&ledger, &locks);
    assert_eq!(account.take(&ledger, 60, 60, 100), Ok(60));
    assert_eq!(account.take(&ledger, 1, 1, 50), Err(Refused::Limit));
    assert_eq!(account.held(), 60);
}

#[test]
fn processes_racing_for_one_budget_get_exactly_the_budget() {
    // Miri, some thousand times slower, tries orders that the machine does not.
    const LIMIT: u64 = if cfg!(miri) { 200 } else { 10_000 };
    const ROUNDS: u64 = if cfg!(miri) { 5 } else { 20_000 };
    let (ledger, locks) = (fresh(), Locks::default());
    let taken: u64 = thread::scope(|scope| {
        let racers: Vec<_> = (0..8_u64)
            .map(|seed| {
                let mut account = account(&ledger, &locks);
                let ledger = &ledger;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let bytes = 1 + (round * 7 + seed * 13) % 97;
                        if account.take(ledger, bytes, bytes, LIMIT).is_ok() && round % 3 != 0 {
                            account.give(ledger, bytes);
                        }
                        assert!(used(ledger) <= LIMIT);
                    }
                    while account.take(ledger, 1, 1, LIMIT).is_ok() {}
                    account.held()
                })
            })
            .collect();
        racers.into_iter().map(|racer| racer.join().expect("no panic")).sum()
    });
    assert_eq!((taken, used(&ledger)), (LIMIT, LIMIT));
}

#[test]
fn what_the_dead_held_comes_back_and_slots_never_move() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut accounts: Vec<_> = (0..3).map(|_| account(&ledger, &locks)).collect();
    for account in &mut accounts {
        account.take(&ledger, 700, 700, 2100).expect("room");
    }
    // The first two die; their locks go with them.
    locks.unlock(0);
    locks.unlock(1);
    assert_eq!(reclaim(&ledger, &locks, &UNLIMITED), 1400);
    assert_eq!(used(&ledger), 700);
    let newcomer = attach(&ledger, &locks, ME, &UNLIMITED);
    assert_eq!(newcomer, Some(0), "the free slot, not the survivor's");
    let survivor = &mut accounts[2];
    assert_eq!(survivor.take(&ledger, 1400, 1400, 2100), Ok(1400));
    assert_eq!(ledger.slot[2].used_bytes.load(Ordering::Relaxed), 2100);
    assert_eq!(survivor.take(&ledger, 1, 1, 2100), Err(Refused::Limit));
}

#[test]
fn a_new_process_takes_a_dead_ones_slot_when_no_other_is_free() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut first = account(&ledger, &locks);
    first.take(&ledger, 5, 5, 10).expect("room");
    // As if each had come for itself, which takes time in the square of their number.
    for slot in 1..SLOTS {
        assert!(locks.try_lock(slot));
        ledger.slot[slot].state.store(SLOT_LIVE, Ordering::Relaxed);
    }
    assert_eq!(attach(&ledger, &locks, ME, &UNLIMITED), None);
    locks.unlock(0);
    assert_eq!(attach(&ledger, &locks, ME, &UNLIMITED), Some(0));
    assert_eq!(used(&ledger), 0);
}

#[test]
fn what_the_host_called_the_dead_is_not_said_of_the_next() {
    let (ledger, locks) = (fresh(), Locks::default());
    let slot = account(&ledger, &locks).slot();
    ledger.slot[slot].set_host_pid(4711);
    locks.unlock(slot);
    reclaim(&ledger, &locks, &UNLIMITED);
    // The same in every respect, as processes that started in the same tick are by the half that is
    // compared.
    assert_eq!(account(&ledger, &locks).slot(), slot);
    assert_eq!(ledger.slot[slot].host_pid.load(Ordering::Relaxed), 0);
}

#[test]
fn launches_of_the_dead_are_kept_in_the_total() {
    let (ledger, locks) = (fresh(), Locks::default());
    account(&ledger, &locks).count_launches(&ledger, 5);
    locks.unlock(0);
    reclaim(&ledger, &locks, &UNLIMITED);
    assert_eq!(ledger.past_launches.load(Ordering::Relaxed), 5);
    assert_eq!(ledger.slot[0].state.load(Ordering::Relaxed), SLOT_FREE);
}

#[test]
fn what_a_dead_process_ran_unpaid_is_charged_once_and_kept_in_the_totals() {
    const MS: u64 = 1_000_000;
    let (ledger, locks) = (fresh(), Locks::default());
    let slot = account(&ledger, &locks).slot();
    let compute = &ledger.slot[slot].compute;
    compute.gpu_ns.store(7 * MS, Ordering::Relaxed);
    compute.busy_ns.store(20 * MS, Ordering::Relaxed);
    compute.begin(1_000 * MS);
    compute.outstanding_ns.store(10 * MS, Ordering::Relaxed);
    // Found late: what it ran ended when it should have.
    compute.done_by_ns.store(1_040 * MS, Ordering::Relaxed);
    locks.unlock(slot);
    let context = ReclaimContext {
        now_ns: 9_000 * MS,
        rate: Some(Rate::from_percent(50)),
        contention: Contention::NONE,
    };
    for _ in 0..2 {
        reclaim(&ledger, &locks, &context);
        // 40 ms, of which 10 were paid, at half speed; the bucket was full.
        assert_eq!(ledger.compute.due_ns.load(Ordering::Relaxed), (1_000 - 20 + 60) * MS);
        assert_eq!(ledger.past_gpu_ns.load(Ordering::Relaxed), (7 + 30) * MS);
        assert_eq!(ledger.compute.past_busy_ns.load(Ordering::Relaxed), (20 + 40) * MS);
        assert_eq!(compute.busy_until(9_000 * MS), 0);
    }
}

#[test]
fn a_ledger_that_was_written_over_gives_nothing() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut account = account(&ledger, &locks);
    account.take(&ledger, 50, 50, 100).expect("room");

    let total = ledger.total.swap(0, Ordering::Relaxed);
    assert_eq!(account.take(&ledger, 1, 1, 100), Err(Refused::Tampered));
    ledger.total.store(total, Ordering::Relaxed);
    ledger.slot[0].used_bytes.store(0, Ordering::Relaxed);
    assert_eq!(account.take(&ledger, 1, 1, 100), Err(Refused::Tampered));
    ledger.slot[0].used_bytes.store(50, Ordering::Relaxed);
    assert_eq!(account.take(&ledger, 1, 1, 100), Ok(1));
    ledger.magic.store(0, Ordering::Relaxed);
    assert_eq!(account.take(&ledger, 1, 1, 100), Err(Refused::Tampered));
}

#[test]
fn a_total_below_what_the_slots_say_is_noticed() {
    let (ledger, locks) = (fresh(), Locks::default());
    account(&ledger, &locks).take(&ledger, 50, 50, 100).expect("room");
    assert!(adds_up(&ledger));
    ledger.total.store(0, Ordering::Relaxed);
    assert!(!adds_up(&ledger));
}

#[test]
fn who_is_kept_off_the_cpu_in_the_middle_of_giving_back_spoils_nothing() {
    let (ledger, locks) = (fresh(), Locks::default());
    let mut account = account(&ledger, &locks);
    account.take(&ledger, 50, 50, 100).expect("room");
    // All of `give` but its end: what is to be is written down, and the total lowered.
    let slot = &ledger.slot[account.slot()];
    slot.next_used_bytes.store(20, Ordering::Relaxed);
    slot.begun.fetch_add(1, Ordering::Relaxed);
    let total = Total { used_bytes: 20, ..Total::unpack(ledger.total.load(Ordering::Relaxed)) };
    ledger.total.store(total.pack(), Ordering::Relaxed);
    assert!(adds_up(&ledger));
}

/// A share over a ledger of its own.
struct Own {
    ledger: Box<LedgerPage>,
    account: Account,
    limit: u64,
}

impl Own {
    fn new(limit: u64) -> Self {
        let ledger = fresh();
        let account = account(&ledger, &Locks::default());
        Self { ledger, account, limit }
    }
}

impl Share for Own {
    fn take(&mut self, least: u64, most: u64) -> Result<u64, Refused> {
        self.account.take(&self.ledger, least, most, self.limit)
    }

    fn give(&mut self, bytes: u64) -> u64 {
        self.account.give(&self.ledger, bytes)
    }
}

#[test]
fn two_grants_on_one_gpu_add_up() {
    let mut shares = [Own::new(100), Own::new(50)];
    assert_eq!(reserve_across(&mut shares, 120), Ok(()));
    assert_eq!(reserve_across(&mut shares, 31), Err(Refused::Limit));
    assert_eq!(reserve_across(&mut shares, 30), Ok(()));
    assert_eq!(reserve_across(&mut shares, 1), Err(Refused::Limit));
    release_across(&mut shares, 150);
    assert!(shares.iter().all(|share| used(&share.ledger) == 0));
    assert_eq!(reserve_across::<Own>(&mut [], 1), Err(Refused::Limit), "no share, no memory");
}

proptest! {
    #[test]
    fn shares_hold_exactly_what_was_reserved_and_never_more_than_their_limits(
        limits in prop::collection::vec(0_u64..200, 1..4),
        steps in prop::collection::vec((any::<bool>(), 0_u64..150), 0..60),
    ) {
        let mut shares: Vec<_> = limits.iter().map(|limit| Own::new(*limit)).collect();
        let room: u64 = limits.iter().sum();
        let mut live = Vec::new();
        for (take, bytes) in steps {
            let held: u64 = live.iter().sum();
            if take {
                let got = reserve_across(&mut shares, bytes).is_ok();
                prop_assert_eq!(got, held + bytes <= room, "{} of {} and {} more", held, room, bytes);
                if got { live.push(bytes); }
            } else if let Some(bytes) = live.pop() {
                release_across(&mut shares, bytes);
            }
            let held: u64 = live.iter().sum();
            prop_assert_eq!(shares.iter().map(|share| used(&share.ledger)).sum::<u64>(), held);
            prop_assert!(shares.iter().all(|share| used(&share.ledger) <= share.limit));
        }
    }
}
