//! What the processes of a container share about compute, in the ledger.

use core::mem::size_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::compute::{Crowd, Published};

/// Over as long as this, what the host added up is better than what it saw last.
const SUMMED_NS: u64 = 200_000_000;

/// One container's use of one GPU: 64 bytes.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ComputePage {
    /// Monotonic ns at which all GPU time taken is paid: the [`Bucket`](crate::compute::Bucket).
    pub due_ns: AtomicU64,
    /// Goes up whenever someone who waits should look again: waiters sleep on it (futex).
    pub wake: AtomicU32,
    reserved0: u32,
    /// Time that processes waited for tokens, ns, added up.
    pub waited_ns: AtomicU64,
    /// Launches that waited.
    pub waits: AtomicU64,
    /// GPU-ns of processes that are gone (`past_gpu_ns` of the ledger).
    pub past_gpu_ns: AtomicU64,
    /// What a process with work all the time would have had of the GPU: grows slower the more there are. GPU-ns; see [`ComputePage::advance`].
    pub turn_ns: AtomicU64,
    /// Monotonic ns up to which `turn_ns` is.
    pub turn_at_ns: AtomicU64,
    /// Busy ns of other containers by then, as the host said.
    pub turn_others_ns: AtomicU64,
}

/// One process's use of one GPU: 48 bytes, which lie at offset 72 of a ledger's slot.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ComputeSlot {
    /// GPU time used, GPU-ns: prepaid, and settled as far as measured.
    pub gpu_ns: AtomicU64,
    /// GPU time prepaid for work not known to be done, GPU-ns.
    pub outstanding_ns: AtomicU64,
    /// Monotonic ns since when it has work and was not looked at; 0: it has none.
    pub busy_since_ns: AtomicU64,
    /// Wall ns in which it had work, up to `busy_since_ns`.
    pub busy_ns: AtomicU64,
    /// Monotonic ns since when it waits; 0: it does not.
    pub waiting_since_ns: AtomicU64,
    /// Monotonic ns by which its work should be done: a process that launches no more may never look.
    pub done_by_ns: AtomicU64,
}

const _: () = {
    assert!(size_of::<ComputePage>() == 64);
    assert!(size_of::<ComputeSlot>() == 48);
};

impl ComputePage {
    /// Brings `turn_ns` up to date and answers it; to be called before the number of processes with work changes. `running` is that
    /// number.
    ///
    /// A GPU that is shared in time serves those who have work in equal parts, so what each had from one time to another is the
    /// difference of this, whatever came and went in between. Two who come at once: one of them counts the time.
    pub fn advance(&self, now: u64, running: u64, published: Option<Published>) -> u64 {
        let at = self.turn_at_ns.load(Ordering::Acquire);
        let wall = now.saturating_sub(at);
        let won = wall > 0
            && self.turn_at_ns.compare_exchange(at, now, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !won {
            return self.turn_ns.load(Ordering::Acquire);
        }
        let others_busy_ns = published.map_or(0, |published| published.others_busy_by(now));
        let before = self.turn_others_ns.swap(others_busy_ns, Ordering::Relaxed);
        if running == 0 || at == 0 {
            return self.turn_ns.load(Ordering::Acquire);
        }
        // The host's sums are no finer than its interval.
        let recent = published.map_or(Crowd::NOBODY, |published| published.others);
        let others =
            if wall < SUMMED_NS { recent } else { Crowd::over(others_busy_ns.saturating_sub(before), wall) };
        let turn = others.and(running - 1).share_of(wall);
        self.turn_ns.fetch_add(turn, Ordering::AcqRel) + turn
    }

    /// Lets those who wait look again. The caller wakes the futex.
    pub fn ring(&self) {
        self.wake.fetch_add(1, Ordering::Release);
    }
}

impl ComputeSlot {
    /// Wall ns in which the process has had work until now.
    #[must_use]
    pub fn busy_until(&self, now: u64) -> u64 {
        let since = self.busy_since_ns.load(Ordering::Relaxed);
        let until = now.min(self.done_by_ns.load(Ordering::Relaxed));
        let now_busy = if since == 0 { 0 } else { until.saturating_sub(since) };
        self.busy_ns.load(Ordering::Relaxed).saturating_add(now_busy)
    }

    /// Whether the process has work.
    #[must_use]
    pub fn is_busy(&self, now: u64) -> bool {
        self.busy_since_ns.load(Ordering::Relaxed) != 0 && now < self.done_by_ns.load(Ordering::Relaxed)
    }

    /// Notes that it has work from now on.
    pub(crate) fn begin(&self, now: u64) {
        self.busy_since_ns.store(now, Ordering::Relaxed);
    }

    /// Books the busy time until now; `more` says whether it goes on.
    pub(crate) fn book(&self, now: u64, more: bool) {
        let since = self.busy_since_ns.load(Ordering::Relaxed);
        if since != 0 {
            self.busy_ns.fetch_add(now.saturating_sub(since), Ordering::Relaxed);
        }
        self.busy_since_ns.store(if more { now } else { 0 }, Ordering::Relaxed);
    }
}

/// Wall ns in which processes had work until now, added up: what it grows by in a second is how many there were.
#[must_use]
pub fn busy_of<'a>(slots: impl Iterator<Item = &'a ComputeSlot>, now: u64) -> u64 {
    slots.map(|slot| slot.busy_until(now)).fold(0, u64::saturating_add)
}

/// How many of these processes have work.
#[must_use]
pub fn running_of<'a>(slots: impl Iterator<Item = &'a ComputeSlot>, now: u64) -> u64 {
    slots.filter(|slot| slot.is_busy(now)).count() as u64
}
