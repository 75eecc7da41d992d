//! The one page from which everything of this process hangs.
//!
//! The kernel zeroes it in forked children: a child finds nothing there and starts for itself, with grants, ledgers and slots
//! of its own, whatever thread of the parent held which lock.

use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::state::State;
use crate::sys::{self, Lock, Map};

/// All zeroes is its beginning.
#[repr(C)]
pub(crate) struct Root {
    lock: Lock,
    state: AtomicPtr<State>,
    /// Where launches are counted, once that is known and there is only one such place.
    launches: AtomicPtr<AtomicU64>,
}

static ROOT: AtomicPtr<Root> = AtomicPtr::new(ptr::null_mut());

const LENGTH: usize = 4096;
const _: () = assert!(size_of::<Root>() <= LENGTH);

/// The root of this process; `None` where the kernel gives no page, or cannot zero it in children.
fn root() -> Option<&'static Root> {
    let known = ROOT.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: what was put there is a page that stays for ever, and zeroes are a valid `Root`.
        return Some(unsafe { &*known });
    }
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

/// Runs something on the state of this process, under its lock: no driver call belongs in there. `None` where there is no
/// memory for a state.
pub(crate) fn with_state<T>(run: impl FnOnce(&mut State) -> T) -> Option<T> {
    let root = root()?;
    root.lock.hold(|| {
        let mut state = root.state.load(Ordering::Relaxed);
        if state.is_null() {
            state = State::discover()?;
            root.state.store(state, Ordering::Relaxed);
        }
        // SAFETY: made by `discover`, never unmapped, and only used under the lock, which is not taken twice: nothing in
        // here calls a driver, and so no hook.
        Some(run(unsafe { &mut *state }))
    })
}

/// The place where launches are counted, if it is known.
pub(crate) fn launches() -> Option<&'static AtomicU64> {
    let place = root()?.launches.load(Ordering::Acquire);
    // SAFETY: only set by `set_launches`, to a word of a mapping that stays for ever.
    unsafe { place.as_ref() }
}

/// Remembers where launches are counted.
pub(crate) fn set_launches(place: &'static AtomicU64) {
    if let Some(root) = root() {
        root.launches.store(ptr::from_ref(place).cast_mut(), Ordering::Release);
    }
}
