//! Arrays: memory in an opaque layout.

use std::ffi::c_uint;

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::refund;
use crate::bind::Owner;
use crate::context::{current, current_gpu};
use crate::state::{self, Handle, State};
use crate::status::Status;

/// An array or a mipmapped array.
#[derive(Debug)]
pub(crate) struct Array {
    gpu: usize,
    context: Handle,
    bytes: u64,
    mipmapped: bool,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor2d {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor3d {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: memory is mapped later.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;

impl Descriptor3d {
    /// Returns the bytes of all elements; a dimension of 0 is absent.
    fn bytes(&self) -> CuResult<u64> {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return Err(Status::InvalidValue),
        };
        if self.width == 0 || !matches!(self.channels, 1 | 2 | 4) {
            return Err(Status::InvalidValue);
        }
        if self.flags & WITHOUT_MEMORY != 0 {
            return Ok(0);
        }
        let sizes = [self.height.max(1), self.depth.max(1), self.channels as usize, channel];
        let all = sizes.into_iter().try_fold(self.width, usize::checked_mul);
        all.map(|bytes| bytes as u64).ok_or(Status::OutOfMemory)
    }
}

impl State {
    pub(crate) fn destroy_arrays_of(&mut self, context: Handle) -> CuResult {
        let of_context = self.arrays.iter().filter(|(_, array)| array.context == context);
        for handle in of_context.map(|(handle, _)| *handle).collect::<Vec<_>>() {
            self.destroy_array(handle)?;
        }
        Ok(())
    }

    fn destroy_array(&mut self, handle: Handle) -> CuResult {
        let array = self.arrays.remove(&handle).ok_or(Status::InvalidHandle)?;
        refund(array.gpu, array.bytes)?;
        self.unbind(|binding| binding.owner == Owner::Array(handle))
    }
}

fn create(out: OutPtr<Handle>, bytes: u64, mipmapped: bool) -> CuResult {
    out.check()?;
    let mut state = state::lock()?;
    let gpu = current_gpu(&state)?;
    let context = current().ok_or(Status::InvalidContext)?;
    state.charge(gpu, bytes)?;
    let handle = state.new_handle();
    state.arrays.insert(handle, Array { gpu, context, bytes, mipmapped });
    out.set(handle)
}

fn destroy(handle: Handle, mipmapped: bool) -> CuResult {
    let mut state = state::lock()?;
    if state.arrays.get(&handle).is_none_or(|array| array.mipmapped != mipmapped) {
        return Err(Status::InvalidHandle);
    }
    state.destroy_array(handle)
}

export! {
    fn cuArrayCreate_v2(array: OutPtr<Handle>, description: InPtr<Descriptor2d>) {
        let Descriptor2d { width, height, format, channels } = description.get()?;
        create(array, Descriptor3d { width, height, depth: 0, format, channels, flags: 0 }.bytes()?, false)
    }

    fn cuArray3DCreate_v2(array: OutPtr<Handle>, description: InPtr<Descriptor3d>) {
        create(array, description.get()?.bytes()?, false)
    }

    fn cuArrayDestroy(array: Handle) { destroy(array, false) }

    fn cuMipmappedArrayCreate(array: OutPtr<Handle>, description: InPtr<Descriptor3d>, levels: c_uint) {
        let mut level = description.get()?;
        let mut bytes = level.bytes()?;
        for _ in 1..levels {
            let (width, height, depth) = (level.width, level.height, level.depth);
            level = Descriptor3d { width: (width / 2).max(1), height: height / 2, depth: depth / 2, ..level };
            bytes = bytes.checked_add(level.bytes()?).ok_or(Status::OutOfMemory)?;
        }
        create(array, bytes, true)
    }

    fn cuMipmappedArrayDestroy(array: Handle) { destroy(array, true) }
}
