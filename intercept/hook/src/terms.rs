//! Terms of this process's launches on a GPU: its entitlement, its slot in the ledger, and the
//! values that the host publishes.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::SLOT_LIVE;
use tessera_intercept_abi::{ComputeSlot, LedgerPage, PublishedPage};
use tessera_intercept_limiter::compute::{
    ComputeView, Entitlement, Gain, LaunchBudget, Published, Rate, WaitUntil,
};

use crate::sys;

/// Time that a context keeps the GPU while others have work.
const SLICE_NS: u64 = 2_000_000;

/// Terms of launches on a GPU by the current grants.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// Ledger of the container's launches.
    pub(crate) ledger: &'static LedgerPage,
    /// Slot of this process.
    pub(crate) slot: usize,
    /// Values that the host publishes in that ledger's grant.
    pub(crate) published: &'static PublishedPage,
    /// Entitlement by all of the container's grants on the GPU.
    pub(crate) entitlement: Entitlement,
    /// True if MPS limits this process by all of its grants.
    pub(crate) by_mps: bool,
}

impl Terms {
    /// Adds another grant of the same GPU.
    pub(crate) fn and(self, entitlement: Entitlement, by_mps: bool) -> Self {
        let entitlement = self.entitlement.and(entitlement);
        Self { entitlement, by_mps: self.by_mps && by_mps, ..self }
    }

    /// Returns the view of the meter. The container's other processes have slots below `reach`.
    pub(crate) fn view<'a>(
        &self,
        budget: &'a LaunchBudget,
        reach: usize,
        now: u64,
    ) -> Option<ComputeView<'a>> {
        let (siblings, has_siblings) = self.count_siblings(reach, now);
        let view = ComputeView {
            budget,
            page: &self.ledger.compute,
            slot: &self.ledger.slot.get(self.slot)?.compute,
            siblings,
            has_siblings,
            published: Published::read(self.published, now),
            gain: Gain::read(self.published, now),
            entitlement: self.entitlement,
            slice_ns: SLICE_NS,
        };
        Some(if self.by_mps { under_mps(view) } else { view })
    }

    /// Returns the number of the container's other processes with work, and true if any had work
    /// lately.
    fn count_siblings(&self, reach: usize, now: u64) -> (u64, bool) {
        let slots =
            self.ledger.slot.iter().take(reach).enumerate().filter(|(at, _)| *at != self.slot);
        let live = slots.filter(|(_, slot)| slot.state.load(Ordering::Relaxed) == SLOT_LIVE);
        // Under MPS, waiting processes share the time of one process too.
        let waits =
            |slot: &ComputeSlot| self.by_mps && slot.waiting_since_ns.load(Ordering::Relaxed) != 0;
        live.map(|(_, slot)| &slot.compute).fold((0, false), |(count, lately), slot| {
            let has_work = slot.is_busy(now) || waits(slot);
            (count + u64::from(has_work), lately || slot.was_busy(now))
        })
    }

    /// Returns the current rate of the container's bucket; `None` if launches need no tokens.
    pub(crate) fn rate(&self, now: u64) -> Option<Rate> {
        let published = Published::read(self.published, now);
        self.entitlement.rate(published)
    }

    /// Returns the index after the last slot in use.
    pub(crate) fn reach(&self) -> usize {
        let live = |slot: &tessera_intercept_abi::SlotPage| {
            slot.state.load(Ordering::Relaxed) == SLOT_LIVE
        };
        self.ledger.slot.iter().rposition(live).map_or(0, |last| last + 1)
    }

    /// Counts launches.
    pub(crate) fn count(&self, launches: u64) {
        if launches > 0
            && let Some(slot) = self.ledger.slot.get(self.slot)
        {
            slot.launches.fetch_add(launches, Ordering::Relaxed);
        }
    }

    /// Sleeps without holding a lock.
    pub(crate) fn wait(&self, waiting: WaitUntil, now: u64) {
        sys::wait_shared(
            &self.ledger.compute.wake,
            waiting.wake,
            waiting.until_ns.saturating_sub(now),
        );
    }

    /// Wakes waiting launches.
    pub(crate) fn wake(&self) {
        sys::wake_shared(&self.ledger.compute.wake);
    }
}

/// Returns the view of a client of MPS. MPS limits each process to the part of the container: one
/// process needs no other limit, and several are limited to the time of one together. Kernels of
/// clients run at the same time, so no time of a launch is another client's.
fn under_mps(view: ComputeView<'_>) -> ComputeView<'_> {
    // All of the time, and yet a limit: the whole of it would be none.
    let most = Rate::new(Rate::FULL.hundredths() - 1);
    let entitlement = match view.siblings {
        0 => Entitlement::UNLIMITED,
        _ => Entitlement { share: most, ..view.entitlement.with(view.published) },
    };
    ComputeView {
        siblings: 0,
        has_siblings: false,
        published: None,
        gain: Gain::ONE,
        entitlement,
        ..view
    }
}
