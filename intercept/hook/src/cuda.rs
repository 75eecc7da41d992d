//! What is known of the driver API: results, handles, and the few functions that are called without
//! standing before them.

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

/// Which form of a function was called; it says what NULL means for a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// NULL is the stream that all others wait for.
    Legacy,
    /// NULL is the thread's own.
    PerThread,
}

/// A function that is called for what it knows.
pub(crate) struct Helper {
    symbol: &'static CStr,
    /// Its address and the library's when it was looked up.
    address: AtomicUsize,
}

impl Helper {
    pub(crate) const fn new(symbol: &str) -> Self {
        Self { symbol: symbols::get(symbol).symbol.c, address: AtomicUsize::new(0) }
    }

    pub(crate) fn address(&self) -> Option<usize> {
        match self.address.load(Ordering::Acquire) {
            0 => {
                let found = Library::driver(Of::Cuda)?.function(self.symbol)?;
                self.address.store(found, Ordering::Release);
                Some(found)
            }
            known => Some(known),
        }
    }
}

impl Helper {
    /// Looks it up anew the next time.
    pub(crate) fn forget(&self) {
        self.address.store(0, Ordering::Release);
    }
}

static CTX_GET_DEVICE: Helper = Helper::new("cuCtxGetDevice");
static CTX_GET_CURRENT: Helper = Helper::new("cuCtxGetCurrent");
static DEVICE_GET_UUID: Helper = Helper::new("cuDeviceGetUuid");
static POINTER_GET_ATTRIBUTE: Helper = Helper::new("cuPointerGetAttribute");
static PRIMARY_GET_STATE: Helper = Helper::new("cuDevicePrimaryCtxGetState");
static PRIMARY_RETAIN: Helper = Helper::new("cuDevicePrimaryCtxRetain");
static PRIMARY_RELEASE: Helper = Helper::new("cuDevicePrimaryCtxRelease_v2");
static MEM_FREE: Helper = Helper::new("cuMemFree_v2");
static POOL_GET_ATTRIBUTE: Helper = Helper::new("cuMemPoolGetAttribute");
static POOL_TRIM: Helper = Helper::new("cuMemPoolTrimTo");
static DEVICE_GET_POOL: Helper = Helper::new("cuDeviceGetMemPool");
static ALLOCATION_PROPERTIES: Helper = Helper::new("cuMemGetAllocationPropertiesFromHandle");
static ADDRESS_RANGE: Helper = Helper::new("cuMemGetAddressRange_v2");
static IS_CAPTURING: Helper = Helper::new("cuStreamIsCapturing");
static IS_CAPTURING_PER_THREAD: Helper = Helper::new("cuStreamIsCapturing_ptsz");
static DEVICE_GET_ATTRIBUTE: Helper = Helper::new("cuDeviceGetAttribute");
static CTX_GET_LIMIT: Helper = Helper::new("cuCtxGetLimit");
static EXCHANGE_MODE: Helper = Helper::new("cuThreadExchangeStreamCaptureMode");
static DRIVER_GET_VERSION: Helper = Helper::new("cuDriverGetVersion");

/// Forgets where the helpers are: the driver was loaded anew.
pub(crate) fn forget_helpers() {
    for helper in [
        &CTX_GET_DEVICE,
        &CTX_GET_CURRENT,
        &DEVICE_GET_UUID,
        &POINTER_GET_ATTRIBUTE,
        &PRIMARY_GET_STATE,
        &PRIMARY_RETAIN,
        &PRIMARY_RELEASE,
        &MEM_FREE,
        &POOL_GET_ATTRIBUTE,
        &POOL_TRIM,
        &DEVICE_GET_POOL,
        &ALLOCATION_PROPERTIES,
        &ADDRESS_RANGE,
        &IS_CAPTURING,
        &IS_CAPTURING_PER_THREAD,
        &DEVICE_GET_ATTRIBUTE,
        &CTX_GET_LIMIT,
        &EXCHANGE_MODE,
        &DRIVER_GET_VERSION,
    ] {
        helper.forget();
    }
    crate::compute::forget_helpers();
    crate::graph::forget_helpers();
}

/// The CUDA version of the driver, as 1000 x major + 10 x minor.
pub(crate) fn driver_version() -> Option<c_int> {
    type Real = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(DRIVER_GET_VERSION.address()?) };
    let mut version = 0;
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut version) } == SUCCESS).then_some(version)
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
    // SAFETY: an int.
    unsafe { pointer_attribute(pointer, DEVICE_ORDINAL) }
}

/// Whether memory moves between the host and GPUs. `None` where the driver does not say.
pub(crate) fn is_managed(pointer: Pointer) -> Option<bool> {
    /// `CU_POINTER_ATTRIBUTE_IS_MANAGED`
    const IS_MANAGED: c_int = 8;
    // SAFETY: a boolean, for which there is room in more than its byte.
    let managed: Option<c_uint> = unsafe { pointer_attribute(pointer, IS_MANAGED) };
    managed.map(|managed| managed != 0)
}

/// Whether memory is the host's, and stays there.
pub(crate) fn is_on_host(pointer: Pointer) -> bool {
    /// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`
    const MEMORY_TYPE: c_int = 2;
    /// `CU_MEMORYTYPE_HOST`
    const HOST: c_uint = 1;
    // SAFETY: an unsigned int.
    let kind: Option<c_uint> = unsafe { pointer_attribute(pointer, MEMORY_TYPE) };
    kind == Some(HOST) && is_managed(pointer) == Some(false)
}

/// The pool that memory is from.
pub(crate) fn pool_of(pointer: Pointer) -> Option<Handle> {
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`
    const POOL: c_int = 17;
    // SAFETY: a handle.
    let pool: usize = unsafe { pointer_attribute(pointer, POOL) }?;
    (pool != 0).then_some(pool as Handle)
}

/// What the driver says of a pointer.
///
/// # Safety
/// The attribute is a `T`.
unsafe fn pointer_attribute<T: Copy + Default>(pointer: Pointer, attribute: c_int) -> Option<T> {
    type Real = unsafe extern "C" fn(*mut c_void, c_int, Pointer) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(POINTER_GET_ATTRIBUTE.address()?) };
    let mut value = T::default();
    // SAFETY: by this function's contract the result fits.
    (unsafe { real((&raw mut value).cast(), attribute, pointer) } == SUCCESS).then_some(value)
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`: what a pool may keep when the program waits.
pub(crate) const POOL_THRESHOLD: c_int = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`: what a pool keeps.
pub(crate) const POOL_RESERVED: c_int = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`: what is out of it.
pub(crate) const POOL_USED: c_int = 7;

/// One of the pool's counters.
pub(crate) fn pool_attribute(pool: Handle, attribute: c_int) -> Option<u64> {
    type Real = unsafe extern "C" fn(Handle, c_int, *mut c_void) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(POOL_GET_ATTRIBUTE.address()?) };
    let mut bytes = 0_u64;
    // SAFETY: the counters are 64-bit.
    (unsafe { real(pool, attribute, (&raw mut bytes).cast()) } == SUCCESS).then_some(bytes)
}

/// Has a pool let go of what nobody holds.
pub(crate) fn trim_pool(pool: Handle) {
    type Real = unsafe extern "C" fn(Handle, usize) -> c_int;
    if let Some(address) = POOL_TRIM.address() {
        // SAFETY: the type is that of cuda.h.
        unsafe { core::mem::transmute::<usize, Real>(address)(pool, 0) };
    }
}

/// The pool that streams of a device take from.
pub(crate) fn current_pool(device: Device) -> Option<Handle> {
    type Real = unsafe extern "C" fn(*mut Handle, Device) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(DEVICE_GET_POOL.address()?) };
    let mut pool = core::ptr::null_mut();
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut pool, device) } == SUCCESS && !pool.is_null()).then_some(pool)
}

/// Whether what is put on a stream becomes part of a graph.
pub(crate) fn is_capturing(stream: Handle, form: Form) -> bool {
    type Real = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
    /// `CU_STREAM_LEGACY`
    const LEGACY: usize = 1;
    let (helper, captures) = match form {
        // The stream that all others wait for cannot be captured, and must not be asked while
        // another is.
        Form::Legacy => (&IS_CAPTURING, stream as usize > LEGACY),
        Form::PerThread => (&IS_CAPTURING_PER_THREAD, stream as usize != LEGACY),
    };
    let Some(address) = helper.address().filter(|_| captures) else { return false };
    let mut status = 0;
    // SAFETY: the type is that of cuda.h; the result goes to a variable of ours.
    let result = unsafe { core::mem::transmute::<usize, Real>(address)(stream, &mut status) };
    result == SUCCESS && status != 0
}

/// A number that describes a device.
pub(crate) fn device_attribute(device: Device, attribute: c_int) -> Option<u64> {
    type Real = unsafe extern "C" fn(*mut c_int, c_int, Device) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(DEVICE_GET_ATTRIBUTE.address()?) };
    let mut value = 0;
    // SAFETY: the result goes to a variable of ours.
    let result = unsafe { real(&mut value, attribute, device) };
    u64::try_from(value).ok().filter(|_| result == SUCCESS)
}

/// Whether managed memory of a device moves while kernels run, and may be more than the device has:
/// not before Pascal, and not under Windows.
pub(crate) fn moves_managed_memory(device: Device) -> bool {
    /// `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`
    const CONCURRENT_MANAGED_ACCESS: c_int = 89;
    device_attribute(device, CONCURRENT_MANAGED_ACCESS).is_some_and(|value| value != 0)
}

/// A limit of the current context.
pub(crate) fn limit(which: c_uint) -> Option<usize> {
    type Real = unsafe extern "C" fn(*mut usize, c_uint) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(CTX_GET_LIMIT.address()?) };
    let mut value = 0;
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut value, which) } == SUCCESS).then_some(value)
}

/// What a handle of physical memory was made with; `false` where it is of something else.
pub(crate) fn allocation_properties(handle: u64, room: &mut [u64; 32]) -> bool {
    type Real = unsafe extern "C" fn(*mut c_void, u64) -> c_int;
    let Some(address) = ALLOCATION_PROPERTIES.address() else { return false };
    // SAFETY: the type is that of cuda.h, and there is more room than any of its versions has
    // properties.
    unsafe {
        core::mem::transmute::<usize, Real>(address)(room.as_mut_ptr().cast(), handle) == SUCCESS
    }
}

/// How long the memory is that begins at an address.
pub(crate) fn length_of(pointer: Pointer) -> Option<u64> {
    type Real = unsafe extern "C" fn(*mut Pointer, *mut usize, Pointer) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(ADDRESS_RANGE.address()?) };
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the results go to variables of ours.
    (unsafe { real(&mut base, &mut bytes, pointer) } == SUCCESS).then_some(bytes as u64)
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

/// The primary context of a device; only to be asked for while somebody retains it.
pub(crate) fn primary(device: Device) -> Option<usize> {
    type Retain = unsafe extern "C" fn(*mut Handle, Device) -> c_int;
    type Release = unsafe extern "C" fn(Device) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let retain = unsafe { core::mem::transmute::<usize, Retain>(PRIMARY_RETAIN.address()?) };
    // SAFETY: as above.
    let release = unsafe { core::mem::transmute::<usize, Release>(PRIMARY_RELEASE.address()?) };
    let mut context = core::ptr::null_mut();
    // SAFETY: the result goes to a variable of ours.
    if unsafe { retain(&mut context, device) } != SUCCESS {
        return None;
    }
    // SAFETY: retained just before.
    unsafe { release(device) };
    Some(context as usize)
}

/// Gives memory back that was got in vain.
pub(crate) fn free(pointer: Pointer) {
    type Real = unsafe extern "C" fn(Pointer) -> c_int;
    if let Some(address) = MEM_FREE.address() {
        // SAFETY: the type is that of cuda.h; the program has not seen the pointer.
        unsafe { core::mem::transmute::<usize, Real>(address)(pointer) };
    }
}

/// Runs something with the thread's capture mode relaxed: calls that a capture forbids neither fail
/// nor end it.
pub(crate) fn relaxed<T>(run: impl FnOnce() -> T) -> T {
    /// `CU_STREAM_CAPTURE_MODE_RELAXED`
    const RELAXED: c_int = 2;
    let before = exchange_capture_mode(RELAXED);
    let result = run();
    if let Some(before) = before {
        exchange_capture_mode(before);
    }
    result
}

/// Changes the thread's capture mode; answers what it was.
fn exchange_capture_mode(mode: c_int) -> Option<c_int> {
    type Real = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(EXCHANGE_MODE.address()?) };
    let mut mode = mode;
    // SAFETY: what it was goes to a variable of ours.
    (unsafe { real(&mut mode) } == SUCCESS).then_some(mode)
}
