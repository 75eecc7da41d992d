//! Utilization of a GPU by the container's processes: from the charges in the ledger, or, while
//! launches are not metered, as the host publishes it.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::{SLOT_LIVE, SLOTS};
use tessera_intercept_abi::{LedgerPage, SlotPage};

/// The shortest time over which utilization is measured.
pub(crate) const LEAST_NS: u64 = 100_000_000;

/// The longest time.
const MOST_NS: u64 = 2_000_000_000;

/// GPU time at the last reading, and utilization until then. All zeroes is a new one.
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
    /// Updates the utilization and returns it in percent. `None`: read again after [`LEAST_NS`].
    pub(crate) fn update(&mut self, ledger: &LedgerPage, now: u64) -> Option<u8> {
        let elapsed_ns = now.saturating_sub(self.at_ns);
        if self.at_ns != 0 && elapsed_ns < LEAST_NS {
            return self.is_known.then_some(self.percent);
        }
        self.is_known = self.at_ns != 0 && elapsed_ns <= MOST_NS;
        self.at_ns = now;
        let percent = |now_ns: u64, before_ns: &mut u64| {
            // The GPU time of an ended process moves from its slot to the sum of past ones.
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
        self.is_known.then_some(self.percent)
    }

    /// Stores the utilization that the host has published, while launches are not metered. NVML
    /// reports it to the host for all processes together: each has the same part.
    pub(crate) fn set_published(&mut self, ledger: &LedgerPage, percent: u8) -> u8 {
        let is_live = |slot: &&SlotPage| slot.state.load(Ordering::Relaxed) == SLOT_LIVE;
        let processes = u8::try_from(ledger.slot.iter().filter(is_live).count()).unwrap_or(u8::MAX);
        self.slot_percent.fill(percent.checked_div(processes).unwrap_or(0));
        // A later reading of the ledger begins anew.
        self.at_ns = 0;
        self.is_known = false;
        percent
    }

    /// Returns the percent of the GPU's time that a process of a PID namespace used.
    pub(crate) fn of_process(&self, ledger: &LedgerPage, namespace: u64, pid: u32) -> u8 {
        let is_process = |slot: &SlotPage| {
            slot.state.load(Ordering::Relaxed) == SLOT_LIVE
                && slot.pid_namespace.load(Ordering::Relaxed) == namespace
                && slot.pid.load(Ordering::Relaxed) == pid
        };
        let found = ledger.slot.iter().position(is_process);
        found.and_then(|at| self.slot_percent.get(at)).map_or(0, |percent| *percent)
    }
}
