//! Busy time and outstanding work of the process, published in its slot.

use core::sync::atomic::Ordering;

use super::Meter;
use crate::compute::Contention;
use crate::compute::decision::ComputeView;

/// Time after which an unmeasured kernel is taken to be done.
pub(in crate::compute) const UNMEASURED_DONE_BY_NS: u64 = 30_000_000_000;

/// Tolerance of the published time by which work is done.
const DONE_BY_SLACK_NS: u64 = 5_000_000;

/// Tolerance of the estimated end of work that no event follows.
const END_SLACK_NS: u64 = 100_000;

impl Meter {
    /// Records the process's busy time. `was` is its outstanding work before spans were settled.
    pub(super) fn record_busy(&mut self, was: u64, view: &ComputeView<'_>, now: u64) {
        if !self.busy {
            return;
        }
        let contention = view.published.map_or(Contention::NONE, |published| published.others);
        // No event follows the last launches: they are done when their estimate has passed.
        let stretched = |gpu_ns: u64| gpu_ns.saturating_mul(2 * (1 + contention.contexts()));
        if self.spans.is_empty()
            && now.saturating_sub(self.admitted) > stretched(self.open) + END_SLACK_NS
        {
            self.unmeasured += core::mem::take(&mut self.open);
            self.busy = false;
        }
        self.publish_outstanding(view, now);
        // If this is called late, the process was busy no longer than its work can have taken.
        let since = view.slot.busy_since_ns.load(Ordering::Relaxed);
        let most = stretched(was).max(core::mem::take(&mut self.longest).saturating_mul(2));
        let end = since.saturating_add(most.saturating_add(END_SLACK_NS));
        let until = if self.busy { now } else { now.min(end) };
        view.slot.record_busy(until, self.busy);
    }

    /// Publishes the outstanding work, and the time by which it is done at the latest.
    pub(super) fn publish_outstanding(&self, view: &ComputeView<'_>, now: u64) {
        let others = view.published.map_or(0, |published| published.others.contexts());
        let contexts = 1 + view.siblings + others;
        let has_unmeasured = self
            .spans
            .under_way()
            .any(|span| view.budget.estimates.known(span.launch.key).is_none());
        let longest = if has_unmeasured {
            UNMEASURED_DONE_BY_NS
        } else {
            self.outstanding().saturating_mul(4 * contexts).saturating_add(DONE_BY_SLACK_NS)
        };
        let charged = self.charged_part(now).of(self.outstanding());
        view.slot.outstanding_ns.store(charged, Ordering::Relaxed);
        view.slot.done_by_ns.store(now.saturating_add(longest), Ordering::Relaxed);
    }

    /// Adds the time that an admitted launch has waited.
    pub(super) fn record_wait(view: &ComputeView<'_>, now: u64) {
        let since = view.slot.waiting_since_ns.load(Ordering::Relaxed);
        if since != 0 {
            view.page.waited_ns.fetch_add(now.saturating_sub(since), Ordering::Relaxed);
            view.slot.waiting_since_ns.store(0, Ordering::Relaxed);
        }
    }
}
