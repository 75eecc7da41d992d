//! Charges of memory that the CUDA driver counts: of pools, of graphs, and of context limits.
//!
//! The bytes that a call makes the driver take show only afterwards, in a counter of the driver. So
//! a call is charged in advance with the most that it may take. Afterwards the counter is read, and
//! the charge becomes its value. A reading counts unless a later one was applied before it: every
//! call takes its ticket when its work is done, so the reading with the last ticket contains the
//! work of all. Between calls the charge is never less than the counter, and when no call runs it
//! is equal.

use crate::charge::{Charge, Refusal, reserve};
use crate::state::{DriverCounter, POOL, State, kind, with_state};

/// Bytes of a GPU that pools of a process may keep beyond their charge. Pools grow by 32 MiB and
/// more: otherwise no program could use the last of its memory through them.
const MOST_UNCHARGED: u64 = 32 << 20;

/// Adds a counter, unless it exists. Returns false if there is no memory for it.
pub(crate) fn begin(state: &mut State, key: u64, gpu: u32, handle: usize) -> bool {
    if state.counters().get(key).is_some() {
        return true;
    }
    if !state.counters().make_room() {
        return false;
    }
    state.counters().put(key, DriverCounter { gpu, handle, ..DriverCounter::default() });
    true
}

/// Removes a counter and releases its charge.
pub(crate) fn end(state: &mut State, key: u64) {
    if let Some(counter) = state.counters().remove(key) {
        state.release(counter.gpu as usize, counter.charged);
    }
}

/// Charges a call with the most that it may take, until [`settle_call`].
///
/// # Errors
/// The memory is not granted, or not yet.
pub(crate) fn charge_call(state: &mut State, key: u64, bytes: u64) -> Result<Charge, Refusal> {
    let gpu = state.counters().get(key).map(|counter| counter.gpu).ok_or(Refusal::NotGranted)?;
    let charge = reserve(state, gpu, bytes)?;
    if let Some(counter) = state.counters().get(key) {
        counter.pending = counter.pending.saturating_add(bytes);
    }
    Ok(charge)
}

/// As [`settle`], after a call that [`charge_call`] has charged.
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

/// Reads a counter and changes its charge to the reading. A charge in advance becomes part of it.
///
/// # Errors
/// The driver holds more than is granted: the rest is not charged.
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
    let reading = read();
    let settled = with_state(|state| {
        if let Some(counter) = state.counters().get(key).filter(|_| was_pending) {
            counter.pending =
                counter.pending.saturating_sub(before.map_or(0, |charge| charge.bytes));
        }
        apply(state, key, ticket, before, reading)
    });
    if settled == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
}

/// Returns true if a pool may keep `more` bytes that are not granted, of a call whose own bytes
/// were charged. The host counts them when it measures (docs/adr/0110-host-measurement.md).
fn may_stay_uncharged(state: &mut State, key: u64, gpu: u32, more: u64) -> bool {
    let (mut place, mut uncharged) = (0, more);
    while let Some((other, next)) = state.counters().key_from(place) {
        place = next;
        let counter = state.counters().get(other).filter(|counter| counter.gpu == gpu);
        if let Some(counter) = counter.filter(|_| kind(other) == POOL && other != key) {
            uncharged = uncharged.saturating_add(counter.reading.saturating_sub(counter.charged));
        }
    }
    kind(key) == POOL && uncharged < MOST_UNCHARGED
}

/// Applies a reading. The charge and the pending charges together are never less than the reading.
/// A reading beyond the charge is of calls under way as far as these are charged: they settle it
/// when they are done.
fn apply(
    state: &mut State,
    key: u64,
    ticket: u64,
    before: Option<Charge>,
    reading: Option<u64>,
) -> bool {
    let Some(counter) = state.counters().get(key).copied() else {
        before.inspect(|charge| state.release(charge.gpu as usize, charge.bytes));
        // The counter was removed: what the driver still holds is unknown.
        return reading == Some(0);
    };
    let (own, other) = match before {
        Some(charge) if charge.gpu == counter.gpu => (charge.bytes, None),
        other => (0, other),
    };
    let have = counter.charged.saturating_add(own);
    // A later reading contains this one, and counts.
    let is_late = counter.ticket > ticket;
    let current = reading.map(|reading| if is_late { counter.reading } else { reading });
    let (charged, settled) = match current {
        // All that the call may have taken is charged.
        None => (have, true),
        Some(current) if current <= have => (current, true),
        Some(current) => {
            let more = current.saturating_sub(have.saturating_add(counter.pending));
            let granted = more == 0 || state.reserve(counter.gpu as usize, more).is_ok();
            let charged = if granted { have.saturating_add(more) } else { have };
            let may_stay = before.is_some() && may_stay_uncharged(state, key, counter.gpu, more);
            (charged, granted || may_stay)
        }
    };
    state.release(counter.gpu as usize, have.saturating_sub(charged));
    other.inspect(|charge| state.release(charge.gpu as usize, charge.bytes));
    if let Some(place) = state.counters().get(key) {
        place.charged = charged;
        if let Some(reading) = reading.filter(|_| !is_late) {
            (place.ticket, place.reading) = (ticket, reading);
        }
    }
    settled
}
