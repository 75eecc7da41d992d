//! Living processes of a ledger, by the locks on their slots.
//!
//! The kernel releases the lock of a slot when its process exits. A query of a lock compares it
//! with all locks on the file, and so does closing the file. Containers may hold as many locks as
//! they want: 50,000 make each take a millisecond. So a read of a ledger has a budget of processor
//! time, and a ledger that exceeds it is not opened for a while ([`SlowLedgers`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};
use rustix::time::{ClockId, clock_gettime};
use tessera_api::names::ClaimDeviceName;
use tessera_intercept_abi::ledger::LOCK_OFFSET;

/// Processor time for one read of a ledger: 448 slots, each locked by a process of its own, take
/// about the half of it.
const BUDGET: Duration = Duration::from_millis(10);

/// First pause of a ledger that exceeded its budget. Doubled each time.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause of a ledger that exceeds its budget.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Time without excess after which the pauses of a ledger begin anew.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Error for a ledger with so many locks that its processes are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many locks on ledger")]
pub struct TooManyLocks;

/// Returns those of the `claimed` slots whose locks a process holds.
///
/// # Errors
/// [`TooManyLocks`].
pub fn live_slots(
    ledger: &File,
    claimed: impl IntoIterator<Item = usize>,
) -> Result<BTreeSet<usize>, TooManyLocks> {
    let begun = thread_time();
    let spent = || thread_time().saturating_sub(begun);
    walk(claimed.into_iter().collect(), |slots| query(ledger, slots), spent)
}

/// Walks from conflict to conflict: one query answers for all slots of a range that nothing locks.
/// So it takes two queries for each held lock at most, and one more.
fn walk(
    claimed: BTreeSet<usize>,
    mut query: impl FnMut(&Range<usize>) -> Option<Range<usize>>,
    spent: impl Fn() -> Duration,
) -> Result<BTreeSet<usize>, TooManyLocks> {
    let mut live = BTreeSet::new();
    let all_slots = 0..usize::MAX;
    let mut open: Vec<Range<usize>> = std::iter::once(all_slots).collect();
    while let Some(range) = open.pop() {
        let mut within = claimed.range(range);
        let Some(&first) = within.next() else { continue };
        let last = within.next_back().copied().unwrap_or(first);
        if spent() > BUDGET {
            return Err(TooManyLocks);
        }
        let asked = first..last + 1;
        if let Some(locked) = query(&asked) {
            // At least one slot, whatever the kernel reports, so that the walk ends.
            let end = locked.end.clamp(asked.start + 1, asked.end);
            let start = locked.start.clamp(asked.start, end - 1);
            live.extend(claimed.range(start..end));
            open.extend([asked.start..start, end..asked.end]);
        }
    }
    Ok(live)
}

/// Returns the slots of one lock of another open file on any of `slots`, or `None` if there is
/// none. If the kernel does not report locks, all slots count as locked.
fn query(ledger: &File, slots: &Range<usize>) -> Option<Range<usize>> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset(slots.start),
        l_len: offset(slots.end) - offset(slots.start),
        l_pid: 0,
    };
    if fcntl(ledger, FcntlArg::F_OFD_GETLK(&mut lock)).is_err() {
        return Some(slots.clone());
    }
    if i32::from(lock.l_type) == libc::F_UNLCK {
        return None;
    }
    let slot = |offset: libc::off_t| {
        usize::try_from(offset.saturating_sub(offset_of_first())).unwrap_or(0)
    };
    let start = slot(lock.l_start);
    // A length of 0 is all of the file.
    let end = match lock.l_len {
        0 => slots.end,
        length => slot(lock.l_start.saturating_add(length)),
    };
    Some(start..end)
}

fn offset(slot: usize) -> libc::off_t {
    offset_of_first() + slot as libc::off_t
}

const fn offset_of_first() -> libc::off_t {
    LOCK_OFFSET as libc::off_t
}

/// Returns the processor time of this thread: another process that runs meanwhile does not count.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanos)
}

/// The ledgers that exceeded their budget, which are not opened for a while.
///
/// Shared by all readers of ledgers, so that a ledger is slow for each of them once.
#[derive(Debug, Default)]
pub struct SlowLedgers(Mutex<BTreeMap<ClaimDeviceName, SlowLedger>>);

#[derive(Clone, Copy, Debug)]
struct SlowLedger {
    pause: Duration,
    since: Instant,
}

impl SlowLedgers {
    /// Returns what `read` returns, which opens a share's ledger, reads it, and closes it again.
    ///
    /// A read that exceeds the budget is the last one before a pause. Its result is returned.
    ///
    /// # Errors
    /// [`TooManyLocks`], without a call of `read`, while the ledger pauses.
    pub fn read<T>(
        &self,
        share: &ClaimDeviceName,
        read: impl FnOnce() -> T,
    ) -> Result<T, TooManyLocks> {
        if self.pauses(share, Instant::now()) {
            return Err(TooManyLocks);
        }
        let begun = thread_time();
        let result = read();
        if thread_time().saturating_sub(begun) > BUDGET {
            self.exceeded(share, Instant::now());
        }
        Ok(result)
    }

    /// Forgets the shares that are not in `shares`.
    pub fn retain(&self, is_prepared: impl Fn(&ClaimDeviceName) -> bool) {
        self.lock().retain(|share, _| is_prepared(share));
    }

    fn pauses(&self, share: &ClaimDeviceName, now: Instant) -> bool {
        let mut slow = self.lock();
        let Some(SlowLedger { pause, since }) = slow.get(share).copied() else { return false };
        let passed = now.saturating_duration_since(since);
        if passed > FORGET_AFTER {
            slow.remove(share);
        }
        passed < pause
    }

    fn exceeded(&self, share: &ClaimDeviceName, now: Instant) {
        let mut slow = self.lock();
        let pause = slow.get(share).map_or(MIN_PAUSE, |slow| (slow.pause * 2).min(MAX_PAUSE));
        slow.insert(share.clone(), SlowLedger { pause, since: now });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ClaimDeviceName, SlowLedger>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tessera_api::names::ClaimUid;

    use super::*;

    fn lock(file: &File, from: i64, length: i64) {
        let lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: LOCK_OFFSET as i64 + from,
            l_len: length,
            l_pid: 0,
        };
        fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).expect("locked");
    }

    /// Returns two open files of one file: of the reader, and of the holder of locks.
    fn files() -> (File, File) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        (file.reopen().expect("opened"), file.reopen().expect("opened"))
    }

    /// Returns the living slots of all 448, and the number of queries.
    fn count(reader: &File) -> (Vec<usize>, usize) {
        let queries = Cell::new(0);
        let counted = |slots: &Range<usize>| {
            queries.set(queries.get() + 1);
            query(reader, slots)
        };
        let live = walk((0..448).collect(), counted, || Duration::ZERO).expect("no budget");
        (live.into_iter().collect(), queries.get())
    }

    #[test]
    fn queries_depend_on_held_locks_only() {
        let (reader, holder) = files();
        assert_eq!(count(&reader), (vec![], 1));
        // Locks beyond the slots of the ledger.
        for slot in 0..1000 {
            lock(&holder, 1000 + 2 * slot, 1);
        }
        assert_eq!(count(&reader), (vec![], 1));
        for slot in [3, 4, 447] {
            lock(&holder, slot, 1);
        }
        let (live, queries) = count(&reader);
        assert_eq!(live, [3, 4, 447]);
        assert!(queries <= 5, "{queries} queries for two ranges");
    }

    #[test]
    fn lock_of_the_whole_file_holds_all_slots() {
        let (reader, holder) = files();
        lock(&holder, -(LOCK_OFFSET as i64), 0);
        let (live, queries) = count(&reader);
        assert_eq!((live.len(), queries), (448, 1));
    }

    #[test]
    fn own_slots_of_processes_are_told_apart_from_others() {
        let (reader, holder) = files();
        lock(&holder, 7, 1);
        assert_eq!(live_slots(&reader, [6, 7, 8]), Ok(BTreeSet::from([7])));
        drop(holder);
        assert_eq!(live_slots(&reader, [6, 7, 8]), Ok(BTreeSet::new()));
    }

    #[test]
    fn walk_ends_when_its_budget_is_spent() {
        let queries = Cell::new(0_u32);
        let one_lock_each = |slots: &Range<usize>| {
            queries.set(queries.get() + 1);
            Some(slots.start..slots.start + 1)
        };
        let spent = || Duration::from_millis(1) * queries.get();
        assert_eq!(walk((0..448).collect(), one_lock_each, spent), Err(TooManyLocks));
        assert_eq!(Duration::from_millis(queries.get().into()), BUDGET + Duration::from_millis(1));
    }

    fn share() -> ClaimDeviceName {
        let claim = ClaimUid::new("1f0c2d3e-9a41-4c3b-8e55-0d6f2b1a4c77").expect("a UID");
        ClaimDeviceName::of_result(&claim, 0, None).expect("a name")
    }

    #[test]
    fn ledger_that_is_slow_to_close_is_not_opened_for_a_while() {
        let (slow, share) = (SlowLedgers::default(), share());
        assert_eq!(slow.read(&share, || 1), Ok(1));
        let close = || {
            // Not before the read begins: its own time must exceed the budget.
            let begun = thread_time();
            while thread_time() - begun <= BUDGET {}
        };
        assert_eq!(slow.read(&share, close), Ok(()));
        assert_eq!(slow.read(&share, || panic!("opened")), Err::<(), _>(TooManyLocks));
    }

    #[test]
    fn pauses_of_a_slow_ledger_double_and_end() {
        let share = share();
        let (slow, mut now) = (SlowLedgers::default(), Instant::now());
        assert!(!slow.pauses(&share, now));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            slow.exceeded(&share, now);
            now += Duration::from_secs(seconds);
            assert!(slow.pauses(&share, now - Duration::from_millis(1)), "{seconds} s");
            assert!(!slow.pauses(&share, now), "{seconds} s");
        }
        // A ledger that is fast for a moment keeps its pause.
        now += FORGET_AFTER;
        assert!(!slow.pauses(&share, now));
        slow.exceeded(&share, now);
        assert!(!slow.pauses(&share, now + MIN_PAUSE));
    }
}
