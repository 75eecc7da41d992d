//! Memory that the driver counts itself: what pools keep, what graphs keep, what limits of contexts
//! reserve.
//!
//! How much a call makes the driver take shows only afterwards, in a counter of the driver's. So a
//! call is charged before with what it may take; afterwards the counter is read, and what is paid
//! becomes what it says. A reading counts unless a later one was there before it: every call takes
//! its ticket when its work is done, so that the reading with the last ticket has seen the work of
//! all. Between calls what is paid is never less than what the driver keeps, and when none runs it
//! is exactly that.

use crate::charge::{Charge, Refusal, reserve};
use crate::root::with_state;
use crate::state::State;

/// One counter.
#[derive(Clone, Copy, Default)]
pub(crate) struct Gauge {
    /// Bytes charged for what it counts.
    pub(crate) paid: u64,
    /// Bytes charged for calls that are under way: what they take may be counted already, or not
    /// yet.
    pending: u64,
    /// The ticket of the last reading, and what it said.
    ticket: u64,
    kept: u64,
    /// The GPU, among those of the state.
    pub(crate) gpu: u32,
    /// Readings that are going on.
    pub(crate) readers: u32,
    /// For pools: pieces that are out.
    pub(crate) pieces: u64,
    /// For limits: what is paid otherwise.
    pub(crate) first: u64,
    /// The driver's handle; 0 = nobody can read the counter any more.
    pub(crate) handle: usize,
    /// For pools: one that may be about to go, which nobody begins to read.
    pub(crate) leaving: bool,
}

/// What pools of a process may keep of a GPU beyond what is charged. Pools grow by 32 MiB and more:
/// otherwise no program could use the last of its memory through them.
const MOST_UNPAID: u64 = 32 << 20;

/// The kinds of gauges, in the upper bits of their keys: handles have none there.
pub(crate) const POOL: u64 = 1 << 60;
/// See [`POOL`]: a context, and which of its limits in the lower bits.
pub(crate) const LIMIT: u64 = 2 << 60;
/// See [`POOL`]: a GPU, and what is kept for its graphs.
pub(crate) const GRAPH: u64 = 3 << 60;

/// The kind of gauge that a key is of.
pub(crate) const fn kind(key: u64) -> u64 {
    key & 0xf << 60
}

/// Begins a gauge, unless there is one. `false` where there is no memory to remember it.
pub(crate) fn begin(state: &mut State, key: u64, gpu: u32, handle: usize) -> bool {
    if state.gauges().get(key).is_some() {
        return true;
    }
    if !state.gauges().make_room() {
        return false;
    }
    state.gauges().put(key, Gauge { gpu, handle, ..Gauge::default() });
    true
}

/// Forgets a gauge and gives back what was paid for it.
pub(crate) fn end(state: &mut State, key: u64) {
    if let Some(gauge) = state.gauges().remove(key) {
        state.release(gauge.gpu as usize, gauge.paid);
    }
}

/// Charges a call with what it may take; [`settle_call`] says that it is done.
///
/// # Errors
/// It is not granted, or not yet.
pub(crate) fn charge_call(state: &mut State, key: u64, bytes: u64) -> Result<Charge, Refusal> {
    let gpu = state.gauges().get(key).map(|gauge| gauge.gpu).ok_or(Refusal::NotGranted)?;
    let charge = reserve(state, gpu, bytes)?;
    if let Some(gauge) = state.gauges().get(key) {
        gauge.pending = gauge.pending.saturating_add(bytes);
    }
    Ok(charge)
}

/// Whether calls are under way that were charged: what they have taken may be paid twice until they
/// are done.
pub(crate) fn is_pending(state: &mut State) -> bool {
    let mut place = 0;
    while let Some((key, next)) = state.gauges().key_from(place) {
        place = next;
        if state.gauges().get(key).is_some_and(|gauge| gauge.pending > 0) {
            return true;
        }
    }
    false
}

/// As [`settle`], for a call that [`charge_call`] has charged.
///
/// # Errors
/// As there.
pub(crate) fn settle_call(
    key: u64,
    charge: Charge,
    read: impl FnOnce() -> Option<u64>,
) -> Result<(), Refusal> {
    settle_with(key, Some(charge), true, read)
}

/// Reads a counter and pays what it says. What was charged before the call goes into that.
///
/// # Errors
/// The driver keeps more than is granted: what it keeps beyond is not paid.
pub(crate) fn settle(
    key: u64,
    before: Option<Charge>,
    read: impl FnOnce() -> Option<u64>,
) -> Result<(), Refusal> {
    settle_with(key, before, false, read)
}

fn settle_with(
    key: u64,
    before: Option<Charge>,
    was_pending: bool,
    read: impl FnOnce() -> Option<u64>,
) -> Result<(), Refusal> {
    let Some(ticket) = with_state(State::next_ticket) else { return Err(Refusal::NotGranted) };
    let kept = read();
    let settled = with_state(|state| {
        if let Some(gauge) = state.gauges().get(key).filter(|_| was_pending) {
            gauge.pending = gauge.pending.saturating_sub(before.map_or(0, |charge| charge.bytes));
        }
        pay(state, key, ticket, before, kept)
    });
    if settled == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
}

/// Returns true if a pool may keep `more` bytes that are not granted, of a call whose own bytes
/// were charged. The host counts them when it measures (docs/adr/0110-host-measurement.md).
fn may_stay_unpaid(state: &mut State, key: u64, gpu: u32, more: u64) -> bool {
    let (mut place, mut unpaid) = (0, more);
    while let Some((other, next)) = state.gauges().key_from(place) {
        place = next;
        let gauge = state.gauges().get(other).filter(|gauge| gauge.gpu == gpu);
        if let Some(gauge) = gauge.filter(|_| kind(other) == POOL && other != key) {
            unpaid = unpaid.saturating_add(gauge.kept.saturating_sub(gauge.paid));
        }
    }
    kind(key) == POOL && unpaid < MOST_UNPAID
}

/// What is paid and what is pending are together never less than what is kept. What is kept beyond
/// what is paid was taken by calls under way as far as those are charged: it is paid when they are
/// done.
fn pay(
    state: &mut State,
    key: u64,
    ticket: u64,
    before: Option<Charge>,
    kept: Option<u64>,
) -> bool {
    let Some(gauge) = state.gauges().get(key).copied() else {
        before.inspect(|charge| state.release(charge.gpu as usize, charge.bytes));
        // It is gone; nobody can say what it keeps.
        return kept == Some(0);
    };
    let (own, other) = match before {
        Some(charge) if charge.gpu == gauge.gpu => (charge.bytes, None),
        other => (0, other),
    };
    let have = gauge.paid.saturating_add(own);
    // A later reading has seen what this one has, and counts.
    let is_late = gauge.ticket > ticket;
    let (paid, settled) = match kept.map(|kept| if is_late { gauge.kept } else { kept }) {
        // Whatever it took, it was charged.
        None => (have, true),
        Some(kept) if kept <= have => (kept, true),
        Some(kept) => {
            let more = kept.saturating_sub(have.saturating_add(gauge.pending));
            let granted = more == 0 || state.reserve(gauge.gpu as usize, more).is_ok();
            let paid = if granted { have.saturating_add(more) } else { have };
            (paid, granted || before.is_some() && may_stay_unpaid(state, key, gauge.gpu, more))
        }
    };
    state.release(gauge.gpu as usize, have.saturating_sub(paid));
    other.inspect(|charge| state.release(charge.gpu as usize, charge.bytes));
    if let Some(place) = state.gauges().get(key) {
        place.paid = paid;
        if let Some(kept) = kept.filter(|_| !is_late) {
            (place.ticket, place.kept) = (ticket, kept);
        }
    }
    settled
}
