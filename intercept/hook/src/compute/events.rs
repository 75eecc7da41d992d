//! Events that measure launches: created at their first use, queried by later launches and
//! synchronizations.
//!
//! The driver is called with the thread's capture mode relaxed: while a stream captures in global
//! mode, a query is forbidden and would invalidate the capture.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tessera_intercept_limiter::compute::{
    CALIBRATION, EventTimer, MARKERS, Marker, MeasuredLaunch, Meter, Streams,
};

use crate::compute::Stream;
use crate::driver::cuda::{Handle, relaxed};
use crate::driver::events;
use crate::sys;

/// Contexts of one GPU whose launches are measured by events. The CPU measures launches in further
/// contexts.
const CONTEXTS: usize = 8;
/// The longest time for which the CPU waits for a launch that it measures.
const MOST_AWAITED_NS: u64 = 250_000_000;
/// Launches that can be measured at the same time.
const PLACES: usize = MARKERS / 2;
/// Mark of a context that may be ending: contexts are pointers, which do not have this bit.
const LEAVING: usize = 1;

const _: () = assert!(PLACES <= u64::BITS as usize);

/// Events of a GPU's contexts. All zeroes is a new one.
pub(super) struct Events {
    pools: [Pool; CONTEXTS],
    /// Bit by place: both of its events are recorded.
    recorded: AtomicU64,
    /// The place of the last launch with an event for calibration, plus one; 0: none.
    calibrates: AtomicUsize,
}

/// Events of one context.
struct Pool {
    /// 0: free. With [`LEAVING`]: the driver is being called to destroy it, and its events are not
    /// used.
    context: AtomicUsize,
    /// By marker; 0: not created yet.
    events: [AtomicUsize; MARKERS],
}

/// Launches to query, oldest first.
pub(super) struct Unsettled {
    launches: [Option<MeasuredLaunch>; PLACES],
    last: Option<MeasuredLaunch>,
}

/// Results of queries.
pub(super) struct Answers {
    may_ask: bool,
    /// By place.
    done: u64,
    /// By place: time between its two events.
    own_ns: [Option<i64>; PLACES],
    /// By place: time from the end of the launch before to its beginning, and the place of that.
    gap_ns: [Option<(usize, i64)>; PLACES],
    /// Time from the calibration's event to the event before a launch, and the place of that.
    empty_ns: Option<(usize, i64)>,
}

fn place_of(marker: Marker) -> usize {
    usize::from(marker.0) / 2
}

fn behind(place: usize) -> usize {
    place * 2 + 1
}

impl Events {
    /// A launch is about to be measured in a place: older events of it are void. Under the meter's
    /// lock.
    pub(super) fn begins(&self, before: Marker) {
        self.recorded.fetch_and(!(1 << place_of(before)), Ordering::Relaxed);
    }

    /// Both events of a launch are recorded.
    pub(super) fn recorded(&self, behind: Marker) {
        self.recorded.fetch_or(1 << place_of(behind), Ordering::Release);
    }

    /// The event for calibration is recorded before a launch.
    pub(super) fn calibrates(&self, before: Marker) {
        self.calibrates.store(place_of(before) + 1, Ordering::Relaxed);
    }

    /// Records an event in a stream of the current context; returns true on success.
    pub(super) fn record(&self, context: usize, marker: Marker, stream: Stream) -> bool {
        let Some(pool) = self.find(context).or_else(|| self.claim(context)) else { return false };
        let Some(place) = pool.events.get(usize::from(marker.0)) else { return false };
        relaxed(|| event_at(place).is_some_and(|event| events::record(event, stream.0)))
    }

    /// Returns true if a stream of the current context is idle.
    pub(super) fn is_idle(stream: Stream) -> bool {
        relaxed(|| events::is_idle(stream.0))
    }

    /// Waits until a stream of the current context is idle, but not for ever: a kernel may wait for
    /// a later launch. `None` if the stream cannot be queried.
    pub(super) fn await_idle(stream: Stream) -> Option<()> {
        let since = sys::monotonic_ns();
        let mut times = 0;
        while relaxed(|| events::has_work(stream.0))? {
            let awaited_ns = sys::monotonic_ns().saturating_sub(since);
            if awaited_ns > MOST_AWAITED_NS {
                break;
            }
            // The error of the measured time is an eighth of it at most.
            sys::back_off_for(times, (awaited_ns / 8).clamp(10_000, 1_000_000));
            times += 1;
        }
        Some(())
    }

    /// Returns true if the GPU has not reached an event of the current context.
    pub(super) fn is_pending(&self, context: usize, marker: Marker) -> bool {
        let Some(pool) = self.find(context) else { return false };
        relaxed(|| !pool.is_done(usize::from(marker.0)))
    }

    /// Returns true if there are events of a context.
    pub(super) fn has(&self, context: usize) -> bool {
        self.find(context).is_some()
    }

    /// Returns true if all measured launches are of one context.
    pub(super) fn are_of_one_context(&self) -> bool {
        self.pools.iter().filter(|pool| pool.context.load(Ordering::Relaxed) != 0).count() < 2
    }

    /// A context may be destroyed: its events are neither recorded nor queried until that is known.
    /// No thread may query meanwhile.
    pub(super) fn suspend(&self, context: usize) {
        if let Some(pool) = self.find(context) {
            pool.context.store(context | LEAVING, Ordering::Release);
        }
    }

    /// The context stays.
    pub(super) fn resume(&self, context: usize) {
        if let Some(pool) = self.find(context | LEAVING) {
            pool.context.store(context, Ordering::Release);
        }
    }

    /// The context was destroyed, and its events with it. No thread may query meanwhile.
    pub(super) fn forget(&self, context: usize) {
        let Some(pool) = self.find(context | LEAVING).or_else(|| self.find(context)) else {
            return;
        };
        pool.events.iter().for_each(|place| place.store(0, Ordering::Relaxed));
        pool.context.store(0, Ordering::Release);
    }

    /// Returns the launches to query. Under the meter's lock.
    pub(super) fn unsettled(&self, meter: &Meter) -> Unsettled {
        let mut unsettled = Unsettled { launches: [None; PLACES], last: meter.last_settled() };
        for (place, launch) in unsettled.launches.iter_mut().zip(meter.unsettled()) {
            *place = Some(launch);
        }
        unsettled
    }

    /// Queries launches. One thread does that at a time, and it also settles them: places are not
    /// reused until then.
    pub(super) fn query(&self, unsettled: &Unsettled) -> Answers {
        let mut answers = Answers { may_ask: true, ..Answers::none() };
        if unsettled.launches.iter().any(Option::is_some) {
            relaxed(|| self.query_all(unsettled, &mut answers));
        }
        answers
    }

    fn query_all(&self, unsettled: &Unsettled, answers: &mut Answers) {
        let recorded = self.recorded.load(Ordering::Acquire);
        let mut last = unsettled.last;
        // Launches behind one of their stream that is not done are settled later or without it.
        let mut held_up = Streams::none();
        for &launch in unsettled.launches.iter().flatten() {
            let place = place_of(launch.before);
            let is_recorded = recorded & 1 << place != 0;
            let pool = self.find(launch.context).filter(|_| is_recorded);
            let Some(pool) = pool.filter(|pool| pool.is_done(behind(place))) else {
                held_up.add(launch.stream);
                continue;
            };
            answers.done |= 1 << place;
            if self.calibrates.load(Ordering::Relaxed) == place + 1 {
                let empty_ns = pool.elapsed_ns(usize::from(CALIBRATION.0), place * 2);
                answers.empty_ns = empty_ns.map(|empty_ns| (place, empty_ns));
            }
            let is_next = !held_up.contains(launch.stream);
            let before = last.filter(|last| is_next && last.context == launch.context);
            let is_overtaken = last.is_some_and(|last| last.serial > launch.serial);
            if answers.measure(pool, place, before) && is_next && !is_overtaken {
                last = Some(launch);
            }
        }
    }

    fn find(&self, context: usize) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.context.load(Ordering::Acquire) == context)
    }

    fn claim(&self, context: usize) -> Option<&Pool> {
        if self.find(context | LEAVING).is_some() {
            return None;
        }
        let claims = |pool: &&Pool| {
            pool.context.compare_exchange(0, context, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let claimed = self.pools.iter().find(claims)?;
        // Another thread may have claimed one too: the first of them is the context's.
        let first = self.find(context)?;
        if !core::ptr::eq(first, claimed) {
            claimed.context.store(0, Ordering::Release);
        }
        Some(first)
    }
}

impl Pool {
    fn event(&self, marker: usize) -> Option<Handle> {
        match self.events.get(marker)?.load(Ordering::Acquire) {
            0 => None,
            event => Some(event as Handle),
        }
    }

    /// Returns true if the event was reached. An event that cannot be queried counts as reached: a
    /// broken context must not stop launches.
    fn is_done(&self, marker: usize) -> bool {
        self.event(marker).is_none_or(|event| !events::is_pending(event))
    }

    fn elapsed_ns(&self, from: usize, to: usize) -> Option<i64> {
        events::elapsed_ns(self.event(from)?, self.event(to)?)
    }
}

impl Answers {
    /// Results if nothing was queried.
    pub(super) const fn none() -> Self {
        Self {
            may_ask: false,
            done: 0,
            own_ns: [None; PLACES],
            gap_ns: [None; PLACES],
            empty_ns: None,
        }
    }

    /// Reads the times of a launch that is done; `last` is the one before it in the same context.
    /// Returns false if they cannot be read.
    fn measure(&mut self, pool: &Pool, place: usize, last: Option<MeasuredLaunch>) -> bool {
        let own_ns = pool.elapsed_ns(place * 2, behind(place));
        let gap_ns = last.and_then(|last| {
            let before = place_of(last.before);
            Some((before, pool.elapsed_ns(behind(before), place * 2)?))
        });
        if let (Some(own), Some(gap)) = (self.own_ns.get_mut(place), self.gap_ns.get_mut(place)) {
            (*own, *gap) = (own_ns, gap_ns);
        }
        own_ns.is_some()
    }
}

impl EventTimer for Answers {
    fn may_ask(&self) -> bool {
        self.may_ask
    }

    fn query_done(&mut self, marker: Marker) -> bool {
        self.done & 1 << place_of(marker) != 0
    }

    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64> {
        if from == CALIBRATION {
            return self.empty_ns.filter(|(place, _)| *place == place_of(to)).map(|(_, ns)| ns);
        }
        let (from, to) = (place_of(from), place_of(to));
        if from == to {
            return *self.own_ns.get(to)?;
        }
        (*self.gap_ns.get(to)?).filter(|(last, _)| *last == from).map(|(_, gap)| gap)
    }
}

/// Returns the event of a place; creates it at its first use.
fn event_at(place: &AtomicUsize) -> Option<Handle> {
    match place.load(Ordering::Acquire) {
        0 => {
            let event = events::create()?;
            place.store(event as usize, Ordering::Release);
            Some(event)
        }
        known => Some(known as Handle),
    }
}
