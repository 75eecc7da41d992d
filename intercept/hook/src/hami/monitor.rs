//! File of HAMi's monitor: shows what the ledgers contain, and takes the monitor's words.
//!
//! One place for each slot of a ledger, with the same index. Its words on a GPU are written under
//! the lock of that slot only: by the process that has it, and by the one that reclaims it. The
//! container's tenant can write the file, as with HAMi-core: it can lift its limits of compute, and
//! never those of memory.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::SLOTS;
use tessera_intercept_abi::{Grant, MAX_MEMORY_BYTES};
use tessera_intercept_hami::{PROCESSES, Process, REGION_LEN, Region, Variables};

use super::environment::Line;
use super::{PATH_ROOM, open_or_make, reporter};
use crate::process_page::{ProcessPage, process_page};
use crate::state::{State, with_state};
use crate::sys::{self, Fd, Map};

/// Offset of the lock under which the file is initialized and gets GPUs: beyond its end.
const LOCK_OFFSET: u64 = 1 << 32;

/// Attempts to take that lock, after 32 of which each waits for 1 ms. Its holder writes 2 MB.
const TRIES: usize = 1_000;

/// Time between two looks at the monitor's word while launches are held.
const HELD_NS: u64 = 100_000_000;

const _: () = assert!(SLOTS <= PROCESSES);

/// A share in the monitor's file.
#[derive(Clone, Copy)]
pub(crate) struct Shown {
    region: &'static Region,
    /// Its GPU's index there.
    gpu: usize,
    /// True if the monitor can lift the limit of compute.
    can_be_lifted: bool,
}

/// Shows a GPU, by its UUID as text, in the monitor's file; `index` is its index among those that
/// the container has, if known, and `grant` what the variables give. `None` if the file cannot be
/// used: limits hold, and the monitor does not see the container.
pub(super) fn show<'v, F: Fn(&[u8]) -> Option<&'v [u8]>>(
    variables: &Variables<F>,
    uuid: &Line<48>,
    index: Option<usize>,
    grant: &Grant,
) -> Option<Shown> {
    let cache = core::str::from_utf8(variables.cache()).ok()?;
    let path = Line::<PATH_ROOM>::of(format_args!("{cache}"))?;
    // HAMi-core's file has one byte more.
    let file = open_or_make(&path, &[], REGION_LEN + 1)?;
    let region = map(&file)?;
    let gpu = under_lock(&file, || {
        if !region.is_initialized() {
            region.initialize(i32::try_from(SLOTS).unwrap_or(i32::MAX));
        }
        region.place_of(uuid.text().as_bytes(), index)
    })??;
    let bytes = grant.memory_limit_bytes;
    let limits = [
        (&region.memory_limit, if bytes == MAX_MEMORY_BYTES { 0 } else { bytes }),
        (&region.cores_percent, grant.cores_percent.into()),
    ];
    for (words, limit) in limits {
        if let Some(word) = words.get(gpu) {
            word.store(limit, Ordering::Relaxed);
        }
    }
    region.priority.store(variables.priority(), Ordering::Relaxed);
    process_page()?.region.store(core::ptr::from_ref(region).cast_mut().cast(), Ordering::Release);
    Some(Shown { region, gpu, can_be_lifted: !variables.always_limits_compute() })
}

fn map(file: &Fd) -> Option<&'static Region> {
    let status = file.status()?;
    if !status.regular || status.length < REGION_LEN as u64 {
        return None;
    }
    let at = sys::map(Map::Shared(file), REGION_LEN)?;
    // SAFETY: a mapping of that length that is never unmapped; every bit pattern is valid for
    // atomics. (A tenant can truncate the file: then its own processes get SIGBUS.)
    Some(unsafe { &*at.cast::<Region>() })
}

/// Runs a function while no other process of the container does. `None` if another one keeps the
/// lock.
fn under_lock<T>(file: &Fd, run: impl FnOnce() -> T) -> Option<T> {
    for times in 0..TRIES {
        if file.try_lock(LOCK_OFFSET) {
            let result = run();
            file.unlock(LOCK_OFFSET);
            return Some(result);
        }
        sys::back_off(times);
    }
    None
}

impl Shown {
    fn process(&self, slot: usize) -> Option<&'static Process> {
        self.region.processes.get(slot)
    }

    /// Shows the bytes that this process holds, by its slot in the ledger.
    pub(crate) fn show_memory(&self, slot: usize, bytes: u64) {
        if let Some(process) = self.process(slot) {
            process.pid.store(sys::pid().cast_signed(), Ordering::Relaxed);
            process.show_memory(self.gpu, bytes);
        }
    }

    /// Shows the percent of the GPU's time that this process uses.
    pub(super) fn show_utilization(&self, slot: usize, percent: u64) {
        if let Some(process) = self.process(slot) {
            process.show_utilization(self.gpu, percent);
        }
    }

    /// Clears the words of a process that has ended or is about to. The caller has the lock of its
    /// slot.
    pub(crate) fn clear(&self, slot: usize) {
        if let Some(process) = self.process(slot) {
            process.show_memory(self.gpu, 0);
            process.show_utilization(self.gpu, 0);
        }
    }

    /// Returns true if the monitor says that the container is alone on its GPUs.
    pub(crate) fn lifts_compute_limit(&self) -> bool {
        self.can_be_lifted && self.region.utilization_switch.load(Ordering::Relaxed) == 0
    }
}

/// Returns the monitor's file, if this process has used a GPU.
pub(super) fn region(page: &ProcessPage) -> Option<&'static Region> {
    // SAFETY: NULL, or a mapping that is never unmapped.
    unsafe { page.region.load(Ordering::Acquire).cast::<Region>().as_ref() }
}

/// Waits while the monitor holds launches for containers with a higher priority, and lets the
/// monitor know that there is a launch.
#[inline]
pub(crate) fn before_launch() {
    let Some(page) = process_page() else { return };
    let Some(region) = region(page) else { return };
    while region.recent_kernel.load(Ordering::Relaxed) < 0 {
        sys::sleep(HELD_NS);
    }
    reporter::note_launch(page);
}

/// Function that the loader calls when the program exits. A program that is killed stays shown
/// until the container's next process uses the GPU.
extern "C" fn exits() {
    let Some(page) = process_page() else { return };
    // In a forked child, and in a program without CUDA, there is nothing to hide.
    if region(page).is_some() {
        with_state(State::hide);
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = exits;
