//! Copies and fills. They check the device memory, take modelled time, and move no bytes, because
//! device memory has no backing store.

use std::ffi::{c_uchar, c_uint, c_ushort};

use crate::abi::{CuResult, export};
use crate::driver;
use crate::host;
use crate::state::{self, Handle};
use crate::status::Status;
use crate::timeline::{self, Engine};

/// Nanoseconds per 16 bytes: between host and GPU (16 GB/s, PCIe 4.0 in practice), and on the GPU
/// (1.6 TB/s).
const OVER_PCIE: f64 = 1.0;
const ON_GPU: f64 = 0.01;

/// Checks that the range is allocated device memory or, if `host_too` is set, host memory.
fn check(address: u64, bytes: u64, host_too: bool) -> CuResult {
    let state = state::lock()?;
    if let Some((start, allocation)) = state.allocation_at(address) {
        let inside =
            (address - start).checked_add(bytes).is_some_and(|end| end <= allocation.bytes);
        return if inside { Ok(()) } else { Err(Status::InvalidValue) };
    }
    let mapped = state
        .reservations
        .range(..=address)
        .next_back()
        .is_some_and(|(start, reservation)| reservation.contains(*start, address, bytes));
    if mapped || host_too && address != 0 { Ok(()) } else { Err(Status::InvalidValue) }
}

/// Checks that the GPU can address the range: unified addressing contains host memory that is known
/// to the GPU.
fn check_device(address: u64, bytes: u64) -> CuResult {
    if host::is_known(address, bytes)? { Ok(()) } else { check(address, bytes, false) }
}

fn queue(on: Handle, bytes: u64, nanos_per_16: f64, wait: bool) -> CuResult {
    let nanos = (bytes as f64 / 16.0 * nanos_per_16) as u64;
    let length = driver::machine()?.world().time.real(nanos);
    let end = state::lock()?.queue(on, Engine::Copies, length)?;
    if wait {
        timeline::wait_until(end);
    }
    Ok(())
}

/// Queues a copy between host and GPU.
fn over_pcie(device: u64, host: u64, bytes: usize, on: Handle, wait: bool) -> CuResult {
    if bytes == 0 {
        return driver::machine().map(drop);
    }
    if host == 0 {
        return Err(Status::InvalidValue);
    }
    check_device(device, bytes as u64)?;
    queue(on, bytes as u64, OVER_PCIE, wait)
}

/// Queues a copy on the GPU or between any memories.
fn anywhere(to: u64, from: u64, bytes: usize, on: Handle, host_too: bool, wait: bool) -> CuResult {
    if bytes == 0 {
        return driver::machine().map(drop);
    }
    check(to, bytes as u64, host_too)?;
    check(from, bytes as u64, host_too)?;
    queue(on, bytes as u64, ON_GPU, wait)
}

fn fill(to: u64, element: usize, count: usize, on: Handle, wait: bool) -> CuResult {
    let bytes = element.checked_mul(count).ok_or(Status::InvalidValue)?;
    if bytes == 0 {
        return driver::machine().map(drop);
    }
    check_device(to, bytes as u64)?;
    queue(on, bytes as u64, ON_GPU, wait)
}

const DEFAULT: Handle = Handle::NULL;

export! {
    fn cuMemcpy(to: u64, from: u64, bytes: usize) { anywhere(to, from, bytes, DEFAULT, true, true) }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, on: Handle) { anywhere(to, from, bytes, on, true, false) }
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) { over_pcie(to, from, bytes, DEFAULT, true) }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, on: Handle) { over_pcie(to, from, bytes, on, false) }
    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) { over_pcie(from, to, bytes, DEFAULT, true) }
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, on: Handle) { over_pcie(from, to, bytes, on, false) }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) { anywhere(to, from, bytes, DEFAULT, false, true) }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, on: Handle) { anywhere(to, from, bytes, on, false, false) }
    fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) { let _ = value; fill(to, 1, count, DEFAULT, true) }
    fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) { let _ = value; fill(to, 2, count, DEFAULT, true) }
    fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) { let _ = value; fill(to, 4, count, DEFAULT, true) }
    fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, on: Handle) { let _ = value; fill(to, 1, count, on, false) }
    fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, on: Handle) { let _ = value; fill(to, 2, count, on, false) }
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, on: Handle) { let _ = value; fill(to, 4, count, on, false) }
}
