//! What is known of the driver API: results, handles, and the few functions that are called without standing before them.

use core::ffi::{CStr, c_int, c_uint, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use tessera_intercept_symbols as symbols;

use crate::elf::Library;
use crate::route::Of;

/// `CUresult`, as far as it is answered here.
pub(crate) const SUCCESS: c_int = 0;
/// See [`SUCCESS`].
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// See [`SUCCESS`].
pub(crate) const NOT_FOUND: c_int = 500;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const NVML_FUNCTION_NOT_FOUND: c_int = 13;

/// What a function answers that the library does not have.
pub(crate) const fn absent(of: Of) -> c_int {
    match of {
        Of::Cuda => NOT_FOUND,
        Of::Nvml => NVML_FUNCTION_NOT_FOUND,
    }
}

/// `CUdeviceptr`.
pub(crate) type Pointer = u64;
/// `CUdevice`.
pub(crate) type Device = c_int;
/// `CUcontext`, `CUstream` and others: opaque.
pub(crate) type Handle = *mut c_void;

/// A function that is called for what it knows.
struct Helper {
    symbol: &'static CStr,
    /// Its address and the library's when it was looked up.
    address: AtomicUsize,
}

impl Helper {
    const fn new(symbol: &str) -> Self {
        Self { symbol: symbols::get(symbol).symbol.c, address: AtomicUsize::new(0) }
    }

    fn address(&self) -> Option<usize> {
        match self.address.load(Ordering::Acquire) {
            0 => {
                let found = Library::loaded(b"libcuda.so.")?.function(self.symbol)?;
                self.address.store(found, Ordering::Release);
                Some(found)
            }
            known => Some(known),
        }
    }
}

static CTX_GET_DEVICE: Helper = Helper::new("cuCtxGetDevice");
static CTX_GET_CURRENT: Helper = Helper::new("cuCtxGetCurrent");
static DEVICE_GET_UUID: Helper = Helper::new("cuDeviceGetUuid");
static POINTER_GET_ATTRIBUTE: Helper = Helper::new("cuPointerGetAttribute");
static PRIMARY_GET_STATE: Helper = Helper::new("cuDevicePrimaryCtxGetState");
static MEM_FREE: Helper = Helper::new("cuMemFree_v2");

/// Forgets where the helpers are: the driver was loaded anew.
pub(crate) fn forget_helpers() {
    for helper in [
        &CTX_GET_DEVICE,
        &CTX_GET_CURRENT,
        &DEVICE_GET_UUID,
        &POINTER_GET_ATTRIBUTE,
        &PRIMARY_GET_STATE,
        &MEM_FREE,
    ] {
        helper.address.store(0, Ordering::Release);
    }
}

/// The device of the current context.
pub(crate) fn current_device() -> Option<Device> {
    type Real = unsafe extern "C" fn(*mut Device) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(CTX_GET_DEVICE.address()?) };
    let mut device = -1;
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut device) } == SUCCESS).then_some(device)
}

/// The current context, as a number.
pub(crate) fn current_context() -> Option<usize> {
    type Real = unsafe extern "C" fn(*mut Handle) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(CTX_GET_CURRENT.address()?) };
    let mut context = core::ptr::null_mut();
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut context) } == SUCCESS && !context.is_null()).then_some(context as usize)
}

/// The UUID of a device.
pub(crate) fn uuid(device: Device) -> Option<[u8; 16]> {
    type Real = unsafe extern "C" fn(*mut [u8; 16], Device) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(DEVICE_GET_UUID.address()?) };
    let mut bytes = [0; 16];
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut bytes, device) } == SUCCESS).then_some(bytes)
}

/// The device that memory lies on.
pub(crate) fn device_of(pointer: Pointer) -> Option<Device> {
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
    const DEVICE_ORDINAL: c_int = 9;
    type Real = unsafe extern "C" fn(*mut c_void, c_int, Pointer) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(POINTER_GET_ATTRIBUTE.address()?) };
    let mut device: Device = -1;
    // SAFETY: the result is an int, for which there is room.
    (unsafe { real((&raw mut device).cast(), DEVICE_ORDINAL, pointer) } == SUCCESS).then_some(device)
}

/// Whether the primary context of a device is alive.
pub(crate) fn primary_is_active(device: Device) -> Option<bool> {
    type Real = unsafe extern "C" fn(Device, *mut c_uint, *mut c_int) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(PRIMARY_GET_STATE.address()?) };
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the results go to variables of ours.
    (unsafe { real(device, &mut flags, &mut active) } == SUCCESS).then_some(active != 0)
}

/// Gives memory back that was got in vain.
pub(crate) fn free(pointer: Pointer) {
    type Real = unsafe extern "C" fn(Pointer) -> c_int;
    if let Some(address) = MEM_FREE.address() {
        // SAFETY: the type is that of cuda.h; the program has not seen the pointer.
        unsafe { core::mem::transmute::<usize, Real>(address)(pointer) };
    }
}
