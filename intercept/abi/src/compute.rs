//! Words about compute that a container's processes share, and that the host publishes to them.
//!
//! ```text
//!  LedgerPage.compute   one ComputePage     for a container and GPU      read-write in the container
//!  SlotPage.compute     one ComputeSlot     for each of its processes    read-write in the container
//!  GrantPage.published  one PublishedPage   for a share                  read-only in the container
//! ```
//!
//! All zeroes is the initial value of each. `intercept/limiter` defines their meaning together.

use core::mem::size_of;
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// One container's use of one GPU: 64 bytes.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ComputePage {
    /// Token bucket: monotonic ns at which its balance is 0.
    pub due_ns: AtomicU64,
    /// Futex of waiting launches: it is incremented when they must ask again.
    pub wake: AtomicU32,
    reserved0: u32,
    /// Time in ns that launches waited for tokens, added up.
    pub waited_ns: AtomicU64,
    /// Launches that waited.
    pub waits: AtomicU64,
    /// Wall ns in which ended processes had work, added up.
    pub past_busy_ns: AtomicU64,
    /// GPU-ns of a process that always had work: grows slower under contention.
    pub turn_ns: AtomicU64,
    /// Monotonic ns of the last update of `turn_ns`.
    pub turn_at_ns: AtomicU64,
    /// Busy ns of other containers at that time, as the host published it.
    pub turn_others_ns: AtomicU64,
}

/// One process's use of one GPU: 48 bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ComputeSlot {
    /// GPU-ns charged: in advance, and corrected by measured times.
    pub gpu_ns: AtomicU64,
    /// GPU-ns charged for work that is not known to be done.
    pub outstanding_ns: AtomicU64,
    /// Monotonic ns since when it has work that is not in `busy_ns`; 0: it has none.
    pub busy_since_ns: AtomicU64,
    /// Wall ns in which it had work, up to `busy_since_ns`.
    pub busy_ns: AtomicU64,
    /// Monotonic ns since when a launch waits; 0: none does.
    pub waiting_since_ns: AtomicU64,
    /// Monotonic ns by which its work is done at the latest: a process that launches no more does
    /// not update `busy_since_ns`.
    pub done_by_ns: AtomicU64,
}

/// Published by the host, read-only in the container: 48 bytes for each share of a GPU. Words are
/// written one after the other: a reader between them is off by one interval of the host.
#[repr(C)]
#[derive(Debug, Default)]
pub struct PublishedPage {
    /// Bits 0..15 rate in 1/100 percent (0: never written), 15 set if launches are not metered,
    /// 16..32 others in 1/256 contexts, 32..64 monotonic ms, the low bits.
    pub word: AtomicU64,
    /// Busy ns of the processes of all other shares, added up: grows by one second each second for
    /// each process that always has work.
    pub others_busy_ns: AtomicU64,
    /// Bits 0..16 GPU time that NVML reports as a part of the charged GPU time, in 1/1024 (0: not
    /// measured), 16..24 utilization that NVML reports for the share's processes in percent, 32..64
    /// monotonic ms, the low bits.
    pub gain: AtomicU64,
    /// Bytes that the CUDA driver holds for the share's processes beyond what their slots say.
    /// Negative if they were charged more for their contexts than these take.
    pub overhead_bytes: AtomicI64,
    /// GPU-ns that NVML reported for the share's processes while launches were not metered, added
    /// up.
    pub unmetered_gpu_ns: AtomicU64,
    /// Part of the guaranteed cores that the container is entitled to while `word` is fresh, in
    /// 1/100 percent; 0 and 10,000: all of them. Less while the shares of the GPU that have work
    /// are guaranteed more than the GPU.
    pub scale: AtomicU64,
}

const _: () = {
    assert!(size_of::<ComputePage>() == 64);
    assert!(size_of::<ComputeSlot>() == 48);
    assert!(size_of::<PublishedPage>() == 48);
};

impl ComputePage {
    pub(crate) const fn empty() -> Self {
        Self {
            due_ns: AtomicU64::new(0),
            wake: AtomicU32::new(0),
            reserved0: 0,
            waited_ns: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            past_busy_ns: AtomicU64::new(0),
            turn_ns: AtomicU64::new(0),
            turn_at_ns: AtomicU64::new(0),
            turn_others_ns: AtomicU64::new(0),
        }
    }

    /// Tells waiting launches to ask again. The caller wakes the futex.
    pub fn signal(&self) {
        self.wake.fetch_add(1, Ordering::Release);
    }
}

impl ComputeSlot {
    pub(crate) const fn empty() -> Self {
        Self {
            gpu_ns: AtomicU64::new(0),
            outstanding_ns: AtomicU64::new(0),
            busy_since_ns: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            waiting_since_ns: AtomicU64::new(0),
            done_by_ns: AtomicU64::new(0),
        }
    }

    /// Returns the wall ns in which the process has had work until now.
    #[must_use]
    pub fn busy_until(&self, now: u64) -> u64 {
        let since = self.busy_since_ns.load(Ordering::Relaxed);
        let until = now.min(self.done_by_ns.load(Ordering::Relaxed));
        busy(self.busy_ns.load(Ordering::Relaxed), since, until)
    }

    /// Returns true if the process has work.
    #[must_use]
    pub fn is_busy(&self, now: u64) -> bool {
        self.busy_since_ns.load(Ordering::Relaxed) != 0
            && now < self.done_by_ns.load(Ordering::Relaxed)
    }

    /// Returns true if the process had work lately: a process that synchronizes after each launch
    /// is rarely seen while it [is busy](Self::is_busy).
    #[must_use]
    pub fn was_busy(&self, now: u64) -> bool {
        const LATELY_NS: u64 = 20_000_000;
        let done_by = self.done_by_ns.load(Ordering::Relaxed);
        done_by != 0 && now < done_by.saturating_add(LATELY_NS)
    }

    /// Notes that it has work from now on.
    pub fn begin(&self, now: u64) {
        self.busy_since_ns.store(now, Ordering::Relaxed);
    }

    /// Adds the busy time until now; `more` is true if the process still has work.
    pub fn record_busy(&self, now: u64, more: bool) {
        let since = self.busy_since_ns.load(Ordering::Relaxed);
        if since != 0 {
            self.busy_ns.fetch_add(now.saturating_sub(since), Ordering::Relaxed);
        }
        self.busy_since_ns.store(if more { now } else { 0 }, Ordering::Relaxed);
    }
}

/// Returns the busy time before `since`, plus the time from then to `until` if there is work.
pub(crate) fn busy(before: u64, since: u64, until: u64) -> u64 {
    let now_busy = if since == 0 { 0 } else { until.saturating_sub(since) };
    before.saturating_add(now_busy)
}
