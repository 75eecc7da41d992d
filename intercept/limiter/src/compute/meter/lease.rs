//! Lease: GPU time taken from the bucket in advance, and the launches that are held back.

use core::sync::atomic::Ordering;

use super::{LEASE_GPU_NS, Meter, RUN_AHEAD_GPU_NS};
use crate::compute::Bucket;
use crate::compute::decision::{ComputeView, Launch, LaunchTime};
use crate::compute::launch_budget::LaunchBudget;
use crate::compute::part::Part;
use crate::compute::proportion::in_proportion;
use crate::compute::spans::Span;

/// The longest that a launch is held back because of queued work. After that, the queued work may
/// be waiting for this launch.
const MOST_HOLD_NS: u64 = 100_000_000;

/// The number of expired holds that double the longest hold.
const MOST_EXPIRED_HOLDS: u32 = 3;

/// The longest that a launch is held back because of an unmeasured kernel that is under way.
const UNMEASURED_HOLD_NS: u64 = 1_000_000_000;

/// Unmeasured kernels that may be under way.
const MOST_UNMEASURED: usize = 24;

/// Deferred charges that a lease takes along at most, as the wall time in which the bucket gains
/// them: a launch waits no longer for them.
const DEFERRED_WALL_NS: u64 = 15_000_000;

/// Longest wait for tokens before the state is read again, because the host cannot wake a waiter.
const LOOK_AGAIN_NS: u64 = 20_000_000;

/// The debt in which a launch is not held longer than [`MOST_HOLD_NS`] beside work of another
/// stream.
const MOST_DEBT_GPU_NS: u64 = 1_000_000_000_000;

/// Time for which a process that has launched in two streams counts as one that overlaps their
/// work.
const STREAMS_HOLD_NS: u64 = 1_000_000_000;

/// The most that a process takes at once if its streams use a part of what is estimated.
const MOST_LEASE_GPU_NS: u64 = 2_000_000;

/// One of this many leases is put into the budget in two parts while streams hardly overlap.
const SPLITS_ONE_OF: u32 = 4;

/// Longest wait for tokens of a process that has work under way.
pub(super) const POLL_NS: u64 = 1_000_000;

impl Meter {
    /// Takes the lease out of the budget. Launches that it was charged for while the process was
    /// not known to have work are its busy time: each was short and waited for, otherwise the meter
    /// would know.
    pub(super) fn drain_budget_of(&mut self, view: &ComputeView<'_>, now: u64) {
        let since = core::mem::replace(&mut self.drained, now);
        let spent = self.drain_budget(view.budget);
        if spent > 0 && !self.busy {
            let at_most = now.saturating_sub(since);
            view.slot.busy_ns.fetch_add(spent.min(at_most), Ordering::Relaxed);
        }
    }

    /// Takes the lease out of the budget; returns the GPU-ns spent of it.
    pub(super) fn drain_budget(&mut self, budget: &LaunchBudget) -> u64 {
        let mut spent = 0;
        if let Some(drained) = budget.drain() {
            spent = self.in_budget.saturating_sub(drained.left);
            self.open += spent;
            // The part of the lease that did not fit into the budget is still here.
            self.lease = self.lease - self.in_budget + drained.left;
            self.launches += drained.launches;
            self.waits += drained.waits;
            self.is_after_wait =
                drained.is_after_wait || self.is_after_wait && drained.launches == 0;
            if drained.is_done {
                self.unmeasured += core::mem::take(&mut self.open);
            }
        }
        self.in_budget = 0;
        spent
    }

    /// Puts the lease into the budget, for launches that need no decision. It stays there while the
    /// process has no work: it is charged.
    pub(super) fn fill_budget(&mut self, budget: &LaunchBudget) {
        let open = self.lease.saturating_sub(self.withheld);
        self.in_budget = open.min(LaunchBudget::CAPACITY);
        budget.fill(self.in_budget);
    }

    /// Extends the lease to the cost of a launch, unless the launch is held back.
    ///
    /// # Errors
    /// Returns the time to ask again.
    pub(super) fn hold_back(
        &mut self,
        launch: Launch,
        (known, cost): (Option<u64>, u64),
        view: &ComputeView<'_>,
        time: LaunchTime,
    ) -> Result<(), u64> {
        let needs_lease = self.lease < cost;
        if known.is_none() {
            self.limit_unmeasured(launch, view, time)?;
        }
        if needs_lease {
            self.charge_excess(view, time.now);
            self.limit_run_ahead(launch.stream, view, time)?;
            self.note_stream(launch.stream, time.now);
            let debt = self.allowed_debt(time);
            self.extend_lease((cost, debt), view, time.now)?;
        }
        Ok(())
    }

    /// Notes if a lease is for another stream than the one before.
    fn note_stream(&mut self, stream: usize, now: u64) {
        if self.stream.replace(stream).is_some_and(|last| last != stream) {
            self.changed_stream = Some(now);
        }
    }

    /// Returns true if the process launches in several streams.
    pub(super) fn has_streams(&self, now: u64) -> bool {
        self.changed_stream.is_some_and(|at| now.saturating_sub(at) < STREAMS_HOLD_NS)
    }

    /// Returns the debt in GPU-ns up to which the bucket gives a lease.
    ///
    /// A kernel under way in another stream may spin until this launch has started, as the kernels
    /// of a collective do. Each ns for which this launch waits is then GPU time that is charged.
    /// With this debt, such a launch goes, and a later one, with no work under way, waits.
    fn allowed_debt(&mut self, LaunchTime { since, now }: LaunchTime) -> u64 {
        if !self.has_streams(now) || self.outstanding() == 0 {
            return 0;
        }
        if now.saturating_sub(self.spared.max(since)) > MOST_HOLD_NS {
            self.spared = now;
            return MOST_DEBT_GPU_NS;
        }
        RUN_AHEAD_GPU_NS
    }

    /// Takes GPU time from the bucket until the lease covers a cost.
    fn extend_lease(
        &mut self,
        (cost, debt): (u64, u64),
        view: &ComputeView<'_>,
        now: u64,
    ) -> Result<(), u64> {
        let missing = cost - self.lease;
        let part = self.charged_part(now);
        let lease = part.whole(self.jittered_lease()).min(MOST_LEASE_GPU_NS);
        let taken = if cost < LEASE_GPU_NS { missing.max(lease) } else { missing };
        let charged = part.of(taken);
        let mut deferred = self.deferred;
        if let Some(rate) = view.rate() {
            deferred = deferred.min(charged.max(rate.gpu_ns(DEFERRED_WALL_NS)));
            let bucket = Bucket::new(&view.page.due_ns);
            bucket
                .take(now, debt, view.corrected(charged + deferred), rate)
                .map_err(|due| due.min(now + self.look_again()))?;
        }
        view.slot.gpu_ns.fetch_add(charged + deferred, Ordering::Relaxed);
        self.charged += taken + deferred;
        self.deferred -= deferred;
        self.part = Part::mean((self.part, self.lease), (part, taken));
        self.lease += taken;
        self.withheld = self.lease_to_withhold(cost, now);
        Ok(())
    }

    /// Returns the part of a new lease before which another launch is measured, at random, if the
    /// process launches in several streams: the first of a lease often runs alone.
    fn lease_to_withhold(&mut self, cost: u64, now: u64) -> u64 {
        if !self.has_streams(now) || self.spans.under_way().next().is_some() {
            return 0;
        }
        let random = self.next_random();
        if self.overlap.part() > Part::MOST && !random.is_multiple_of(SPLITS_ONE_OF) {
            return 0;
        }
        in_proportion(self.lease - cost, u64::from(random), u64::from(u32::MAX))
    }

    /// Returns the longest wait for tokens: short while work is under way, so that its end is seen
    /// and others do not take this process for busy.
    fn look_again(&self) -> u64 {
        if self.spans.is_empty() { LOOK_AGAIN_NS } else { POLL_NS / 5 }
    }

    /// Holds a launch back while too much work is queued in its stream, but not for ever: another
    /// stream may wait for this launch. The launch that the GPU runs does not count: it may be
    /// long, and other streams exist to run work beside it.
    fn limit_run_ahead(
        &mut self,
        stream: usize,
        view: &ComputeView<'_>,
        time: LaunchTime,
    ) -> Result<(), u64> {
        // If no more launches can be measured, no event shows that open work is done.
        let open =
            if self.spans.has_room(false) { self.charged_part(time.now).of(self.open) } else { 0 };
        let Some(queued) = self.spans.queued_in(stream) else { return Ok(()) };
        let outstanding = queued + open;
        if !view.may_hold() || outstanding < RUN_AHEAD_GPU_NS {
            return Ok(());
        }
        let contexts = 2 + view.published.map_or(0, |published| published.others.in_256ths() / 256);
        let longest =
            MOST_HOLD_NS.saturating_add(outstanding.saturating_mul(2 * u64::from(contexts)));
        self.hold(longest, time)
    }

    /// Holds an unmeasured kernel back while it is being measured in its stream, where it would
    /// only be queued, or while too many others are: their lengths are known too late. In another
    /// stream it goes, because the one that is being measured may spin until then.
    fn limit_unmeasured(
        &mut self,
        launch: Launch,
        view: &ComputeView<'_>,
        time: LaunchTime,
    ) -> Result<(), u64> {
        let is_unmeasured = |span: &&Span| view.budget.estimates.known(span.launch.key).is_none();
        let count = self.spans.under_way().filter(is_unmeasured).count();
        let is_same =
            |span: &Span| (span.launch.key, span.launch.stream) == (launch.key, launch.stream);
        let same = self.spans.under_way().any(is_same);
        if !view.may_hold() || !same && count < MOST_UNMEASURED {
            return Ok(());
        }
        self.hold(UNMEASURED_HOLD_NS, time)
    }

    /// Holds a launch back for at most `longest`.
    fn hold(&mut self, longest: u64, LaunchTime { since, now }: LaunchTime) -> Result<(), u64> {
        if now.saturating_sub(since) > longest << self.expired_holds.min(MOST_EXPIRED_HOLDS) {
            self.expired_holds += 1;
            return Ok(());
        }
        // The interval grows with the time waited so far.
        Err(now + (now.saturating_sub(since) / 8).clamp(100_000, POLL_NS))
    }

    /// Returns a lease near [`LEASE_GPU_NS`], so that in a repeated sequence of launches it is not
    /// always the same one that is measured.
    const fn jittered_lease(&mut self) -> u64 {
        LEASE_GPU_NS * 3 / 4 + self.next_random() as u64 % (LEASE_GPU_NS / 2)
    }

    /// Returns the next random number (xorshift).
    const fn next_random(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random
    }
}
