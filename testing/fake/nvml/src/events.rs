//! Event sets. Events come from the control file. A set delivers each event once if it happened
//! after its GPU was registered.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::nvmlEventData_t;
use tessera_fake_world::{Control, EventKind, World};

use crate::abi::{Code, Handle, NvmlResult, OutPtr, Return, export};
use crate::library::machine;

const SINGLE_BIT_ECC: u64 = 0x1;
const DOUBLE_BIT_ECC: u64 = 0x2;
const XID: u64 = 0x8;
const SUPPORTED: u64 = SINGLE_BIT_ECC | DOUBLE_BIT_ECC | XID;

/// Interval at which a waiting call reads the control file.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// `nvmlEventSet_t`: a number; 0 is not a set.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SetHandle(usize);

/// Registration of one GPU in a set.
struct Registration {
    kinds: u64,
    /// Highest id of the events that are already past.
    last_event: u64,
}

struct Sets {
    next: usize,
    sets: Option<HashMap<SetHandle, BTreeMap<usize, Registration>>>,
}

static SETS: Mutex<Sets> = Mutex::new(Sets { next: 1, sets: None });

fn with_sets<T>(f: impl FnOnce(&mut HashMap<SetHandle, BTreeMap<usize, Registration>>) -> T) -> T {
    let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
    f(sets.sets.get_or_insert_default())
}

/// Removes all sets at shutdown.
pub(crate) fn clear() {
    with_sets(HashMap::clear);
}

fn kind_bits(kind: EventKind) -> (u64, u64) {
    match kind {
        EventKind::Xid(code) => (XID, code),
        EventKind::EccSingleBit => (SINGLE_BIT_ECC, 0),
        EventKind::EccDoubleBit => (DOUBLE_BIT_ECC, 0),
    }
}

/// An event to deliver: GPU, kind, data.
struct Delivery {
    gpu: usize,
    kind: u64,
    data: u64,
}

/// Returns the oldest undelivered event of a set. Returns `GPU_IS_LOST` if there is none and one of
/// its GPUs is lost or hangs.
fn next(set: SetHandle, world: &World, control: &Control) -> NvmlResult<Option<Delivery>> {
    with_sets(|sets| {
        let registrations = sets.get_mut(&set).ok_or(Code::InvalidArgument)?;
        for event in &control.events {
            let Some(gpu) = world.gpu_by_uuid(&event.gpu) else { continue };
            let Some(registration) = registrations.get_mut(&gpu.index) else { continue };
            if event.id <= registration.last_event {
                continue;
            }
            registration.last_event = event.id;
            let (kind, data) = kind_bits(event.kind);
            if registration.kinds & kind != 0 {
                return Ok(Some(Delivery { gpu: gpu.index, kind, data }));
            }
        }
        let is_unreachable = |uuid: &str| control.is_lost(uuid) || control.is_hung(uuid);
        let lost = registrations.keys().any(|&gpu| is_unreachable(&world.gpus[gpu].uuid));
        if lost { Err(Code::GpuIsLost) } else { Ok(None) }
    })
}

fn wait(set: SetHandle, data: OutPtr<nvmlEventData_t>, timeout_ms: c_uint) -> NvmlResult {
    let machine = machine()?;
    if data.is_null() {
        return Err(Code::InvalidArgument);
    }
    let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    loop {
        if let Some(event) = next(set, machine.world(), &machine.control())? {
            return data.set(nvmlEventData_t {
                device: Handle::of(event.gpu).as_raw(),
                eventType: event.kind,
                eventData: event.data,
                gpuInstanceId: c_uint::MAX,
                computeInstanceId: c_uint::MAX,
            });
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Code::Timeout);
        }
        pause(left.min(POLL_INTERVAL));
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the caller blocks in C; a file that may not exist yet cannot be watched"
)]
fn pause(time: Duration) {
    thread::sleep(time);
}

export! {
    fn nvmlDeviceGetSupportedEventTypes(device: Handle, kinds: OutPtr<c_ulonglong>) {
        device.device()?;
        kinds.set(SUPPORTED)
    }
    fn nvmlDeviceRegisterEvents(device: Handle, kinds: c_ulonglong, set: SetHandle) {
        let device = device.device()?;
        if kinds & !SUPPORTED != 0 {
            return Err(Code::NotSupported);
        }
        let last_event = device.control.last_event();
        with_sets(|sets| {
            let registrations = sets.get_mut(&set).ok_or(Code::InvalidArgument)?;
            registrations.entry(device.index).or_insert(Registration { kinds: 0, last_event }).kinds |= kinds;
            Ok(())
        })
    }
    fn nvmlEventSetCreate(set: OutPtr<SetHandle>) {
        machine()?;
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = SetHandle(sets.next);
        set.set(handle)?;
        sets.next += 1;
        sets.sets.get_or_insert_default().insert(handle, BTreeMap::new());
        Ok(())
    }
    fn nvmlEventSetWait(set: SetHandle, data: OutPtr<nvmlEventData_t>, timeout_ms: c_uint) { wait(set, data, timeout_ms) }
    fn nvmlEventSetWait_v2(set: SetHandle, data: OutPtr<nvmlEventData_t>, timeout_ms: c_uint) {
        wait(set, data, timeout_ms)
    }
    fn nvmlEventSetFree(set: SetHandle) {
        machine()?;
        with_sets(|sets| sets.remove(&set)).map(|_| ()).ok_or(Code::InvalidArgument)
    }
}

/// Layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlEventData_t>() == 32);
    assert!(std::mem::offset_of!(nvmlEventData_t, gpuInstanceId) == 24);
    assert!(size_of::<Return>() == 4);
};
