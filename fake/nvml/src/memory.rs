//! Memory, and the processes that hold it.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlBAR1Memory_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlProcessInfo_t, nvmlProcessInfo_v1_t,
};

use crate::abi::{Answer, Code, Handle, Out, export, set_list};

/// `NVML_STRUCT_VERSION(Memory, 2)`.
const MEMORY_V2: c_uint = size_of::<nvmlMemory_v2_t>() as c_uint | 2 << 24;

/// "Not part of a MIG instance".
const NO_INSTANCE: c_uint = c_uint::MAX;

fn processes(device: Handle) -> Answer<Vec<nvmlProcessInfo_t>> {
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
    fn nvmlDeviceGetMemoryInfo(device: Handle, memory: Out<nvmlMemory_t>) {
        let device = device.device()?;
        let state = device.machine.memory(&device);
        // The first version counts what the driver keeps as used.
        memory.set(nvmlMemory_t { total: state.total, free: state.free, used: state.used + state.reserved })
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: Out<nvmlMemory_v2_t>) {
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
    fn nvmlDeviceGetBAR1MemoryInfo(device: Handle, memory: Out<nvmlBAR1Memory_t>) {
        // Data-centre GPUs map all of their memory: the next power of two.
        let total = device.device()?.model.memory_bytes().next_power_of_two();
        memory.set(nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - (1 << 20), bar1Used: 1 << 20 })
    }
    fn nvmlDeviceGetComputeRunningProcesses(device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v1_t>) {
        let first_version =
            |info: nvmlProcessInfo_t| nvmlProcessInfo_v1_t { pid: info.pid, usedGpuMemory: info.usedGpuMemory };
        set_list(count, infos, processes(device)?.into_iter().map(first_version).collect())
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_t>) {
        set_list(count, infos, processes(device)?)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Handle, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_t>) {
        device.device()?;
        count.set(0)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Handle, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_t>) {
        device.device()?;
        count.set(0)
    }
}

/// The layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlMemory_t>() == 24);
    assert!(size_of::<nvmlMemory_v2_t>() == 40);
    assert!(std::mem::offset_of!(nvmlMemory_v2_t, total) == 8);
    assert!(std::mem::offset_of!(nvmlMemory_v2_t, used) == 32);
    assert!(size_of::<nvmlProcessInfo_v1_t>() == 16);
    assert!(size_of::<nvmlProcessInfo_t>() == 24);
    assert!(std::mem::offset_of!(nvmlProcessInfo_t, gpuInstanceId) == 16);
};
