//! Settlement: measured times correct what was charged in advance.

use core::sync::atomic::Ordering;

use super::{ContentionReading, Ended, LEASE_GPU_NS, Meter};
use crate::compute::decision::{ComputeView, EventTimer, LaunchPlan, Marker};
use crate::compute::proportion::in_proportion;
use crate::compute::sample::{
    During, Measured, NOTICEABLE_GAP_NS, Sample, own_after_turns, own_part, sample,
};
use crate::compute::spans::{CALIBRATION, Span, Spans};
use crate::compute::{Bucket, Contention};

/// The shortest time over which contention is computed.
const LEAST_CONTENTION_NS: u64 = 300_000;

/// The most that measured launches can charge later on behalf of launches that were not measured.
const MOST_DEFERRED_NS: u64 = 1_000_000_000;

/// The longest time of an empty pair of events. In a longer one, another context had the GPU.
const MOST_OVERHEAD_NS: u64 = 5_000;

/// A sample that may contain a turn of another context counts as at most this many times the
/// kernel's typical time.
const MOST_TYPICAL: u64 = 2;

/// The least time between two launches that the CPU measures.
const LEAST_UNTIMED_NS: u64 = 50_000_000;

/// The CPU waits for at most one of this many launches, by their times.
const WAITS_ONE_OF: u64 = 4;

/// Time of a settlement.
#[derive(Debug, Clone, Copy)]
struct At {
    now: u64,
    /// `turn_ns` of the page.
    turn: u64,
    /// True if only one span is settled.
    is_single: bool,
}

impl Meter {
    /// Settles the spans that the GPU is done with.
    pub(super) fn settle_done(
        &mut self,
        view: &ComputeView<'_>,
        timer: &mut impl EventTimer,
        now: u64,
        turn: u64,
    ) {
        let is_single = self.spans.pending().filter(|(_, span)| span.done).count() < 2;
        let mut settled = false;
        while let Some((place, span)) = self.spans.pop_done(now) {
            self.settle(place, span, view, timer, At { now, turn, is_single });
            settled = true;
        }
        if settled {
            self.contention =
                ContentionReading { at: now, turn, contention: self.contention.contention };
        }
    }

    /// Returns true if a launch whose events cannot be recorded is to be measured by the CPU now
    /// ([`Meter::timed`]). Not each of them: the waits let the GPU become idle.
    #[must_use]
    pub const fn may_time(&self, now: u64) -> bool {
        now >= self.next_timed
    }

    /// A launch with a plan was submitted without its events, in an idle stream. The CPU waited for
    /// the stream: `wall_ns` passed since before the launch. It contains the time of submission,
    /// and the turns of others.
    pub fn timed(&mut self, plan: LaunchPlan, wall_ns: u64, view: &ComputeView<'_>, now: u64) {
        let pause_ns = wall_ns.saturating_mul(WAITS_ONE_OF).max(LEAST_UNTIMED_NS);
        self.next_timed = now.saturating_add(pause_ns);
        self.drain_budget_of(view, now);
        let turn = self.advance_turn(view, now);
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.void = true;
            let span = *span;
            let (contention, _) = self.contention_during(span, now, turn);
            let (key, estimates) = (span.launch.key, &view.budget.estimates);
            if contention.is_negligible() {
                let parts = estimates.usual_part(key, wall_ns);
                estimates.learn(key, wall_ns);
                self.charge_sample((span, 0), parts, span.stands_for, view, now);
            } else {
                let used = own_after_turns(wall_ns, view.slice_ns.max(1), contention.contexts())
                    .unwrap_or_else(|| span.cost.min(wall_ns));
                estimates.learn(key, used);
                self.correct(span.cost, used, used, view, now);
            }
        }
        self.fill_budget(view.budget);
    }

    fn settle(
        &mut self,
        place: usize,
        span: Span,
        view: &ComputeView<'_>,
        timer: &mut impl EventTimer,
        At { now, turn, is_single }: At,
    ) {
        if span.void {
            return;
        }
        let Some(measured) = self.measure(place, span, timer) else { return };
        let (contention, turn_ns) = self.contention_during(span, now, turn);
        // The turn is this launch's only if no other launch ran in that time.
        let is_own = is_single && span.charged == span.cost && span.cost >= LEASE_GPU_NS;
        let only_siblings = !view.has_others();
        let during = During { contention, turn_ns: turn_ns.filter(|_| is_own), only_siblings };
        let estimates = &view.budget.estimates;
        let slice_ns = view.slice_ns.max(1);
        // A long launch contains turns of others, whose number `own_part` derives. A short one
        // contains none, or one of any length.
        let is_alone = contention.is_negligible() && only_siblings && !view.has_siblings;
        let typical =
            estimates.typical(span.launch.key).filter(|mean| !is_alone && *mean < slice_ns / 4);
        let own = |wall: u64| {
            let measured = Measured { wall, ..measured };
            own_part(estimates, span.launch.key, measured, during, slice_ns)
        };
        let Some(submission) = span.submission else { return };
        match sample(measured.wall, submission, self.overhead_ns.unwrap_or(0)) {
            Sample::Long(wall) | Sample::Idle(wall)
                if typical.is_some_and(|typical| wall > typical + typical / 2) =>
            {
                estimates.raise(span.launch.key);
            }
            Sample::Exact(wall) | Sample::Long(wall) => {
                let Some(all) = own(wall) else { return };
                let parts = estimates.usual_part(span.launch.key, all);
                let most = typical.map_or(u64::MAX, |typical| typical * MOST_TYPICAL);
                estimates.learn(span.launch.key, all.min(most));
                // Which launch of a lease is measured is random, with a probability in proportion
                // to its estimate: it stands for the others.
                let is_typical = contention.is_negligible() && typical.is_none();
                let stands_for = if is_typical { span.stands_for } else { span.cost };
                self.charge_sample((span, measured.overlap), parts, stands_for, view, now);
            }
            Sample::Idle(wall) => {
                let Some(all) = own(wall) else { return };
                let parts = estimates.usual_part(span.launch.key, all);
                estimates.learn(span.launch.key, all);
                self.charge_sample((span, measured.overlap), parts, span.cost, view, now);
            }
            Sample::Within(least, most) => {
                let least = if typical.is_some() { 0 } else { least };
                let (Some(least), Some(most)) = (own(least), own(most)) else { return };
                estimates.bound(span.launch.key, least, most);
                let used = span.cost.clamp(least, most.max(least));
                self.correct(span.cost, used, used, view, now);
            }
        }
    }

    /// Charges the usual part and the excess of a sample that stands for charged launches. The
    /// overlap with other streams is charged already.
    fn charge_sample(
        &mut self,
        (span, overlap): (Span, u64),
        (usual, excess): (u64, u64),
        stands_for: u64,
        view: &ComputeView<'_>,
        now: u64,
    ) {
        let of_all = |part: u64| in_proportion(part, stands_for, span.cost.max(1));
        let own = usual - overlap.min(usual);
        self.correct(stands_for, of_all(own), own, view, now);
        self.add_excess((excess, of_all(excess)), view, now);
    }

    fn measure(
        &mut self,
        place: usize,
        span: Span,
        timer: &mut impl EventTimer,
    ) -> Option<Measured> {
        let (before, behind) = (Spans::before(place), Spans::behind(place));
        self.calibrate(span, before, timer);
        let wall = u64::try_from(timer.elapsed_ns(before, behind)?).unwrap_or(0);
        self.longest = self.longest.max(wall);
        if self.ended.is_some_and(|last| last.serial > span.serial) {
            // Later launches of other streams ran beside it, and were charged.
            let overlap = self.overtook(&span).min(wall);
            return Some(Measured { wall, follows: false, overlap });
        }
        let last = self.ended.filter(|last| last.context == span.launch.context);
        let gap = last
            .and_then(|last| timer.elapsed_ns(Spans::behind(last.place), before))
            .unwrap_or(i64::MAX);
        let overlap = u64::try_from(gap.saturating_neg()).unwrap_or(0).min(wall);
        self.ended = Some(Ended { place, serial: span.serial, context: span.launch.context });
        Some(Measured { wall, follows: gap < NOTICEABLE_GAP_NS, overlap })
    }

    /// Returns the contention while a span was under way, and its turn: since it began, or since
    /// the span before it was done.
    fn contention_during(&mut self, span: Span, now: u64, turn: u64) -> (Contention, Option<u64>) {
        let last = &self.contention;
        let (at, before) =
            if last.at > span.begun { (last.at, last.turn) } else { (span.begun, span.turn) };
        // Spans that are settled together have the same contention.
        let turn_ns = turn.saturating_sub(before);
        if now.saturating_sub(at) >= LEAST_CONTENTION_NS || last.at == 0 {
            self.contention.contention = Contention::of_share(turn_ns, now.saturating_sub(at));
            return (self.contention.contention, Some(turn_ns));
        }
        (self.contention.contention, None)
    }

    /// Returns GPU-ns charged for work of other streams that was done while a span was under way.
    fn overtook(&self, span: &Span) -> u64 {
        self.completed().saturating_sub(span.completed).saturating_sub(span.charged)
    }

    /// Learns the time of an empty pair of events from one that the GPU had not reached when the
    /// CPU had submitted both: the mean of the last ones, without those in which another context
    /// had the GPU.
    fn calibrate(&mut self, span: Span, before: Marker, timer: &mut impl EventTimer) {
        let was_queued = span.submission.is_some_and(|submission| submission.was_queued);
        if !span.calibrates || !was_queued {
            return;
        }
        let elapsed = timer.elapsed_ns(CALIBRATION, before);
        let Some(empty_ns) = elapsed.and_then(|elapsed| u64::try_from(elapsed).ok()) else {
            return;
        };
        if empty_ns <= MOST_OVERHEAD_NS {
            let before_ns = self.overhead_ns.unwrap_or(empty_ns);
            self.overhead_ns = Some((before_ns * 15 + empty_ns) / 16);
        }
    }

    /// Corrects what was charged for launches to what they used. One launch of them was measured
    /// and used `own`; the rest is inferred from it, and is charged with later leases.
    pub(super) fn correct(
        &mut self,
        charged: u64,
        used: u64,
        own: u64,
        view: &ComputeView<'_>,
        now: u64,
    ) {
        if used > charged {
            let at_once = (used - charged).min(own);
            self.deferred = (self.deferred + (used - charged - at_once)).min(MOST_DEFERRED_NS);
            view.slot.gpu_ns.fetch_add(at_once, Ordering::Relaxed);
            self.charged += at_once;
            if let Some(rate) = view.rate() {
                Bucket::new(&view.page.due_ns).charge(now, view.corrected(at_once), rate);
            }
            return;
        }
        let settled = self.deferred.min(charged - used);
        self.deferred -= settled;
        let refund = charged - used - settled;
        view.slot.gpu_ns.fetch_sub(refund, Ordering::Relaxed);
        self.charged = self.charged.saturating_sub(refund);
        if let Some(rate) = view.rate() {
            Bucket::new(&view.page.due_ns).refund(view.corrected(refund), rate);
            if refund > LEASE_GPU_NS {
                view.page.signal();
                self.needs_wake = true;
            }
        }
    }
}
