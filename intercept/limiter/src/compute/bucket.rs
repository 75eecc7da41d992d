//! The container's tokens.

use crate::book::Word;
use crate::compute::{Crowd, Rate};

/// How much unused GPU time a container keeps.
pub const BURST_GPU_NS: u64 = 10_000_000;

/// The most GPU time that a process is charged for when it is found dead with work under way. Most
/// die right after work that nobody looked at any more, and whoever comes next in their container
/// waits for what they owe.
const BURIAL_GPU_NS: u64 = 1_000_000_000;

/// A bucket of GPU-nanoseconds in one word, shared by the processes of a container.
///
/// The word is the time at which everything taken will have been paid, so it refills by itself: no
/// refill can be missed or done twice, and whoever dies leaves nothing half done. The balance in
/// GPU time is `(now - due) x rate`.
#[derive(Debug)]
pub struct Bucket<'a, W> {
    due_ns: &'a W,
}

impl<'a, W: Word> Bucket<'a, W> {
    /// The bucket in that word; 0 is a full one.
    #[must_use]
    pub const fn new(due_ns: &'a W) -> Self {
        Self { due_ns }
    }

    /// Takes GPU time, if everything taken before is paid. What is taken may then leave a debt,
    /// which the next who comes waits for: a kernel longer than the bucket is deep runs too.
    ///
    /// # Errors
    /// When the debt will be paid.
    pub fn take(&self, now: u64, gpu_ns: u64, rate: Rate) -> Result<(), u64> {
        let mut due = self.due_ns.load();
        loop {
            if due > now {
                return Err(due);
            }
            let paid = due.max(floor(now, rate)).saturating_add(rate.wall_ns(gpu_ns));
            match self.due_ns.replace(due, paid) {
                Ok(()) => return Ok(()),
                Err(other) => due = other,
            }
        }
    }

    /// Takes GPU time that was used already.
    pub fn charge(&self, now: u64, gpu_ns: u64, rate: Rate) {
        self.change(|due| due.max(floor(now, rate)).saturating_add(rate.wall_ns(gpu_ns)));
    }

    /// Gives back GPU time that was taken and not used.
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

/// The earliest `due`: a full bucket.
fn floor(now: u64, rate: Rate) -> u64 {
    now.saturating_sub(rate.wall_ns(BURST_GPU_NS))
}

/// Settles for a process that died: its lock is gone, the caller holds it. What it had taken stays
/// taken; what it ran beyond that is charged as of when it ran, so that a container that comes back
/// much later owes nothing.
///
/// Killed in here, the charge may be lost; it is never made twice. Answers how much was charged,
/// GPU-ns.
pub fn bury<W: Word>(
    due_ns: &W,
    busy_since_ns: &W,
    outstanding_ns: &W,
    now: u64,
    rate: Rate,
    crowd: Crowd,
) -> u64 {
    let since = busy_since_ns.load();
    let prepaid = outstanding_ns.load();
    let mut unpaid = 0;
    if since != 0 && busy_since_ns.replace(since, 0).is_ok() {
        let ran = crowd.share_of(now.saturating_sub(since)).min(BURIAL_GPU_NS);
        unpaid = ran.saturating_sub(prepaid);
        Bucket::new(due_ns).charge(since, unpaid, rate);
    }
    outstanding_ns.store(0);
    unpaid
}
