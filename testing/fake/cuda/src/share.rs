//! Memory that is shared between processes and with other APIs. An import is not charged, because
//! the exporter is; memory opened by CUDA IPC that its owner frees belongs to a process that has it
//! open.
//!
//! Descriptors refer to a file that has the GPU and the size.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::fs::File;
use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;

use tessera_fake_world::ExportedMemory;

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::{Allocation, AllocationKind, rounded};
use crate::context::current;
use crate::device::{Device, gpu};
use crate::driver;
use crate::state::{self, Handle, State};
use crate::status::Status;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const DESCRIPTOR: c_int = 1;

/// Content of `CUipcMemHandle`, `CUmemPoolPtrExportData` and of files.
#[repr(C)]
#[derive(Clone, Copy)]
struct Shared {
    process: u64,
    address: u64,
    gpu: u64,
    bytes: u64,
    /// Slot and owner of [`ExportedMemory`], of CUDA IPC only.
    exporter: [u64; 2],
    rest: [u64; 2],
}

/// Imported memory of another process.
#[derive(Debug)]
pub(crate) struct ImportedMemory {
    memory: ExportedMemory,
    references: usize,
}

/// The modelled part of `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`.
#[repr(C)]
#[derive(Clone, Copy)]
struct External {
    kind: c_int,
    handle: [u64; 2],
    bytes: u64,
}

fn shared(state: &State, pointer: u64) -> CuResult<Shared> {
    let found = state
        .allocation_at(pointer)
        .filter(|(_, allocation)| allocation.kind != AllocationKind::Managed);
    let (start, allocation) = found.ok_or(Status::InvalidValue)?;
    let process = u64::from(std::process::id());
    Ok(Shared {
        process,
        address: start,
        gpu: allocation.gpu as u64,
        bytes: allocation.bytes,
        exporter: [0; 2],
        rest: [0; 2],
    })
}

/// Content of a descriptor: the GPU, if any, the `CUmemLocation` and the size in bytes.
type DescriptorContent = (Option<usize>, (c_int, c_int), u64);

/// Writes the content to a new file and returns its descriptor.
fn descriptor((gpu, (kind, id), bytes): DescriptorContent) -> CuResult<c_int> {
    // SAFETY: the name is terminated.
    let fd = unsafe { libc::memfd_create(c"shared".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Status::OutOfMemory);
    }
    // SAFETY: the descriptor is new.
    let mut file = unsafe { File::from_raw_fd(fd) };
    let gpu = gpu.map_or(u64::MAX, |gpu| gpu as u64);
    let text: Vec<u8> = [gpu, u64::from(kind as u32), u64::from(id as u32), bytes]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    file.write_all(&text).map_err(|_| Status::OutOfMemory)?;
    Ok(file.into_raw_fd())
}

fn read_descriptor(shareable: *mut c_void) -> CuResult<DescriptorContent> {
    let fd = shareable as usize as c_int;
    if fd < 0 {
        return Err(Status::InvalidValue);
    }
    // SAFETY: the descriptor is not closed here; the caller keeps it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let mut bytes = [0; 32];
    file.read_exact_at(&mut bytes, 0).map_err(|_| Status::InvalidValue)?;
    let word = |at: usize| {
        bytes[at..at + 8].iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte))
    };
    let gpu = usize::try_from(word(0)).ok().filter(|gpu| *gpu != usize::MAX);
    Ok((gpu, (word(8) as c_int, word(16) as c_int), word(24)))
}

fn open_ipc(out: OutPtr<u64>, shared: &Shared) -> CuResult {
    out.check()?;
    if shared.bytes == 0 {
        return Err(Status::InvalidValue);
    }
    if shared.process == u64::from(std::process::id()) {
        return Err(Status::InvalidContext);
    }
    let mut state = state::lock()?;
    let [slot, owner] = shared.exporter;
    let memory = ExportedMemory { slot, owner, address: shared.address };
    let known = state.opened.iter_mut().find(|(_, opened)| opened.memory == memory);
    if let Some((pointer, opened)) = known {
        opened.references += 1;
        return out.set(*pointer);
    }
    let pointer = import(&mut state, shared, AllocationKind::Imported)?;
    let bytes = rounded(shared.bytes).ok_or(Status::InvalidValue)?;
    if !driver::machine()?.usage().opened(memory, shared.gpu as usize, bytes) {
        state.free(pointer)?;
        return Err(Status::OutOfMemory);
    }
    state.opened.insert(pointer, ImportedMemory { memory, references: 1 });
    out.set(pointer)
}

impl State {
    /// Closes memory that was opened, if any.
    pub(crate) fn close_imported(&mut self, address: u64) -> CuResult {
        if let Some(opened) = self.opened.remove(&address) {
            driver::machine()?.usage().closed(opened.memory);
        }
        Ok(())
    }
}

/// Reserves an address for memory of another process.
fn import(state: &mut State, shared: &Shared, kind: AllocationKind) -> CuResult<u64> {
    let context = current().ok_or(Status::InvalidContext)?;
    let gpu = shared.gpu as usize;
    let address = state.new_addresses(gpu, shared.bytes, 512)?;
    let allocation = Allocation { gpu, context, bytes: shared.bytes, kind };
    state.allocations.insert(address, allocation);
    Ok(address)
}

export! {
    fn cuIpcGetMemHandle(handle: OutPtr<Shared>, pointer: u64) {
        handle.check()?;
        let state = state::lock()?;
        let shared = shared(&state, pointer)?;
        let exported = driver::machine()?.usage().export(shared.address);
        let ExportedMemory { slot, owner, .. } = exported.ok_or(Status::OutOfMemory)?;
        handle.set(Shared { exporter: [slot, owner], ..shared })
    }

    fn cuIpcOpenMemHandle(pointer: OutPtr<u64>, handle: Shared, flags: c_uint) {
        if flags != 1 {
            return Err(Status::InvalidValue);
        }
        open_ipc(pointer, &handle)
    }

    fn cuIpcOpenMemHandle_v2(pointer: OutPtr<u64>, handle: Shared, flags: c_uint) {
        if flags != 1 {
            return Err(Status::InvalidValue);
        }
        open_ipc(pointer, &handle)
    }

    fn cuIpcCloseMemHandle(pointer: u64) {
        let mut state = state::lock()?;
        let opened = state.opened.get_mut(&pointer).ok_or(Status::InvalidValue)?;
        opened.references -= 1;
        if opened.references > 0 {
            return Ok(());
        }
        state.free(pointer)
    }

    fn cuMemExportToShareableHandle(shareable: OutPtr<c_int>, handle: u64, kind: c_int, flags: c_ulonglong) {
        shareable.check()?;
        if kind != DESCRIPTOR || flags != 0 {
            return Err(Status::NotSupported);
        }
        let state = state::lock()?;
        let physical = state.physical.get(&handle).ok_or(Status::InvalidValue)?;
        shareable.set(descriptor((physical.gpu, physical.location, physical.bytes))?)
    }

    fn cuMemImportFromShareableHandle(handle: OutPtr<u64>, shareable: *mut c_void, kind: c_int) {
        handle.check()?;
        if kind != DESCRIPTOR {
            return Err(Status::NotSupported);
        }
        let (gpu, location, bytes) = read_descriptor(shareable)?;
        let mut state = state::lock()?;
        let new = state.open_physical(gpu, bytes, 0);
        state.set_location(new, location);
        handle.set(new)
    }

    fn cuMemPoolExportToShareableHandle(shareable: OutPtr<c_int>, pool: Handle, kind: c_int, flags: c_ulonglong) {
        shareable.check()?;
        if kind != DESCRIPTOR || flags != 0 {
            return Err(Status::NotSupported);
        }
        state::lock()?.pools.get(&pool).ok_or(Status::InvalidValue)?;
        shareable.set(descriptor((None, (0, 0), 0))?)
    }

    fn cuMemPoolImportFromShareableHandle(
        pool: OutPtr<Handle>,
        shareable: *mut c_void,
        kind: c_int,
        flags: c_ulonglong,
    ) {
        pool.check()?;
        if kind != DESCRIPTOR || flags != 0 {
            return Err(Status::NotSupported);
        }
        read_descriptor(shareable)?;
        let mut state = state::lock()?;
        let handle = state.new_handle();
        state.imported_pools.insert(handle);
        pool.set(handle)
    }

    fn cuMemPoolExportPointer(data: OutPtr<Shared>, pointer: u64) {
        data.check()?;
        let shared = shared(&*state::lock()?, pointer)?;
        data.set(shared)
    }

    fn cuMemPoolImportPointer(pointer: OutPtr<u64>, pool: Handle, data: InPtr<Shared>) {
        pointer.check()?;
        let shared = data.get()?;
        let mut state = state::lock()?;
        if !state.imported_pools.contains(&pool) {
            return Err(Status::InvalidValue);
        }
        let address = import(&mut state, &shared, AllocationKind::ImportedFromPool)?;
        pointer.set(address)
    }

    fn cuImportExternalMemory(memory: OutPtr<Handle>, description: InPtr<External>) {
        memory.check()?;
        let External { kind, bytes, .. } = description.get()?;
        if kind != DESCRIPTOR || bytes == 0 {
            return Err(Status::InvalidValue);
        }
        gpu(Device::at(0))?;
        let mut state = state::lock()?;
        current().ok_or(Status::InvalidContext)?;
        let handle = state.new_handle();
        state.external.insert(handle);
        memory.set(handle)
    }

    fn cuDestroyExternalMemory(memory: Handle) {
        if state::lock()?.external.remove(&memory) { Ok(()) } else { Err(Status::InvalidHandle) }
    }
}
