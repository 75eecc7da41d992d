//! Compute: launches are paid for before they are made, and wait where the container has no tokens.
//!
//! ```text
//!  hook (launch, order) --> Gate of the GPU
//!                             |-- Till::spend                from the lease: no lock, no call        (nearly always)
//!                             `-- Gate::enter   capturing?   not charged: the graph is, when it is launched
//!                                   |-- Events::ask          what is done, without any lock that a launch waits for
//!                                   |-- Meter::admit         under the gate's lock, no call
//!                                   `-- futex                as long as it says, holding nothing
//!                                 launch, between two events where the meter asks for them
//!                             `-- Gate::made                 kept, given back where it failed, or let go unmeasured
//! ```
//!
//! What cannot be asked or measured is let go as it was paid: nobody is kept from launching for
//! ever by an event. Why it is done this way:
//! `docs/adr/0078-compute-limits.md`.

mod driver;
mod events;
mod gate;
mod terms;

use core::ffi::c_int;

use tessera_intercept_limiter::compute::Key;

use crate::charge::uuid_of;
use crate::cuda::{self, Form, Handle, SUCCESS};
use crate::mps;
use crate::root::{self, with_state};
use crate::state::State;
pub(crate) use driver::forget_helpers;
pub(crate) use gate::Gate;
pub(crate) use terms::Terms;

/// A stream as the driver's functions proper take it, whichever form the program called.
#[derive(Clone, Copy)]
pub(crate) struct Stream(pub(crate) Handle);

impl Stream {
    /// What a function of the plain form was given.
    pub(crate) fn plain(stream: Handle) -> Self {
        Self(stream)
    }

    /// What a function of the form for the per-thread default stream was given.
    pub(crate) fn per_thread(stream: Handle) -> Self {
        /// `CU_STREAM_PER_THREAD`
        const PER_THREAD: usize = 2;
        Self(if stream.is_null() { PER_THREAD as Handle } else { stream })
    }

    /// Whether launches in it are recorded in place of being made. Where the driver does not say,
    /// the launch itself will fail.
    #[cold]
    fn is_capturing(self) -> bool {
        cuda::is_capturing(self.0, Form::Legacy)
    }
}

/// Makes a launch once it is paid.
///
/// `make` is called here and passed to nobody: then its arguments would be stored before every
/// launch, and on x86 the till's compare-and-swap waits for that.
#[inline]
pub(crate) fn launch(key: Key, stream: Stream, make: impl FnOnce() -> c_int) -> c_int {
    let Some(gate) = gate() else { return make() };
    if root::has_captured() && stream.is_capturing() {
        return make();
    }
    let Some(paid) = gate.till.spend(key) else {
        let entered = gate.enter(key, stream);
        return gate.made(entered, make());
    };
    let result = make();
    if result != SUCCESS {
        gate.till.give_back(paid);
    }
    result
}

/// A context's work is done: the program waited for it.
pub(crate) fn context_is_done() {
    if let Some(gate) = gate() {
        gate.drain(true);
    }
}

/// Some work is done: the program waited for it.
pub(crate) fn work_is_done() {
    if let Some(gate) = gate() {
        gate.drain(false);
    }
}

/// Has the driver end a context, or not: `ends` says whether it did, by what it answered. Its
/// events go with it.
pub(crate) fn context_may_end(
    context: usize,
    end: impl FnOnce() -> c_int,
    ends: impl FnOnce(c_int) -> bool,
) -> c_int {
    root::gates().for_each(|gate| gate.suspend(context));
    let result = end();
    if ends(result) {
        context_is_gone(context);
    } else {
        root::gates().for_each(|gate| gate.resume(context));
    }
    result
}

/// A context is gone, and its events with it.
pub(crate) fn context_is_gone(context: usize) {
    root::gates().for_each(|gate| gate.forget_context(context));
}

/// As [`context_may_end`], for a green context.
pub(crate) fn green_context_may_end(green: Handle, end: impl FnOnce() -> c_int) -> c_int {
    match driver::context_of_green(green) {
        Some(context) => context_may_end(context, end, |result| result == SUCCESS),
        None => end(),
    }
}

/// Code is gone: other functions may get the addresses of those that were in it.
pub(crate) fn code_is_gone() {
    root::gates().for_each(Gate::doubt);
}

/// An executable graph is gone, or another from now on.
pub(crate) fn graph_is_gone(executable: Handle) {
    root::gates().for_each(|gate| gate.forget(Key::graph(executable as usize)));
}

/// A stream records its launches from now on. There is no way back: whether any stream still does
/// could only be known by asking about streams that may be gone.
pub(crate) fn capture_begins() {
    root::note_capture();
}

/// The gate of the current context's GPU; `None` where nothing is granted of it.
#[inline]
fn gate() -> Option<&'static Gate> {
    match root::only_gate() {
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
        Some((gpu, state.gpu_count() == 1, state.wonders_about_mps(gpu)))
    };
    let (gpu, only_one, wonders_about_mps) = with_state(find)??;
    if wonders_about_mps {
        mps::find_out(gpu, device);
    }
    root::gate(gpu, only_one)
}
