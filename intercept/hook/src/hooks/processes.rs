//! Reports of processes by NVML: those of this container, from the ledger. Processes of other
//! containers are not reported.
//!
//! The driver is called first, without room for a result: if it returns an error, for example for
//! an invalid device, that is the result.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::route::hooks;
use super::utilization;
use crate::driver::nvml::{
    Device, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, SUCCESS, uuid, uuid_text,
};
use crate::pools;
use crate::state::{Holder, with_state};
use crate::sys::{self, Fd, HERE};

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Process1 {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, and `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Process2 {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Detail {
    process: Process2,
    protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DetailList {
    version: c_uint,
    mode: c_uint,
    count: c_uint,
    processes: *mut Detail,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sample {
    pid: c_uint,
    time_us: u64,
    multiprocessors: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Utilization {
    time_us: u64,
    pid: c_uint,
    multiprocessors: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
    jpeg: c_uint,
    optical_flow: c_uint,
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UtilizationList {
    version: c_uint,
    count: c_uint,
    last_seen: c_ulonglong,
    processes: *mut Utilization,
}

impl From<Holder> for Process1 {
    fn from(Holder { pid, bytes, .. }: Holder) -> Self {
        Self { pid, used: bytes }
    }
}

impl From<Holder> for Process2 {
    fn from(Holder { pid, bytes, .. }: Holder) -> Self {
        // No MIG instance.
        Self { pid, used: bytes, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX }
    }
}

impl From<Holder> for Detail {
    fn from(holder: Holder) -> Self {
        Self { process: holder.into(), protected: 0 }
    }
}

/// The ledger has no values of the other engines.
impl From<Holder> for Sample {
    fn from(Holder { pid, percent, .. }: Holder) -> Self {
        let time_us = sys::real_time_us();
        let multiprocessors = percent.into();
        Self { pid, time_us, multiprocessors, memory: 0, encoder: 0, decoder: 0 }
    }
}

impl From<Holder> for Utilization {
    fn from(holder: Holder) -> Self {
        let Sample { pid, time_us, multiprocessors, .. } = holder.into();
        let [memory, encoder, decoder, jpeg, optical_flow] = [0; 5];
        Self { time_us, pid, multiprocessors, memory, encoder, decoder, jpeg, optical_flow }
    }
}

/// Calls `found` with the processes that have used a device; returns their number.
fn each(device: Device, mut found: impl FnMut(usize, Holder)) -> usize {
    pools::refresh();
    let Some(uuid) = uuid(device) else { return 0 };
    let own = sys::pid_namespace();
    let mut count = 0;
    with_state(|state| {
        state.each_holder(uuid, own, |holder| {
            found(count, holder);
            count += 1;
        });
    });
    count
}

/// Writes a list by NVML's rule: the count is the room before the call, and the number of processes
/// after it.
///
/// # Safety
/// The pointers are the program's, for NVML to write to.
unsafe fn list<T: From<Holder>>(
    device: Device,
    count: *mut c_uint,
    room: *mut T,
    real: impl FnOnce(*mut c_uint) -> c_int,
) -> c_int {
    let mut none = 0;
    let result = real(if count.is_null() { count } else { &mut none });
    if count.is_null() || !matches!(result, SUCCESS | INSUFFICIENT_SIZE) {
        return result;
    }
    // SAFETY: by this function's contract.
    let places = unsafe { count.read_unaligned() } as usize;
    let places = if room.is_null() { 0 } else { places };
    let found = each(device, |at, holder| {
        if at < places {
            // SAFETY: the program has passed this number of places.
            unsafe { room.add(at).write_unaligned(holder.into()) };
        }
    });
    // SAFETY: as above.
    unsafe { count.write_unaligned(c_uint::try_from(found).unwrap_or(c_uint::MAX)) };
    if found > places { INSUFFICIENT_SIZE } else { SUCCESS }
}

/// Maps NVML's error for a GPU that no process has used for a while to success.
fn found_or_not(result: c_int) -> c_int {
    if result == NOT_FOUND { SUCCESS } else { result }
}

/// Writes an empty list.
///
/// # Safety
/// `count` is NULL or the program's, for NVML to write to.
unsafe fn empty(
    count: *mut c_uint,
    success: c_int,
    real: impl FnOnce(*mut c_uint) -> c_int,
) -> c_int {
    let mut none = 0;
    let result = real(if count.is_null() { count } else { &mut none });
    if count.is_null() || !matches!(result, SUCCESS | INSUFFICIENT_SIZE | NOT_FOUND) {
        return result;
    }
    // SAFETY: by this function's contract.
    unsafe { count.write_unaligned(0) };
    success
}

/// Returns the result for a process of another container, or without a record.
fn no_record(device: Device) -> c_int {
    match uuid_text(device) {
        Ok(_) => NOT_FOUND,
        Err(error) => error,
    }
}

/// Reads the name of a process from `/proc` of this container; returns its length with the NUL.
fn name_of(pid: c_uint, name: &mut [u8]) -> Option<usize> {
    let mut path = [0_u8; 32];
    let file = Fd::open_at(HERE, sys::path_of_process(pid, &mut path)?, libc::O_RDONLY)?;
    let read = file.read_start(name);
    let read = name.get(..read)?;
    // The first argument; a zombie has none.
    let length = read.iter().position(|byte| *byte == 0).unwrap_or(read.len());
    (length > 0).then_some(length)
}

hooks! {
    fn nvmlDeviceGetComputeRunningProcesses(device: Device, count: *mut c_uint, room: *mut Process1) |real| {
        // SAFETY: the program's own call.
        unsafe { list(device, count, room, |count| real(device, count, core::ptr::null_mut())) }
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { list(device, count, room, |count| real(device, count, core::ptr::null_mut())) }
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { list(device, count, room, |count| real(device, count, core::ptr::null_mut())) }
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(device: Device, count: *mut c_uint, room: *mut Process1) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut c_uint, room: *mut Process1) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetRunningProcessDetailList(device: Device, out: *mut DetailList) |real| {
        /// Mode that lists compute processes.
        const COMPUTE: c_uint = 0;
        if out.is_null() {
            // SAFETY: the program's own call.
            return unsafe { real(device, out) };
        }
        // SAFETY: the program's own list.
        let request = unsafe { out.read_unaligned() };
        let mut none = DetailList { count: 0, processes: core::ptr::null_mut(), ..request };
        // SAFETY: a local list.
        let mut ask = || unsafe { real(device, &mut none) };
        // SAFETY: the count lies in the program's list.
        let count = unsafe { &raw mut (*out).count };
        if request.mode == COMPUTE {
            // SAFETY: the program's own call.
            unsafe { list(device, count, request.processes, |_| ask()) }
        } else {
            // SAFETY: as above.
            unsafe { empty(count, SUCCESS, |_| ask()) }
        }
    }

    fn nvmlDeviceGetAccountingPids(device: Device, count: *mut c_uint, pids: *mut c_uint) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, pids)) }
    }

    fn nvmlDeviceGetAccountingStats(device: Device, pid: c_uint, stats: *mut c_void) |real| {
        let _ = (pid, stats, real);
        no_record(device)
    }

    fn nvmlDeviceGetAccountingStats_v2(device: Device, stats: *mut c_void) |real| {
        let _ = (stats, real);
        no_record(device)
    }

    fn nvmlDeviceGetEncoderSessions(device: Device, count: *mut c_uint, sessions: *mut c_void) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, sessions)) }
    }

    fn nvmlDeviceGetFBCSessions(device: Device, count: *mut c_uint, sessions: *mut c_void) |real| {
        // SAFETY: the program's own call.
        unsafe { empty(count, SUCCESS, |count| real(device, count, sessions)) }
    }

    fn nvmlDeviceGetProcessUtilization(
        device: Device, samples: *mut Sample, count: *mut c_uint, since: c_ulonglong,
    ) |real| {
        utilization::measure(device);
        // SAFETY: the program's own call, with no room.
        let ask = |count| unsafe { real(device, core::ptr::null_mut(), count, since) };
        // SAFETY: the program's own call.
        unsafe { list(device, count, samples, |count| found_or_not(ask(count))) }
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(device: Device, out: *mut UtilizationList) |real| {
        if out.is_null() {
            // SAFETY: the program's own call.
            return unsafe { real(device, out) };
        }
        utilization::measure(device);
        // SAFETY: the program's own list.
        let request = unsafe { out.read_unaligned() };
        let mut none = UtilizationList { count: 0, processes: core::ptr::null_mut(), ..request };
        // SAFETY: a local list.
        let mut ask = || unsafe { real(device, &mut none) };
        // SAFETY: the count lies in the program's list.
        let count = unsafe { &raw mut (*out).count };
        // SAFETY: the program's own call.
        unsafe { list(device, count, request.processes, |_| found_or_not(ask())) }
    }

    // The driver would take the PID for one of the host.
    fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) |real| {
        /// Length to which NVML cuts names.
        const LONGEST: usize = 1024;
        // SAFETY: the program's own call; no process has that id.
        let result = unsafe { real(c_uint::MAX, name, length) };
        if !matches!(result, SUCCESS | NOT_FOUND) {
            return result;
        }
        if name.is_null() || length == 0 {
            return INVALID_ARGUMENT;
        }
        let mut known = [0_u8; LONGEST];
        let Some(found) = name_of(pid, &mut known) else { return NOT_FOUND };
        let places = length as usize - 1;
        for (at, byte) in known.iter().take(found.min(places)).chain([&0]).enumerate() {
            // SAFETY: there are `length` places, and at most so many bytes are written.
            unsafe { name.add(at).write(*byte as c_char) };
        }
        if found > places { INSUFFICIENT_SIZE } else { SUCCESS }
    }
}
