//! Memory, and the processes that hold it. Each process is in all process lists: graphics, MPS,
//! accounting and sessions. The utilization of a process is that of its kernels.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nvml_wrapper_sys::bindings::{
    nvmlAccountingStats_t, nvmlBAR1Memory_t, nvmlConfComputeMemSizeInfo_t, nvmlDeviceAttributes_t,
    nvmlEncoderSessionInfo_t, nvmlFBCSessionInfo_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlProcessDetail_v1_t, nvmlProcessDetailList_t, nvmlProcessInfo_t, nvmlProcessInfo_v1_t,
    nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t,
    nvmlProcessesUtilizationInfo_t,
};

use crate::abi::{Code, Handle, NvmlResult, OutPtr, export, set_list};
use crate::mig::MigDevice;

/// `NVML_STRUCT_VERSION(Memory, 2)`.
const MEMORY_V2: c_uint = size_of::<nvmlMemory_v2_t>() as c_uint | 2 << 24;

/// Value of "not part of a MIG instance".
const NO_INSTANCE: c_uint = c_uint::MAX;

/// A sample of the utilization of a process.
struct Sample {
    pid: c_uint,
    percent: c_uint,
    /// Time of the real-time clock in us.
    at_us: u64,
}

/// The last reading of a process's kernels on a GPU.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    gpu_ns: u64,
    percent: c_uint,
}

/// Utilization of processes that are not of the fake CUDA, in percent.
const FOREIGN_PERCENT: c_uint = 50;

/// Interval of NVML's samples: earlier calls return the last sample.
const SAMPLE: Duration = Duration::from_millis(166);

/// Returns the last sample of each process. In a first call it is 0 percent, as for a process whose
/// first sample is not taken yet.
fn utilization(device: Handle) -> NvmlResult<Vec<Sample>> {
    static READINGS: Mutex<BTreeMap<(usize, c_uint), Reading>> = Mutex::new(BTreeMap::new());
    let device = device.device()?;
    let mut readings = READINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = device.machine.processes(&device);
    readings.retain(|(gpu, pid), _| {
        *gpu != device.index || found.iter().any(|process| process.pid == *pid)
    });
    let now = Instant::now();
    let read = found.into_iter().map(|process| {
        let Some(gpu_ns) = process.gpu_ns else {
            return Sample { pid: process.pid, percent: FOREIGN_PERCENT, at_us: real_time_us() };
        };
        let new = Reading { at: now, gpu_ns, percent: 0 };
        let reading = readings.entry((device.index, process.pid)).or_insert(new);
        let elapsed = now.duration_since(reading.at);
        if elapsed >= SAMPLE {
            let used = Duration::from_nanos(gpu_ns.saturating_sub(reading.gpu_ns));
            let percent = (used.as_secs_f64() / elapsed.as_secs_f64() * 100.0).min(100.0);
            *reading = Reading { percent: percent as c_uint, ..new };
        }
        let age_us = u64::try_from(now.duration_since(reading.at).as_micros()).unwrap_or(0);
        let at_us = real_time_us().saturating_sub(age_us);
        Sample { pid: process.pid, percent: reading.percent, at_us }
    });
    Ok(read.collect())
}

fn real_time_us() -> u64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX)
}

fn processes(device: Handle) -> NvmlResult<Vec<nvmlProcessInfo_t>> {
    let device = device.device()?;
    let held = device.machine.processes(&device).into_iter().map(|process| nvmlProcessInfo_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
        gpuInstanceId: NO_INSTANCE,
        computeInstanceId: NO_INSTANCE,
    });
    Ok(held.collect())
}

export! {
    fn nvmlDeviceGetMemoryInfo(device: Handle, memory: OutPtr<nvmlMemory_t>) {
        if let Some(mig) = MigDevice::of(device)? {
            let total = mig.memory_mib << 20;
            return memory.set(nvmlMemory_t { total, free: total, used: 0 });
        }
        let device = device.device()?;
        let state = device.machine.memory(&device);
        // Version 1 counts the driver's reserve as used.
        memory.set(nvmlMemory_t { total: state.total, free: state.free, used: state.used + state.reserved })
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: OutPtr<nvmlMemory_v2_t>) {
        let device = device.device()?;
        if memory.get()?.version != MEMORY_V2 {
            return Err(Code::ArgumentVersionMismatch);
        }
        let state = device.machine.memory(&device);
        memory.set(nvmlMemory_v2_t {
            version: MEMORY_V2,
            total: state.total,
            reserved: state.reserved,
            free: state.free,
            used: state.used,
        })
    }
    fn nvmlDeviceGetBAR1MemoryInfo(device: Handle, memory: OutPtr<nvmlBAR1Memory_t>) {
        // Data-centre GPUs map all of their memory, rounded up to a power of two.
        let total = device.device()?.model.memory_bytes().next_power_of_two();
        memory.set(nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - (1 << 20), bar1Used: 1 << 20 })
    }
    fn nvmlDeviceGetComputeRunningProcesses(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_v1_t>) {
        set_list(count, infos, processes(device)?.into_iter().map(first_version).collect())
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_v1_t>) {
        set_list(count, infos, processes(device)?.into_iter().map(first_version).collect())
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_v1_t>) {
        set_list(count, infos, processes(device)?.into_iter().map(first_version).collect())
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, info: OutPtr<nvmlProcessDetailList_t>) {
        let mut list = info.get()?;
        if list.version != size_of::<nvmlProcessDetailList_t>() as c_uint | 1 << 24 {
            return Err(Code::ArgumentVersionMismatch);
        }
        let detail = |info: nvmlProcessInfo_t| nvmlProcessDetail_v1_t {
            pid: info.pid,
            usedGpuMemory: info.usedGpuMemory,
            gpuInstanceId: info.gpuInstanceId,
            computeInstanceId: info.computeInstanceId,
            usedGpuCcProtectedMemory: 0,
        };
        let details = processes(device)?.into_iter().map(detail).collect();
        let (count, array) = (OutPtr::to(&mut list.numProcArrayEntries), OutPtr::at_pointer(list.procArray));
        let answer = set_list(count, array, details);
        info.set(list)?;
        answer
    }
    fn nvmlDeviceGetAccountingPids(device: Handle, count: OutPtr<c_uint>, pids: OutPtr<c_uint>) {
        set_list(count, pids, processes(device)?.into_iter().map(|process| process.pid).collect())
    }
    fn nvmlDeviceGetAccountingStats(device: Handle, pid: c_uint, stats: OutPtr<nvmlAccountingStats_t>) {
        let found = processes(device)?.into_iter().find(|process| process.pid == pid).ok_or(Code::NotFound)?;
        stats.set(nvmlAccountingStats_t {
            gpuUtilization: 50,
            memoryUtilization: 50,
            maxMemoryUsage: found.usedGpuMemory,
            time: 0,
            startTime: 0,
            isRunning: 1,
            reserved: [0; 5],
        })
    }
    fn nvmlDeviceGetEncoderSessions(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlEncoderSessionInfo_t>) {
        let session = |process: nvmlProcessInfo_t| nvmlEncoderSessionInfo_t { pid: process.pid, ..EMPTY_SESSION };
        set_list(count, infos, processes(device)?.into_iter().map(session).collect())
    }
    fn nvmlDeviceGetFBCSessions(device: Handle, count: OutPtr<c_uint>, infos: OutPtr<nvmlFBCSessionInfo_t>) {
        let session = |process: nvmlProcessInfo_t| nvmlFBCSessionInfo_t { pid: process.pid, ..EMPTY_CAPTURE };
        set_list(count, infos, processes(device)?.into_iter().map(session).collect())
    }
    fn nvmlDeviceGetProcessUtilization(
        device: Handle,
        samples: OutPtr<nvmlProcessUtilizationSample_t>,
        count: OutPtr<c_uint>,
        since: u64,
    ) {
        let sample = |Sample { pid, percent, at_us }| nvmlProcessUtilizationSample_t {
            pid,
            timeStamp: since.max(at_us),
            smUtil: percent,
            memUtil: percent / 2,
            encUtil: 0,
            decUtil: 0,
        };
        set_list(count, samples, utilization(device)?.into_iter().map(sample).collect())
    }
    fn nvmlDeviceGetProcessesUtilizationInfo(device: Handle, info: OutPtr<nvmlProcessesUtilizationInfo_t>) {
        let mut list = info.get()?;
        if list.version != size_of::<nvmlProcessesUtilizationInfo_t>() as c_uint | 1 << 24 {
            return Err(Code::ArgumentVersionMismatch);
        }
        let sample = |Sample { pid, percent, at_us }| nvmlProcessUtilizationInfo_v1_t {
            timeStamp: at_us,
            pid,
            smUtil: percent,
            memUtil: percent / 2,
            encUtil: 0,
            decUtil: 0,
            jpgUtil: 0,
            ofaUtil: 0,
        };
        let samples = utilization(device)?.into_iter().map(sample).collect();
        let (count, array) = (OutPtr::to(&mut list.processSamplesCount), OutPtr::at_pointer(list.procUtilArray));
        let answer = set_list(count, array, samples);
        info.set(list)?;
        answer
    }
    fn nvmlDeviceGetAttributes_v2(device: Handle, info: OutPtr<nvmlDeviceAttributes_t>) {
        let device = device.device()?;
        info.set(nvmlDeviceAttributes_t {
            multiprocessorCount: device.model.multiprocessors,
            sharedCopyEngineCount: 8,
            sharedDecoderCount: 7,
            sharedEncoderCount: 0,
            sharedJpegCount: 7,
            sharedOfaCount: 1,
            gpuInstanceSliceCount: 0,
            computeInstanceSliceCount: 0,
            memorySizeMB: device.machine.memory(&device).total >> 20,
        })
    }
    fn nvmlDeviceGetConfComputeMemSizeInfo(device: Handle, sizes: OutPtr<nvmlConfComputeMemSizeInfo_t>) {
        let device = device.device()?;
        let total = device.machine.memory(&device).total;
        sizes.set(nvmlConfComputeMemSizeInfo_t { protectedMemSizeKib: total >> 10, unprotectedMemSizeKib: total >> 10 })
    }
    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(device: Handle, memory: OutPtr<nvmlMemory_t>) {
        let device = device.device()?;
        let state = device.machine.memory(&device);
        memory.set(nvmlMemory_t { total: state.total, free: state.free, used: state.used + state.reserved })
    }
}

fn first_version(info: nvmlProcessInfo_t) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: info.pid, usedGpuMemory: info.usedGpuMemory }
}

/// Session of each process, so that tests see which processes are listed.
const EMPTY_SESSION: nvmlEncoderSessionInfo_t = nvmlEncoderSessionInfo_t {
    sessionId: 1,
    pid: 0,
    vgpuInstance: 0,
    codecType: 0,
    hResolution: 1920,
    vResolution: 1080,
    averageFps: 30,
    averageLatency: 1000,
};

/// Capture session of each process; see [`EMPTY_SESSION`].
const EMPTY_CAPTURE: nvmlFBCSessionInfo_t = nvmlFBCSessionInfo_t {
    sessionId: 1,
    pid: 0,
    vgpuInstance: 0,
    displayOrdinal: 0,
    sessionType: 0,
    sessionFlags: 0,
    hMaxResolution: 1920,
    vMaxResolution: 1080,
    hResolution: 1920,
    vResolution: 1080,
    averageFPS: 30,
    averageLatency: 1000,
};

/// Layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlMemory_t>() == 24);
    assert!(size_of::<nvmlMemory_v2_t>() == 40);
    assert!(std::mem::offset_of!(nvmlMemory_v2_t, total) == 8);
    assert!(std::mem::offset_of!(nvmlMemory_v2_t, used) == 32);
    assert!(size_of::<nvmlProcessInfo_v1_t>() == 16);
    assert!(size_of::<nvmlProcessInfo_t>() == 24);
    assert!(std::mem::offset_of!(nvmlProcessInfo_t, gpuInstanceId) == 16);
};
