//! Who owns which slot.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::{SLOT_FREE, SLOT_LIVE, Total};
use tessera_intercept_abi::{ComputeSlot, LedgerPage, SlotPage};

use crate::change;
use crate::compute::{Crowd, Rate, bury};

/// The locks that own slots. A lock must go away when its holder dies, however it dies.
pub trait SlotLocks {
    /// Takes the slot's lock without waiting. `false` where somebody has it, or where locks cannot
    /// be had.
    fn try_lock(&self, slot: usize) -> bool;
    /// Lets go of a lock that [`SlotLocks::try_lock`] took.
    fn unlock(&self, slot: usize);
}

/// Who a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Its id in its own PID namespace.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
    /// Inode of its PID namespace.
    pub pid_namespace: u64,
}

/// What is known when the slot of a dead process is found, to settle for its compute.
#[derive(Debug, Clone, Copy)]
pub struct Burial {
    /// Monotonic time.
    pub now_ns: u64,
    /// How fast the container pays; `None` where it need not.
    pub rate: Option<Rate>,
    /// Who else was on the GPU.
    pub crowd: Crowd,
}

/// Gives this process a slot and leaves it locked. `None` where all slots are owned by the living.
pub fn attach(
    ledger: &LedgerPage,
    locks: &impl SlotLocks,
    who: Identity,
    burial: &Burial,
) -> Option<usize> {
    let free = |slot: &usize| state(ledger, *slot) == SLOT_FREE && locks.try_lock(*slot);
    let any = |slot: &usize| locks.try_lock(*slot);
    let slot = (0..ledger.slot.len()).find(free).or_else(|| (0..ledger.slot.len()).find(any))?;
    clear(ledger, slot, burial);
    let page = ledger.slot.get(slot)?;
    // Whose it was before is not whose it is now.
    page.host_pid.store(0, Ordering::Relaxed);
    page.pid.store(who.pid, Ordering::Relaxed);
    page.start_ticks.store(who.start_ticks, Ordering::Relaxed);
    page.pid_namespace.store(who.pid_namespace, Ordering::Relaxed);
    page.state.store(SLOT_LIVE, Ordering::Release);
    Some(slot)
}

/// Gives back what dead processes hold. Answers how many bytes that were.
pub fn reclaim(ledger: &LedgerPage, locks: &impl SlotLocks, burial: &Burial) -> u64 {
    let mut freed = 0_u64;
    for slot in 0..ledger.slot.len() {
        if state(ledger, slot) != SLOT_FREE && locks.try_lock(slot) {
            freed = freed.saturating_add(clear(ledger, slot, burial));
            locks.unlock(slot);
        }
    }
    freed
}

/// Whether the total covers what the slots say, as it does unless somebody wrote over either.
/// Reclaim first: a process that died while giving back leaves the total lower than its slot.
///
/// A change lowers the total before the slot, and who makes it may be kept off the CPU in between
/// for as long as the kernel likes: so a slot in the middle of a change has the lesser of what it
/// had and what it will have. That changes while it is looked at, so one look may be unlucky; many
/// are not.
#[must_use]
pub fn adds_up(ledger: &LedgerPage) -> bool {
    // Miri, some thousand times slower, runs no tests in which it is unlucky.
    const LOOKS: usize = if cfg!(miri) { 2 } else { 1000 };
    (0..LOOKS).any(|_| {
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

/// Empties a slot whose lock the caller holds.
fn clear(ledger: &LedgerPage, slot: usize, burial: &Burial) -> u64 {
    let freed = change::recover(ledger, slot);
    if let Some(page) = ledger.slot.get(slot) {
        settle_compute(ledger, &page.compute, burial);
        // Killed between these two, launches are counted twice at most: they are a figure, not a
        // limit.
        ledger.past_launches.fetch_add(page.launches.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        page.state.store(SLOT_FREE, Ordering::Release);
    }
    freed
}

/// Charges what a dead process had running, and adds what it used to what is past.
fn settle_compute(ledger: &LedgerPage, slot: &ComputeSlot, burial: &Burial) {
    // What it had under way ended with it, and at the latest when it should have.
    let end = burial.now_ns.min(slot.done_by_ns.load(Ordering::Relaxed));
    let busy = slot.busy_until(burial.now_ns);
    let (due, since, outstanding) =
        (&ledger.compute.due_ns, &slot.busy_since_ns, &slot.outstanding_ns);
    let unpaid =
        bury(due, since, outstanding, end, burial.rate.unwrap_or(Rate::FULL), burial.crowd);
    let used = slot.gpu_ns.swap(0, Ordering::Relaxed).saturating_add(unpaid);
    ledger.past_gpu_ns.fetch_add(used, Ordering::Relaxed);
    slot.busy_ns.store(0, Ordering::Relaxed);
    ledger.compute.past_busy_ns.fetch_add(busy, Ordering::Relaxed);
    slot.waiting_since_ns.store(0, Ordering::Relaxed);
    slot.done_by_ns.store(0, Ordering::Relaxed);
}
