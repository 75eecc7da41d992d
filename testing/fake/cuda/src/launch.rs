//! Launches: a kernel takes its modelled time on the GPU, and the caller takes the time of a
//! launch.

use std::ffi::{c_uint, c_void};

use crate::abi::{CuResult, InPtr, export};
use crate::driver;
use crate::kernel::{MAX_THREADS, resident_blocks};
use crate::module;
use crate::state::{self, Handle};
use crate::status::Status;
use crate::stream;
use crate::timeline::{self, Engine, Fill};

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const c_void,
    attribute_count: c_uint,
}

fn product(sizes: [c_uint; 3]) -> u64 {
    sizes.into_iter().fold(1_u64, |product, size| product.saturating_mul(size.into()))
}

fn launch(function: Handle, grid: [c_uint; 3], block: [c_uint; 3], on: Handle) -> CuResult {
    let (blocks, threads) = (product(grid), product(block));
    let machine = driver::machine()?;
    let mut state = state::lock()?;
    module::load_function(&mut state, function)?;
    let length = state.functions.get(&function).ok_or(Status::InvalidHandle)?.length;
    if blocks == 0 || threads == 0 || threads > MAX_THREADS as u64 {
        return Err(Status::InvalidValue);
    }
    let board = &machine.world().gpus[stream::gpu_of(&state, on)?];
    let at_once = u64::from(board.model.multiprocessors) * resident_blocks(threads);
    let fill = Fill::of(blocks, at_once);
    let time = &machine.world().time;
    let nanos = match length {
        Some(length) => u64::try_from(length.as_nanos()).unwrap_or(u64::MAX),
        None => time.kernel_nanos(&board.model, blocks),
    };
    drop(state);
    // The GPU gets the kernel at the end of the call: an idle one waits for it until then.
    timeline::spin(time.real(time.launch_nanos));
    state::lock()?.queue(on, Engine::Kernels(fill), time.real(nanos)).map(drop)
}

export! {
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        on: Handle,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let _ = (shared_bytes, parameters, extra);
        launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], on)
    }

    fn cuLaunchKernelEx(
        config: InPtr<Config>,
        function: Handle,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let _ = (parameters, extra);
        let Config { grid, block, stream, .. } = config.get()?;
        launch(function, grid, block, stream)
    }

    fn cuLaunchCooperativeKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        on: Handle,
        parameters: *const *const c_void,
    ) {
        let _ = (shared_bytes, parameters);
        launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], on)
    }
}
