//! Utilization of a GPU as the container is to see it: by its own processes, by what the ledger
//! says that they were charged. The driver's figure is that of all containers.
//!
//! It is the mean since the last question, if that was 0.1 to 2 s ago; otherwise the first question
//! waits for 0.1 s. NVML's own is the mean of a sixth of a second to a second.

use core::ffi::{c_int, c_uint};
use core::sync::atomic::{AtomicU32, Ordering};

use tessera_intercept_abi::LedgerPage;
use tessera_intercept_abi::ledger::{SLOT_LIVE, SLOTS};

use crate::nvml::{Device, retell, uuid};
use crate::root::with_state;
use crate::route::hooks;
use crate::sys;

/// The shortest time over which utilization is measured.
const LEAST_NS: u64 = 100_000_000;

/// The longest.
const MOST_NS: u64 = 2_000_000_000;

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Rates {
    gpu: c_uint,
    memory: c_uint,
}

/// GPU time at the last question, and utilization until then. All zeroes is the beginning.
#[repr(C)]
pub(crate) struct Usage {
    at_ns: u64,
    is_known: bool,
    percent: u8,
    total_ns: u64,
    /// By slot of the ledger.
    slot_ns: [u64; SLOTS],
    slot_percent: [u8; SLOTS],
}

impl Usage {
    /// Brings it up to date. `false`: ask again after [`LEAST_NS`].
    pub(crate) fn look(&mut self, ledger: &LedgerPage, now: u64) -> bool {
        let elapsed_ns = now.saturating_sub(self.at_ns);
        if self.at_ns != 0 && elapsed_ns < LEAST_NS {
            return self.is_known;
        }
        self.is_known = self.at_ns != 0 && elapsed_ns <= MOST_NS;
        self.at_ns = now;
        let percent = |now_ns: u64, before_ns: &mut u64| {
            // What a dead process had goes from its slot to the past ones.
            let used_ns = now_ns.saturating_sub(core::mem::replace(before_ns, now_ns));
            u8::try_from((used_ns.saturating_mul(100) / elapsed_ns.max(1)).min(100)).unwrap_or(100)
        };
        let mut total_ns = ledger.past_gpu_ns.load(Ordering::Relaxed);
        let known = self.slot_ns.iter_mut().zip(&mut self.slot_percent);
        for (slot, (before_ns, slot_percent)) in ledger.slot.iter().zip(known) {
            let gpu_ns = slot.compute.gpu_ns.load(Ordering::Relaxed);
            total_ns = total_ns.saturating_add(gpu_ns);
            *slot_percent = percent(gpu_ns, before_ns);
        }
        self.percent = percent(total_ns, &mut self.total_ns);
        self.is_known
    }

    /// Percent of the GPU's time that a process of a PID namespace had.
    pub(crate) fn of_process(&self, ledger: &LedgerPage, namespace: u64, pid: u32) -> u8 {
        let is_process = |slot: &tessera_intercept_abi::SlotPage| {
            slot.state.load(Ordering::Relaxed) == SLOT_LIVE
                && slot.pid_namespace.load(Ordering::Relaxed) == namespace
                && slot.pid.load(Ordering::Relaxed) == pid
        };
        let found = ledger.slot.iter().position(is_process);
        found.and_then(|at| self.slot_percent.get(at)).map_or(0, |percent| *percent)
    }
}

/// Measures the utilization of a device; returns percent, 0 where the container has no share.
pub(crate) fn measure(device: Device) -> u8 {
    /// Another thread may begin anew meanwhile.
    const TRIES: usize = 3;
    static NEVER: AtomicU32 = AtomicU32::new(0);
    let Some(uuid) = uuid(device) else { return 0 };
    for _ in 0..TRIES {
        let looked = with_state(|state| {
            let (usage, ledger) = state.usage(uuid)?;
            Some(usage.look(ledger, sys::monotonic_ns()).then_some(usage.percent))
        });
        match looked.flatten() {
            None => return 0,
            Some(Some(percent)) => return percent,
            Some(None) => sys::wait_shared(&NEVER, 0, LEAST_NS),
        }
    }
    0
}

/// The driver's figure for memory is that of all containers: the same part of it.
fn rates(device: Device, told: Rates) -> Rates {
    let gpu = c_uint::from(measure(device));
    let memory = told.memory.saturating_mul(gpu).checked_div(told.gpu).unwrap_or(0);
    Rates { gpu, memory: memory.min(told.memory) }
}

hooks! {
    fn nvmlDeviceGetUtilizationRates(device: Device, told: *mut Rates) |real| {
        // SAFETY: the program's own call.
        let result: c_int = unsafe { real(device, told) };
        // SAFETY: as above.
        unsafe { retell(result, told, |told| rates(device, told)) }
    }
}
