//! Excess: GPU time of kernels beyond what is usual for them, charged to the bucket over seconds.

use core::sync::atomic::Ordering;

use super::Meter;
use crate::compute::decision::ComputeView;
use crate::compute::proportion::in_proportion;
use crate::compute::{Bucket, Rate};

/// Time constant of the charge. Peers that wait for each other converge if they do so several times
/// within it (docs/adr/0114-collectives.md).
const CHARGED_OVER_NS: u64 = 2_000_000_000;

/// The most excess that is not charged to the bucket yet: what a GPU that runs nothing else adds
/// within the time constant. More is charged at once.
const MOST_EXCESS_NS: u64 = CHARGED_OVER_NS;

/// The least time without contention after which inferred excess is charged: the host publishes the
/// contention every 50 ms.
const CONFIRMED_AFTER_NS: u64 = 200_000_000;

/// GPU time of one process that is not charged to the bucket yet.
#[derive(Debug)]
pub(super) struct Excess {
    gpu_ns: u64,
    /// Time of the last charge.
    charged_at: u64,
}

impl Excess {
    pub(super) const fn new() -> Self {
        Self { gpu_ns: 0, charged_at: 0 }
    }

    /// Adds GPU time and returns the part that there is no room for.
    fn add(&mut self, gpu_ns: u64) -> u64 {
        let added = gpu_ns.min(MOST_EXCESS_NS.saturating_sub(self.gpu_ns));
        self.gpu_ns += added;
        gpu_ns - added
    }

    /// Takes the part to charge for the time since the last charge: in proportion to the excess,
    /// and at most seven eighths of what the bucket gains meanwhile, so that launches go on.
    /// Returns it with the time of the last charge.
    fn take(&mut self, now: u64, rate: Option<Rate>) -> (u64, u64) {
        let since = core::mem::replace(&mut self.charged_at, now);
        let elapsed = now.saturating_sub(since);
        let part = in_proportion(self.gpu_ns, elapsed.min(CHARGED_OVER_NS), CHARGED_OVER_NS);
        let gained = rate.map_or(u64::MAX, |rate| rate.gpu_ns(elapsed));
        let part = part.min(gained / 8 * 7);
        self.gpu_ns -= part;
        (part, since)
    }
}

/// Excess of launches that were not measured, inferred from a sample of them.
///
/// A turn of another container looks like excess until the host has published that this container
/// has work, and the sample may stand for hundreds of launches. So inferred excess is charged after
/// a time without contention, and dropped otherwise.
#[derive(Debug)]
pub(super) struct InferredExcess {
    /// Of the current interval.
    new_ns: u64,
    /// Of the interval before.
    old_ns: u64,
    /// Begin of the current interval.
    since: u64,
    /// True if there was contention in the current interval.
    has_contention: bool,
}

impl InferredExcess {
    pub(super) const fn new() -> Self {
        Self { new_ns: 0, old_ns: 0, since: 0, has_contention: false }
    }

    fn add(&mut self, gpu_ns: u64) {
        self.new_ns = self.new_ns.saturating_add(gpu_ns);
    }

    /// Takes what is to be charged now.
    fn take(&mut self, has_contention: bool, now: u64) -> u64 {
        self.has_contention |= has_contention;
        let elapsed = now.saturating_sub(self.since);
        if elapsed < CONFIRMED_AFTER_NS {
            return 0;
        }
        let Self { new_ns, old_ns, has_contention, .. } = *self;
        *self = Self { since: now, ..Self::new() };
        if has_contention {
            return 0;
        }
        if elapsed >= 2 * CONFIRMED_AFTER_NS {
            return old_ns.saturating_add(new_ns);
        }
        self.old_ns = new_ns;
        old_ns
    }
}

impl Meter {
    /// Counts excess: that of a launch, and of those that it stands for. That of the launch is in
    /// the ledger at once.
    pub(super) fn add_excess(
        &mut self,
        (own_ns, all_ns): (u64, u64),
        view: &ComputeView<'_>,
        now: u64,
    ) {
        if all_ns > 0 {
            self.charge_excess(view, now);
            let measured_ns = own_ns.min(all_ns);
            self.count_excess(measured_ns, view, now);
            self.inferred_excess.add(all_ns - measured_ns);
        }
    }

    /// Adds excess to the ledger. What there is no room for is charged to the bucket at once.
    fn count_excess(&mut self, gpu_ns: u64, view: &ComputeView<'_>, now: u64) {
        let beyond_ns = self.excess.add(gpu_ns);
        view.slot.gpu_ns.fetch_add(gpu_ns - beyond_ns, Ordering::Relaxed);
        self.correct(0, beyond_ns, beyond_ns, view, now);
    }

    /// Charges the bucket for excess, as of the time of the last charge: an idle container has
    /// gained meanwhile.
    pub(super) fn charge_excess(&mut self, view: &ComputeView<'_>, now: u64) {
        let has_contention = view.has_others() || !self.contention.contention.is_negligible();
        let inferred_ns = self.inferred_excess.take(has_contention, now);
        if inferred_ns > 0 {
            self.count_excess(inferred_ns, view, now);
        }
        let rate = view.rate();
        let (gpu_ns, since) = self.excess.take(now, rate);
        if let Some(rate) = rate.filter(|_| gpu_ns > 0) {
            Bucket::new(&view.page.due_ns).charge(since, view.corrected(gpu_ns), rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: u64 = CONFIRMED_AFTER_NS;

    /// Returns what is charged at the ends of intervals of which some have contention. Excess is
    /// inferred in the first.
    fn charged(contention: [bool; 3]) -> [u64; 3] {
        let mut inferred = InferredExcess::new();
        assert_eq!(inferred.take(false, INTERVAL), 0);
        inferred.add(7);
        let mut end = INTERVAL;
        contention.map(|has_contention| {
            assert_eq!(inferred.take(has_contention, end + INTERVAL / 2), 0);
            end += INTERVAL;
            inferred.take(false, end)
        })
    }

    #[test]
    fn inferred_excess_is_charged_after_time_without_contention() {
        assert_eq!(charged([false; 3]), [0, 7, 0]);
        assert_eq!(charged([true, false, false]), [0; 3], "at the same time");
        assert_eq!(charged([false, true, false]), [0; 3], "right after");
        assert_eq!(charged([false, false, true]), [0, 7, 0], "later");
    }

    #[test]
    fn inferred_excess_is_charged_after_an_idle_time() {
        let mut inferred = InferredExcess::new();
        assert_eq!(inferred.take(false, INTERVAL), 0);
        inferred.add(7);
        assert_eq!(inferred.take(false, 9 * INTERVAL), 7);
        assert_eq!(inferred.take(false, 20 * INTERVAL), 0);
    }
}
