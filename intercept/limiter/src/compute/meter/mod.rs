//! Admission of one process's launches on one GPU, and settlement of their measured times.
//!
//! ```text
//!  admit    lease      takes GPU time from the bucket, limits run-ahead and unmeasured kernels
//!  drain    settlement corrects charges by measured times
//!           learning   teaches the estimates
//!           window     settles launches of several streams by the time from one end to the next
//!           overlap    learns what streams that run at the same time use of their estimates
//!           excess     charges what kernels take beyond their usual time, over seconds
//!           busy       publishes the process's busy time and outstanding work
//! ```

mod busy;
mod excess;
mod interruptions;
mod learning;
mod lease;
mod overlap;
mod settlement;
mod window;

use core::sync::atomic::Ordering;

use crate::compute::Contention;
use crate::compute::decision::{
    ComputeView, EventPair, EventTimer, Launch, LaunchDecision, LaunchPlan, LaunchTime, Marker,
    WaitUntil,
};
use crate::compute::launch_budget::LaunchBudget;
use crate::compute::page::advance;
use crate::compute::part::Part;
use crate::compute::spans::{CALIBRATION, Span, Spans, Submission};

use excess::{Excess, InferredExcess};
use overlap::Overlap;

pub(super) use busy::UNMEASURED_DONE_BY_NS;

/// GPU time that a process takes from the bucket at once. A longer launch takes its own time, and
/// is measured.
pub const LEASE_GPU_NS: u64 = 500_000;

/// GPU time that may be queued in a stream: work that completes later than this is charged too late
/// to be limited.
pub const RUN_AHEAD_GPU_NS: u64 = 10_000_000;

/// Number of events that a meter uses.
pub const MARKERS: usize = Spans::MARKERS;

/// One of this many measured launches also measures an empty pair of events.
const CALIBRATES_ONE_OF: u64 = 16;

/// Admission and settlement of one process's launches on one GPU. Lives in the process's own memory
/// under its lock. Most launches are charged from the [`LaunchBudget`] without it.
#[derive(Debug)]
pub struct Meter {
    spans: Spans,
    /// GPU-ns charged so far.
    charged: u64,
    /// GPU-ns taken from the bucket and not spent, as estimates count them.
    lease: u64,
    /// Part of the lease that was charged.
    part: Part,
    overlap: Overlap,
    /// Part of the lease that is not put into the budget yet: the launch that needs it is measured.
    withheld: u64,
    /// Part of the lease that was put into the budget.
    in_budget: u64,
    /// Launches that were charged from the budget and not counted yet.
    launches: u64,
    /// GPU-ns spent since the last span.
    open: u64,
    /// Number of the busy period: while it lasts, some measured launch is always under way.
    period: u64,
    /// Times that the program has waited for work since the last span.
    waits: u64,
    /// True if it has launched nothing since the last of them.
    is_after_wait: bool,
    /// GPU-ns spent since the last span for work that is done.
    unmeasured: u64,
    /// GPU-ns spent for spans that are under way.
    pending: u64,
    /// Last span that was settled.
    ended: Option<Ended>,
    /// Contention at the last settlement.
    contention: ContentionReading,
    /// Time when the budget was last drained.
    drained: u64,
    /// Time of the last admission other than from the budget.
    admitted: u64,
    /// Stream of the last request for a lease.
    stream: Option<usize>,
    /// Time of the last request for a lease in another stream than that of the request before.
    changed_stream: Option<u64>,
    /// Time of the last launch that got a lease in spite of its debt.
    spared: u64,
    /// Holds that expired since the GPU was last seen to complete work.
    expired_holds: u32,
    /// Time of an empty pair of events in ns, once measured.
    overhead_ns: Option<u64>,
    /// GPU-ns inferred from measured launches and not charged yet.
    deferred: u64,
    /// GPU time of kernels beyond what is usual for them.
    excess: Excess,
    inferred_excess: InferredExcess,
    /// The longest wall time settled in this drain.
    longest: u64,
    /// Time from which on the CPU may measure a launch.
    next_timed: u64,
    random: u32,
    needs_wake: bool,
    busy: bool,
}

/// A span that was settled.
#[derive(Debug, Clone, Copy)]
struct Ended {
    place: usize,
    span: Span,
}

/// A measured launch.
#[derive(Debug, Clone, Copy)]
pub struct MeasuredLaunch {
    /// The event before it.
    pub before: Marker,
    /// Number in the order of submission.
    pub serial: u64,
    /// Its stream.
    pub stream: usize,
    /// Its context.
    pub context: usize,
}

impl MeasuredLaunch {
    const fn new(place: usize, span: &Span) -> Self {
        let Launch { stream, context, .. } = span.launch;
        Self { before: Spans::before(place), serial: span.serial, stream, context }
    }
}

/// Contention up to the time of its reading.
#[derive(Debug, Clone, Copy)]
struct ContentionReading {
    at: u64,
    turn: u64,
    contention: Contention,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// Creates a meter without launches.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            spans: Spans::new(),
            charged: 0,
            lease: 0,
            part: Part::ALL,
            overlap: Overlap::new(),
            withheld: 0,
            in_budget: 0,
            launches: 0,
            open: 0,
            period: 0,
            waits: 0,
            is_after_wait: false,
            unmeasured: 0,
            pending: 0,
            ended: None,
            contention: ContentionReading { at: 0, turn: 0, contention: Contention::NONE },
            drained: 0,
            admitted: 0,
            stream: None,
            changed_stream: None,
            spared: 0,
            expired_holds: 0,
            overhead_ns: None,
            deferred: 0,
            excess: Excess::new(),
            inferred_excess: InferredExcess::new(),
            longest: 0,
            next_timed: 0,
            random: 0x9e37_79b9,
            needs_wake: false,
            busy: false,
        }
    }

    /// Decides on a launch.
    pub fn admit(
        &mut self,
        launch: Launch,
        view: &ComputeView<'_>,
        timer: &mut impl EventTimer,
        time: LaunchTime,
    ) -> LaunchDecision {
        self.drain_budget_of(view, time.now);
        let decision = self.decide(launch, view, timer, time);
        self.fill_budget(view.budget);
        decision
    }

    fn decide(
        &mut self,
        launch: Launch,
        view: &ComputeView<'_>,
        timer: &mut impl EventTimer,
        time: LaunchTime,
    ) -> LaunchDecision {
        let now = time.now;
        // Read first: every later change ends the wait.
        let wake = view.page.wake.load(Ordering::Acquire);
        self.look(view, timer, now);
        let estimates = &view.budget.estimates;
        let known = estimates.known(launch.key);
        let cost = known.unwrap_or_else(|| estimates.unmeasured_cost());
        let needs_lease = self.lease < cost;
        if let Err(until_ns) = self.hold_back(launch, (known, cost), view, time) {
            if view.slot.waiting_since_ns.load(Ordering::Relaxed) == 0 {
                view.slot.waiting_since_ns.store(now, Ordering::Relaxed);
                view.page.waits.fetch_add(1, Ordering::Relaxed);
            }
            return LaunchDecision::Wait(WaitUntil { until_ns, wake });
        }
        Self::record_wait(view, now);
        let needs_withheld = self.lease < cost.saturating_add(self.withheld);
        if needs_withheld {
            self.withheld = 0;
        }
        self.lease -= cost;
        self.open += cost;
        let is_after_wait = core::mem::replace(&mut self.is_after_wait, false);
        self.admitted = now;
        if !self.busy {
            self.busy = true;
            view.slot.begin(now);
        }
        let is_measured = (needs_lease || needs_withheld || known.is_none())
            && self.spans.has_room(cost >= LEASE_GPU_NS);
        let plan = if is_measured {
            self.begin_span(launch, (cost, is_after_wait), view, now)
        } else {
            None
        };
        self.publish_outstanding(view, now);
        LaunchDecision::Go(plan.unwrap_or(LaunchPlan { pair: None, serial: 0 }))
    }

    /// Queries the launches that are under way, and settles those that are done. Not while a
    /// stream is being captured.
    pub fn drain(&mut self, view: &ComputeView<'_>, timer: &mut impl EventTimer, now: u64) {
        self.drain_budget_of(view, now);
        (self.waits, self.is_after_wait) = (self.waits + 1, true);
        self.look(view, timer, now);
        self.fill_budget(view.budget);
    }

    fn look(&mut self, view: &ComputeView<'_>, timer: &mut impl EventTimer, now: u64) {
        let was = self.outstanding();
        let turn = self.advance_turn(view, now);
        if timer.may_ask() {
            self.query_done(timer);
            self.settle_done(view, timer, now, turn);
        }
        self.record_busy(was, view, now);
    }

    /// Advances `turn_ns` of the page to now and returns it.
    fn advance_turn(&self, view: &ComputeView<'_>, now: u64) -> u64 {
        advance(view.page, now, view.siblings + u64::from(self.busy), view.published)
    }

    /// Notes which spans the GPU is done with.
    fn query_done(&mut self, timer: &mut impl EventTimer) {
        for (place, span) in self.spans.pending() {
            if !span.done && (span.void || timer.query_done(Spans::behind(place))) {
                span.done = true;
                self.pending -= span.charged;
                self.expired_holds = 0;
            }
        }
    }

    /// All work of the process on this GPU is done: a synchronization of the context returned, or
    /// of its only stream.
    pub fn synced(&mut self, view: &ComputeView<'_>, timer: &mut impl EventTimer, now: u64) {
        self.drain_budget_of(view, now);
        (self.waits, self.is_after_wait) = (self.waits + 1, true);
        self.unmeasured += core::mem::take(&mut self.open);
        self.admitted = 0;
        self.look(view, timer, now);
        self.fill_budget(view.budget);
    }

    /// A context is destroyed, and its events with it: drain before. Its work under way stays
    /// charged as estimated.
    pub fn leave(&mut self, context: usize) {
        for (_, span) in self.spans.pending().filter(|(_, span)| span.launch.context == context) {
            span.void = true;
        }
        self.ended = self.ended.filter(|ended| ended.span.launch.context != context);
    }

    /// A launch with a plan failed: its charge goes back into the lease.
    pub fn failed(&mut self, plan: LaunchPlan, budget: &LaunchBudget) {
        self.drain_budget(budget);
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.void = true;
            self.lease += span.cost;
            span.charged -= span.cost;
            span.stands_for -= span.cost;
            self.pending -= span.cost;
            span.cost = 0;
        }
        self.fill_budget(budget);
    }

    /// A launch with a plan and its events were submitted.
    pub fn submitted(&mut self, plan: LaunchPlan, submission: Submission) {
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.submission = Some(submission);
        }
    }

    /// A launch with a plan was submitted without its events, and nothing else shows its time: it
    /// stays charged as estimated. See [`Meter::timed`].
    pub fn unmeasured(&mut self, plan: LaunchPlan) {
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.void = true;
        }
    }

    /// Returns the launches charged from the budget since the last call.
    pub const fn take_launches(&mut self) -> u64 {
        core::mem::replace(&mut self.launches, 0)
    }

    /// Returns the measured launches that are not settled, oldest first.
    pub fn unsettled(&self) -> impl Iterator<Item = MeasuredLaunch> {
        self.spans.places().map(|(place, span)| MeasuredLaunch::new(place, span))
    }

    /// Returns the launch from whose end the times of the next ones are counted: the last in the
    /// order of submission that was settled.
    #[must_use]
    pub fn last_settled(&self) -> Option<MeasuredLaunch> {
        self.ended.map(|last| MeasuredLaunch::new(last.place, &last.span))
    }

    /// Returns true, once, if waiters must be woken (futex of `page.wake`).
    pub const fn take_wake(&mut self) -> bool {
        core::mem::replace(&mut self.needs_wake, false)
    }

    /// Returns true if the process has work, as far as events show.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        self.busy
    }

    /// Returns GPU-ns charged for work that is not known to be done.
    #[must_use]
    pub const fn outstanding(&self) -> u64 {
        self.pending + self.open
    }

    /// Returns GPU-ns charged for work that is known to be done.
    const fn completed(&self) -> u64 {
        self.charged.saturating_sub(self.lease).saturating_sub(self.outstanding())
    }

    fn begin_span(
        &mut self,
        launch: Launch,
        (cost, is_after_wait): (u64, bool),
        view: &ComputeView<'_>,
        now: u64,
    ) -> Option<LaunchPlan> {
        let turn = view.page.turn_ns.load(Ordering::Acquire);
        let charged = self.open;
        if self.spans.under_way().next().is_none() {
            self.period += 1;
        }
        let calibrates =
            self.overhead_ns.is_none() || self.spans.pushed().is_multiple_of(CALIBRATES_ONE_OF);
        let span = Span {
            serial: 0,
            launch,
            cost,
            charged,
            stands_for: charged.saturating_add(self.unmeasured),
            part: self.part,
            waits: self.waits,
            is_after_wait,
            period: self.period,
            begun: now,
            turn,
            completed: self.completed(),
            calibrates,
            submission: None,
            done: false,
            void: false,
        };
        let (place, serial) = self.spans.push(span, self.ended.map(|ended| ended.place))?;
        (self.open, self.unmeasured, self.waits) = (0, 0, 0);
        self.pending += charged;
        let pair = EventPair {
            calibration: calibrates.then_some(CALIBRATION),
            before: Spans::before(place),
            behind: Spans::behind(place),
        };
        Some(LaunchPlan { pair: Some(pair), serial })
    }
}
