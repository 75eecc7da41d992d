//! Physical memory: handles and mappings.

use core::ffi::{c_int, c_ulonglong, c_void};

use super::route::hooks;
use crate::allocation::{charge, charge_gpu};
use crate::charge::{Charge, gpu_of};
use crate::driver::cuda::{self, Device, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::physical;
use crate::state::with_state;

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location: c_int,
}

/// Place of memory as far as it is charged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Host memory that does not move: not charged.
    Host,
    /// A device, or a part of one.
    Device(Device),
    /// Managed memory without a device.
    Managed,
    /// A place of an unknown type: such memory is refused.
    Unknown,
}

/// Returns the place of memory. [`Place::Unknown`] for NULL, which the driver refuses.
///
/// # Safety
/// `properties` is NULL or what the program wants the driver to read.
pub(super) unsafe fn place(properties: *const Properties) -> Place {
    if properties.is_null() {
        return Place::Unknown;
    }
    // SAFETY: by this function's contract.
    place_of(&unsafe { properties.read_unaligned() })
}

/// Returns the place by `CUmemAllocationType` and `CUmemLocationType` of cuda.h.
fn place_of(properties: &Properties) -> Place {
    const PINNED: c_int = 1;
    const MANAGED: c_int = 2;
    const NONE: c_int = 0;
    const DEVICE: c_int = 1;
    const HOST: c_int = 2;
    const HOST_NUMA_CURRENT: c_int = 4;
    const DEVICE_LOCALITY_DOMAIN: c_int = 6;
    match (properties.location_type, properties.kind) {
        (DEVICE, _) => Place::Device(properties.location),
        // One byte is the device, another one the domain.
        (DEVICE_LOCALITY_DOMAIN, _) => Place::Device(properties.location & 0xff),
        (NONE | HOST..=HOST_NUMA_CURRENT, MANAGED) => Place::Managed,
        (HOST..=HOST_NUMA_CURRENT, PINNED) => Place::Host,
        _ => Place::Unknown,
    }
}

/// Returns the properties of a handle.
fn properties_of(handle: u64) -> Option<Properties> {
    let mut room = [0_u64; 32];
    if !cuda::allocation_properties(handle, &mut room) {
        return None;
    }
    // SAFETY: the room is longer than the properties, which are all integers.
    Some(unsafe { room.as_ptr().cast::<Properties>().read_unaligned() })
}

hooks! {
    fn cuMemCreate(
        out: *mut u64, bytes: usize, properties: *const Properties, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let take = || unsafe { real(out, bytes, properties, flags) };
        // SAFETY: the program's own description.
        let device = match unsafe { place(properties) } {
            Place::Host => return take(),
            Place::Device(device) => Some(device),
            Place::Managed => cuda::current_device(),
            Place::Unknown => None,
        };
        let charge = match charge(device, bytes as u64) {
            Ok(charge) => charge,
            Err(refusal) => {
                // SAFETY: the call succeeded: the driver has written there.
                return refusal.result(take, || cuda::release_physical(unsafe { out.read_unaligned() }));
            }
        };
        let result = take();
        if result != SUCCESS {
            charge.undo();
            return result;
        }
        // SAFETY: the call succeeded: the driver has written there.
        let handle = unsafe { out.read_unaligned() };
        if with_state(|state| physical::add_allocated(state, charge, handle)) == Some(true) {
            return SUCCESS;
        }
        charge.undo();
        cuda::release_physical(handle);
        OUT_OF_MEMORY
    }

    fn cuMemImportFromShareableHandle(out: *mut u64, shared: *mut c_void, kind: c_int) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, shared, kind) };
        if result != SUCCESS {
            return result;
        }
        // SAFETY: the call succeeded: the driver has written there.
        let handle = unsafe { out.read_unaligned() };
        let gpu = match properties_of(handle).map(|properties| place_of(&properties)) {
            // An object without memory of its own.
            None | Some(Place::Host) => Ok(None),
            // Memory of a GPU that the container has no share of is refused.
            Some(Place::Device(device)) => gpu_of(device).map(Some).ok_or(()),
            Some(Place::Managed) => cuda::current_device().and_then(gpu_of).map(Some).ok_or(()),
            Some(Place::Unknown) => Err(()),
        };
        let is_added =
            gpu.is_ok_and(|gpu| with_state(|state| physical::add_imported(state, handle, gpu)) == Some(true));
        if is_added {
            return SUCCESS;
        }
        cuda::release_physical(handle);
        OUT_OF_MEMORY
    }

    fn cuMemRelease(handle: u64) |real| {
        let number = with_state(|state| physical::take_handle(state, handle)).flatten();
        // SAFETY: the program's own call.
        let result = unsafe { real(handle) };
        if let Some(number) = number {
            with_state(|state| match result {
                SUCCESS => physical::unhold(state, number),
                _ => physical::put_handle(state, handle, number),
            });
        }
        result
    }

    fn cuMemMap(pointer: Pointer, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) |real| {
        let cost = with_state(|state| physical::cost_of_mapping(state, handle, bytes as u64)).flatten();
        let charged = cost.map(|(gpu, more)| charge_gpu(gpu, more)).transpose();
        let Ok(charge) = charged else { return OUT_OF_MEMORY };
        // SAFETY: the program's own call.
        let result = unsafe { real(pointer, bytes, offset, handle, flags) };
        if result == SUCCESS {
            with_state(|state| physical::map(state, pointer, bytes as u64, handle, charge));
        } else {
            charge.into_iter().for_each(Charge::undo);
        }
        result
    }

    fn cuMemUnmap(pointer: Pointer, bytes: usize) |real| {
        with_state(|state| physical::set_leaving(state, pointer, bytes as u64, true));
        // SAFETY: the program's own call.
        let result = unsafe { real(pointer, bytes) };
        with_state(|state| match result {
            SUCCESS => physical::unmap(state, pointer, bytes as u64),
            _ => physical::set_leaving(state, pointer, bytes as u64, false),
        });
        result
    }

    fn cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, address) };
        if result == SUCCESS && !out.is_null() {
            // SAFETY: the call succeeded: the driver has written there.
            let handle = unsafe { out.read_unaligned() };
            with_state(|state| physical::add_retained(state, handle, address as u64));
        }
        result
    }
}
