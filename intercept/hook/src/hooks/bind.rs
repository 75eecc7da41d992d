//! Bindings of physical memory to objects without memory of their own: multicast objects, logical
//! endpoints, sparse arrays.

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::route::hooks;
use crate::charge::gpu_of;
use crate::driver::cuda::{Device, Handle, Pointer, SUCCESS};
use crate::physical::{self, bind, unbind};
use crate::state::{Owner, State, with_state};

/// `CUarrayMapInfo`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArrayMap {
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

fn ticket() -> u64 {
    with_state(State::next_ticket).unwrap_or(0)
}

/// Adds a binding at an offset of a multicast object or an endpoint, if the call succeeded.
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

/// Calls the driver to unbind a range, and removes its bindings.
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
    with_state(|state| physical::number_of(state, handle)).flatten().map(Owner::Multicast)
}

fn of_handle(handle: u64) -> impl FnOnce(&mut State) -> Option<u64> {
    move |state| physical::number_of(state, handle)
}

fn of_address(address: Pointer) -> impl FnOnce(&mut State) -> Option<u64> {
    move |state| physical::number_at(state, address)
}

/// Returns a number that identifies a place of an array.
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

/// Maps memory to arrays, or removes mappings.
///
/// # Safety
/// `maps` are as many as `count` says.
unsafe fn map_arrays(maps: *const ArrayMap, count: c_uint, real: impl FnOnce() -> c_int) -> c_int {
    let (before, result) = (ticket(), real());
    if result != SUCCESS || maps.is_null() {
        return result;
    }
    for at in 0..count as usize {
        // SAFETY: by this function's contract; the driver has read them.
        let map = unsafe { maps.add(at).read_unaligned() };
        let (owner, place) = (Owner::Array(map.resource), place_of(&map));
        with_state(|state| {
            unbind(state, before, |binding| binding.owner == owner && binding.at == place);
            if map.operation == MAP {
                let memory = physical::number_of(state, map.handle);
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
            // SAFETY: the call succeeded: the driver has written there.
            let handle = unsafe { out.read_unaligned() };
            with_state(|state| physical::add_without_memory(state, handle));
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
            with_state(|state| physical::unbind_all(state, Owner::Endpoint(endpoint)));
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
