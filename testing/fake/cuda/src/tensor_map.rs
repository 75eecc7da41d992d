//! Tensor maps: descriptions of tensors in device memory for copies by hardware.

use std::ffi::{c_int, c_uint};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::driver;
use crate::state;
use crate::status::Status;

/// `CUtensorMap`, whose content is opaque.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct TensorMap([u64; 16]);

/// Most dimensions of a tensor.
const MOST_DIMENSIONS: c_uint = 5;

/// Alignment of the tensor in bytes.
const ALIGNMENT: u64 = 16;

/// Returns the map of a tensor, if its dimensions and address are valid.
fn encode(dimensions: c_uint, address: u64) -> CuResult<TensorMap> {
    driver::machine()?;
    let is_valid = (1..=MOST_DIMENSIONS).contains(&dimensions) && address.is_multiple_of(ALIGNMENT);
    if !is_valid {
        return Err(Status::InvalidValue);
    }
    check(address)?;
    let mut map = [0; 16];
    (map[0], map[1]) = (address, dimensions.into());
    Ok(TensorMap(map))
}

fn check(address: u64) -> CuResult {
    let state = state::lock()?;
    let is_known = state.allocation_at(address).is_some() || state.mapping_at(address).is_some();
    if is_known { Ok(()) } else { Err(Status::InvalidValue) }
}

export! {
    fn cuTensorMapEncodeTiled(
        map: OutPtr<TensorMap>,
        kind: c_int,
        dimensions: c_uint,
        address: u64,
        sizes: InPtr<u64>,
        strides: InPtr<u64>,
        tile: InPtr<c_uint>,
        steps: InPtr<c_uint>,
        interleave: c_int,
        swizzle: c_int,
        promotion: c_int,
        fill: c_int,
    ) {
        let _ = (kind, strides, interleave, swizzle, promotion, fill);
        let (_, _, _) = (sizes.get()?, tile.get()?, steps.get()?);
        map.set(encode(dimensions, address)?)
    }

    fn cuTensorMapEncodeIm2col(
        map: OutPtr<TensorMap>,
        kind: c_int,
        dimensions: c_uint,
        address: u64,
        sizes: InPtr<u64>,
        strides: InPtr<u64>,
        lower: InPtr<c_int>,
        upper: InPtr<c_int>,
        channels: c_uint,
        pixels: c_uint,
        steps: InPtr<c_uint>,
        interleave: c_int,
        swizzle: c_int,
        promotion: c_int,
        fill: c_int,
    ) {
        let _ = (kind, strides, lower, upper, channels, pixels, interleave, swizzle, promotion, fill);
        let (_, _) = (sizes.get()?, steps.get()?);
        map.set(encode(dimensions, address)?)
    }
}
