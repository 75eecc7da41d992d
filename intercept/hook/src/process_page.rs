//! Page that all state of this process hangs from.
//!
//! The kernel zeroes it in forked children. So a child starts with new state, grants, ledgers and
//! slots, whichever locks the threads of the parent held.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::host_pid::HostPid;
use crate::sys::{self, Lock, Map};

/// GPUs that a container can have shares of.
pub(crate) const GPUS: usize = 64;

/// The page. All zeroes is a new one. Pointers are of objects that are never freed.
#[repr(C)]
pub(crate) struct ProcessPage {
    /// Lock of `state`. No driver function is called under it.
    pub(crate) lock: Lock,
    /// The `State`.
    pub(crate) state: AtomicPtr<c_void>,
    /// The `Gate` of all launches, if the container has one GPU only.
    pub(crate) only_gate: AtomicPtr<c_void>,
    /// The `Gate`s by GPU of the state.
    pub(crate) gates: [AtomicPtr<c_void>; GPUS],
    /// True if a stream has captured launches.
    pub(crate) has_captured: AtomicBool,
    /// Host's PID of this process.
    pub(crate) host_pid: HostPid,
    /// File of HAMi's monitor, once this process has used a GPU.
    #[cfg(feature = "hami")]
    pub(crate) region: AtomicPtr<c_void>,
    /// Thread that tells HAMi's monitor about launches.
    #[cfg(feature = "hami")]
    pub(crate) reporter: crate::hami::Reporter,
}

static PAGE: AtomicPtr<ProcessPage> = AtomicPtr::new(ptr::null_mut());

const LENGTH: usize = 4096;
const _: () = assert!(size_of::<ProcessPage>() <= LENGTH);

/// Returns the page of this process. `None` if the kernel has no memory, or cannot zero the page in
/// children.
#[inline]
pub(crate) fn process_page() -> Option<&'static ProcessPage> {
    let known = PAGE.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: a page that is never unmapped, and zeroes are a valid `ProcessPage`.
        return Some(unsafe { &*known });
    }
    map_page()
}

#[cold]
fn map_page() -> Option<&'static ProcessPage> {
    let page = sys::map(Map::WipedOnFork, LENGTH)?.cast::<ProcessPage>();
    match PAGE.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above.
        Ok(_) => Some(unsafe { &*page }),
        Err(other) => {
            // SAFETY: another thread was first; no reference to this page exists.
            unsafe { sys::unmap(page.cast(), LENGTH) };
            // SAFETY: as above.
            Some(unsafe { &*other })
        }
    }
}
