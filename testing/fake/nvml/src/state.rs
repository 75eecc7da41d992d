//! State of a device: utilisation, clocks, power, temperature, modes, ECC, field values.

use std::ffi::{c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    field_id::{
        NVML_FI_DEV_ECC_DBE_AGG_TOTAL, NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
        NVML_FI_DEV_ECC_SBE_AGG_TOTAL, NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_FI_DEV_NVLINK_LINK_COUNT,
    },
    nvmlFieldValue_t, nvmlProcessUtilizationSample_t, nvmlUtilization_t, nvmlValue_t,
};
use tessera_fake_world::GpuCondition;

use crate::abi::{Code, Device, Handle, NvmlResult, OutPtr, export};

const CLOCK_MEMORY: c_uint = 2;
const CLOCKS: c_uint = 4;
const ERROR_CORRECTED: c_uint = 0;
const ERROR_UNCORRECTED: c_uint = 1;
const ON: c_uint = 1;
const VALUE_UNSIGNED_INT: c_uint = 1;
const VALUE_UNSIGNED_LONG_LONG: c_uint = 3;
/// Values of an idle GPU: degrees Celsius, and percent of its power limit.
const IDLE_DEGREES: u32 = 34;
const IDLE_POWER_PERCENT: u32 = 15;

impl Device {
    fn condition(&self) -> GpuCondition {
        self.control.gpu(&self.uuid).cloned().unwrap_or_default()
    }

    /// Returns the utilisation in percent, from the control file. Kernels of the fake CUDA only
    /// take modelled time.
    fn utilization(&self) -> u32 {
        self.condition().utilization.unwrap_or(0).min(100)
    }

    /// Returns the power in milliwatts: from idle to the limit, by utilisation.
    fn power(&self) -> u32 {
        let limit = self.model.power_watts * 1000;
        let idle = limit / 100 * IDLE_POWER_PERCENT;
        idle + (limit - idle) / 100 * self.utilization()
    }
}

fn clock(device: Handle, kind: c_uint, mhz: OutPtr<c_uint>) -> NvmlResult {
    let device = device.device()?;
    match kind {
        CLOCK_MEMORY => mhz.set(device.model.memory_clock_mhz),
        0..CLOCKS => mhz.set(device.model.sm_clock_mhz),
        _ => Err(Code::InvalidArgument),
    }
}

fn power_limit(device: Handle, milliwatts: OutPtr<c_uint>) -> NvmlResult {
    milliwatts.set(device.device()?.model.power_watts * 1000)
}

fn ecc_errors(device: &Device, kind: c_uint) -> NvmlResult<u64> {
    if !device.model.ecc {
        return Err(Code::NotSupported);
    }
    match kind {
        ERROR_CORRECTED => Ok(device.condition().ecc_corrected),
        ERROR_UNCORRECTED => Ok(device.condition().ecc_uncorrected),
        _ => Err(Code::InvalidArgument),
    }
}

/// Writes the value of one field in place.
fn field_value(device: &Device, value: &mut nvmlFieldValue_t) {
    let answer = match value.fieldId {
        NVML_FI_DEV_ECC_SBE_VOL_TOTAL | NVML_FI_DEV_ECC_SBE_AGG_TOTAL => {
            ecc_errors(device, ERROR_CORRECTED)
                .map(|count| (VALUE_UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: count }))
        }
        NVML_FI_DEV_ECC_DBE_VOL_TOTAL | NVML_FI_DEV_ECC_DBE_AGG_TOTAL => {
            ecc_errors(device, ERROR_UNCORRECTED)
                .map(|count| (VALUE_UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: count }))
        }
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            if device.machine.world().driver.knows_recovery_action() =>
        {
            Ok((
                VALUE_UNSIGNED_INT,
                nvmlValue_t { uiVal: device.condition().recovery_action as c_uint },
            ))
        }
        NVML_FI_DEV_NVLINK_LINK_COUNT => {
            Ok((VALUE_UNSIGNED_INT, nvmlValue_t { uiVal: device.model.nvlinks }))
        }
        _ => Err(Code::NotSupported),
    };
    value.timestamp = 0;
    value.latencyUsec = 0;
    match answer {
        Ok((kind, union)) => (value.nvmlReturn, value.valueType, value.value) = (0, kind, union),
        Err(code) => value.nvmlReturn = code as c_uint,
    }
}

export! {
    fn nvmlDeviceGetUtilizationRates(device: Handle, utilization: OutPtr<nvmlUtilization_t>) {
        let percent = device.device()?.utilization();
        utilization.set(nvmlUtilization_t { gpu: percent, memory: percent / 2 })
    }
    fn nvmlDeviceGetClock(device: Handle, kind: c_uint, _which: c_uint, mhz: OutPtr<c_uint>) { clock(device, kind, mhz) }
    fn nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, mhz: OutPtr<c_uint>) { clock(device, kind, mhz) }
    fn nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, mhz: OutPtr<c_uint>) { clock(device, kind, mhz) }
    fn nvmlDeviceGetMemoryBusWidth(device: Handle, bits: OutPtr<c_uint>) {
        bits.set(device.device()?.model.memory_bus_bits)
    }
    fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: OutPtr<c_uint>) { milliwatts.set(device.device()?.power()) }
    fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, milliwatts: OutPtr<c_uint>) { power_limit(device, milliwatts) }
    fn nvmlDeviceGetPowerManagementLimit(device: Handle, milliwatts: OutPtr<c_uint>) { power_limit(device, milliwatts) }
    fn nvmlDeviceGetPowerManagementDefaultLimit(device: Handle, milliwatts: OutPtr<c_uint>) {
        power_limit(device, milliwatts)
    }
    fn nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, degrees: OutPtr<c_uint>) {
        let device = device.device()?;
        // The only sensor is the die.
        if sensor != 0 {
            return Err(Code::InvalidArgument);
        }
        degrees.set(device.condition().temperature.unwrap_or(IDLE_DEGREES + device.utilization() / 3))
    }
    fn nvmlDeviceGetComputeMode(device: Handle, mode: OutPtr<c_uint>) {
        device.device()?;
        mode.set(0)
    }
    fn nvmlDeviceGetPersistenceMode(device: Handle, mode: OutPtr<c_uint>) {
        device.device()?;
        mode.set(ON)
    }
    fn nvmlDeviceGetEccMode(device: Handle, current: OutPtr<c_uint>, pending: OutPtr<c_uint>) {
        if !device.device()?.model.ecc {
            return Err(Code::NotSupported);
        }
        if pending.is_null() {
            return Err(Code::InvalidArgument);
        }
        current.set(ON)?;
        pending.set(ON)
    }
    fn nvmlDeviceGetTotalEccErrors(device: Handle, kind: c_uint, counter: c_uint, count: OutPtr<c_ulonglong>) {
        let device = device.device()?;
        // Volatile and aggregate counters.
        if counter > 1 {
            return Err(Code::InvalidArgument);
        }
        count.set(ecc_errors(&device, kind)?)
    }
    fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: OutPtr<nvmlFieldValue_t>) {
        let device = device.device()?;
        if count <= 0 {
            return Err(Code::InvalidArgument);
        }
        for position in 0..count as usize {
            let mut value = values.get_at(position)?;
            field_value(&device, &mut value);
            values.at(position).set(value)?;
        }
        Ok(())
    }
}

/// Layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlUtilization_t>() == 8);
    assert!(size_of::<nvmlFieldValue_t>() == 40);
    assert!(std::mem::offset_of!(nvmlFieldValue_t, value) == 32);
    assert!(size_of::<nvmlProcessUtilizationSample_t>() == 32);
};
