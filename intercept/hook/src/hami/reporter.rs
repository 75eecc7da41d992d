//! Thread that tells HAMi's monitor about launches. The monitor only reads memory, so a value that
//! becomes old by itself, such as utilization, needs a writer while the program does nothing.
//!
//! It begins with a launch and ends after three seconds without one. It has no signals. Where it
//! cannot begin, the monitor sees no launches; limits hold.

use core::ffi::{CStr, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tessera_intercept_hami::LAUNCHED;

use super::monitor;
use crate::driver::LoadedLibrary;
use crate::process_page::{GPUS, ProcessPage, process_page};
use crate::state::with_state;
use crate::sys;

/// Time between two reports.
const PERIOD_NS: u64 = 1_000_000_000;

/// Periods without a launch after which the thread ends.
const IDLE_PERIODS: u32 = 3;

/// State of the thread. All zeroes is one that has not begun.
#[repr(C)]
pub(crate) struct Reporter {
    /// True if there was a launch since the last report.
    launched: AtomicBool,
    /// 0: no thread; 1: it runs; 2: it cannot begin.
    state: AtomicU32,
}

const NONE: u32 = 0;
const RUNS: u32 = 1;
const UNAVAILABLE: u32 = 2;

/// Notes a launch; begins the thread, if it does not run.
#[inline]
pub(super) fn note_launch(page: &'static ProcessPage) {
    let reporter = &page.reporter;
    if !reporter.launched.load(Ordering::Relaxed) {
        reporter.launched.store(true, Ordering::SeqCst);
    }
    if reporter.state.load(Ordering::SeqCst) == NONE {
        begin(page);
    }
}

#[cold]
fn begin(page: &'static ProcessPage) {
    let state = &page.reporter.state;
    if state.compare_exchange(NONE, RUNS, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        && sys::without_signals(begin_thread).is_none()
    {
        state.store(UNAVAILABLE, Ordering::SeqCst);
    }
}

/// `pthread_create`
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

/// `pthread_detach`
type Detach = unsafe extern "C" fn(libc::pthread_t) -> c_int;

/// Begins the thread. `None` if that fails.
///
/// The functions are looked up, because the library must load into programs without threads: they
/// are in libc from glibc 2.34 on, and in libpthread before, which CUDA's driver needs.
fn begin_thread() -> Option<()> {
    let [create, detach] = [c"pthread_create", c"pthread_detach"].map(of_pthread);
    // SAFETY: the functions of these names have these types.
    let create = unsafe { core::mem::transmute::<usize, Create>(create?) };
    // SAFETY: as above.
    let detach = unsafe { core::mem::transmute::<usize, Detach>(detach?) };
    let mut thread = 0;
    // SAFETY: the place for the thread's name is a local variable; its function takes no argument.
    if unsafe { create(&raw mut thread, ptr::null(), report_launches, ptr::null_mut()) } != 0 {
        return None;
    }
    // SAFETY: a thread that was just made and is not joined.
    unsafe { detach(thread) };
    Some(())
}

fn of_pthread(name: &CStr) -> Option<usize> {
    let of = |library: &[u8]| LoadedLibrary::find(library)?.function(name);
    of(b"libc.so.").or_else(|| of(b"libpthread.so."))
}

/// Function of the thread.
extern "C" fn report_launches(_: *mut c_void) -> *mut c_void {
    let Some(page) = process_page() else { return ptr::null_mut() };
    let mut usage = Usage { at_ns: sys::monotonic_ns(), gpu_ns: [0; GPUS] };
    let mut idle_periods = 0;
    usage.report();
    loop {
        if page.reporter.launched.swap(false, Ordering::SeqCst) {
            idle_periods = 0;
            report_launch(page);
        } else {
            idle_periods += 1;
        }
        if idle_periods >= IDLE_PERIODS && end(page) {
            return ptr::null_mut();
        }
        sys::sleep(PERIOD_NS);
        usage.report();
    }
}

/// Reports that there was a launch, unless the monitor holds launches.
fn report_launch(page: &ProcessPage) {
    let Some(region) = monitor::region(page) else { return };
    region.last_kernel_seconds.store(sys::real_time_us() / 1_000_000, Ordering::Relaxed);
    let _ = region.recent_kernel.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |kernel| {
        (kernel >= 0).then_some(LAUNCHED)
    });
}

/// Ends the thread. Returns false if there was a launch meanwhile that relies on it.
fn end(page: &ProcessPage) -> bool {
    let Reporter { launched, state } = &page.reporter;
    state.store(NONE, Ordering::SeqCst);
    !launched.load(Ordering::SeqCst)
        || state.compare_exchange(NONE, RUNS, Ordering::SeqCst, Ordering::SeqCst).is_err()
}

/// GPU time of this process at the last report.
struct Usage {
    at_ns: u64,
    gpu_ns: [u64; GPUS],
}

impl Usage {
    /// Shows the mean utilization since the last report.
    fn report(&mut self) {
        let now_ns = sys::monotonic_ns();
        let elapsed_ns = now_ns.saturating_sub(core::mem::replace(&mut self.at_ns, now_ns));
        with_state(|state| {
            for (gpu, before_ns) in self.gpu_ns.iter_mut().enumerate() {
                let Some((shown, slot, gpu_ns)) = state.shown_usage(gpu) else { continue };
                let used_ns = gpu_ns.saturating_sub(core::mem::replace(before_ns, gpu_ns));
                let percent = used_ns.saturating_mul(100).checked_div(elapsed_ns).unwrap_or(0);
                shown.show_utilization(slot, percent.min(100));
            }
        });
    }
}
