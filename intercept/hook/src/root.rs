//! The one page from which everything of this process hangs.
//!
//! The kernel zeroes it in forked children: a child finds nothing there and starts for itself, with
//! grants, ledgers and slots of its own, whatever thread of the parent held which lock.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::compute::Gate;
use crate::host_pid::HostPid;
use crate::state::{GPUS, State};
use crate::sys::{self, Lock, Map};

/// All zeroes is its beginning.
#[repr(C)]
pub(crate) struct Root {
    lock: Lock,
    state: AtomicPtr<State>,
    /// What launches go through, once that is known and the container has one GPU only.
    only_gate: AtomicPtr<Gate>,
    /// By GPU of the state.
    gates: [AtomicPtr<Gate>; GPUS],
    /// A stream has captured launches, or does.
    has_captured: AtomicBool,
    /// What the host calls this process.
    host_pid: HostPid,
}

static ROOT: AtomicPtr<Root> = AtomicPtr::new(ptr::null_mut());

const LENGTH: usize = 4096;
const _: () = assert!(size_of::<Root>() <= LENGTH);

/// The root of this process; `None` where the kernel gives no page, or cannot zero it in children.
#[inline]
fn root() -> Option<&'static Root> {
    let known = ROOT.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: what was put there is a page that stays for ever, and zeroes are a valid `Root`.
        return Some(unsafe { &*known });
    }
    make_root()
}

#[cold]
fn make_root() -> Option<&'static Root> {
    let page = sys::map(Map::WipedOnFork, LENGTH)?.cast::<Root>();
    match ROOT.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above.
        Ok(_) => Some(unsafe { &*page }),
        Err(other) => {
            // SAFETY: another thread was first; nobody has seen this page.
            unsafe { sys::unmap(page.cast(), LENGTH) };
            // SAFETY: as above.
            Some(unsafe { &*other })
        }
    }
}

/// Runs something on the state of this process, under its lock: no driver call belongs in there.
/// `None` where there is no memory for a state.
pub(crate) fn with_state<T>(run: impl FnOnce(&mut State) -> T) -> Option<T> {
    let root = root()?;
    let result = hold_state(root, run);
    // Only here, with the lock let go of: the host is waited for.
    root.host_pid.ask_if_due();
    result
}

fn hold_state<T>(root: &Root, run: impl FnOnce(&mut State) -> T) -> Option<T> {
    root.lock.hold(|| {
        let mut state = root.state.load(Ordering::Relaxed);
        if state.is_null() {
            state = State::discover()?;
            root.state.store(state, Ordering::Relaxed);
        }
        // SAFETY: made by `discover`, never unmapped, and only used under the lock, which is not
        // taken twice: nothing in here calls a driver, and so no hook.
        Some(run(unsafe { &mut *state }))
    })
}

/// What the host calls this process.
pub(crate) fn host_pid() -> Option<&'static HostPid> {
    root().map(|root| &root.host_pid)
}

/// What launches go through, where that is the same for all of them.
#[inline]
pub(crate) fn only_gate() -> Option<&'static Gate> {
    let gate = root()?.only_gate.load(Ordering::Acquire);
    // SAFETY: what was put there stays for ever.
    unsafe { gate.as_ref() }
}

/// What launches on that GPU go through; made if need be.
pub(crate) fn gate(gpu: usize, only_one: bool) -> Option<&'static Gate> {
    let root = root()?;
    let place = root.gates.get(gpu)?;
    if place.load(Ordering::Acquire).is_null() {
        let new = Gate::new(gpu)?;
        if place
            .compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: another thread was first; nobody has seen this one.
            unsafe { Gate::discard(new) };
        }
    }
    let gate = place.load(Ordering::Acquire);
    if only_one {
        root.only_gate.store(gate, Ordering::Release);
    }
    // SAFETY: what was put there stays for ever.
    unsafe { gate.as_ref() }
}

/// All that were made.
pub(crate) fn gates() -> impl Iterator<Item = &'static Gate> {
    let places = root().map_or(&[][..], |root| &root.gates[..]);
    // SAFETY: what was put there stays for ever.
    places.iter().filter_map(|place| unsafe { place.load(Ordering::Acquire).as_ref() })
}

/// Whether a stream has captured launches.
#[inline]
pub(crate) fn has_captured() -> bool {
    root().is_some_and(|root| root.has_captured.load(Ordering::Acquire))
}

/// A stream captures launches.
pub(crate) fn note_capture() {
    if let Some(root) = root() {
        root.has_captured.store(true, Ordering::Release);
    }
}
