//! One process's launches on one GPU.

use core::sync::atomic::Ordering;

use crate::compute::decision::{
    Asked, Decision, Launch, Marker, Pair, Plan, Surroundings, Timer, Waiting,
};
use crate::compute::page::advance;
use crate::compute::proportion::in_proportion;
use crate::compute::sample::{During, Measured, NOTICEABLE_GAP_NS, Sample, own_part, sample};
use crate::compute::spans::{CALIBRATION, Span, Spans, Submission};
use crate::compute::till::Till;
use crate::compute::{Bucket, Crowd};

/// GPU time that a process takes from the bucket at once; a launch that takes longer is paid for by
/// itself, and measured.
pub const LEASE_GPU_NS: u64 = 500_000;

/// GPU time that may be on its way. Whatever comes back later than this is charged too late to hold
/// anybody.
pub const RUN_AHEAD_GPU_NS: u64 = 10_000_000;

/// Events that a meter needs.
pub const MARKERS: usize = Spans::MARKERS;

/// How long the work of others may keep a launch waiting for room; longer, and it may be waiting
/// for this very launch.
const PATIENCE_NS: u64 = 100_000_000;

/// How often patience doubles at most.
const MOST_IMPATIENCE: u32 = 3;

/// As long for a kernel of unknown length that is under way already.
const STRANGERS_PATIENCE_NS: u64 = 1_000_000_000;

/// Kernels of unknown length that may be under way.
const STRANGERS: usize = 24;

/// Company is not looked at over less than this.
const SHORTEST_LOOK_NS: u64 = 300_000;

/// What measured launches can cost on behalf of those that were not measured.
const MOST_DEFERRED_NS: u64 = 1_000_000_000;

/// The time that is charged at once of what was inferred: nothing waits longer for it.
const DEFERRED_WALL_NS: u64 = 15_000_000;

/// One of so many measured launches shows how much time an empty pair of events takes.
const CALIBRATES_ONE_OF: u64 = 16;

/// What an empty pair of events shows at most; more, and another context had the GPU in between.
const MOST_OVERHEAD_NS: u64 = 5_000;

/// A sample that may have a turn of another context in it counts as this many times what the kernel
/// usually takes, at most.
const MOST_USUAL: u64 = 2;

/// By when a kernel of unknown length is taken to be done.
pub(super) const STRANGERS_PROMISE_NS: u64 = 30_000_000_000;

/// What a promise is late by at most.
const PROMISE_SLACK_NS: u64 = 5_000_000;

/// A waiter looks again after this, since the host cannot wake it.
const LOOK_AGAIN_NS: u64 = 20_000_000;

/// And after this where it has work under way.
const POLL_NS: u64 = 1_000_000;

/// One process's launches on one GPU. In the process's own memory, under its lock. What needs no
/// decision pays at the [`Till`].
#[derive(Debug)]
pub struct Meter {
    spans: Spans,
    /// Charged so far, GPU-ns.
    paid: u64,
    /// Taken from the bucket and not spent.
    lease: u64,
    /// How much of it was put into the till.
    lent: u64,
    /// Launches that were paid from the till and nobody has asked about.
    launches: u64,
    /// Spent since the last span.
    open: u64,
    /// Spent since the last span for what is done.
    unmeasured: u64,
    /// Spent for spans that are under way.
    pending: u64,
    /// Last span that ended.
    ended: Option<Ended>,
    /// How much company there was lately.
    company: Company,
    /// The last time it took the lease out of the till.
    collected: u64,
    /// The last time it let go a launch other than by [`Meter::spend`].
    admitted: u64,
    /// How often patience ended since the GPU was last seen to be done with something.
    impatience: u32,
    /// What an empty pair of events shows, ns, once that was measured.
    overhead_ns: Option<u64>,
    /// GPU-ns inferred from measured launches and not charged yet.
    deferred: u64,
    /// The longest wall time settled in this drain.
    longest: u64,
    random: u32,
    rang: bool,
    busy: bool,
}

/// The last span that was settled.
#[derive(Debug, Clone, Copy)]
struct Ended {
    place: usize,
    serial: u64,
    context: usize,
}

/// Company up to the last time it was looked at.
#[derive(Debug, Clone, Copy)]
struct Company {
    at: u64,
    turn: u64,
    crowd: Crowd,
}

/// When spans are settled.
#[derive(Debug, Clone, Copy)]
struct Look {
    now: u64,
    /// `turn_ns` of the page.
    turn: u64,
    /// Only one span is.
    single: bool,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// Nothing launched.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            spans: Spans::new(),
            paid: 0,
            lease: 0,
            lent: 0,
            launches: 0,
            open: 0,
            unmeasured: 0,
            pending: 0,
            ended: None,
            company: Company { at: 0, turn: 0, crowd: Crowd::NOBODY },
            collected: 0,
            admitted: 0,
            impatience: 0,
            overhead_ns: None,
            deferred: 0,
            longest: 0,
            random: 0x9e37_79b9,
            rang: false,
            busy: false,
        }
    }

    /// Decides on a launch.
    pub fn admit(
        &mut self,
        launch: Launch,
        around: &Surroundings<'_>,
        timer: &mut impl Timer,
        asked: Asked,
    ) -> Decision {
        self.collect_from(around, asked.now);
        let decision = self.decide(launch, around, timer, asked);
        self.lend(around.till);
        decision
    }

    fn decide(
        &mut self,
        launch: Launch,
        around: &Surroundings<'_>,
        timer: &mut impl Timer,
        asked: Asked,
    ) -> Decision {
        let now = asked.now;
        // Before anything is looked at: what changes from here on ends the wait.
        let wake = around.page.wake.load(Ordering::Acquire);
        self.look(around, timer, now);
        let estimates = &around.till.estimates;
        let known = estimates.known(launch.key);
        let cost = known.unwrap_or_else(|| estimates.stranger());
        let pays = self.lease < cost;
        let meets =
            if known.is_none() { self.meet_strangers(launch, around, asked) } else { Ok(()) };
        let paid =
            meets.and_then(|()| if pays { self.pay(launch, cost, around, asked) } else { Ok(()) });
        if let Err(until_ns) = paid {
            if around.slot.waiting_since_ns.load(Ordering::Relaxed) == 0 {
                around.slot.waiting_since_ns.store(now, Ordering::Relaxed);
                around.page.waits.fetch_add(1, Ordering::Relaxed);
            }
            return Decision::Wait(Waiting { until_ns, wake });
        }
        self.waited(around, now);
        self.lease -= cost;
        self.open += cost;
        self.admitted = now;
        if !self.busy {
            self.busy = true;
            around.slot.begin(now);
        }
        let measured = (pays || known.is_none()) && self.spans.has_room(cost >= LEASE_GPU_NS);
        let plan = if measured { self.begin_span(launch, cost, around, now) } else { None };
        self.promise(around, now);
        Decision::Go(plan.unwrap_or(Plan { pair: None, serial: 0 }))
    }

    /// Looks which launches the GPU is done with, and settles them. Not while a stream is being
    /// captured.
    pub fn drain(&mut self, around: &Surroundings<'_>, timer: &mut impl Timer, now: u64) {
        self.collect_from(around, now);
        self.look(around, timer, now);
        self.lend(around.till);
    }

    fn look(&mut self, around: &Surroundings<'_>, timer: &mut impl Timer, now: u64) {
        let was = self.outstanding();
        let turn =
            advance(around.page, now, around.siblings + u64::from(self.busy), around.published);
        if !timer.may_ask() {
            return self.note_busy(was, around, now);
        }
        for (place, span) in self.spans.pending() {
            if !span.done && (span.void || timer.is_done(Spans::behind(place))) {
                span.done = true;
                self.pending -= span.charged;
                self.impatience = 0;
            }
        }
        let mut settled = false;
        let single = self.spans.pending().filter(|(_, span)| span.done).count() < 2;
        while let Some((place, span)) = self.spans.pop_done(now) {
            self.settle(place, span, around, timer, Look { now, turn, single });
            settled = true;
        }
        if settled {
            self.company = Company { at: now, turn, crowd: self.company.crowd };
        }
        self.note_busy(was, around, now);
    }

    /// All work of the process on this GPU is done: a synchronisation of the context returned, or
    /// of its only stream.
    pub fn synced(&mut self, around: &Surroundings<'_>, timer: &mut impl Timer, now: u64) {
        self.collect_from(around, now);
        self.unmeasured += core::mem::take(&mut self.open);
        self.admitted = 0;
        self.look(around, timer, now);
        self.lend(around.till);
    }

    /// A context goes away, and its events with it: drain before. What it has under way stays paid
    /// as estimated.
    pub fn leave(&mut self, context: usize) {
        for (_, span) in self.spans.pending().filter(|(_, span)| span.launch.context == context) {
            span.void = true;
        }
        self.ended = self.ended.filter(|ended| ended.context != context);
    }

    /// A launch with a plan failed: what was paid for it pays for others.
    pub fn failed(&mut self, plan: Plan, till: &Till) {
        self.collect(till);
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.void = true;
            self.lease += span.cost;
            span.charged -= span.cost;
            span.stands_for -= span.cost;
            self.pending -= span.cost;
            span.cost = 0;
        }
        self.lend(till);
    }

    /// A launch with a plan and its events were submitted.
    pub fn submitted(&mut self, plan: Plan, submission: Submission) {
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.submission = Some(submission);
        }
    }

    /// A launch with a plan was made, and could not be measured: it stays paid as estimated.
    pub fn unmeasured(&mut self, plan: Plan) {
        if let Some(span) = self.spans.under_way_as(plan.serial) {
            span.void = true;
        }
    }

    /// Launches that were paid from the till since the last time that somebody asked.
    pub const fn take_launches(&mut self) -> u64 {
        core::mem::replace(&mut self.launches, 0)
    }

    /// The launches that are measured and under way, oldest first, with the first of their
    /// markers.
    pub fn unsettled(&self) -> impl Iterator<Item = (Marker, Launch)> {
        self.spans.places().map(|(place, span)| (Spans::before(place), span.launch))
    }

    /// The last launch that was measured, likewise.
    #[must_use]
    pub fn last_settled(&self) -> Option<(Marker, usize)> {
        self.ended.map(|last| (Spans::before(last.place), last.context))
    }

    /// Whether waiters are to be woken (futex of `page.wake`); once.
    pub const fn must_wake(&mut self) -> bool {
        core::mem::replace(&mut self.rang, false)
    }

    /// Whether there is work, as far as is known.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        self.busy
    }

    /// GPU-ns paid for work that is not known to be done.
    #[must_use]
    pub const fn outstanding(&self) -> u64 {
        self.pending + self.open
    }

    /// Takes the lease out of the till. Launches that it paid for while the process was not known
    /// to have work are its busy time: each was short and waited for, or the meter would know.
    fn collect_from(&mut self, around: &Surroundings<'_>, now: u64) {
        let since = core::mem::replace(&mut self.collected, now);
        let spent = self.collect(around.till);
        if spent > 0 && !self.busy {
            let at_most = now.saturating_sub(since);
            around.slot.busy_ns.fetch_add(spent.min(at_most), Ordering::Relaxed);
        }
    }

    /// GPU-ns charged for work that is known to be done.
    const fn completed(&self) -> u64 {
        self.paid.saturating_sub(self.lease).saturating_sub(self.outstanding())
    }

    /// Takes the lease out of the till; returns what was spent of it.
    fn collect(&mut self, till: &Till) -> u64 {
        let mut spent = 0;
        if let Some(takings) = till.empty() {
            spent = self.lent.saturating_sub(takings.left);
            self.open += spent;
            // What did not fit into the till is still here.
            self.lease = self.lease - self.lent + takings.left;
            self.launches += takings.launches;
        }
        self.lent = 0;
        spent
    }

    /// Puts the lease into the till, for launches that need not ask. It stays there while the
    /// process has no work: it is paid.
    fn lend(&mut self, till: &Till) {
        self.lent = self.lease.min(Till::ROOM);
        till.fill(self.lent);
    }

    /// Gets at least so much into the lease.
    ///
    /// # Errors
    /// When to ask again.
    fn pay(
        &mut self,
        launch: Launch,
        cost: u64,
        around: &Surroundings<'_>,
        asked: Asked,
    ) -> Result<(), u64> {
        self.find_room(launch.stream, around, asked)?;
        let missing = cost - self.lease;
        let taken = if cost < LEASE_GPU_NS { missing.max(self.jittered_lease()) } else { missing };
        let mut deferred = self.deferred;
        if let Some(rate) = around.rate() {
            deferred = deferred.min(taken.max(rate.gpu_ns(DEFERRED_WALL_NS)));
            let bucket = Bucket::new(&around.page.due_ns);
            bucket
                .take(asked.now, around.corrected(taken + deferred), rate)
                .map_err(|due| due.min(asked.now + self.look_again()))?;
        }
        around.slot.gpu_ns.fetch_add(taken + deferred, Ordering::Relaxed);
        self.paid += taken + deferred;
        self.deferred -= deferred;
        self.lease += taken;
        Ok(())
    }

    /// When a waiter is to look again: soon where something is under way, so that others do not
    /// take this process for busy.
    fn look_again(&self) -> u64 {
        if self.spans.is_empty() { LOOK_AGAIN_NS } else { POLL_NS / 5 }
    }

    /// Holds back while too much is on its way in the stream, but not for ever: another stream may
    /// wait for what this launch does. What the GPU is at is not counted: it may be long, and work
    /// of other streams beside it is what streams are for.
    fn find_room(
        &mut self,
        stream: usize,
        around: &Surroundings<'_>,
        asked: Asked,
    ) -> Result<(), u64> {
        // Where nothing more can be measured, nobody would see what is open being done.
        let open = if self.spans.has_room(false) { self.open } else { 0 };
        let Some(queued) = self.spans.queued_in(stream) else { return Ok(()) };
        let outstanding = queued + open;
        if !around.may_hold() || outstanding < RUN_AHEAD_GPU_NS {
            return Ok(());
        }
        let contexts =
            2 + around.published.map_or(0, |published| published.others.in_256ths() / 256);
        let patience =
            PATIENCE_NS.saturating_add(outstanding.saturating_mul(2 * u64::from(contexts)));
        self.be_patient(patience, asked)
    }

    /// Holds back a kernel of unknown length while it is being measured, or too many others are:
    /// how long they are is known too late.
    fn meet_strangers(
        &mut self,
        launch: Launch,
        around: &Surroundings<'_>,
        asked: Asked,
    ) -> Result<(), u64> {
        let unknown = |span: &&Span| around.till.estimates.known(span.launch.key).is_none();
        let count = self.spans.under_way().filter(unknown).count();
        let same = self.spans.under_way().any(|span| span.launch.key == launch.key);
        if !around.may_hold() || !same && count < STRANGERS {
            return Ok(());
        }
        self.be_patient(STRANGERS_PATIENCE_NS, asked)
    }

    fn be_patient(&mut self, patience: u64, Asked { since, now }: Asked) -> Result<(), u64> {
        if now.saturating_sub(since) > patience << self.impatience.min(MOST_IMPATIENCE) {
            self.impatience += 1;
            return Ok(());
        }
        // The longer it took so far, the longer it may take.
        Err(now + (now.saturating_sub(since) / 8).clamp(100_000, POLL_NS))
    }

    /// Around [`LEASE_GPU_NS`], so that what repeats is not always measured at the same place
    /// (xorshift).
    const fn jittered_lease(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        LEASE_GPU_NS * 3 / 4 + self.random as u64 % (LEASE_GPU_NS / 2)
    }

    fn begin_span(
        &mut self,
        launch: Launch,
        cost: u64,
        around: &Surroundings<'_>,
        now: u64,
    ) -> Option<Plan> {
        let turn = around.page.turn_ns.load(Ordering::Acquire);
        let charged = self.open;
        let calibrates =
            self.overhead_ns.is_none() || self.spans.pushed().is_multiple_of(CALIBRATES_ONE_OF);
        let span = Span {
            serial: 0,
            launch,
            cost,
            charged,
            stands_for: charged.saturating_add(self.unmeasured),
            begun: now,
            turn,
            completed: self.completed(),
            calibrates,
            submission: None,
            done: false,
            void: false,
        };
        let (place, serial) = self.spans.push(span, self.ended.map(|ended| ended.place))?;
        (self.open, self.unmeasured) = (0, 0);
        self.pending += charged;
        let pair = Pair {
            calibration: calibrates.then_some(CALIBRATION),
            before: Spans::before(place),
            behind: Spans::behind(place),
        };
        Some(Plan { pair: Some(pair), serial })
    }

    fn settle(
        &mut self,
        place: usize,
        span: Span,
        around: &Surroundings<'_>,
        timer: &mut impl Timer,
        Look { now, turn, single }: Look,
    ) {
        if span.void {
            return;
        }
        let Some(measured) = self.measure(place, span, timer) else { return };
        let (crowd, had) = self.crowd_during(span, now, turn);
        // It holds for this launch only if there was no other in that time.
        let had = had.filter(|_| single && span.charged == span.cost && span.cost >= LEASE_GPU_NS);
        let only_siblings = around.published.is_none_or(|published| published.others.is_nobody());
        let company = During { crowd, had, only_siblings };
        let estimates = &around.till.estimates;
        let slice_ns = around.slice_ns.max(1);
        // What is long has turns of others in it, of which `own_part` knows how many. A short one
        // has none, or one of any length.
        let is_alone = crowd.is_nobody() && only_siblings && !around.has_siblings;
        let usual =
            estimates.usual(span.launch.key).filter(|mean| !is_alone && *mean < slice_ns / 4);
        let own = |wall: u64| {
            let measured = Measured { wall, ..measured };
            own_part(estimates, span.launch.key, measured, company, slice_ns)
        };
        let Some(submission) = span.submission else { return };
        match sample(measured.wall, submission, self.overhead_ns.unwrap_or(0)) {
            Sample::Long(wall) | Sample::Idle(wall)
                if usual.is_some_and(|usual| wall > usual + usual / 2) =>
            {
                estimates.raise(span.launch.key);
            }
            Sample::Exact(wall) | Sample::Long(wall) => {
                let Some(own) = own(wall) else { return };
                let most = usual.map_or(u64::MAX, |usual| usual * MOST_USUAL);
                estimates.learn(span.launch.key, own.min(most));
                // Which launch of a lease is measured is by chance, in proportion to what it was
                // thought to take: it stands for the others.
                let is_typical = crowd.is_nobody() && usual.is_none();
                let stands_for = if is_typical { span.stands_for } else { span.cost };
                let own = own - measured.overlap.min(own);
                let used = in_proportion(own, stands_for, span.cost.max(1));
                self.correct(stands_for, used, own, around, now);
            }
            Sample::Idle(wall) => {
                let Some(own) = own(wall) else { return };
                estimates.learn(span.launch.key, own);
                let own = own - measured.overlap.min(own);
                self.correct(span.cost, own, own, around, now);
            }
            Sample::Within(least, most) => {
                let least = if usual.is_some() { 0 } else { least };
                let (Some(least), Some(most)) = (own(least), own(most)) else { return };
                estimates.bound(span.launch.key, least, most);
                let used = span.cost.clamp(least, most.max(least));
                self.correct(span.cost, used, used, around, now);
            }
        }
    }

    fn measure(&mut self, place: usize, span: Span, timer: &mut impl Timer) -> Option<Measured> {
        let (before, behind) = (Spans::before(place), Spans::behind(place));
        self.calibrate(span, before, timer);
        let wall = u64::try_from(timer.elapsed_ns(before, behind)?).unwrap_or(0);
        self.longest = self.longest.max(wall);
        if self.ended.is_some_and(|last| last.serial > span.serial) {
            // Later ones of other streams ran beside it, and were charged.
            return Some(Measured {
                wall,
                follows: false,
                overlap: self.overtook(&span).min(wall),
            });
        }
        let last = self.ended.filter(|last| last.context == span.launch.context);
        let gap = last
            .and_then(|last| timer.elapsed_ns(Spans::behind(last.place), before))
            .unwrap_or(i64::MAX);
        let overlap = u64::try_from(gap.saturating_neg()).unwrap_or(0).min(wall);
        self.ended = Some(Ended { place, serial: span.serial, context: span.launch.context });
        Some(Measured { wall, follows: gap < NOTICEABLE_GAP_NS, overlap })
    }

    /// Company while a span was under way: since it began, or since the one before it was done.
    fn crowd_during(&mut self, span: Span, now: u64, turn: u64) -> (Crowd, Option<u64>) {
        let last = &self.company;
        let (at, before) =
            if last.at > span.begun { (last.at, last.turn) } else { (span.begun, span.turn) };
        // Several that are found done at once had the same.
        let had = turn.saturating_sub(before);
        if now.saturating_sub(at) >= SHORTEST_LOOK_NS || last.at == 0 {
            self.company.crowd = Crowd::of_share(had, now.saturating_sub(at));
            return (self.company.crowd, Some(had));
        }
        (self.company.crowd, None)
    }

    /// GPU-ns charged for work of other streams that was done while a launch was under way.
    fn overtook(&self, span: &Span) -> u64 {
        self.completed().saturating_sub(span.completed).saturating_sub(span.charged)
    }

    /// Learns how much time an empty pair of events takes, from one that the GPU had not come to
    /// when the CPU had submitted both: the mean of the last ones, without those in which another
    /// context had the GPU.
    fn calibrate(&mut self, span: Span, before: Marker, timer: &mut impl Timer) {
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

    /// Corrects what was paid for launches to what they used. Of that, one launch was measured and
    /// used `own`; the rest is inferred from it, and is not charged at once.
    fn correct(&mut self, paid: u64, used: u64, own: u64, around: &Surroundings<'_>, now: u64) {
        if used > paid {
            let at_once = (used - paid).min(own);
            self.deferred = (self.deferred + (used - paid - at_once)).min(MOST_DEFERRED_NS);
            around.slot.gpu_ns.fetch_add(at_once, Ordering::Relaxed);
            self.paid += at_once;
            if let Some(rate) = around.rate() {
                Bucket::new(&around.page.due_ns).charge(now, around.corrected(at_once), rate);
            }
            return;
        }
        let settled = self.deferred.min(paid - used);
        self.deferred -= settled;
        let refund = paid - used - settled;
        around.slot.gpu_ns.fetch_sub(refund, Ordering::Relaxed);
        self.paid = self.paid.saturating_sub(refund);
        if let Some(rate) = around.rate() {
            Bucket::new(&around.page.due_ns).refund(around.corrected(refund), rate);
            if refund > LEASE_GPU_NS {
                around.page.ring();
                self.rang = true;
            }
        }
    }

    /// Keeps the slot's busy time. `was` is what was outstanding before.
    fn note_busy(&mut self, was: u64, around: &Surroundings<'_>, now: u64) {
        if !self.busy {
            return;
        }
        let crowd = around.published.map_or(Crowd::NOBODY, |published| published.others);
        let slack = 100_000;
        // What follows the last span is not measured: it is done when it should be.
        let stretched = |gpu_ns: u64| {
            gpu_ns.saturating_mul(2 * (1 + u64::from(crowd.in_256ths().div_ceil(256))))
        };
        if self.spans.is_empty() && now.saturating_sub(self.admitted) > stretched(self.open) + slack
        {
            self.unmeasured += core::mem::take(&mut self.open);
            self.busy = false;
        }
        self.promise(around, now);
        // Looked at late, it was busy no longer than its work can have taken.
        let since = around.slot.busy_since_ns.load(Ordering::Relaxed);
        let most = stretched(was).max(core::mem::take(&mut self.longest).saturating_mul(2));
        let until =
            if self.busy { now } else { now.min(since.saturating_add(most.saturating_add(slack))) };
        around.slot.book(until, self.busy);
    }

    /// Says how much is under way, and by when it is done at the latest, should nobody look.
    fn promise(&self, around: &Surroundings<'_>, now: u64) {
        let others =
            around.published.map_or(0, |published| published.others.in_256ths().div_ceil(256));
        let contexts = 1 + around.siblings + u64::from(others);
        let strange = self
            .spans
            .under_way()
            .any(|span| around.till.estimates.known(span.launch.key).is_none());
        let longest = if strange {
            STRANGERS_PROMISE_NS
        } else {
            self.outstanding().saturating_mul(4 * contexts).saturating_add(PROMISE_SLACK_NS)
        };
        around.slot.outstanding_ns.store(self.outstanding(), Ordering::Relaxed);
        around.slot.done_by_ns.store(now.saturating_add(longest), Ordering::Relaxed);
    }

    fn waited(&mut self, around: &Surroundings<'_>, now: u64) {
        let since = around.slot.waiting_since_ns.load(Ordering::Relaxed);
        if since != 0 {
            around.page.waited_ns.fetch_add(now.saturating_sub(since), Ordering::Relaxed);
            around.slot.waiting_since_ns.store(0, Ordering::Relaxed);
        }
    }
}
