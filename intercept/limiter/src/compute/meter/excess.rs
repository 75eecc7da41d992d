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

impl Meter {
    /// Counts excess: that of a launch, and of those that it stands for. It is in the ledger at
    /// once.
    pub(super) fn add_excess(
        &mut self,
        (own_ns, all_ns): (u64, u64),
        view: &ComputeView<'_>,
        now: u64,
    ) {
        if all_ns > 0 {
            self.charge_excess(view, now);
            let beyond_ns = self.excess.add(all_ns);
            view.slot.gpu_ns.fetch_add(all_ns - beyond_ns, Ordering::Relaxed);
            self.correct(0, beyond_ns, own_ns, view, now);
        }
    }

    /// Charges the bucket for excess, as of the time of the last charge: an idle container has
    /// gained meanwhile.
    pub(super) fn charge_excess(&mut self, view: &ComputeView<'_>, now: u64) {
        let rate = view.rate();
        let (gpu_ns, since) = self.excess.take(now, rate);
        if let Some(rate) = rate.filter(|_| gpu_ns > 0) {
            Bucket::new(&view.page.due_ns).charge(since, view.corrected(gpu_ns), rate);
        }
    }
}
