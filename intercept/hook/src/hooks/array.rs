//! Arrays: their size is computed from their description.

use core::ffi::{c_int, c_uint};

use super::route::hooks;
use crate::allocation::{allocate, free};
use crate::driver::cuda::{Handle, SUCCESS, destroy_array, destroy_mipmapped_array};
use crate::physical::unbind_all;
use crate::state::{Kind, Owner, with_state};

/// `CUDA_ARRAY_DESCRIPTOR` of CUDA 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Flat32 {
    width: c_uint,
    height: c_uint,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Flat {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` of CUDA 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Solid32 {
    width: c_uint,
    height: c_uint,
    depth: c_uint,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Solid {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

impl From<Flat32> for Solid {
    fn from(flat: Flat32) -> Self {
        let Flat32 { width, height, format, channels } = flat;
        Self {
            width: width as usize,
            height: height as usize,
            depth: 0,
            format,
            channels,
            flags: 0,
        }
    }
}

impl From<Flat> for Solid {
    fn from(flat: Flat) -> Self {
        let Flat { width, height, format, channels } = flat;
        Self { width, height, depth: 0, format, channels, flags: 0 }
    }
}

impl From<Solid32> for Solid {
    fn from(solid: Solid32) -> Self {
        let Solid32 { width, height, depth, format, channels, flags } = solid;
        let (width, height, depth) = (width as usize, height as usize, depth as usize);
        Self { width, height, depth, format, channels, flags }
    }
}

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: no memory of their own.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;

impl Solid {
    /// Returns the bytes of an element. Formats other than the plain ones (compressed blocks, video
    /// surfaces) count as 16, which no format exceeds.
    fn element(&self) -> u64 {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return 16,
        };
        channel * u64::from(self.channels.max(1))
    }

    /// Returns the bytes of all elements in this many levels, each half as large in every dimension
    /// as the one before.
    fn bytes(&self, levels: c_uint) -> u64 {
        if self.flags & WITHOUT_MEMORY != 0 {
            return 0;
        }
        let level = |level: c_uint| {
            let size = |size: usize| (size as u64).checked_shr(level).unwrap_or(0).max(1);
            [size(self.width), size(self.height), size(self.depth)]
                .into_iter()
                .fold(self.element(), u64::saturating_mul)
        };
        // A 64-bit size is 1 after 64 halvings; the driver refuses more levels.
        (0..levels.clamp(1, 64)).map(level).fold(0, u64::saturating_add)
    }
}

/// Returns the bytes of an array to be created. 0 for NULL, which the driver refuses.
///
/// # Safety
/// `description` is NULL or what the program wants the driver to read.
unsafe fn bytes_of<D: Copy + Into<Solid>>(description: *const D, levels: c_uint) -> u64 {
    if description.is_null() {
        return 0;
    }
    // SAFETY: by this function's contract.
    let solid: Solid = unsafe { description.read_unaligned() }.into();
    solid.bytes(levels)
}

/// Creates an array.
///
/// # Safety
/// As [`bytes_of`]; `out` is where the driver is to put the handle.
unsafe fn create<D: Copy + Into<Solid>>(
    out: *mut Handle,
    description: *const D,
    levels: c_uint,
    real: impl FnOnce() -> c_int,
    destroy: impl Fn(Handle),
) -> c_int {
    // SAFETY: by this function's contract.
    let bytes = unsafe { bytes_of(description, levels) };
    // SAFETY: the driver has written there.
    let taken = || unsafe { out.read_unaligned() } as u64;
    allocate(bytes, Kind::Array, real, taken, |array| destroy(array as Handle))
}

/// Destroys an array and its mappings.
fn destroyed(array: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let result = free(Kind::Array, array as u64, real);
    if result == SUCCESS {
        with_state(|state| unbind_all(state, Owner::Array(array as u64)));
    }
    result
}

hooks! {
    fn cuArrayCreate(out: *mut Handle, description: *const Flat32) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, description, 1, || real(out, description), destroy_array) }
    }

    fn cuArrayCreate_v2(out: *mut Handle, description: *const Flat) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, description, 1, || real(out, description), destroy_array) }
    }

    fn cuArray3DCreate(out: *mut Handle, description: *const Solid32) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, description, 1, || real(out, description), destroy_array) }
    }

    fn cuArray3DCreate_v2(out: *mut Handle, description: *const Solid) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, description, 1, || real(out, description), destroy_array) }
    }

    fn cuMipmappedArrayCreate(out: *mut Handle, description: *const Solid, levels: c_uint) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, description, levels, || real(out, description, levels), destroy_mipmapped_array) }
    }

    fn cuArrayDestroy(array: Handle) |real| {
        // SAFETY: the program's own call.
        destroyed(array, || unsafe { real(array) })
    }

    fn cuMipmappedArrayDestroy(array: Handle) |real| {
        // SAFETY: the program's own call.
        destroyed(array, || unsafe { real(array) })
    }
}
