//! Values derived from the words that the processes of a container share.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::{ComputePage, ComputeSlot};

use crate::compute::{Contention, Published};

/// Over this time and longer, the sums of the host are more exact than its last interval.
const SUMMED_NS: u64 = 200_000_000;

/// Brings `turn_ns` up to date and returns it. Call it before the number of processes with work
/// changes; `running` is that number.
///
/// A GPU that is shared in time serves the contexts with work in equal parts. So the GPU time of
/// each from one time to another is the difference of this word, whatever began and ended in
/// between. Of two processes that call it at once, one counts the time.
pub(super) fn advance(
    page: &ComputePage,
    now: u64,
    running: u64,
    published: Option<Published>,
) -> u64 {
    let at = page.turn_at_ns.load(Ordering::Acquire);
    let wall = now.saturating_sub(at);
    let won = wall > 0
        && page.turn_at_ns.compare_exchange(at, now, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !won {
        return page.turn_ns.load(Ordering::Acquire);
    }
    let others_busy_ns = published.map_or(0, |published| published.others_busy_by(now));
    let before = page.turn_others_ns.swap(others_busy_ns, Ordering::Relaxed);
    if running == 0 || at == 0 {
        return page.turn_ns.load(Ordering::Acquire);
    }
    // The host's sums are no finer than its interval.
    let recent = published.map_or(Contention::NONE, |published| published.others);
    let others = if wall < SUMMED_NS {
        recent
    } else {
        Contention::over(others_busy_ns.saturating_sub(before), wall)
    };
    let turn = others.and(running - 1).share_of(wall);
    page.turn_ns.fetch_add(turn, Ordering::AcqRel) + turn
}

/// Returns the wall ns in which processes had work until now, added up: it grows by one second each
/// second for each process that always has work.
#[must_use]
pub fn busy_of<'a>(slots: impl Iterator<Item = &'a ComputeSlot>, now: u64) -> u64 {
    slots.map(|slot| slot.busy_until(now)).fold(0, u64::saturating_add)
}

/// Returns the number of these processes that have work.
#[must_use]
pub fn running_of<'a>(slots: impl Iterator<Item = &'a ComputeSlot>, now: u64) -> u64 {
    slots.filter(|slot| slot.is_busy(now)).count() as u64
}
