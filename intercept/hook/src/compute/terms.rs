//! What holds for this process's launches on a GPU: its grants, its places in the ledger, and what
//! the host says.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::SLOT_LIVE;
use tessera_intercept_abi::{ComputePolicy, ComputeSlot, LedgerPage, PublishedPage};
use tessera_intercept_limiter::compute::{
    Gain, Published, Rate, Surroundings, Till, Waiting, rate_of,
};

use crate::sys;

/// How long a context keeps the GPU while others have work.
const SLICE_NS: u64 = 2_000_000;

/// As the grants are now.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// Where the container accounts.
    pub(crate) ledger: &'static LedgerPage,
    /// This process's slot.
    pub(crate) slot: usize,
    /// What the host says, for that ledger's grant.
    pub(crate) published: &'static PublishedPage,
    /// Of all the container's grants on the GPU: the one that holds least.
    pub(crate) policy: ComputePolicy,
    /// Of all of them together.
    pub(crate) share: Rate,
    /// MPS holds this process, by all of them.
    pub(crate) by_mps: bool,
}

impl Terms {
    /// With another grant on the same GPU: they add up.
    pub(crate) fn and(self, policy: ComputePolicy, share: Rate, by_mps: bool) -> Self {
        let policy = match (self.policy, policy) {
            (ComputePolicy::None, _) | (_, ComputePolicy::None) => ComputePolicy::None,
            (ComputePolicy::Balance, _) | (_, ComputePolicy::Balance) => ComputePolicy::Balance,
            (ComputePolicy::Fixed, ComputePolicy::Fixed) => ComputePolicy::Fixed,
        };
        let share = Rate::new(self.share.hundredths().saturating_add(share.hundredths()));
        Self { policy, share, by_mps: self.by_mps && by_mps, ..self }
    }

    /// As the meter wants it; the container's other processes have slots below `reach`.
    pub(super) fn around<'a>(
        &self,
        till: &'a Till,
        reach: usize,
        now: u64,
    ) -> Option<Surroundings<'a>> {
        let (siblings, has_siblings) = self.count_siblings(reach, now);
        let around = Surroundings {
            till,
            page: &self.ledger.compute,
            slot: &self.ledger.slot.get(self.slot)?.compute,
            siblings,
            has_siblings,
            published: Published::read(self.published, now),
            gain: Gain::read(self.published, now),
            // Who has all of it need not hold back what is under way either.
            policy: if self.share == Rate::FULL { ComputePolicy::None } else { self.policy },
            share: self.share,
            slice_ns: SLICE_NS,
        };
        Some(if self.by_mps { beside_mps(around) } else { around })
    }

    /// Counts the container's other processes that have work, and tells whether any had work
    /// lately.
    fn count_siblings(&self, reach: usize, now: u64) -> (u64, bool) {
        let slots =
            self.ledger.slot.iter().take(reach).enumerate().filter(|(at, _)| *at != self.slot);
        let live = slots.filter(|(_, slot)| slot.state.load(Ordering::Relaxed) == SLOT_LIVE);
        // Beside MPS who waits is one of those who share the time of one, and would go on at once
        // if it were not.
        let waits =
            |slot: &ComputeSlot| self.by_mps && slot.waiting_since_ns.load(Ordering::Relaxed) != 0;
        live.map(|(_, slot)| &slot.compute).fold((0, false), |(count, lately), slot| {
            let has_work = slot.is_busy(now) || waits(slot);
            (count + u64::from(has_work), lately || slot.was_busy(now))
        })
    }

    /// How fast the container may use the GPU's time now; `None` where launches need no tokens.
    pub(super) fn rate(&self, now: u64) -> Option<Rate> {
        let published = Published::read(self.published, now);
        rate_of(self.policy, self.share, published)
    }

    /// The slot behind the last that is anybody's.
    pub(super) fn reach(&self) -> usize {
        let live = |slot: &tessera_intercept_abi::SlotPage| {
            slot.state.load(Ordering::Relaxed) == SLOT_LIVE
        };
        self.ledger.slot.iter().rposition(live).map_or(0, |last| last + 1)
    }

    /// Counts launches.
    pub(super) fn count(&self, launches: u64) {
        if launches > 0
            && let Some(slot) = self.ledger.slot.get(self.slot)
        {
            slot.launches.fetch_add(launches, Ordering::Relaxed);
        }
    }

    /// Sleeps, holding nothing.
    pub(super) fn wait(&self, waiting: Waiting, now: u64) {
        sys::wait_shared(
            &self.ledger.compute.wake,
            waiting.wake,
            waiting.until_ns.saturating_sub(now),
        );
    }

    /// Lets those look who sleep.
    pub(super) fn wake(&self) {
        sys::wake_shared(&self.ledger.compute.wake);
    }
}

/// MPS lets each process have as much as the container: one alone needs nobody else to hold it, and
/// several are held so that together they have the time of one. Their kernels run at the same time
/// as everybody's: what one has taken nobody else had a part in.
fn beside_mps(around: Surroundings<'_>) -> Surroundings<'_> {
    let policy = if around.siblings == 0 { ComputePolicy::None } else { around.policy };
    // All of the time, and yet a limit: the whole of it would be none.
    let share = Rate::new(Rate::FULL.hundredths() - 1);
    Surroundings {
        siblings: 0,
        has_siblings: false,
        published: None,
        gain: Gain::ONE,
        policy,
        share,
        ..around
    }
}
