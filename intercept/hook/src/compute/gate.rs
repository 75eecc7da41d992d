//! Launches of this process on one GPU.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use tessera_intercept_abi::PublishedPage;
use tessera_intercept_limiter::compute::{
    ComputeView, Key, Launch, LaunchBudget, LaunchDecision, LaunchPlan, LaunchTime, Meter,
    Submission, is_metered,
};

use crate::compute::Stream;
use crate::compute::events::{Answers, Events};
use crate::driver::cuda::{self, SUCCESS};
use crate::process_page::process_page;
use crate::state::with_state;
use crate::sys::{self, Lock, Map};
use crate::terms::Terms;
use crate::trace::Held;

/// Time for which the number of slots in use is cached.
const REACH_HOLDS_NS: u64 = 10_000_000;

/// Admission and measurement of launches on one GPU. Lives in memory from the kernel that begins
/// zeroed and is not inherited by forked children.
///
/// It has two locks. `lock` is of the meter; the driver is not called under it. `querying` is for
/// queries of events, which call the driver: a launch only tries it, and settles nothing if another
/// thread has it. A thread that destroys a context waits for it, because the events end too.
pub(crate) struct Gate {
    pub(super) budget: LaunchBudget,
    lock: Lock,
    meter: UnsafeCell<Meter>,
    querying: Lock,
    events: Events,
    /// The GPU, by its index in the state.
    gpu: usize,
    /// True if the process has work, as far as events show.
    busy: AtomicBool,
    reach: AtomicUsize,
    reach_at: AtomicU64,
    held: Held,
    /// Words of the host, once a launch was admitted.
    published: AtomicPtr<PublishedPage>,
    /// Counter of this process's launches, once a launch was admitted.
    launches: AtomicPtr<AtomicU64>,
}

// SAFETY: the meter is only used under the lock; all else is atomic.
unsafe impl Sync for Gate {}

/// An admitted launch.
pub(super) struct Entered {
    context: usize,
    stream: Stream,
    plan: LaunchPlan,
    terms: Terms,
    /// True if its stream was idle.
    was_idle: bool,
    /// Time when the event before it was recorded, monotonic ns; `None` if it was not.
    begun: Option<u64>,
    /// Time since which its stream is idle, monotonic ns, if it is measured without events.
    idle_since: Option<u64>,
}

/// Result of a step of the meter.
struct Outcome<T> {
    value: T,
    launches: u64,
    wakes: bool,
}

impl Gate {
    /// Creates a gate; `None` if the kernel has no memory.
    pub(crate) fn new(gpu: usize) -> Option<*mut Self> {
        let gate = sys::map(Map::Private, Self::LENGTH)?.cast::<Self>();
        // SAFETY: a new mapping of that length, zeroed, which is the initial value of all other
        // fields.
        unsafe {
            (&raw mut (*gate).meter).write(UnsafeCell::new(Meter::new()));
            (&raw mut (*gate).gpu).write(gpu);
        }
        Some(gate)
    }

    /// Unmaps a gate that no other thread has seen.
    ///
    /// # Safety
    /// It came from [`Gate::new`] and is not used any more.
    pub(crate) unsafe fn discard(gate: *mut Self) {
        // SAFETY: by this function's contract.
        unsafe { sys::unmap(gate.cast(), Self::LENGTH) };
    }

    const LENGTH: usize = size_of::<Self>().next_multiple_of(4096);

    /// Returns true if launches are not metered now; counts the launch then.
    #[inline]
    pub(super) fn skips_metering(&self) -> bool {
        let page = self.published.load(Ordering::Acquire);
        // SAFETY: NULL, or a page that is never unmapped.
        if unsafe { page.as_ref() }.is_none_or(is_metered) {
            return false;
        }
        let launches = self.launches.load(Ordering::Relaxed);
        // SAFETY: stored before `published`; a ledger is never unmapped.
        if let Some(launches) = unsafe { launches.as_ref() } {
            launches.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Stores where the host publishes, for later launches.
    fn note_terms(&self, terms: &Terms) {
        if let Some(slot) = terms.ledger.slot.get(terms.slot) {
            let launches = core::ptr::from_ref(&slot.launches).cast_mut();
            self.launches.store(launches, Ordering::Relaxed);
            let published = core::ptr::from_ref(terms.published).cast_mut();
            self.published.store(published, Ordering::Release);
        }
    }

    /// Admits a launch that is not charged from the budget; waits if it is held. `None`: the launch
    /// is not accounted. Pass the result to [`Gate::made`].
    #[cold]
    #[must_use = "pass it to `made`"]
    pub(super) fn enter(&self, key: Key, stream: Stream) -> Option<Entered> {
        // A captured launch does not run now, and events would be captured too.
        if stream.is_capturing() {
            return None;
        }
        let context = cuda::current_context()?;
        let launch = Launch { key, context, stream: stream.0 as usize };
        let (plan, terms) = self.admit(launch)?;
        let was_idle = plan.pair.is_some() && Events::is_idle(stream);
        let begun = plan.pair.is_some_and(|pair| {
            if pair.calibration.is_some() {
                self.events.calibrates(pair.before);
            }
            let mut markers = pair.calibration.into_iter().chain([pair.before]);
            markers.all(|marker| self.events.record(context, marker, stream))
        });
        let begun = begun.then(sys::monotonic_ns);
        let needs_cpu = plan.pair.is_some()
            && begun.is_none()
            && self.with_meter(|meter| meter.may_time(sys::monotonic_ns()));
        let is_awaited = needs_cpu.then(|| Events::await_idle(stream)).flatten();
        let idle_since = is_awaited.map(|()| sys::monotonic_ns());
        Some(Entered { context, stream, plan, terms, was_idle, begun, idle_since })
    }

    /// Settles or undoes an admitted launch by the driver's result.
    #[cold]
    pub(super) fn made(&self, entered: Option<Entered>, result: c_int) -> c_int {
        let Some(entered) = entered else {
            return result;
        };
        let Entered { context, stream, plan, terms, was_idle, begun, idle_since } = entered;
        if result != SUCCESS {
            self.with_meter(|meter| meter.failed(plan, &self.budget));
            return result;
        }
        terms.count(1);
        if let Some(pair) = plan.pair {
            let launched = sys::monotonic_ns();
            let submission = begun
                .filter(|_| self.events.record(context, pair.behind, stream))
                .map(|before| Submission {
                    before,
                    launched,
                    behind: sys::monotonic_ns(),
                    was_idle,
                    was_queued: self.events.is_pending(context, pair.before),
                });
            match submission {
                Some(submission) => {
                    self.with_meter(|meter| meter.submitted(plan, submission));
                    self.events.recorded(pair.behind);
                }
                None => self.measure_by_cpu(plan, stream, &terms, idle_since),
            }
        }
        result
    }

    /// Settles a launch in a stream in which no events can be recorded
    /// (docs/adr/0116-launches-without-events.md).
    fn measure_by_cpu(
        &self,
        plan: LaunchPlan,
        stream: Stream,
        terms: &Terms,
        idle_since: Option<u64>,
    ) {
        let awaited = idle_since.and_then(|since| Events::await_idle(stream).map(|()| since));
        let now = sys::monotonic_ns();
        match awaited {
            Some(since) => {
                self.step(terms, |meter, view, _| {
                    meter.timed(plan, now.saturating_sub(since), view, now)
                });
            }
            None => self.with_meter(|meter| meter.unmeasured(plan)),
        }
    }

    /// Waits until a launch is admitted. `None` if it cannot be accounted.
    fn admit(&self, launch: Launch) -> Option<(LaunchPlan, Terms)> {
        let since = sys::monotonic_ns();
        let mut has_waited = false;
        loop {
            let terms = self.terms()?;
            let time = LaunchTime { since, now: sys::monotonic_ns() };
            let decision = self.step(&terms, |meter, view, answers| {
                let decision = meter.admit(launch, view, answers, time);
                if let LaunchDecision::Go(LaunchPlan { pair: Some(pair), .. }) = decision {
                    self.events.begins(pair.before);
                }
                decision
            })?;
            match decision {
                LaunchDecision::Go(plan) => {
                    self.note_terms(&terms);
                    if has_waited {
                        let held_ns = time.now.saturating_sub(since);
                        self.held.add(held_ns, || terms.rate(time.now), time.now);
                    }
                    return Some((plan, terms));
                }
                LaunchDecision::Wait(waiting) => {
                    has_waited = true;
                    terms.wait(waiting, sys::monotonic_ns());
                }
            }
        }
    }

    /// Settles launches that are done. `all`: all work of the current context is done.
    pub(super) fn drain(&self, all: bool) {
        let all = all && self.events.are_of_one_context();
        if !self.busy.load(Ordering::Relaxed) {
            return self.budget.waited(all);
        }
        let Some(terms) = self.terms() else { return };
        let now = sys::monotonic_ns();
        self.step(&terms, |meter, view, answers| {
            if all { meter.synced(view, answers, now) } else { meter.drain(view, answers, now) }
        });
    }

    /// A context may be about to be destroyed.
    pub(super) fn suspend(&self, context: usize) {
        if self.events.has(context) {
            self.drain(false);
            self.querying.hold(|| self.events.suspend(context));
        }
    }

    /// The context stays.
    pub(super) fn resume(&self, context: usize) {
        self.events.resume(context);
    }

    /// The context was destroyed.
    pub(super) fn forget_context(&self, context: usize) {
        self.querying.hold(|| {
            self.with_meter(|meter| meter.leave(context));
            self.events.forget(context);
        });
    }

    /// A module was unloaded: each estimate may be of another kernel from now on.
    pub(super) fn invalidate(&self) {
        self.with_meter(|_| self.budget.invalidate());
    }

    /// A graph was destroyed: its estimate may be of another one from now on.
    pub(super) fn forget(&self, key: Key) {
        self.with_meter(|_| self.budget.forget(key));
    }

    fn terms(&self) -> Option<Terms> {
        with_state(|state| state.terms(self.gpu))?
    }

    /// Runs a function on the meter with the results of queries, then wakes other launches if it
    /// says so.
    fn step<T>(
        &self,
        terms: &Terms,
        run: impl Fn(&mut Meter, &ComputeView<'_>, &mut Answers) -> T,
    ) -> Option<T> {
        let decide = |answers: &mut Answers| {
            let now = sys::monotonic_ns();
            let view = terms.view(&self.budget, self.reach(terms, now), now)?;
            Some(self.with_meter(|meter| {
                let value = run(meter, &view, answers);
                self.busy.store(meter.is_busy(), Ordering::Relaxed);
                Outcome { value, launches: meter.take_launches(), wakes: meter.take_wake() }
            }))
        };
        let queried = self.querying.try_hold(|| {
            let unsettled = self.with_meter(|meter| self.events.unsettled(meter));
            decide(&mut self.events.query(&unsettled))
        });
        let outcome = queried.unwrap_or_else(|| decide(&mut Answers::none()))?;
        terms.count(outcome.launches);
        if outcome.wakes {
            terms.wake();
        }
        Some(outcome.value)
    }

    /// Returns the number of slots in use. A scan takes a microsecond or two, so it is cached.
    fn reach(&self, terms: &Terms, now: u64) -> usize {
        if now.saturating_sub(self.reach_at.load(Ordering::Relaxed)) > REACH_HOLDS_NS {
            self.reach.store(terms.reach(), Ordering::Relaxed);
            self.reach_at.store(now, Ordering::Relaxed);
        }
        self.reach.load(Ordering::Relaxed)
    }

    fn with_meter<T>(&self, run: impl FnOnce(&mut Meter) -> T) -> T {
        // SAFETY: only here, under the lock, which is not taken twice: functions of the meter do
        // not call back.
        self.lock.hold(|| run(unsafe { &mut *self.meter.get() }))
    }
}

/// Returns the gate of all launches, if it is the same for all of them.
#[inline]
pub(super) fn only_gate() -> Option<&'static Gate> {
    let gate = process_page()?.only_gate.load(Ordering::Acquire).cast::<Gate>();
    // SAFETY: NULL, or a gate that is never unmapped.
    unsafe { gate.as_ref() }
}

/// Returns the gate of a GPU; creates it at its first use.
pub(super) fn gate_of(gpu: usize, only_one: bool) -> Option<&'static Gate> {
    let page = process_page()?;
    let place = page.gates.get(gpu)?;
    if place.load(Ordering::Acquire).is_null() {
        let new = Gate::new(gpu)?;
        let none = core::ptr::null_mut();
        if place.compare_exchange(none, new.cast(), Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: another thread was first; no other thread has seen this one.
            unsafe { Gate::discard(new) };
        }
    }
    let gate = place.load(Ordering::Acquire);
    if only_one {
        page.only_gate.store(gate, Ordering::Release);
    }
    // SAFETY: a gate that is never unmapped.
    unsafe { gate.cast::<Gate>().as_ref() }
}

/// Returns all gates.
pub(super) fn gates() -> impl Iterator<Item = &'static Gate> {
    let places = process_page().map_or(&[][..], |page| &page.gates[..]);
    // SAFETY: NULL, or a gate that is never unmapped.
    places
        .iter()
        .filter_map(|place| unsafe { place.load(Ordering::Acquire).cast::<Gate>().as_ref() })
}
