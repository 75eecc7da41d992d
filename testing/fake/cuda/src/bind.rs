//! Objects that reference physical memory: multicast objects, logical endpoints, sparse arrays.

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::device::{Device, gpu};
use crate::state::{self, Handle, State};
use crate::status::Status;

/// A reference to physical memory.
#[derive(Debug)]
pub(crate) struct Binding {
    pub(crate) owner: Owner,
    location: Vec<u64>,
    gpu: Option<usize>,
    memory: u64,
}

/// Object that holds the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Multicast(u64),
    Endpoint(u32),
    Array(Handle),
}

/// `CUmulticastObjectProp`
#[repr(C)]
#[derive(Clone, Copy)]
struct MulticastProperties {
    devices: c_uint,
    bytes: usize,
    handle_types: u64,
    flags: u64,
}

/// `CUarrayMapInfo`
#[repr(C)]
#[derive(Clone, Copy)]
struct ArrayMap {
    resource_kind: c_int,
    resource: Handle,
    location_kind: c_int,
    location: [u64; 4],
    operation: c_int,
    handle_kind: c_int,
    handle: u64,
    offset: u64,
    devices: c_uint,
    flags: c_uint,
    reserved: [c_uint; 2],
}

impl State {
    fn bind(
        &mut self,
        owner: Owner,
        location: Vec<u64>,
        gpu: Option<usize>,
        memory: u64,
    ) -> CuResult {
        let physical = self.physical.get_mut(&memory).ok_or(Status::InvalidValue)?;
        physical.references += 1;
        let gpu = gpu.or(physical.gpu);
        self.bindings.push(Binding { owner, location, gpu, memory });
        Ok(())
    }

    /// Removes the matching bindings and their references.
    pub(crate) fn unbind(&mut self, matches: impl Fn(&Binding) -> bool) -> CuResult {
        let removed: Vec<_> = self.bindings.extract_if(.., |binding| matches(binding)).collect();
        removed.into_iter().try_for_each(|binding| self.release_physical(binding.memory))
    }

    /// Removes the bindings at an offset of an object.
    fn unbind_at(&mut self, owner: Owner, device: Device, at: u64) -> CuResult {
        let gpu = gpu(device)?;
        let before = self.bindings.len();
        self.unbind(|binding| {
            binding.owner == owner && binding.location == [at] && binding.gpu == Some(gpu)
        })?;
        if self.bindings.len() < before { Ok(()) } else { Err(Status::InvalidValue) }
    }

    fn multicast(&self, object: u64) -> CuResult<Owner> {
        self.physical.get(&object).ok_or(Status::InvalidValue)?;
        Ok(Owner::Multicast(object))
    }

    fn endpoint(&self, endpoint: u32) -> CuResult<Owner> {
        if self.endpoints.contains(&endpoint) {
            Ok(Owner::Endpoint(endpoint))
        } else {
            Err(Status::InvalidValue)
        }
    }
}

fn bind_multicast(
    object: u64,
    device: Option<Device>,
    at: usize,
    memory: impl FnOnce(&State) -> CuResult<u64>,
) -> CuResult {
    let gpu = device.map(gpu).transpose()?;
    let mut state = state::lock()?;
    let (owner, memory) = (state.multicast(object)?, memory(&state)?);
    state.bind(owner, vec![at as u64], gpu, memory)
}

fn map_array(state: &mut State, map: &ArrayMap) -> CuResult {
    let owner = Owner::Array(map.resource);
    state.arrays.get(&map.resource).ok_or(Status::InvalidHandle)?;
    let mut location = vec![map.location_kind as u64];
    location.extend(map.location);
    state.unbind(|binding| binding.owner == owner && binding.location == location)?;
    match map.operation {
        1 => state.bind(owner, location, None, map.handle),
        2 => Ok(()),
        _ => Err(Status::InvalidValue),
    }
}

export! {
    fn cuMulticastCreate(object: OutPtr<u64>, properties: InPtr<MulticastProperties>) {
        object.check()?;
        let MulticastProperties { devices, bytes, .. } = properties.get()?;
        if devices == 0 || bytes == 0 {
            return Err(Status::InvalidValue);
        }
        object.set(state::lock()?.open_physical(None, 0, 0))
    }

    fn cuMulticastAddDevice(object: u64, device: Device) {
        gpu(device)?;
        state::lock()?.multicast(object).map(drop)
    }

    fn cuMulticastBindMem(object: u64, at: usize, memory: u64, offset: usize, bytes: usize, flags: c_ulonglong) {
        let _ = (offset, bytes, flags);
        bind_multicast(object, None, at, |_| Ok(memory))
    }

    fn cuMulticastBindMem_v2(
        object: u64,
        device: Device,
        at: usize,
        memory: u64,
        offset: usize,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        let _ = (offset, bytes, flags);
        bind_multicast(object, Some(device), at, |_| Ok(memory))
    }

    fn cuMulticastBindAddr(object: u64, at: usize, address: u64, bytes: usize, flags: c_ulonglong) {
        let _ = (bytes, flags);
        bind_multicast(object, None, at, |state| state.physical_at(address))
    }

    fn cuMulticastBindAddr_v2(
        object: u64,
        device: Device,
        at: usize,
        address: u64,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        let _ = (bytes, flags);
        bind_multicast(object, Some(device), at, |state| state.physical_at(address))
    }

    fn cuMulticastUnbind(object: u64, device: Device, at: usize, bytes: usize) {
        let _ = bytes;
        let mut state = state::lock()?;
        let owner = state.multicast(object)?;
        state.unbind_at(owner, device, at as u64)
    }

    fn cuLogicalEndpointIdReserve(first: OutPtr<u32>, count: u32) {
        first.check()?;
        let mut state = state::lock()?;
        let next = state.endpoint_ids + 1;
        state.endpoint_ids += count;
        first.set(next)
    }

    fn cuLogicalEndpointCreate(endpoint: u32, properties: *const u8) {
        let mut state = state::lock()?;
        if properties.is_null() || endpoint == 0 || endpoint > state.endpoint_ids {
            return Err(Status::InvalidValue);
        }
        state.endpoints.insert(endpoint);
        Ok(())
    }

    fn cuLogicalEndpointDestroy(endpoint: u32) {
        let mut state = state::lock()?;
        let owner = state.endpoint(endpoint)?;
        state.endpoints.remove(&endpoint);
        state.unbind(|binding| binding.owner == owner)
    }

    fn cuLogicalEndpointBindMem(
        endpoint: u32,
        device: Device,
        at: u64,
        memory: u64,
        offset: u64,
        bytes: u64,
        flags: c_ulonglong,
    ) {
        let _ = (offset, bytes, flags);
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        let owner = state.endpoint(endpoint)?;
        state.bind(owner, vec![at], Some(gpu), memory)
    }

    fn cuLogicalEndpointBindAddr(
        endpoint: u32,
        device: Device,
        at: u64,
        address: u64,
        bytes: u64,
        flags: c_ulonglong,
    ) {
        let _ = (bytes, flags);
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        let (owner, memory) = (state.endpoint(endpoint)?, state.physical_at(address)?);
        state.bind(owner, vec![at], Some(gpu), memory)
    }

    fn cuLogicalEndpointUnbind(endpoint: u32, device: Device, at: u64, bytes: u64) {
        let _ = bytes;
        let mut state = state::lock()?;
        let owner = state.endpoint(endpoint)?;
        state.unbind_at(owner, device, at)
    }

    fn cuMemMapArrayAsync(maps: InPtr<ArrayMap>, count: c_uint, on: Handle) {
        let mut state = state::lock()?;
        crate::stream::gpu_of(&state, on)?;
        (0..count as usize).try_for_each(|at| map_array(&mut state, &maps.get_at(at)?))
    }
}
