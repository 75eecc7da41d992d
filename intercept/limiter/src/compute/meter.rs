//! One process's launches on one GPU.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ComputePolicy;

use crate::compute::estimates::{Estimates, Key};
use crate::compute::page::advance;
use crate::compute::proportion::in_proportion;
use crate::compute::spans::{Span, Spans};
use crate::compute::till::Till;
use crate::compute::{Bucket, ComputePage, ComputeSlot, Crowd, Published, Rate};

/// GPU time that a process takes from the bucket at once; a launch that takes longer is paid for by
/// itself, and measured.
pub const LEASE_GPU_NS: u64 = 500_000;

/// GPU time that may be on its way. Whatever comes back later than this is charged too late to hold
/// anybody.
pub const RUN_AHEAD_GPU_NS: u64 = 10_000_000;

/// Events that a meter needs.
pub const MARKERS: usize = Spans::MARKERS;

/// Slices of another context that may pass within a short kernel, and it still counts as short.
const TURNS_WITHIN_SHORT: u64 = 2;

/// A stream that had nothing to do for so long had given up its turn.
const NOTICEABLE_GAP_NS: i64 = 5_000;

/// How long the work of others may keep a launch waiting for room; longer, and it may be waiting
/// for this very launch.
const PATIENCE_NS: u64 = 100_000_000;

/// How often patience doubles at most.
const MOST_IMPATIENCE: u32 = 3;

/// As long for a kernel of unknown length that is under way already.
const STRANGERS_PATIENCE_NS: u64 = 1_000_000_000;

/// Kernels of unknown length that may be under way.
const STRANGERS: usize = 4;

/// Company is not looked at over less than this.
const SHORTEST_LOOK_NS: u64 = 300_000;

/// What a measured launch can cost on behalf of those that were not measured.
const MOST_FOR_OTHERS_NS: u64 = 1_000_000_000;

/// By when a kernel of unknown length is taken to be done.
const STRANGERS_PROMISE_NS: u64 = 30_000_000_000;

/// What a promise is late by at most.
const PROMISE_SLACK_NS: u64 = 5_000_000;

/// A waiter looks again after this, since the host cannot wake it.
const LOOK_AGAIN_NS: u64 = 20_000_000;

/// And after this where it has work under way.
const POLL_NS: u64 = 1_000_000;

/// Number of an event: below [`MARKERS`]. Which `CUevent` that is, the caller knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Marker(pub u16);

/// What can be asked of events.
pub trait Timer {
    /// Whether events may be asked now. `false`: nothing is settled.
    fn may_ask(&self) -> bool {
        true
    }

    /// Whether the GPU has passed it. Where that cannot be known, `true`.
    fn is_done(&mut self, marker: Marker) -> bool;

    /// The GPU's time from one passed event to another of the same context, less what an empty pair
    /// shows. `None` where that cannot be known.
    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64>;
}

/// Where a process's launches count, and what goes on around it.
#[derive(Debug, Clone, Copy)]
pub struct Surroundings<'a> {
    /// Where the process's launches pay.
    pub till: &'a Till,
    /// The container's part.
    pub page: &'a ComputePage,
    /// The process's own part.
    pub slot: &'a ComputeSlot,
    /// [`running_of`](crate::compute::running_of) the container's other processes.
    pub siblings: u64,
    /// What the host says.
    pub published: Option<Published>,
    /// The grant's.
    pub policy: ComputePolicy,
    /// The grant's cores.
    pub share: Rate,
    /// How long a context keeps the GPU while others have work, ns.
    pub slice_ns: u64,
}

/// When a launch asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The first time, monotonic ns: how long it is kept waiting is its own affair, whatever other
    /// threads launch meanwhile.
    pub since: u64,
    /// This time.
    pub now: u64,
}

/// Whether a launch may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Now.
    Go(Plan),
    /// Not yet.
    Wait(Waiting),
}

/// How a launch is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Record these right before and right behind it, in its stream. If it fails:
    /// [`Meter::failed`].
    pub between: Option<(Marker, Marker)>,
    /// Which measured launch it is; 0: none.
    serial: u64,
}

/// How to wait: on the futex `page.wake` as long as it is `wake`, no longer than until then. Then
/// ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Monotonic ns.
    pub until_ns: u64,
    /// What the futex is now.
    pub wake: u32,
}

/// One process's launches on one GPU. In the process's own memory, under its lock. What needs no
/// decision pays at the [`Till`].
#[derive(Debug)]
pub struct Meter {
    spans: Spans,
    /// Taken from the bucket and not spent.
    lease: u64,
    /// How much of it was put into the till.
    lent: u64,
    /// Launches that were paid from the till and nobody has asked about.
    launches: u64,
    /// Spent since the last span.
    open: u64,
    /// Spent for spans that are under way.
    pending: u64,
    /// Last span that ended.
    ended: Option<Ended>,
    /// How much company there was lately.
    company: Company,
    /// The last time it let go a launch other than by [`Meter::spend`].
    admitted: u64,
    /// How often patience ended since the GPU was last seen to be done with something.
    impatience: u32,
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

/// A span as the events tell it, ns.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// From its first event to its last.
    wall: u64,
    /// It was queued behind the one before.
    follows: bool,
    /// What of `wall` is in the span before too, which ran in another stream.
    overlap: u64,
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

/// Company while a span was under way.
#[derive(Debug, Clone, Copy)]
struct During {
    crowd: Crowd,
    /// What a process with work all the time had of the GPU.
    had: Option<u64>,
    /// Nobody from other containers.
    only_siblings: bool,
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
            lease: 0,
            lent: 0,
            launches: 0,
            open: 0,
            pending: 0,
            ended: None,
            company: Company { at: 0, turn: 0, crowd: Crowd::NOBODY },
            admitted: 0,
            impatience: 0,
            longest: 0,
            random: 0x9e37_79b9,
            rang: false,
            busy: false,
        }
    }

    /// Decides on a launch.
    pub fn admit(
        &mut self,
        key: Key,
        context: usize,
        around: &Surroundings<'_>,
        timer: &mut impl Timer,
        asked: Asked,
    ) -> Decision {
        self.collect(around.till);
        let decision = self.decide(key, context, around, timer, asked);
        self.lend(around.till);
        decision
    }

    fn decide(
        &mut self,
        key: Key,
        context: usize,
        around: &Surroundings<'_>,
        timer: &mut impl Timer,
        asked: Asked,
    ) -> Decision {
        let now = asked.now;
        // Before anything is looked at: what changes from here on ends the wait.
        let wake = around.page.wake.load(Ordering::Acquire);
        self.look(around, timer, now);
        let estimates = &around.till.estimates;
        let known = estimates.known(key);
        let cost = known.unwrap_or_else(|| estimates.stranger());
        let pays = self.lease < cost;
        let meets = if known.is_none() { self.meet_strangers(key, around, asked) } else { Ok(()) };
        let paid = meets.and_then(|()| if pays { self.pay(cost, around, asked) } else { Ok(()) });
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
        let span = if measured { self.begin_span(key, context, cost, around, now) } else { None };
        self.promise(around, now);
        let between = span.map(|(place, _)| (Spans::before(place), Spans::behind(place)));
        Decision::Go(Plan { between, serial: span.map_or(0, |(_, serial)| serial) })
    }

    /// Looks which launches the GPU is done with, and settles them. Not while a stream is being
    /// captured.
    pub fn drain(&mut self, around: &Surroundings<'_>, timer: &mut impl Timer, now: u64) {
        self.collect(around.till);
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
        self.collect(around.till);
        self.open = 0;
        self.admitted = 0;
        self.look(around, timer, now);
        self.lend(around.till);
    }

    /// A context goes away, and its events with it: drain before. What it has under way stays paid
    /// as estimated.
    pub fn leave(&mut self, context: usize) {
        for (_, span) in self.spans.pending().filter(|(_, span)| span.context == context) {
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
            self.pending -= span.cost;
            span.cost = 0;
        }
        self.lend(till);
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

    /// The launches that are measured and under way, oldest first: the first of their markers, and
    /// their context.
    pub fn unsettled(&self) -> impl Iterator<Item = (Marker, usize)> {
        self.spans.places().map(|(place, span)| (Spans::before(place), span.context))
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

    /// Takes the lease out of the till.
    fn collect(&mut self, till: &Till) {
        if let Some(takings) = till.empty() {
            self.open += self.lent.saturating_sub(takings.left);
            // What did not fit into the till is still here.
            self.lease = self.lease - self.lent + takings.left;
            self.launches += takings.launches;
        }
        self.lent = 0;
    }

    /// Puts the lease into the till, for launches that need not ask. Who has no work asks.
    fn lend(&mut self, till: &Till) {
        if self.busy {
            self.lent = self.lease.min(Till::ROOM);
            till.fill(self.lent);
        }
    }

    /// Gets at least so much into the lease.
    ///
    /// # Errors
    /// When to ask again.
    fn pay(&mut self, cost: u64, around: &Surroundings<'_>, asked: Asked) -> Result<(), u64> {
        self.find_room(around, asked)?;
        let missing = cost - self.lease;
        let taken = if cost < LEASE_GPU_NS { missing.max(self.jittered_lease()) } else { missing };
        if let Some(rate) = around.rate() {
            let bucket = Bucket::new(&around.page.due_ns);
            bucket
                .take(asked.now, taken, rate)
                .map_err(|due| due.min(asked.now + self.look_again()))?;
        }
        around.slot.gpu_ns.fetch_add(taken, Ordering::Relaxed);
        self.lease += taken;
        Ok(())
    }

    /// When a waiter is to look again: soon where something is under way, so that others do not
    /// take this process for busy.
    fn look_again(&self) -> u64 {
        if self.spans.is_empty() { LOOK_AGAIN_NS } else { POLL_NS / 5 }
    }

    /// Holds back while too much is on its way, but not for ever: a stream may wait for what this
    /// launch does.
    fn find_room(&mut self, around: &Surroundings<'_>, asked: Asked) -> Result<(), u64> {
        // Where nothing more can be measured, nobody would see what is open being done.
        let open = if self.spans.has_room(false) { self.open } else { 0 };
        let outstanding = self.pending + open;
        if !around.may_hold() || outstanding < RUN_AHEAD_GPU_NS || self.spans.is_empty() {
            return Ok(());
        }
        let contexts =
            2 + around.published.map_or(0, |published| published.others.in_256ths() / 256);
        let patience =
            PATIENCE_NS.saturating_add(outstanding.saturating_mul(2 * u64::from(contexts)));
        self.be_patient(patience, asked)
    }

    /// Holds back a kernel of unknown length while it is being measured, or too many others are.
    fn meet_strangers(
        &mut self,
        key: Key,
        around: &Surroundings<'_>,
        asked: Asked,
    ) -> Result<(), u64> {
        let (mut count, mut same) = (0, false);
        for span in
            self.spans.under_way().filter(|span| around.till.estimates.known(span.key).is_none())
        {
            count += 1;
            same |= span.key == key;
        }
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
        key: Key,
        context: usize,
        cost: u64,
        around: &Surroundings<'_>,
        now: u64,
    ) -> Option<(usize, u64)> {
        let turn = around.page.turn_ns.load(Ordering::Acquire);
        let charged = self.open;
        let span = Span {
            serial: 0,
            key,
            context,
            cost,
            charged,
            begun: now,
            turn,
            done: false,
            void: false,
        };
        let begun = self.spans.push(span, self.ended.map(|ended| ended.place))?;
        self.open = 0;
        self.pending += charged;
        Some(begun)
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
        let Some(own) =
            own_part(&around.till.estimates, span.key, measured, company, around.slice_ns.max(1))
        else {
            return;
        };
        around.till.estimates.learn(span.key, own);
        let own = own - measured.overlap.min(own);
        // Which launch of a lease is measured is by chance, in proportion to what it was thought to
        // take: it stands for the others.
        let stands_for = if company.crowd.is_nobody() { span.charged } else { span.cost };
        let used = in_proportion(own, stands_for, span.cost.max(1));
        self.correct(stands_for, used.min(own.saturating_add(MOST_FOR_OTHERS_NS)), around, now);
    }

    fn measure(&mut self, place: usize, span: Span, timer: &mut impl Timer) -> Option<Measured> {
        let (before, behind) = (Spans::before(place), Spans::behind(place));
        let wall = u64::try_from(timer.elapsed_ns(before, behind)?).unwrap_or(0);
        self.longest = self.longest.max(wall);
        if self.ended.is_some_and(|last| last.serial > span.serial) {
            // Later ones were done before it, which took what time they took: it is charged whole.
            return Some(Measured { wall, follows: false, overlap: 0 });
        }
        let last = self.ended.filter(|last| last.context == span.context);
        let gap = last
            .and_then(|last| timer.elapsed_ns(Spans::behind(last.place), before))
            .unwrap_or(i64::MAX);
        let overlap = u64::try_from(gap.saturating_neg()).unwrap_or(0).min(wall);
        self.ended = Some(Ended { place, serial: span.serial, context: span.context });
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

    fn correct(&mut self, paid: u64, used: u64, around: &Surroundings<'_>, now: u64) {
        let bucket = Bucket::new(&around.page.due_ns);
        if used > paid {
            around.slot.gpu_ns.fetch_add(used - paid, Ordering::Relaxed);
            if let Some(rate) = around.rate() {
                bucket.charge(now, used - paid, rate);
            }
            return;
        }
        around.slot.gpu_ns.fetch_sub(paid - used, Ordering::Relaxed);
        if let Some(rate) = around.rate() {
            bucket.refund(paid - used, rate);
            if paid - used > LEASE_GPU_NS {
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
            self.open = 0;
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
        let strange =
            self.spans.under_way().any(|span| around.till.estimates.known(span.key).is_none());
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

/// What of the time between two events was this kernel's. `None` where that cannot be told.
fn own_part(
    estimates: &Estimates,
    key: Key,
    measured: Measured,
    company: During,
    slice_ns: u64,
) -> Option<u64> {
    let Measured { wall, follows, .. } = measured;
    if company.crowd.is_nobody() || wall <= slice_ns && !company.only_siblings {
        return Some(wall);
    }
    let known = estimates.known(key);
    // Siblings' turns are no whole slices. What took its usual time had none of them in it.
    let usual = wall <= slice_ns && known.is_some_and(|mean| wall <= mean + mean / 2);
    let even = company.only_siblings && company.had.is_some() && !usual;
    if !even && known.is_some_and(|mean| mean <= slice_ns) {
        // What took longer had turns of others in it, and says nothing. What took much longer was
        // long itself.
        let turns =
            slice_ns * TURNS_WITHIN_SHORT * u64::from(company.crowd.in_256ths().div_ceil(256));
        if wall <= slice_ns {
            return Some(wall);
        }
        if wall <= turns + slice_ns {
            return None;
        }
    }
    let Some(had) = company.had else { return Some(company.crowd.share_of(wall)) };
    if company.only_siblings || follows {
        return Some(had);
    }
    let even = estimates.learn_even(key, had);
    let beyond = wall % slice_ns;
    Some(((even.saturating_sub(beyond) + slice_ns / 2) / slice_ns * slice_ns + beyond).min(wall))
}

impl Surroundings<'_> {
    /// Whether launches are held back, now or, with `Balance`, when others come back: what is
    /// queued then cannot be taken back.
    fn may_hold(&self) -> bool {
        self.policy == ComputePolicy::Balance || self.rate().is_some()
    }

    /// How fast tokens come in; `None` where none are needed.
    fn rate(&self) -> Option<Rate> {
        rate_of(self.policy, self.share, self.published)
    }
}

/// How fast a container pays; `None` where it need not.
#[must_use]
pub fn rate_of(policy: ComputePolicy, share: Rate, published: Option<Published>) -> Option<Rate> {
    let rate = match policy {
        ComputePolicy::None => return None,
        ComputePolicy::Fixed => share,
        ComputePolicy::Balance => published.map_or(share, |published| published.rate.max(share)),
    };
    (rate < Rate::FULL).then_some(rate)
}
