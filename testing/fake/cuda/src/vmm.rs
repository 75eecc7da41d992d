//! Virtual memory management: physical memory, address ranges, and mappings.

use std::ffi::{c_int, c_ulonglong, c_void};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::refund;
use crate::bind::Owner;
use crate::device::Device;
use crate::driver;
use crate::pool::{self, ON_DEVICE};
use crate::state;
use crate::status::Status;

/// Granularity of physical memory: 2 MiB.
const GRANULARITY: u64 = 2 << 20;

/// Physical memory, or a multicast object, which has none.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) gpu: Option<usize>,
    /// `CUmemLocation`.
    pub(crate) location: (c_int, c_int),
    pub(crate) bytes: u64,
    /// Bytes that this process is charged for. Zero for host memory, which is not accounted, and
    /// for memory of other processes.
    pub(crate) charged: u64,
    /// References: open handles, mappings and bindings.
    pub(crate) references: usize,
    pub(crate) handles: usize,
}

/// A reserved address range.
#[derive(Debug)]
pub(crate) struct Reservation {
    bytes: u64,
    /// Mappings as pairs of address and handle.
    mappings: Vec<(u64, u64)>,
}

/// Start of `CUmemAllocationProp`; the rest of its 32 bytes is ignored.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location: c_int,
}

/// Returns the GPU of new memory; `None` for the host.
fn location(properties: InPtr<Properties>) -> CuResult<Option<usize>> {
    let Properties { kind, location_type, location, .. } = properties.get()?;
    if kind != 1 {
        return Err(Status::InvalidValue);
    }
    pool::location(location_type, location)
}

impl Reservation {
    /// Returns true if memory is mapped at or below `address` and the bytes end in the range.
    pub(crate) fn contains(&self, start: u64, address: u64, bytes: u64) -> bool {
        let inside = (address - start).checked_add(bytes).is_some_and(|end| end <= self.bytes);
        inside && self.mappings.iter().any(|(at, _)| *at <= address)
    }
}

impl state::State {
    /// Drops one reference to physical memory and frees it after the last.
    pub(crate) fn release_physical(&mut self, handle: u64) -> CuResult {
        let physical = self.physical.get_mut(&handle).ok_or(Status::InvalidValue)?;
        physical.references -= 1;
        if physical.references > 0 {
            return Ok(());
        }
        let (gpu, charged) = (physical.gpu, physical.charged);
        self.physical.remove(&handle);
        gpu.map_or(Ok(()), |gpu| refund(gpu, charged))?;
        self.unbind(|binding| binding.owner == Owner::Multicast(handle))
    }

    /// Creates a handle for physical memory.
    pub(crate) fn open_physical(&mut self, gpu: Option<usize>, bytes: u64, charged: u64) -> u64 {
        let new = self.new_handle().0 as u64;
        let location = gpu.map_or((3, 0), |gpu| (ON_DEVICE, Device::of(gpu).ordinal()));
        self.physical
            .insert(new, Physical { gpu, location, bytes, charged, references: 1, handles: 1 });
        new
    }

    /// Sets the location of new memory as the caller requested it.
    pub(crate) fn set_location(&mut self, handle: u64, location: (c_int, c_int)) {
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.location = location;
        }
    }

    /// Returns the memory that is mapped at an address.
    pub(crate) fn physical_at(&self, address: u64) -> CuResult<u64> {
        self.mapping_at(address).map(|(_, handle, _)| handle).ok_or(Status::InvalidValue)
    }

    /// Returns the start, the handle and the memory of the mapping that contains an address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, u64, &Physical)> {
        let (_, reservation) = self.reservations.range(..=address).next_back()?;
        reservation.mappings.iter().find_map(|(at, handle)| {
            let physical = self.physical.get(handle)?;
            let is_inside = (*at..at.saturating_add(physical.bytes)).contains(&address);
            is_inside.then_some((*at, *handle, physical))
        })
    }
}

export! {
    fn cuMemGetAllocationGranularity(bytes: OutPtr<usize>, properties: InPtr<Properties>, option: c_int) {
        driver::machine()?;
        location(properties)?;
        if !matches!(option, 0 | 1) {
            return Err(Status::InvalidValue);
        }
        bytes.set(GRANULARITY as usize)
    }

    fn cuMemCreate(handle: OutPtr<u64>, bytes: usize, properties: InPtr<Properties>, flags: c_ulonglong) {
        handle.check()?;
        let bytes = bytes as u64;
        if flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Status::InvalidValue);
        }
        let gpu = location(properties)?;
        let mut state = state::lock()?;
        if let Some(gpu) = gpu {
            state.charge(gpu, bytes)?;
        }
        let charged = if gpu.is_some() { bytes } else { 0 };
        let new = state.open_physical(gpu, bytes, charged);
        let Properties { location_type, location, .. } = properties.get()?;
        state.set_location(new, (location_type, location));
        handle.set(new)
    }

    fn cuMemRelease(handle: u64) {
        let mut state = state::lock()?;
        let physical = state.physical.get_mut(&handle).ok_or(Status::InvalidValue)?;
        physical.handles = physical.handles.checked_sub(1).ok_or(Status::InvalidValue)?;
        state.release_physical(handle)
    }

    fn cuMemRetainAllocationHandle(handle: OutPtr<u64>, address: u64) {
        handle.check()?;
        let mut state = state::lock()?;
        let found = state.physical_at(address)?;
        let physical = state.physical.get_mut(&found).ok_or(Status::InvalidValue)?;
        (physical.handles, physical.references) = (physical.handles + 1, physical.references + 1);
        handle.set(found)
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: OutPtr<Properties>, handle: u64) {
        properties.check()?;
        let state = state::lock()?;
        let physical = state.physical.get(&handle).filter(|physical| physical.bytes > 0);
        let (location_type, location) = physical.ok_or(Status::InvalidValue)?.location;
        properties.set(Properties { kind: 1, handle_types: 0, location_type, location })
    }

    fn cuMemAddressReserve(
        pointer: OutPtr<u64>,
        bytes: usize,
        alignment: usize,
        wanted: u64,
        flags: c_ulonglong,
    ) {
        pointer.check()?;
        let (bytes, alignment) = (bytes as u64, alignment as u64);
        let is_invalid = alignment != 0 && !alignment.is_power_of_two();
        if flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || is_invalid {
            return Err(Status::InvalidValue);
        }
        // The requested address is only a hint. Ranges without a GPU use the addresses of the
        // first.
        let _ = wanted;
        let mut state = state::lock()?;
        let address = state.new_addresses(0, bytes, alignment.max(GRANULARITY))?;
        state.reservations.insert(address, Reservation { bytes, mappings: Vec::new() });
        pointer.set(address)
    }

    fn cuMemAddressFree(pointer: u64, bytes: usize) {
        let mut state = state::lock()?;
        let reservation = state.reservations.get(&pointer).ok_or(Status::InvalidValue)?;
        if reservation.bytes != bytes as u64 || !reservation.mappings.is_empty() {
            return Err(Status::InvalidValue);
        }
        state.reservations.remove(&pointer);
        Ok(())
    }

    fn cuMemMap(pointer: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let mut state = state::lock()?;
        let physical = state.physical.get(&handle).ok_or(Status::InvalidValue)?;
        // NVIDIA's driver does not support an offset either.
        if flags != 0 || offset != 0 || bytes as u64 > physical.bytes {
            return Err(Status::InvalidValue);
        }
        let found = state.reservations.range_mut(..=pointer).next_back();
        let (start, reservation) = found.ok_or(Status::InvalidValue)?;
        let inside = pointer - start + bytes as u64 <= reservation.bytes;
        if !inside || reservation.mappings.iter().any(|(at, _)| *at == pointer) {
            return Err(Status::InvalidValue);
        }
        reservation.mappings.push((pointer, handle));
        state.physical.get_mut(&handle).ok_or(Status::InvalidValue)?.references += 1;
        Ok(())
    }

    fn cuMemUnmap(pointer: u64, bytes: usize) {
        let mut state = state::lock()?;
        let end = pointer.checked_add(bytes as u64).ok_or(Status::InvalidValue)?;
        let (_, reservation) = state.reservations.range_mut(..=pointer).next_back().ok_or(Status::InvalidValue)?;
        let removed: Vec<_> = reservation.mappings.extract_if(.., |(at, _)| (pointer..end).contains(at)).collect();
        if removed.is_empty() {
            return Err(Status::InvalidValue);
        }
        removed.into_iter().try_for_each(|(_, handle)| state.release_physical(handle))
    }

    fn cuMemSetAccess(pointer: u64, bytes: usize, access: *const c_void, count: usize) {
        let _ = (bytes, access, count);
        let state = state::lock()?;
        state.reservations.range(..=pointer).next_back().map(drop).ok_or(Status::InvalidValue)
    }
}
