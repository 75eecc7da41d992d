//! NVML as the interceptor uses it: results, and calls of functions that it does not hook.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::str::FromStr as _;

use tessera_intercept_abi::GpuUuid;

use super::function::driver_functions;

/// `nvmlDevice_t`.
pub(crate) type Device = *mut c_void;

/// `NVML_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `NVML_ERROR_INVALID_ARGUMENT`.
pub(crate) const INVALID_ARGUMENT: c_int = 2;
/// `NVML_ERROR_NOT_FOUND`.
pub(crate) const NOT_FOUND: c_int = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
pub(crate) const INSUFFICIENT_SIZE: c_int = 7;

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_ROOM: usize = 96;

driver_functions! {
    fn nvmlDeviceGetUUID(device: Device, uuid: *mut c_char, length: c_uint);
    fn nvmlDeviceGetCudaComputeCapability(device: Device, major: *mut c_int, minor: *mut c_int);
}

/// Returns the UUID of a device as NVML formats it. It is not cached: programs initialize and shut
/// down NVML, and handles change their meaning.
///
/// # Errors
/// Returns NVML's own error, for example for an invalid device.
pub(crate) fn uuid_text(device: Device) -> Result<[u8; UUID_ROOM], c_int> {
    let mut text = [0_u8; UUID_ROOM];
    // SAFETY: the buffer has this length.
    match unsafe { nvmlDeviceGetUUID(device, text.as_mut_ptr().cast(), UUID_ROOM as c_uint) } {
        SUCCESS => Ok(text),
        error => Err(error),
    }
}

/// Returns the UUID of a device.
pub(crate) fn uuid(device: Device) -> Option<GpuUuid> {
    let text = uuid_text(device).ok()?;
    GpuUuid::from_str(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?).ok()
}

/// Returns true if managed memory of a device may be larger than the device: from Pascal on. CUDA,
/// which would answer that, may not be loaded.
pub(crate) fn moves_managed_memory(device: Device) -> bool {
    const PASCAL: c_int = 6;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the results go to local variables.
    let result = unsafe { nvmlDeviceGetCudaComputeCapability(device, &mut major, &mut minor) };
    result == SUCCESS && major >= PASCAL
}
