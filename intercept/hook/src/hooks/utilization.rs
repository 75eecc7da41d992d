//! Utilization of a GPU as the container is to see it: by its own processes, from the charges in
//! the ledger. The driver's value is of all containers.
//!
//! It is the mean since the last request, if that was 0.1 to 2 s ago; otherwise the first request
//! waits for 0.1 s. NVML's own value is the mean of a sixth of a second to a second.

use core::ffi::{c_int, c_uint};
use core::sync::atomic::AtomicU32;

use super::nvml::adjust;
use super::route::hooks;
use crate::driver::nvml::{Device, uuid};
use crate::state::{LEAST_NS, Utilization, with_state};
use crate::sys;

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rates {
    gpu: c_uint,
    memory: c_uint,
}

/// Measures the utilization of a device in percent; 0 without a share. `None`: it is that of the
/// device.
pub(super) fn measure(device: Device) -> Option<u8> {
    /// Another thread may begin a measurement meanwhile.
    const TRIES: usize = 3;
    static NEVER: AtomicU32 = AtomicU32::new(0);
    let Some(uuid) = uuid(device) else { return Some(0) };
    for _ in 0..TRIES {
        let measured = with_state(|state| state.update_usage(uuid, sys::monotonic_ns()));
        match measured.flatten() {
            None => return Some(0),
            Some(Utilization::Percent(percent)) => return Some(percent),
            Some(Utilization::OfDevice) => return None,
            Some(Utilization::NotYet) => sys::wait_shared(&NEVER, 0, LEAST_NS),
        }
    }
    Some(0)
}

/// Returns the container's part of reported rates. The driver's rate of memory is of all
/// containers: it is reduced in proportion.
fn rates(device: Device, reported: Rates) -> Rates {
    let Some(gpu) = measure(device).map(c_uint::from) else { return reported };
    let memory = reported.memory.saturating_mul(gpu).checked_div(reported.gpu).unwrap_or(0);
    Rates { gpu, memory: memory.min(reported.memory) }
}

hooks! {
    fn nvmlDeviceGetUtilizationRates(device: Device, out: *mut Rates) |real| {
        // SAFETY: the program's own call.
        let result: c_int = unsafe { real(device, out) };
        // SAFETY: as above.
        unsafe { adjust(result, out, |reported| rates(device, reported)) }
    }
}
