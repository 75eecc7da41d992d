//! CUDA driver API as the interceptor uses it: results, handles, and calls of functions that it
//! does not hook or must not call through its hooks.

use core::ffi::{c_int, c_uint, c_void};

use super::function::driver_functions;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_FOUND`.
pub(crate) const NOT_FOUND: c_int = 500;

/// `CUdeviceptr`.
pub(crate) type Pointer = u64;
/// `CUdevice`.
pub(crate) type Device = c_int;
/// `CUcontext`, `CUstream` and others: opaque.
pub(crate) type Handle = *mut c_void;

/// Form of a called function: it defines the meaning of a NULL stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// NULL is the legacy default stream.
    Legacy,
    /// NULL is the per-thread default stream.
    PerThread,
}

driver_functions! {
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuCtxGetDevice(device: *mut Device);
    fn cuCtxGetLimit(value: *mut usize, limit: c_uint);
    fn cuArrayDestroy(array: Handle);
    fn cuDestroyExternalMemory(memory: Handle);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: Device);
    fn cuDeviceGetGraphMemAttribute(device: Device, attribute: c_int, value: *mut c_void);
    fn cuDeviceGetMemPool(pool: *mut Handle, device: Device);
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: Device);
    fn cuDeviceGraphMemTrim(device: Device);
    fn cuDevicePrimaryCtxGetState(device: Device, flags: *mut c_uint, active: *mut c_int);
    fn cuDevicePrimaryCtxRelease_v2(device: Device);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: Device);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGraphChildGraphNodeGetGraph(node: Handle, graph: *mut Handle);
    fn cuGraphExecDestroy(graph: Handle);
    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize);
    fn cuGraphMemAllocNodeGetParams(node: Handle, parameters: *mut c_void);
    fn cuGraphNodeGetType(node: Handle, kind: *mut c_uint);
    fn cuIpcCloseMemHandle(pointer: Pointer);
    fn cuMemAllocManaged(pointer: *mut Pointer, bytes: usize, flags: c_uint);
    fn cuMemFree_v2(pointer: Pointer);
    fn cuMemGetAddressRange_v2(base: *mut Pointer, bytes: *mut usize, pointer: Pointer);
    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut c_void, handle: u64);
    fn cuMemPoolDestroy(pool: Handle);
    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut c_void);
    fn cuMemPoolTrimTo(pool: Handle, keep: usize);
    fn cuMemRelease(handle: u64);
    fn cuMipmappedArrayDestroy(array: Handle);
    fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, pointer: Pointer);
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int);
    fn cuStreamIsCapturing_ptsz(stream: Handle, status: *mut c_int);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
}

/// Returns the CUDA version of the driver, as 1000 x major + 10 x minor.
pub(crate) fn driver_version() -> Option<c_int> {
    let mut version = 0;
    // SAFETY: the result goes to a local variable.
    (unsafe { cuDriverGetVersion(&mut version) } == SUCCESS).then_some(version)
}

/// Returns the device of the current context.
pub(crate) fn current_device() -> Option<Device> {
    let mut device = -1;
    // SAFETY: the result goes to a local variable.
    (unsafe { cuCtxGetDevice(&mut device) } == SUCCESS).then_some(device)
}

/// Returns the current context as a number.
pub(crate) fn current_context() -> Option<usize> {
    let mut context = core::ptr::null_mut();
    // SAFETY: the result goes to a local variable.
    (unsafe { cuCtxGetCurrent(&mut context) } == SUCCESS && !context.is_null())
        .then_some(context as usize)
}

/// Returns the UUID of a device.
pub(crate) fn uuid(device: Device) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    // SAFETY: the result goes to a local variable.
    (unsafe { cuDeviceGetUuid(&mut bytes, device) } == SUCCESS).then_some(bytes)
}

/// Returns the device of memory.
pub(crate) fn device_of(pointer: Pointer) -> Option<Device> {
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
    const DEVICE_ORDINAL: c_int = 9;
    // SAFETY: an int.
    unsafe { pointer_attribute(pointer, DEVICE_ORDINAL) }
}

/// Returns true if memory is managed: it moves between the host and GPUs. `None` if the driver does
/// not answer.
pub(crate) fn is_managed(pointer: Pointer) -> Option<bool> {
    /// `CU_POINTER_ATTRIBUTE_IS_MANAGED`
    const IS_MANAGED: c_int = 8;
    // SAFETY: a boolean, which needs less room than this.
    let managed: Option<c_uint> = unsafe { pointer_attribute(pointer, IS_MANAGED) };
    managed.map(|managed| managed != 0)
}

/// Returns true if memory is host memory that does not move.
pub(crate) fn is_on_host(pointer: Pointer) -> bool {
    /// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`
    const MEMORY_TYPE: c_int = 2;
    /// `CU_MEMORYTYPE_HOST`
    const HOST: c_uint = 1;
    // SAFETY: an unsigned int.
    let kind: Option<c_uint> = unsafe { pointer_attribute(pointer, MEMORY_TYPE) };
    kind == Some(HOST) && is_managed(pointer) == Some(false)
}

/// Returns the pool that memory was allocated from.
pub(crate) fn pool_of(pointer: Pointer) -> Option<Handle> {
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`
    const POOL: c_int = 17;
    // SAFETY: a handle.
    let pool: usize = unsafe { pointer_attribute(pointer, POOL) }?;
    (pool != 0).then_some(pool as Handle)
}

/// Returns an attribute of a pointer.
///
/// # Safety
/// The attribute is a `T`.
unsafe fn pointer_attribute<T: Copy + Default>(pointer: Pointer, attribute: c_int) -> Option<T> {
    let mut value = T::default();
    // SAFETY: by this function's contract the result fits.
    let result = unsafe { cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer) };
    (result == SUCCESS).then_some(value)
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`: bytes that a pool keeps when the program synchronizes.
pub(crate) const POOL_THRESHOLD: c_int = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`: bytes that a pool has taken.
pub(crate) const POOL_RESERVED: c_int = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`: bytes allocated from a pool.
pub(crate) const POOL_USED: c_int = 7;

/// Returns one of the 64-bit attributes of a pool.
pub(crate) fn pool_attribute(pool: Handle, attribute: c_int) -> Option<u64> {
    let mut bytes = 0_u64;
    // SAFETY: these attributes have 64 bits.
    let result = unsafe { cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) };
    (result == SUCCESS).then_some(bytes)
}

/// Releases the unused memory of a pool.
pub(crate) fn trim_pool(pool: Handle) {
    // SAFETY: a pool, which is not destroyed meanwhile.
    unsafe { cuMemPoolTrimTo(pool, 0) };
}

/// Returns the current pool of a device.
pub(crate) fn current_pool(device: Device) -> Option<Handle> {
    let mut pool = core::ptr::null_mut();
    // SAFETY: the result goes to a local variable.
    (unsafe { cuDeviceGetMemPool(&mut pool, device) } == SUCCESS && !pool.is_null()).then_some(pool)
}

/// Returns true if work on a stream becomes part of a graph.
pub(crate) fn is_capturing(stream: Handle, form: Form) -> bool {
    /// `CU_STREAM_LEGACY`
    const LEGACY: usize = 1;
    // The legacy default stream cannot capture, and must not be queried while another stream does.
    let can_capture = match form {
        Form::Legacy => stream as usize > LEGACY,
        Form::PerThread => stream as usize != LEGACY,
    };
    if !can_capture {
        return false;
    }
    let mut status = 0;
    // SAFETY: the result goes to a local variable.
    let result = unsafe {
        match form {
            Form::Legacy => cuStreamIsCapturing(stream, &mut status),
            Form::PerThread => cuStreamIsCapturing_ptsz(stream, &mut status),
        }
    };
    result == SUCCESS && status != 0
}

/// Returns an attribute of a device.
pub(crate) fn device_attribute(device: Device, attribute: c_int) -> Option<u64> {
    let mut value = 0;
    // SAFETY: the result goes to a local variable.
    let result = unsafe { cuDeviceGetAttribute(&mut value, attribute, device) };
    u64::try_from(value).ok().filter(|_| result == SUCCESS)
}

/// Returns true if managed memory of a device moves while kernels run, and may be larger than the
/// device: from Pascal on, and not under Windows.
pub(crate) fn moves_managed_memory(device: Device) -> bool {
    /// `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`
    const CONCURRENT_MANAGED_ACCESS: c_int = 89;
    device_attribute(device, CONCURRENT_MANAGED_ACCESS).is_some_and(|value| value != 0)
}

/// Returns a limit of the current context.
pub(crate) fn limit(which: c_uint) -> Option<usize> {
    let mut value = 0;
    // SAFETY: the result goes to a local variable.
    (unsafe { cuCtxGetLimit(&mut value, which) } == SUCCESS).then_some(value)
}

/// Reads the allocation properties of a handle of physical memory; returns false for other handles.
pub(crate) fn allocation_properties(handle: u64, room: &mut [u64; 32]) -> bool {
    // SAFETY: there is more room than any version of the properties needs.
    unsafe { cuMemGetAllocationPropertiesFromHandle(room.as_mut_ptr().cast(), handle) == SUCCESS }
}

/// Returns the bytes of the allocation at an address.
pub(crate) fn length_of(pointer: Pointer) -> Option<u64> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the results go to local variables.
    let result = unsafe { cuMemGetAddressRange_v2(&mut base, &mut bytes, pointer) };
    (result == SUCCESS).then_some(bytes as u64)
}

/// Returns true if the primary context of a device is active.
pub(crate) fn primary_is_active(device: Device) -> Option<bool> {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the results go to local variables.
    let result = unsafe { cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    (result == SUCCESS).then_some(active != 0)
}

/// Returns the primary context of a device, which another holder retains.
pub(crate) fn primary(device: Device) -> Option<usize> {
    let mut context = core::ptr::null_mut();
    // SAFETY: the result goes to a local variable.
    if unsafe { cuDevicePrimaryCtxRetain(&mut context, device) } != SUCCESS {
        return None;
    }
    // SAFETY: retained just before.
    unsafe { cuDevicePrimaryCtxRelease_v2(device) };
    Some(context as usize)
}

/// Allocates managed memory that every stream of every GPU may use.
///
/// # Safety
/// `out` is where the program wants the pointer, or NULL.
pub(crate) unsafe fn allocate_managed(out: *mut Pointer, bytes: usize) -> c_int {
    /// `CU_MEM_ATTACH_GLOBAL`
    const ATTACH_GLOBAL: c_uint = 1;
    // SAFETY: by this function's contract.
    unsafe { cuMemAllocManaged(out, bytes, ATTACH_GLOBAL) }
}

/// Frees memory that the program has not seen.
pub(crate) fn free(pointer: Pointer) {
    // SAFETY: by this function's contract.
    unsafe { cuMemFree_v2(pointer) };
}

/// Releases a handle of physical memory that the program has not seen.
pub(crate) fn release_physical(handle: u64) {
    // SAFETY: by this function's contract.
    unsafe { cuMemRelease(handle) };
}

/// Destroys a pool that the program has not seen.
pub(crate) fn destroy_pool(pool: Handle) {
    // SAFETY: by this function's contract.
    unsafe { cuMemPoolDestroy(pool) };
}

/// Destroys an array that the program has not seen.
pub(crate) fn destroy_array(array: Handle) {
    // SAFETY: by this function's contract.
    unsafe { cuArrayDestroy(array) };
}

/// Destroys a mipmapped array that the program has not seen.
pub(crate) fn destroy_mipmapped_array(array: Handle) {
    // SAFETY: by this function's contract.
    unsafe { cuMipmappedArrayDestroy(array) };
}

/// Destroys an executable graph that the program has not seen.
pub(crate) fn destroy_executable_graph(graph: Handle) {
    // SAFETY: by this function's contract.
    unsafe { cuGraphExecDestroy(graph) };
}

/// Closes IPC memory that the program has not seen.
pub(crate) fn close_ipc(pointer: Pointer) {
    // SAFETY: by this function's contract.
    unsafe { cuIpcCloseMemHandle(pointer) };
}

/// Destroys external memory that the program has not seen.
pub(crate) fn destroy_external(memory: Handle) {
    // SAFETY: by this function's contract.
    unsafe { cuDestroyExternalMemory(memory) };
}

/// Returns one of the memory counters of a device's graphs.
pub(crate) fn graph_memory(device: Device, counter: c_int) -> Option<u64> {
    let mut bytes = 0_u64;
    // SAFETY: the counters have 64 bits.
    let result = unsafe { cuDeviceGetGraphMemAttribute(device, counter, (&raw mut bytes).cast()) };
    (result == SUCCESS).then_some(bytes)
}

/// Releases the unused memory of a device's graphs.
pub(crate) fn trim_graph_memory(device: Device) {
    // SAFETY: no pointers.
    unsafe { cuDeviceGraphMemTrim(device) };
}

/// Writes at most `count` nodes of a graph, and the number of its nodes. Returns true on success.
///
/// # Safety
/// `nodes` is NULL or has room for `count` handles.
pub(crate) unsafe fn graph_nodes(graph: Handle, nodes: *mut Handle, count: &mut usize) -> bool {
    // SAFETY: by this function's contract.
    unsafe { cuGraphGetNodes(graph, nodes, count) == SUCCESS }
}

/// Returns the type of a node.
pub(crate) fn node_type(node: Handle) -> Option<c_uint> {
    let mut kind = 0;
    // SAFETY: the result goes to a local variable.
    (unsafe { cuGraphNodeGetType(node, &mut kind) } == SUCCESS).then_some(kind)
}

/// Returns the graph of a child graph node.
pub(crate) fn child_graph(node: Handle) -> Option<Handle> {
    let mut graph = core::ptr::null_mut();
    // SAFETY: the result goes to a local variable.
    (unsafe { cuGraphChildGraphNodeGetGraph(node, &mut graph) } == SUCCESS).then_some(graph)
}

/// Returns the parameters of a node that allocates memory, in words of 64 bits.
pub(crate) fn allocation_node(node: Handle) -> Option<[u64; 64]> {
    let mut parameters = [0_u64; 64];
    // SAFETY: there is more room than any version of the parameters needs.
    let result = unsafe { cuGraphMemAllocNodeGetParams(node, parameters.as_mut_ptr().cast()) };
    (result == SUCCESS).then_some(parameters)
}

/// Runs a function with the thread's capture mode relaxed: calls that a capture forbids neither
/// fail nor invalidate it.
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

/// Sets the thread's capture mode; returns the mode before.
fn exchange_capture_mode(mode: c_int) -> Option<c_int> {
    let mut mode = mode;
    // SAFETY: the result goes to a local variable.
    (unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) } == SUCCESS).then_some(mode)
}
