//! Physical memory that something else keeps: multicast objects, logical endpoints, sparse arrays.
//!
//! None of them has memory of its own. What is bound to one lives on when its handles and mappings
//! are gone, until it is unbound or the thing that keeps it goes.

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::charge::gpu_of;
use crate::cuda::{Device, Handle, Pointer, SUCCESS};
use crate::root::with_state;
use crate::route::hooks;
use crate::state::State;
use crate::vmm;

/// One binding.
#[derive(Clone, Copy, Default)]
pub(crate) struct Binding {
    /// What keeps the memory.
    owner: Owner,
    /// Where in it; for arrays, what tells the place apart from others.
    at: u64,
    /// For multicast objects and endpoints: the GPU that hosts the memory, where the call named
    /// one.
    gpu: Option<u32>,
    /// The number of the memory.
    memory: u64,
}

/// What can keep memory.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Owner {
    #[default]
    Nothing,
    /// A multicast object, by the number of its handle.
    Multicast(u64),
    Endpoint(c_uint),
    /// An array or a mipmapped array.
    Array(u64),
}

/// `CUarrayMapInfo`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ArrayMap {
    resource_kind: c_int,
    resource: u64,
    place_kind: c_int,
    place: [u64; 4],
    operation: c_int,
    handle_kind: c_int,
    handle: u64,
    offset: u64,
    devices: c_uint,
    flags: c_uint,
    reserved: [c_uint; 2],
}

/// `CU_MEM_OPERATION_TYPE_MAP`
const MAP: c_int = 1;

/// Binds memory. Where that cannot be remembered, the memory is charged for ever.
fn bind(state: &mut State, owner: Owner, at: u64, gpu: Option<u32>, memory: Option<u64>) {
    let Some(memory) = memory else { return };
    vmm::hold(state, memory);
    // Where no GPU is named it is the one that the memory lies on.
    let gpu = gpu.or_else(|| vmm::gpu_of(state, memory));
    let key = state.next_ticket();
    if state.bindings().make_room() {
        state.bindings().put(key, Binding { owner, at, gpu, memory });
    }
}

/// Lets go of what such bindings keep, as far as they were made before a ticket: another thread may
/// have bound anew at the same place after the driver had unbound what was there.
fn unbind(state: &mut State, before: u64, goes: impl Fn(&Binding) -> bool) {
    let mut place = 0;
    let goes = |key, binding: &Binding| key < before && goes(binding);
    while let Some(binding) = state.bindings().remove_next(&mut place, goes) {
        vmm::let_go(state, binding.memory);
    }
}

/// The thing that keeps memory is gone.
pub(crate) fn gone(state: &mut State, owner: Owner) {
    unbind(state, u64::MAX, |binding| binding.owner == owner);
}

fn ticket() -> u64 {
    with_state(State::next_ticket).unwrap_or(0)
}

/// Binds at a place of a multicast object or an endpoint.
fn bound(
    result: c_int,
    owner: Option<Owner>,
    device: Option<Device>,
    at: u64,
    memory: impl FnOnce(&mut State) -> Option<u64>,
) -> c_int {
    let gpu = device.and_then(gpu_of);
    if let Some(owner) = owner
        && result == SUCCESS
    {
        with_state(|state| {
            let memory = memory(state);
            bind(state, owner, at, gpu, memory);
        });
    }
    result
}

/// Unbinds a range.
fn unbind_range(
    owner: Option<Owner>,
    device: Device,
    range: (u64, u64),
    real: impl FnOnce() -> c_int,
) -> c_int {
    let (before, result) = (ticket(), real());
    let (gpu, (at, bytes)) = (gpu_of(device), range);
    let end = at.saturating_add(bytes);
    if let Some(owner) = owner
        && result == SUCCESS
    {
        with_state(|state| {
            unbind(state, before, |binding| {
                binding.owner == owner && binding.gpu == gpu && (at..end).contains(&binding.at)
            });
        });
    }
    result
}

fn multicast(handle: u64) -> Option<Owner> {
    with_state(|state| vmm::number_of(state, handle)).flatten().map(Owner::Multicast)
}

fn of_handle(handle: u64) -> impl FnOnce(&mut State) -> Option<u64> {
    move |state| vmm::number_of(state, handle)
}

fn of_address(address: Pointer) -> impl FnOnce(&mut State) -> Option<u64> {
    move |state| vmm::number_at(state, address)
}

/// What tells a place of an array apart from all others.
fn place_of(map: &ArrayMap) -> u64 {
    let parts = [
        map.place_kind.unsigned_abs().into(),
        map.place[0],
        map.place[1],
        map.place[2],
        map.place[3],
    ];
    parts.into_iter().fold(0, |mixed: u64, part| {
        (mixed ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}

/// Maps memory to arrays, or unmaps it.
///
/// # Safety
/// `maps` are as many as `count` says.
unsafe fn map_arrays(maps: *const ArrayMap, count: c_uint, real: impl FnOnce() -> c_int) -> c_int {
    let (before, result) = (ticket(), real());
    if result != SUCCESS || maps.is_null() {
        return result;
    }
    for at in 0..count as usize {
        // SAFETY: by this function's contract; the driver was content with them.
        let map = unsafe { maps.add(at).read_unaligned() };
        let (owner, place) = (Owner::Array(map.resource), place_of(&map));
        with_state(|state| {
            unbind(state, before, |binding| binding.owner == owner && binding.at == place);
            if map.operation == MAP {
                let memory = vmm::number_of(state, map.handle);
                bind(state, owner, place, None, memory);
            }
        });
    }
    result
}

hooks! {
    fn cuMulticastCreate(out: *mut u64, properties: *const c_void) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, properties) };
        if result == SUCCESS {
            // SAFETY: the driver was content and has written there.
            let handle = unsafe { out.read_unaligned() };
            with_state(|state| vmm::remember_without_memory(state, handle));
        }
        result
    }

    fn cuMulticastBindMem(
        object: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(object, at, handle, offset, bytes, flags) };
        bound(result, multicast(object), None, at as u64, of_handle(handle))
    }

    fn cuMulticastBindMem_v2(
        object: u64, device: Device, at: usize, handle: u64, offset: usize, bytes: usize, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(object, device, at, handle, offset, bytes, flags) };
        bound(result, multicast(object), Some(device), at as u64, of_handle(handle))
    }

    fn cuMulticastBindAddr(object: u64, at: usize, address: Pointer, bytes: usize, flags: c_ulonglong) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(object, at, address, bytes, flags) };
        bound(result, multicast(object), None, at as u64, of_address(address))
    }

    fn cuMulticastBindAddr_v2(
        object: u64, device: Device, at: usize, address: Pointer, bytes: usize, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(object, device, at, address, bytes, flags) };
        bound(result, multicast(object), Some(device), at as u64, of_address(address))
    }

    fn cuMulticastUnbind(object: u64, device: Device, at: usize, bytes: usize) |real| {
        // SAFETY: the program's own call.
        let unbind = || unsafe { real(object, device, at, bytes) };
        unbind_range(multicast(object), device, (at as u64, bytes as u64), unbind)
    }

    fn cuLogicalEndpointBindMem(
        endpoint: c_uint, device: Device, at: u64, handle: u64, offset: u64, bytes: u64, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(endpoint, device, at, handle, offset, bytes, flags) };
        bound(result, Some(Owner::Endpoint(endpoint)), Some(device), at, of_handle(handle))
    }

    fn cuLogicalEndpointBindAddr(
        endpoint: c_uint, device: Device, at: u64, address: *mut c_void, bytes: u64, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(endpoint, device, at, address, bytes, flags) };
        bound(result, Some(Owner::Endpoint(endpoint)), Some(device), at, of_address(address as u64))
    }

    fn cuLogicalEndpointUnbind(endpoint: c_uint, device: Device, at: u64, bytes: u64) |real| {
        // SAFETY: the program's own call.
        let unbind = || unsafe { real(endpoint, device, at, bytes) };
        unbind_range(Some(Owner::Endpoint(endpoint)), device, (at, bytes), unbind)
    }

    fn cuLogicalEndpointDestroy(endpoint: c_uint) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(endpoint) };
        if result == SUCCESS {
            with_state(|state| gone(state, Owner::Endpoint(endpoint)));
        }
        result
    }

    fn cuMemMapArrayAsync(maps: *const ArrayMap, count: c_uint, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { map_arrays(maps, count, || real(maps, count, stream)) }
    }

    fn cuMemMapArrayAsync_ptsz(maps: *const ArrayMap, count: c_uint, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { map_arrays(maps, count, || real(maps, count, stream)) }
    }
}
