//! Settlement: measured times correct what was charged in advance.

use core::sync::atomic::Ordering;

use super::learning::{Settled, learn};
use super::{ContentionReading, Ended, LEASE_GPU_NS, Meter};
use crate::compute::decision::{ComputeView, EventTimer, LaunchPlan, Marker};
use crate::compute::proportion::in_proportion;
use crate::compute::sample::{
    During, Measured, NOTICEABLE_GAP_NS, Overlapped, Window, own_after_turns, sample,
};
use crate::compute::spans::{CALIBRATION, Span, Spans};
use crate::compute::{Bucket, Contention};

/// The shortest time over which contention is computed.
const LEAST_CONTENTION_NS: u64 = 300_000;

/// The most that measured launches can charge later on behalf of launches that were not measured.
const MOST_DEFERRED_NS: u64 = 1_000_000_000;

/// The longest time of an empty pair of events. In a longer one, another context had the GPU.
const MOST_OVERHEAD_NS: u64 = 5_000;

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
                let measured = Measured::alone(wall_ns);
                self.charge_sample((span, measured), parts, span.stands_for, view, now);
            } else {
                let used = own_after_turns(wall_ns, view.slice_ns.max(1), contention.contexts())
                    .unwrap_or_else(|| span.cost.min(wall_ns));
                estimates.learn(key, used);
                self.correct(span.part.of(span.cost), used, used, view, now);
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
        at: At,
    ) {
        if span.void {
            return;
        }
        let Some(measured) = self.measure(place, span, timer) else { return };
        let (contention, turn_ns) = self.contention_during(span, at.now, at.turn);
        // The turn is this launch's only if no other launch ran in that time.
        let is_own = at.is_single && span.charged == span.cost && span.cost >= LEASE_GPU_NS;
        let only_siblings = !view.has_others();
        let during = During { contention, turn_ns: turn_ns.filter(|_| is_own), only_siblings };
        let Some(submission) = span.submission else { return };
        let sample = sample(measured.wall, submission, self.overhead_ns.unwrap_or(0));
        let settled = learn((span, measured, sample), during, view);
        if !self.has_streams(at.now) {
            self.overlap.reset();
        } else if let Some(window) = measured.window {
            let window = window.without(measured.wall.saturating_sub(sample.most()));
            return self.settle_window((span, window), settled, contention, view, at.now);
        }
        match settled {
            Settled::Unknown => {}
            Settled::Sample { parts, is_of_all } => {
                let stands_for = if is_of_all { span.stands_for } else { span.cost };
                self.charge_sample((span, measured), parts, stands_for, view, at.now);
            }
            Settled::Bounds(least, most) => {
                let charged = span.part.of(span.cost);
                let used = charged.clamp(least, most);
                self.correct(charged, used, used, view, at.now);
            }
        }
    }

    /// Charges the usual part and the excess of a sample that stands for charged launches. The
    /// overlap with other streams is charged already.
    fn charge_sample(
        &mut self,
        (span, measured): (Span, Measured),
        (usual, excess): (u64, u64),
        stands_for: u64,
        view: &ComputeView<'_>,
        now: u64,
    ) {
        let of_all = |part: u64| in_proportion(part, stands_for, span.cost.max(1));
        let own = measured.without_overlap(usual);
        self.correct(span.part.of(stands_for), of_all(own), own, view, now);
        if self.has_streams(now) {
            self.overlap.learn(stands_for, of_all(own));
        }
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
        let last = self.ended.filter(|last| last.span.launch.context == span.launch.context);
        let gap = last.and_then(|last| timer.elapsed_ns(Spans::behind(last.place), before));
        let end = gap.map(|gap| gap.saturating_add_unsigned(wall));
        if self.ended.is_some_and(|last| last.span.serial > span.serial) {
            // Later launches of other streams ran beside it, and were charged.
            let overlap = Overlapped::Charged(self.overtook(&span));
            let elapsed_ns = end.map(|end| self.overlap.overtaken(end));
            let window = elapsed_ns.map(|elapsed_ns| Window { elapsed_ns, is_busy: true });
            return Some(Measured { wall, follows: false, overlap, window });
        }
        self.ended = Some(Ended { place, span });
        let follows = gap.is_some_and(|gap| gap < NOTICEABLE_GAP_NS);
        let window = end.map(|end| Window {
            elapsed_ns: self.overlap.advance(end),
            is_busy: last.is_some_and(|last| last.span.period == span.period)
                && (follows || span.was_queued()),
        });
        if window.is_none() {
            self.overlap.restart();
        }
        let overlap_ns = gap.map_or(0, |gap| u64::try_from(gap.saturating_neg()).unwrap_or(0));
        Some(Measured { wall, follows, overlap: Overlapped::Wall(overlap_ns.min(wall)), window })
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
        let estimated =
            self.completed().saturating_sub(span.completed).saturating_sub(span.charged);
        span.part.of(estimated)
    }

    /// Learns the time of an empty pair of events from one that the GPU had not reached when the
    /// CPU had submitted both: the mean of the last ones, without those in which another context
    /// had the GPU.
    fn calibrate(&mut self, span: Span, before: Marker, timer: &mut impl EventTimer) {
        if !span.calibrates || !span.was_queued() {
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
        // What was charged in advance is known up to the change of its part.
        let refunded = |gpu_ns: u64| Some(gpu_ns.saturating_sub(refund));
        let _ = view.slot.gpu_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refunded);
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
