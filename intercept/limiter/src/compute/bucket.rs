//! Token bucket of a container.

use crate::compute::{Contention, Rate};
use crate::ledger_words::Word;

/// GPU time that an idle container accumulates at most.
pub const BURST_GPU_NS: u64 = 10_000_000;

/// The most GPU time that an ended process is charged for work that it had under way. Most
/// processes end right after work that they did not wait for, and the next process of the
/// container waits until the charge is repaid.
const MOST_EXITED_GPU_NS: u64 = 1_000_000_000;

/// A bucket of GPU-nanoseconds in one word, shared by the processes of a container.
///
/// The word is the time at which the bucket is level again after all that was taken. So it refills
/// by itself: no refill is missed or made twice, and a killed process leaves nothing half done. The
/// balance in GPU time is `(now - due) x rate`.
#[derive(Debug)]
pub struct Bucket<'a, W> {
    due_ns: &'a W,
}

impl<'a, W: Word> Bucket<'a, W> {
    /// Takes the word of a bucket; 0 is a full one.
    #[must_use]
    pub const fn new(due_ns: &'a W) -> Self {
        Self { due_ns }
    }

    /// Takes GPU time if the balance is at least `-debt_gpu_ns`. The balance may be lower
    /// afterwards, and the next caller waits: so a kernel that is longer than the burst runs too.
    ///
    /// # Errors
    /// Returns the time at which the balance is that.
    pub fn take(&self, now: u64, debt_gpu_ns: u64, gpu_ns: u64, rate: Rate) -> Result<(), u64> {
        let debt_wall_ns = rate.wall_ns(debt_gpu_ns);
        let mut due = self.due_ns.load();
        loop {
            if due.saturating_sub(debt_wall_ns) > now {
                return Err(due - debt_wall_ns);
            }
            let taken = due.max(floor(now, rate)).saturating_add(rate.wall_ns(gpu_ns));
            match self.due_ns.replace(due, taken) {
                Ok(()) => return Ok(()),
                Err(other) => due = other,
            }
        }
    }

    /// Takes GPU time that was used already, whatever the balance.
    pub fn charge(&self, now: u64, gpu_ns: u64, rate: Rate) {
        self.change(|due| due.max(floor(now, rate)).saturating_add(rate.wall_ns(gpu_ns)));
    }

    /// Returns GPU time that was taken and not used to the bucket.
    pub fn refund(&self, gpu_ns: u64, rate: Rate) {
        self.change(|due| due.saturating_sub(rate.wall_ns(gpu_ns)));
    }

    fn change(&self, next: impl Fn(u64) -> u64) {
        let mut due = self.due_ns.load();
        while let Err(other) = self.due_ns.replace(due, next(due)) {
            due = other;
        }
    }
}

/// Returns the earliest `due`, which is a full bucket.
fn floor(now: u64, rate: Rate) -> u64 {
    now.saturating_sub(rate.wall_ns(BURST_GPU_NS))
}

/// Charges the work that an ended process had under way, as of the time when it began: a container
/// that starts again much later has a full bucket. Returns the GPU-ns charged. The caller holds the
/// slot's lock.
///
/// If the caller is killed in here, the charge may be lost; it is never made twice.
pub fn charge_exited<W: Word>(
    due_ns: &W,
    busy_since_ns: &W,
    outstanding_ns: &W,
    now: u64,
    rate: Rate,
    contention: Contention,
) -> u64 {
    let since = busy_since_ns.load();
    let prepaid = outstanding_ns.load();
    let mut uncharged = 0;
    if since != 0 && busy_since_ns.replace(since, 0).is_ok() {
        let ran = contention.share_of(now.saturating_sub(since)).min(MOST_EXITED_GPU_NS);
        uncharged = ran.saturating_sub(prepaid);
        Bucket::new(due_ns).charge(since, uncharged, rate);
    }
    outstanding_ns.store(0);
    uncharged
}
