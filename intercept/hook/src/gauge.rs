//! Memory that the driver counts itself: what pools keep, what graphs keep, what limits of contexts reserve.
//!
//! How much a call makes the driver take shows only afterwards, in a counter of the driver's. So a call is charged before with
//! what it may take; afterwards the counter is read, and what is paid becomes what it says. A reading counts unless a later
//! one was there before it: every call takes its ticket when its work is done, so that the reading with the last ticket has
//! seen the work of all. Between calls what is paid is never less than what the driver keeps, and when none runs it is
//! exactly that.

use crate::charge::{Charge, Refusal};
use crate::root::with_state;
use crate::state::State;

/// One counter.
#[derive(Clone, Copy, Default)]
pub(crate) struct Gauge {
    /// Bytes charged for what it counts.
    pub(crate) paid: u64,
    /// The ticket of the last reading.
    ticket: u64,
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
}

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

/// Reads a counter and pays what it says. What was charged before the call goes into that.
///
/// # Errors
/// The driver keeps more than is granted: what it keeps beyond is not paid.
pub(crate) fn settle(
    key: u64,
    before: Option<Charge>,
    read: impl FnOnce() -> Option<u64>,
) -> Result<(), Refusal> {
    let Some(ticket) = with_state(State::next_ticket) else { return Err(Refusal::NotGranted) };
    let kept = read();
    let settled = with_state(|state| pay(state, key, ticket, before, kept));
    if settled == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
}

fn pay(state: &mut State, key: u64, ticket: u64, before: Option<Charge>, kept: Option<u64>) -> bool {
    let Some(gauge) = state.gauges().get(key).copied() else {
        before.inspect(|charge| state.release(charge.gpu as usize, charge.bytes));
        return kept.is_none_or(|kept| kept == 0);
    };
    let (own, other) = match before {
        Some(charge) if charge.gpu == gauge.gpu => (charge.bytes, None),
        other => (0, other),
    };
    let have = gauge.paid.saturating_add(own);
    let (paid, settled) = match kept {
        // Whatever it took, it was charged.
        None => (have, true),
        Some(_) if gauge.ticket > ticket => (gauge.paid, true),
        Some(kept) => match kept.checked_sub(have) {
            Some(more) if more > 0 && state.reserve(gauge.gpu as usize, more).is_err() => (have, false),
            _ => (kept, true),
        },
    };
    state.release(gauge.gpu as usize, have.saturating_sub(paid));
    other.inspect(|charge| state.release(charge.gpu as usize, charge.bytes));
    if let Some(place) = state.gauges().get(key) {
        place.paid = paid;
        if kept.is_some() {
            place.ticket = place.ticket.max(ticket);
        }
    }
    settled
}
