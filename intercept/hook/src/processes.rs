//! Processes as NVML shows them: those of this container, with what the ledger says of them. What
//! the driver knows of others is not told.
//!
//! The driver is asked first, with no room for an answer: where it refuses, for a device that is
//! none for example, its refusal stands.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::nvml::{
    Device, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, SUCCESS, told_uuid, uuid,
};
use crate::root::with_state;
use crate::route::hooks;
use crate::sys::{self, Fd, HERE};
use crate::utilization;

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process1 {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, and `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process2 {
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
pub(crate) struct DetailList {
    version: c_uint,
    mode: c_uint,
    count: c_uint,
    processes: *mut Detail,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sample {
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
pub(crate) struct UtilizationList {
    version: c_uint,
    count: c_uint,
    last_seen: c_ulonglong,
    processes: *mut Utilization,
}

/// A process that has used a GPU.
#[derive(Clone, Copy)]
pub(crate) struct Holder {
    pub(crate) pid: u32,
    /// Bytes of GPU memory.
    pub(crate) bytes: u64,
    /// Percent of the GPU's time, as last measured.
    pub(crate) percent: u8,
}

impl From<Holder> for Process1 {
    fn from(Holder { pid, bytes, .. }: Holder) -> Self {
        Self { pid, used: bytes }
    }
}

impl From<Holder> for Process2 {
    fn from(Holder { pid, bytes, .. }: Holder) -> Self {
        // Of no MIG instance.
        Self { pid, used: bytes, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX }
    }
}

impl From<Holder> for Detail {
    fn from(holder: Holder) -> Self {
        Self { process: holder.into(), protected: 0 }
    }
}

/// Of the other engines, the ledger says nothing.
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

/// Calls `found` with the processes that have used a device, one after the other; answers how
/// many there are.
fn each(device: Device, mut found: impl FnMut(usize, Holder)) -> usize {
    crate::pool::refresh();
    let Some(uuid) = uuid(device) else { return 0 };
    let own = sys::pid_namespace();
    let mut count = 0;
    with_state(|state| {
        state.holders(uuid, own, |holder| {
            found(count, holder);
            count += 1;
        });
    });
    count
}

/// Answers with a list by NVML's rule: the count says how much room there is, and then how much
/// there is.
///
/// # Safety
/// The pointers are what the program wants NVML to write to.
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
            // SAFETY: the program has said that there are so many places.
            unsafe { room.add(at).write_unaligned(holder.into()) };
        }
    });
    // SAFETY: as above.
    unsafe { count.write_unaligned(c_uint::try_from(found).unwrap_or(c_uint::MAX)) };
    if found > places { INSUFFICIENT_SIZE } else { SUCCESS }
}

/// NVML finds no sample on a GPU that no process has used for a while: no error here.
fn found_or_not(result: c_int) -> c_int {
    if result == NOT_FOUND { SUCCESS } else { result }
}

/// Answers that there is nobody.
///
/// # Safety
/// `count` is NULL or what the program wants NVML to write to.
unsafe fn nobody(
    count: *mut c_uint,
    answer: c_int,
    real: impl FnOnce(*mut c_uint) -> c_int,
) -> c_int {
    let mut none = 0;
    let result = real(if count.is_null() { count } else { &mut none });
    if count.is_null() || !matches!(result, SUCCESS | INSUFFICIENT_SIZE | NOT_FOUND) {
        return result;
    }
    // SAFETY: by this function's contract.
    unsafe { count.write_unaligned(0) };
    answer
}

/// What is answered of a process that is none of the container's, or of which no books are kept
/// here.
fn nothing_of(device: Device) -> c_int {
    match told_uuid(device) {
        Ok(_) => NOT_FOUND,
        Err(error) => error,
    }
}

/// The name of a process, as `/proc` of this container has it; answers its length with the
/// terminating NUL.
fn name_of(pid: c_uint, name: &mut [u8]) -> Option<usize> {
    let mut path = [0_u8; 32];
    let file = Fd::open_at(HERE, sys::path_of_process(pid, &mut path)?, libc::O_RDONLY)?;
    let read = file.read_start(name);
    let read = name.get(..read)?;
    // The first argument; what is left of a process that has ended has none.
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
        unsafe { nobody(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut c_uint, room: *mut Process1) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut c_uint, room: *mut Process2) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, room)) }
    }

    fn nvmlDeviceGetRunningProcessDetailList(device: Device, told: *mut DetailList) |real| {
        /// The mode in which processes of CUDA are listed.
        const COMPUTE: c_uint = 0;
        if told.is_null() {
            // SAFETY: the program's own call.
            return unsafe { real(device, told) };
        }
        // SAFETY: the program's own list.
        let asked = unsafe { told.read_unaligned() };
        let mut none = DetailList { count: 0, processes: core::ptr::null_mut(), ..asked };
        // SAFETY: a list of ours.
        let mut ask = || unsafe { real(device, &mut none) };
        // SAFETY: the count lies in the program's list.
        let count = unsafe { &raw mut (*told).count };
        if asked.mode == COMPUTE {
            // SAFETY: the program's own call.
            unsafe { list(device, count, asked.processes, |_| ask()) }
        } else {
            // SAFETY: as above.
            unsafe { nobody(count, SUCCESS, |_| ask()) }
        }
    }

    fn nvmlDeviceGetAccountingPids(device: Device, count: *mut c_uint, pids: *mut c_uint) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, pids)) }
    }

    fn nvmlDeviceGetAccountingStats(device: Device, pid: c_uint, stats: *mut c_void) |real| {
        let _ = (pid, stats, real);
        nothing_of(device)
    }

    fn nvmlDeviceGetAccountingStats_v2(device: Device, stats: *mut c_void) |real| {
        let _ = (stats, real);
        nothing_of(device)
    }

    fn nvmlDeviceGetEncoderSessions(device: Device, count: *mut c_uint, sessions: *mut c_void) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, sessions)) }
    }

    fn nvmlDeviceGetFBCSessions(device: Device, count: *mut c_uint, sessions: *mut c_void) |real| {
        // SAFETY: the program's own call.
        unsafe { nobody(count, SUCCESS, |count| real(device, count, sessions)) }
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

    fn nvmlDeviceGetProcessesUtilizationInfo(device: Device, told: *mut UtilizationList) |real| {
        if told.is_null() {
            // SAFETY: the program's own call.
            return unsafe { real(device, told) };
        }
        utilization::measure(device);
        // SAFETY: the program's own list.
        let asked = unsafe { told.read_unaligned() };
        let mut none = UtilizationList { count: 0, processes: core::ptr::null_mut(), ..asked };
        // SAFETY: a list of ours.
        let mut ask = || unsafe { real(device, &mut none) };
        // SAFETY: the count lies in the program's list.
        let count = unsafe { &raw mut (*told).count };
        // SAFETY: the program's own call.
        unsafe { list(device, count, asked.processes, |_| found_or_not(ask())) }
    }

    // The driver would take the id for one of the host's.
    fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) |real| {
        /// What NVML cuts names to.
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
