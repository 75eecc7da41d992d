//! One GPU's launches in this process.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tessera_intercept_limiter::compute::{
    Asked, Decision, Key, Launch, Meter, Plan, Submission, Surroundings, Till,
};

use crate::compute::events::{Answers, Events};
use crate::compute::{Stream, Terms};
use crate::cuda::{self, SUCCESS};
use crate::root::with_state;
use crate::sys::{self, Lock, Map};
use crate::trace::Held;

/// How long it is believed which slots are anybody's.
const REACH_HOLDS_NS: u64 = 10_000_000;

/// What launches on one GPU go through. Lives in memory of the kernel's, which begins zeroed and is
/// not there in a forked child.
///
/// Two locks. `lock` is for the meter, and nothing is called under it. `asking` is for those who
/// ask events, which is calling the driver: a launch only tries it, and settles nothing where
/// another thread has it. Who ends a context waits for it, since the events go too.
pub(crate) struct Gate {
    pub(super) till: Till,
    lock: Lock,
    meter: UnsafeCell<Meter>,
    asking: Lock,
    events: Events,
    /// The GPU, among those of the state.
    gpu: usize,
    /// Whether the process has work, as far as is known.
    busy: AtomicBool,
    reach: AtomicUsize,
    reach_at: AtomicU64,
    held: Held,
}

// SAFETY: the meter is only used under the lock; all else is atomic.
unsafe impl Sync for Gate {}

/// A launch that may be made.
pub(super) struct Entered {
    context: usize,
    stream: Stream,
    plan: Plan,
    terms: Terms,
    /// Its stream had nothing to do.
    was_idle: bool,
    /// When the event before it was recorded, monotonic ns; `None` where it was not.
    begun: Option<u64>,
}

/// What came of asking the meter.
struct Outcome<T> {
    value: T,
    launches: u64,
    wakes: bool,
}

impl Gate {
    /// A new one; `None` where the kernel has no memory.
    pub(crate) fn new(gpu: usize) -> Option<*mut Self> {
        let gate = sys::map(Map::Private, Self::LENGTH)?.cast::<Self>();
        // SAFETY: a new mapping of that length, zeroed, which is how all other fields begin.
        unsafe {
            (&raw mut (*gate).meter).write(UnsafeCell::new(Meter::new()));
            (&raw mut (*gate).gpu).write(gpu);
        }
        Some(gate)
    }

    /// Gives back one that nobody has seen.
    ///
    /// # Safety
    /// It came from [`Gate::new`] and is not used any more.
    pub(crate) unsafe fn discard(gate: *mut Self) {
        // SAFETY: by this function's contract.
        unsafe { sys::unmap(gate.cast(), Self::LENGTH) };
    }

    const LENGTH: usize = size_of::<Self>().next_multiple_of(4096);

    /// Lets in a launch that the till does not pay for; it waits here. `None`: it is not accounted
    /// for. What came of it, to [`Gate::made`].
    #[cold]
    #[must_use = "what was begun must be told how it ended"]
    pub(super) fn enter(&self, key: Key, stream: Stream) -> Option<Entered> {
        // What is recorded is not launched, and an event would be recorded too.
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
        Some(Entered { context, stream, plan, terms, was_idle, begun })
    }

    /// A launch was made, or not, as the driver answered.
    #[cold]
    pub(super) fn made(&self, entered: Option<Entered>, result: c_int) -> c_int {
        let Some(Entered { context, stream, plan, terms, was_idle, begun }) = entered else {
            return result;
        };
        if result != SUCCESS {
            self.with_meter(|meter| meter.failed(plan, &self.till));
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
                None => self.with_meter(|meter| meter.unmeasured(plan)),
            }
        }
        result
    }

    /// Waits until a launch may be made. `None` where it cannot be accounted for.
    fn admit(&self, launch: Launch) -> Option<(Plan, Terms)> {
        let since = sys::monotonic_ns();
        let mut has_waited = false;
        loop {
            let terms = self.terms()?;
            let asked = Asked { since, now: sys::monotonic_ns() };
            let decision = self.step(&terms, |meter, around, answers| {
                let decision = meter.admit(launch, around, answers, asked);
                if let Decision::Go(Plan { pair: Some(pair), .. }) = decision {
                    self.events.begins(pair.before);
                }
                decision
            })?;
            match decision {
                Decision::Go(plan) => {
                    if has_waited {
                        let held_ns = asked.now.saturating_sub(since);
                        self.held.add(held_ns, || terms.rate(asked.now), asked.now);
                    }
                    return Some((plan, terms));
                }
                Decision::Wait(waiting) => {
                    has_waited = true;
                    terms.wait(waiting, sys::monotonic_ns());
                }
            }
        }
    }

    /// Looks what is done. `all`: everything in the current context.
    pub(super) fn drain(&self, all: bool) {
        if !self.busy.load(Ordering::Relaxed) {
            return;
        }
        let Some(terms) = self.terms() else { return };
        let now = sys::monotonic_ns();
        let all = all && self.events.are_of_one_context();
        self.step(&terms, |meter, around, answers| {
            if all { meter.synced(around, answers, now) } else { meter.drain(around, answers, now) }
        });
    }

    /// A context may be about to end.
    pub(super) fn suspend(&self, context: usize) {
        if self.events.has(context) {
            self.drain(false);
            self.asking.hold(|| self.events.suspend(context));
        }
    }

    /// It did not.
    pub(super) fn resume(&self, context: usize) {
        self.events.resume(context);
    }

    /// It did.
    pub(super) fn forget_context(&self, context: usize) {
        self.asking.hold(|| {
            self.with_meter(|meter| meter.leave(context));
            self.events.forget(context);
        });
    }

    /// What is known of any kernel may be of another.
    pub(super) fn doubt(&self) {
        self.with_meter(|_| self.till.doubt());
    }

    /// What is known of one is of another.
    pub(super) fn forget(&self, key: Key) {
        self.with_meter(|_| self.till.forget(key));
    }

    fn terms(&self) -> Option<Terms> {
        with_state(|state| state.terms(self.gpu))?
    }

    /// Runs something on the meter, with what events say; then tells others what came of it.
    fn step<T>(
        &self,
        terms: &Terms,
        run: impl Fn(&mut Meter, &Surroundings<'_>, &mut Answers) -> T,
    ) -> Option<T> {
        let decide = |answers: &mut Answers| {
            let now = sys::monotonic_ns();
            let around = terms.around(&self.till, self.reach(terms, now), now)?;
            Some(self.with_meter(|meter| {
                let value = run(meter, &around, answers);
                self.busy.store(meter.is_busy(), Ordering::Relaxed);
                Outcome { value, launches: meter.take_launches(), wakes: meter.must_wake() }
            }))
        };
        let asked = self.asking.try_hold(|| {
            let unsettled = self.with_meter(|meter| self.events.unsettled(meter));
            decide(&mut self.events.ask(&unsettled))
        });
        let outcome = asked.unwrap_or_else(|| decide(&mut Answers::none()))?;
        terms.count(outcome.launches);
        if outcome.wakes {
            terms.wake();
        }
        Some(outcome.value)
    }

    /// Looking at all slots takes a microsecond or two, so it is done seldom.
    fn reach(&self, terms: &Terms, now: u64) -> usize {
        if now.saturating_sub(self.reach_at.load(Ordering::Relaxed)) > REACH_HOLDS_NS {
            self.reach.store(terms.reach(), Ordering::Relaxed);
            self.reach_at.store(now, Ordering::Relaxed);
        }
        self.reach.load(Ordering::Relaxed)
    }

    fn with_meter<T>(&self, run: impl FnOnce(&mut Meter) -> T) -> T {
        // SAFETY: only here, under the lock, which is not taken twice: nothing that runs on the
        // meter calls back.
        self.lock.hold(|| run(unsafe { &mut *self.meter.get() }))
    }
}
