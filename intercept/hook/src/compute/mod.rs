//! Compute: launches are charged before they are made, and wait if the container has no tokens.
//!
//! ```text
//!  hook (launch) --> Gate of the GPU
//!                      |-- Gate::skips_metering  the host says so: only counted          (without limits and neighbours)
//!                      |-- LaunchBudget::charge  from the lease: no lock, no call                    (nearly always)
//!                      `-- Gate::enter   capturing?   not charged: the graph is, when it is launched
//!                            |-- Events::query        launches that are done, without a lock that a launch waits for
//!                            |-- Meter::admit         under the gate's lock, without a call
//!                            `-- futex                while held, without a lock
//!                          launch, between two events if the plan has them
//!                      `-- Gate::made                 settles, refunds a failed launch, or takes the time by the CPU
//! ```
//!
//! A launch whose events cannot be queried stays charged as estimated: no event holds launches for
//! ever. Reasons: `docs/adr/0078-compute-limits.md`, `docs/adr/0116-launches-without-events.md`.

mod events;
mod gate;

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use gate::{Gate, gate_of, gates, only_gate};
use tessera_intercept_limiter::compute::Key;

use crate::charge::uuid_of;
use crate::driver::cuda::{self, Form, Handle, SUCCESS};
use crate::driver::events::context_of_green;
use crate::mps;
use crate::process_page::process_page;
use crate::state::{State, with_state};

/// A stream as the driver's functions of the plain form take it.
#[derive(Clone, Copy)]
pub(crate) struct Stream(pub(crate) Handle);

impl Stream {
    /// Takes a stream of a function of the plain form.
    pub(crate) fn plain(stream: Handle) -> Self {
        Self(stream)
    }

    /// Takes a stream of a function of the form for the per-thread default stream.
    pub(crate) fn per_thread(stream: Handle) -> Self {
        /// `CU_STREAM_PER_THREAD`
        const PER_THREAD: usize = 2;
        Self(if stream.is_null() { PER_THREAD as Handle } else { stream })
    }

    /// Returns true if launches in it are captured. If the driver does not answer, the launch
    /// itself will fail.
    #[cold]
    fn is_capturing(self) -> bool {
        cuda::is_capturing(self.0, Form::Legacy)
    }
}

/// Makes a launch once it is charged.
///
/// `make` is called in this function only. If it were passed on, its arguments would be stored
/// before every launch, and on x86 the compare-and-swap of the budget waits for stores.
#[inline]
pub(crate) fn launch(key: Key, stream: Stream, make: impl FnOnce() -> c_int) -> c_int {
    let Some(gate) = gate() else { return make() };
    #[cfg(feature = "hami")]
    crate::hami::before_launch();
    if has_captured() && stream.is_capturing() {
        return make();
    }
    if gate.skips_metering() {
        return make();
    }
    let Some(charge) = gate.budget.charge(key) else {
        let entered = gate.enter(key, stream);
        return gate.made(entered, make());
    };
    let result = make();
    if result != SUCCESS {
        gate.budget.refund(charge);
    }
    result
}

/// All work of the current context is done: the program synchronized it.
pub(crate) fn context_synced() {
    if let Some(gate) = gate() {
        gate.drain(true);
    }
}

/// Some work is done: the program synchronized a stream or an event.
pub(crate) fn work_synced() {
    if let Some(gate) = gate() {
        gate.drain(false);
    }
}

/// Calls the driver to destroy a context; `ends` returns true if the result means that it was
/// destroyed. Its events end with it.
pub(crate) fn context_may_end(
    context: usize,
    call: impl FnOnce() -> c_int,
    ends: impl FnOnce(c_int) -> bool,
) -> c_int {
    gates().for_each(|gate| gate.suspend(context));
    let result = call();
    if ends(result) {
        context_ended(context);
    } else {
        gates().for_each(|gate| gate.resume(context));
    }
    result
}

/// A context was destroyed, and its events with it.
pub(crate) fn context_ended(context: usize) {
    gates().for_each(|gate| gate.forget_context(context));
}

/// As [`context_may_end`], for a green context.
pub(crate) fn green_context_may_end(green: Handle, call: impl FnOnce() -> c_int) -> c_int {
    match context_of_green(green) {
        Some(context) => context_may_end(context, call, |result| result == SUCCESS),
        None => call(),
    }
}

/// A module was unloaded: other functions may get its addresses.
pub(crate) fn code_unloaded() {
    gates().for_each(Gate::invalidate);
}

/// An executable graph was destroyed or changed.
pub(crate) fn graph_changed(executable: Handle) {
    gates().for_each(|gate| gate.forget(Key::graph(executable as usize)));
}

/// A stream is about to capture launches. This is never reset: to know if a stream still captures,
/// streams would have to be queried that may be destroyed.
pub(crate) fn capture_begins() {
    if let Some(page) = process_page() {
        page.has_captured.store(true, Ordering::Release);
    }
}

/// Returns true if a stream has captured launches.
#[inline]
fn has_captured() -> bool {
    process_page().is_some_and(|page| page.has_captured.load(Ordering::Acquire))
}

/// Returns the gate of the current context's GPU; `None` without a grant.
#[inline]
fn gate() -> Option<&'static Gate> {
    match only_gate() {
        Some(gate) => Some(gate),
        None => find_gate(),
    }
}

#[cold]
fn find_gate() -> Option<&'static Gate> {
    let device = cuda::current_device()?;
    let uuid = uuid_of(device)?;
    let find = |state: &mut State| {
        let gpu = state.find(uuid)?;
        Some((gpu, state.gpu_count() == 1, state.needs_mps_check(gpu)))
    };
    let (gpu, only_one, needs_mps_check) = with_state(find)??;
    if needs_mps_check {
        mps::check(gpu, device);
    }
    gate_of(gpu, only_one)
}
