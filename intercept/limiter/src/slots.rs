//! Owners of slots.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::{SLOT_FREE, SLOT_LIVE, Total};
use tessera_intercept_abi::{ComputeSlot, LedgerPage, SlotPage};

use crate::change;
use crate::compute::{Contention, Rate, charge_exited};

/// Locks that own slots. A lock must end with its holder, also if the holder is killed.
pub trait SlotLocks {
    /// Takes the slot's lock without waiting. Returns false if another process has it, or if locks
    /// are unavailable.
    fn try_lock(&self, slot: usize) -> bool;
    /// Releases a lock that [`SlotLocks::try_lock`] took.
    fn unlock(&self, slot: usize);
}

/// Identity of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Id in its own PID namespace.
    pub pid: u32,
    /// Start in clock ticks since boot.
    pub start_ticks: u64,
    /// Inode of its PID namespace.
    pub pid_namespace: u64,
}

/// State of the GPU when the slot of an ended process is found. It decides how much GPU time the
/// process is charged for work that it had under way.
#[derive(Debug, Clone, Copy)]
pub struct ReclaimContext {
    /// Monotonic time.
    pub now_ns: u64,
    /// Rate of the container's token bucket; `None` if launches need no tokens.
    pub rate: Option<Rate>,
    /// Contention of the GPU by others.
    pub contention: Contention,
}

/// Assigns a slot to this process and leaves it locked. Returns `None` if living processes own all
/// slots.
pub fn attach(
    ledger: &LedgerPage,
    locks: &impl SlotLocks,
    who: Identity,
    context: &ReclaimContext,
) -> Option<usize> {
    let free = |slot: &usize| state(ledger, *slot) == SLOT_FREE && locks.try_lock(*slot);
    let any = |slot: &usize| locks.try_lock(*slot);
    let slot = (0..ledger.slot.len()).find(free).or_else(|| (0..ledger.slot.len()).find(any))?;
    clear(ledger, slot, context);
    let page = ledger.slot.get(slot)?;
    // The identity of the previous owner.
    page.host_pid.store(0, Ordering::Relaxed);
    page.pid.store(who.pid, Ordering::Relaxed);
    page.start_ticks.store(who.start_ticks, Ordering::Relaxed);
    page.pid_namespace.store(who.pid_namespace, Ordering::Relaxed);
    page.state.store(SLOT_LIVE, Ordering::Release);
    Some(slot)
}

/// Releases the memory of ended processes. Returns the number of bytes.
pub fn reclaim(ledger: &LedgerPage, locks: &impl SlotLocks, context: &ReclaimContext) -> u64 {
    let mut freed = 0_u64;
    for slot in 0..ledger.slot.len() {
        if state(ledger, slot) != SLOT_FREE && locks.try_lock(slot) {
            freed = freed.saturating_add(clear(ledger, slot, context));
            locks.unlock(slot);
        }
    }
    freed
}

/// Returns true if the total covers the sum of the slots, which holds unless a process overwrote
/// one of them. Call [`reclaim`] first: a process that was killed during a release leaves the total
/// lower than its slot.
///
/// A change lowers the total before the slot, and its process may be preempted in between for any
/// time: so a slot in the middle of a change counts with the lesser of its bytes before and after.
/// Slots change while they are read, so one reading may be wrong; of many, one is right.
#[must_use]
pub fn adds_up(ledger: &LedgerPage) -> bool {
    // Miri is some thousand times slower, and runs no test in which slots change meanwhile.
    const READINGS: usize = if cfg!(miri) { 2 } else { 1000 };
    (0..READINGS).any(|_| {
        let held = ledger.slot.iter().map(least_held).fold(0, u64::saturating_add);
        held <= Total::unpack(ledger.total.load(Ordering::SeqCst)).used_bytes
    })
}

fn least_held(slot: &SlotPage) -> u64 {
    let changes = slot.begun.load(Ordering::SeqCst) != slot.settled.load(Ordering::SeqCst);
    let used = slot.used_bytes.load(Ordering::SeqCst);
    if changes { used.min(slot.next_used_bytes.load(Ordering::SeqCst)) } else { used }
}

fn state(ledger: &LedgerPage, slot: usize) -> u32 {
    ledger.slot.get(slot).map_or(SLOT_FREE, |page| page.state.load(Ordering::Acquire))
}

/// Clears a slot whose lock the caller holds.
fn clear(ledger: &LedgerPage, slot: usize, context: &ReclaimContext) -> u64 {
    let freed = change::recover(ledger, slot);
    if let Some(page) = ledger.slot.get(slot) {
        settle_compute(ledger, &page.compute, context);
        // If this process is killed in between, launches are counted twice at most: they are a
        // metric, not a limit.
        ledger.past_launches.fetch_add(page.launches.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        page.state.store(SLOT_FREE, Ordering::Release);
    }
    freed
}

/// Charges the GPU time that an ended process had under way, and adds all that it used to the sums
/// of past processes.
fn settle_compute(ledger: &LedgerPage, slot: &ComputeSlot, context: &ReclaimContext) {
    // Its work ended with it, and at the latest by the time that it had published.
    let end = context.now_ns.min(slot.done_by_ns.load(Ordering::Relaxed));
    let busy = slot.busy_until(context.now_ns);
    let (due, since, outstanding) =
        (&ledger.compute.due_ns, &slot.busy_since_ns, &slot.outstanding_ns);
    let uncharged = charge_exited(
        due,
        since,
        outstanding,
        end,
        context.rate.unwrap_or(Rate::FULL),
        context.contention,
    );
    let used = slot.gpu_ns.swap(0, Ordering::Relaxed).saturating_add(uncharged);
    ledger.past_gpu_ns.fetch_add(used, Ordering::Relaxed);
    slot.busy_ns.store(0, Ordering::Relaxed);
    ledger.compute.past_busy_ns.fetch_add(busy, Ordering::Relaxed);
    slot.waiting_since_ns.store(0, Ordering::Relaxed);
    slot.done_by_ns.store(0, Ordering::Relaxed);
}
