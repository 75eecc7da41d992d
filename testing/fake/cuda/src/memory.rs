//! Memory: allocation, release and queries.

use std::ffi::{c_int, c_uint};
use std::ops::Range;

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::AllocationKind;
use crate::context::{current, current_gpu};
use crate::device::Device;
use crate::driver;
use crate::host;
use crate::state::{self, Handle};
use crate::status::Status;
use crate::vmm::Physical;

/// Alignment of the rows of pitched memory.
const PITCH: usize = 512;

fn allocate(out: OutPtr<u64>, bytes: usize, kind: AllocationKind) -> CuResult {
    out.check()?;
    let mut state = state::lock()?;
    let gpu = current_gpu(&state)?;
    let context = current().ok_or(Status::InvalidContext)?;
    out.set(state.allocate(gpu, context, bytes as u64, kind)?)
}

/// Returns free and total bytes of the current context's GPU. Total is the usable memory, as for
/// `cuDeviceTotalMem`.
fn info() -> CuResult<(u64, u64)> {
    let gpu = current_gpu(&*state::lock()?)?;
    let machine = driver::machine()?;
    let board = &machine.world().gpus[gpu];
    let memory = machine.memory(board);
    Ok((memory.free, board.model.usable_bytes()))
}

fn narrow(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}

/// Value of a pointer attribute.
enum Value {
    Int(c_int),
    Word(u64),
}

/// `CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE`.
const READ_AND_WRITE: c_int = 3;

/// Returns the value of a `CUpointer_attribute`, if the address is allocated and the attribute is
/// modelled.
fn attribute(attribute: c_int, address: u64) -> CuResult<Value> {
    let state = state::lock()?;
    if let Some((start, _, physical)) = state.mapping_at(address) {
        return of_mapping(attribute, address, start, physical);
    }
    let Some((start, allocation)) = state.allocation_at(address) else {
        let (start, bytes) = host::at(address)?.ok_or(Status::InvalidValue)?;
        let device = Device::of(current_gpu(&state).unwrap_or(0));
        return of_host(attribute, address, start..start + bytes, device);
    };
    let managed =
        matches!(allocation.kind, AllocationKind::Managed | AllocationKind::ManagedPool { .. });
    let pool = match allocation.kind {
        AllocationKind::Pool(pool)
        | AllocationKind::HostPool(pool)
        | AllocationKind::ManagedPool { pool, .. } => pool.0 as u64,
        _ => 0,
    };
    let on_host = matches!(
        allocation.kind,
        AllocationKind::HostPool(_) | AllocationKind::ManagedPool { on_host: true, .. }
    );
    Ok(match attribute {
        1 => Value::Word(allocation.context.0 as u64),
        // CU_MEMORYTYPE_HOST or CU_MEMORYTYPE_DEVICE; the latter for managed memory, too.
        2 => Value::Int(if on_host { 1 } else { 2 }),
        3 => Value::Word(address),
        4 if managed => Value::Word(address),
        7 | 20 => Value::Word(start),
        8 => Value::Int(managed.into()),
        9 => Value::Int(Device::of(allocation.gpu).ordinal()),
        11 | 19 => Value::Word(start),
        12 | 18 => Value::Word(allocation.bytes),
        // Synchronous operations are not requested; of no shareable handle type.
        6 | 21 => Value::Int(0),
        10 => Value::Int((!managed && pool == 0).into()),
        13 | 15 => Value::Int(1),
        14 => Value::Word(0),
        16 => Value::Int(READ_AND_WRITE),
        17 => Value::Word(pool),
        4..=21 => return Err(Status::InvalidValue),
        _ => return Err(Status::NotSupported),
    })
}

/// Returns the value of a `CUpointer_attribute` of host memory that is known to the GPU. It has one
/// address, belongs to the current context, and every GPU can access it.
fn of_host(attribute: c_int, address: u64, memory: Range<u64>, device: Device) -> CuResult<Value> {
    Ok(match attribute {
        1 => Value::Word(current().map_or(0, |context| context.0 as u64)),
        2 => Value::Int(1),
        3 | 4 => Value::Word(address),
        7 | 11 | 19 | 20 => Value::Word(memory.start),
        9 => Value::Int(device.ordinal()),
        12 | 18 => Value::Word(memory.end - memory.start),
        6 | 8 | 10 | 21 => Value::Int(0),
        13 | 15 => Value::Int(1),
        14 | 17 => Value::Word(0),
        16 => Value::Int(READ_AND_WRITE),
        5 => return Err(Status::InvalidValue),
        _ => return Err(Status::NotSupported),
    })
}

/// Returns the value of a `CUpointer_attribute` of mapped physical memory, which belongs to no
/// context.
fn of_mapping(attribute: c_int, address: u64, start: u64, physical: &Physical) -> CuResult<Value> {
    Ok(match attribute {
        1 => Value::Word(0),
        2 => Value::Int(if physical.gpu.is_some() { 2 } else { 1 }),
        3 => Value::Word(address),
        7 | 11 | 19 | 20 => Value::Word(start),
        8 => Value::Int(0),
        9 => Value::Int(physical.gpu.map_or(-2, |gpu| Device::of(gpu).ordinal())),
        12 | 18 => Value::Word(physical.bytes),
        6 | 10 | 21 => Value::Int(0),
        13 | 15 => Value::Int(1),
        // A file descriptor.
        14 => Value::Word(1),
        16 => Value::Int(READ_AND_WRITE),
        17 => Value::Word(0),
        4..=21 => return Err(Status::InvalidValue),
        _ => return Err(Status::NotSupported),
    })
}

/// Pointer to a result whose type depends on the attribute.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Any(*mut std::ffi::c_void);

impl Any {
    fn set(self, value: &Value) -> CuResult {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        match value {
            // SAFETY: by CUDA's contract the pointer is valid for the type of the requested
            // attribute.
            Value::Int(value) => unsafe { self.0.cast::<c_int>().write_unaligned(*value) },
            // SAFETY: as above.
            Value::Word(value) => unsafe { self.0.cast::<u64>().write_unaligned(*value) },
        }
        Ok(())
    }
}

export! {
    fn cuMemGetInfo(free: OutPtr<c_uint>, total: OutPtr<c_uint>) {
        let (free_bytes, total_bytes) = info()?;
        free.set_unless_null(narrow(free_bytes));
        total.set_unless_null(narrow(total_bytes));
        Ok(())
    }

    fn cuMemGetInfo_v2(free: OutPtr<usize>, total: OutPtr<usize>) {
        let (free_bytes, total_bytes) = info()?;
        free.set_unless_null(free_bytes as usize);
        total.set_unless_null(total_bytes as usize);
        Ok(())
    }

    fn cuMemAlloc_v2(pointer: OutPtr<u64>, bytes: usize) { allocate(pointer, bytes, AllocationKind::Device) }

    fn cuMemAllocPitch_v2(
        pointer: OutPtr<u64>,
        pitch: OutPtr<usize>,
        width: usize,
        height: usize,
        element: c_uint,
    ) {
        pitch.check()?;
        if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
            return Err(Status::InvalidValue);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(Status::OutOfMemory)?;
        allocate(pointer, row.checked_mul(height).ok_or(Status::OutOfMemory)?, AllocationKind::Device)?;
        pitch.set(row)
    }

    fn cuMemAllocManaged(pointer: OutPtr<u64>, bytes: usize, flags: c_uint) {
        // Flags: attached globally, or to the host.
        if !matches!(flags, 1 | 2) {
            return Err(Status::InvalidValue);
        }
        allocate(pointer, bytes, AllocationKind::Managed)
    }

    fn cuMemFree_v2(pointer: u64) {
        let mut state = state::lock()?;
        if pointer == 0 {
            return Ok(());
        }
        // `cuMemFree` waits for the GPU.
        state.free(pointer)?;
        state.shrink_pools()
    }

    fn cuMemGetAddressRange_v2(base: OutPtr<u64>, bytes: OutPtr<usize>, pointer: u64) {
        let state = state::lock()?;
        let mapping = state.mapping_at(pointer).map(|(start, _, physical)| (start, physical.bytes));
        let allocation = || state.allocation_at(pointer).map(|(start, found)| (start, found.bytes));
        let (start, length) = mapping.or_else(allocation).ok_or(Status::InvalidValue)?;
        base.set_unless_null(start);
        bytes.set_unless_null(length as usize);
        Ok(())
    }

    fn cuPointerGetAttribute(data: Any, which: c_int, pointer: u64) { data.set(&attribute(which, pointer)?) }

    fn cuPointerGetAttributes(count: c_uint, which: InPtr<c_int>, data: InPtr<Any>, pointer: u64) {
        for position in 0..count as usize {
            // Unknown attributes are left unchanged; for foreign pointers that is all of them.
            if let Ok(value) = attribute(which.get_at(position)?, pointer) {
                data.get_at(position)?.set(&value)?;
            }
        }
        driver::machine().map(drop)
    }

    fn cuMemAdvise(pointer: u64, bytes: usize, advice: c_int, device: Device) {
        let _ = (bytes, advice, device);
        state::lock()?.allocation_at(pointer).map(drop).ok_or(Status::InvalidValue)
    }

    fn cuMemPrefetchAsync(pointer: u64, bytes: usize, device: Device, stream: Handle) {
        let _ = (bytes, device, stream);
        state::lock()?.allocation_at(pointer).map(drop).ok_or(Status::InvalidValue)
    }
}
