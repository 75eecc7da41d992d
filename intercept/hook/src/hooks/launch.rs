//! Launches: each is charged before it is made.

use core::ffi::{c_int, c_uint, c_void};

use tessera_intercept_limiter::compute::Key;

use super::graph::with_memory;
use super::route::hooks;
use crate::compute::{Stream, launch};
use crate::driver::cuda::Handle;

/// The beginning of `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    parameters: *mut *mut c_void,
}

fn kernel(function: Handle, grid: [c_uint; 3], block: [c_uint; 3]) -> Key {
    Key::kernel(function as usize, grid, block)
}

/// Makes a launch by its configuration. The driver refuses an invalid one.
///
/// # Safety
/// `config` is NULL or what the program wants the driver to read.
unsafe fn configured(
    config: *const c_void,
    function: Handle,
    stream: fn(Handle) -> Stream,
    make: impl FnOnce() -> c_int,
) -> c_int {
    if config.is_null() {
        return make();
    }
    // SAFETY: by this function's contract.
    let config = unsafe { config.cast::<Config>().read_unaligned() };
    launch(kernel(function, config.grid, config.block), stream(config.stream), make)
}

/// Makes a cooperative launch on several GPUs, which begins on all of them at once. It is charged
/// on the GPU of the current context, for all of them.
///
/// # Safety
/// `list` is NULL or has `count` entries that the program passes to the driver.
unsafe fn on_devices(list: *const c_void, count: c_uint, make: impl FnOnce() -> c_int) -> c_int {
    if list.is_null() || count == 0 {
        return make();
    }
    // SAFETY: by this function's contract.
    let first = unsafe { list.cast::<Parameters>().read_unaligned() };
    let [width, height, depth] = first.grid;
    let key = kernel(first.function, [width.wrapping_mul(count), height, depth], first.block);
    launch(key, Stream::plain(first.stream), make)
}

hooks! {
    fn cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        let key = kernel(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the program's own call.
        launch(key, Stream::plain(stream), move || unsafe {
            real(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra,
            )
        })
    }

    fn cuLaunchKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        let key = kernel(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the program's own call.
        launch(key, Stream::per_thread(stream), move || unsafe {
            real(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra,
            )
        })
    }

    fn cuLaunchKernelEx(
        config: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe {
            configured(config, function, Stream::plain, move || real(config, function, parameters, extra))
        }
    }

    fn cuLaunchKernelEx_ptsz(
        config: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe {
            configured(config, function, Stream::per_thread, move || real(config, function, parameters, extra))
        }
    }

    fn cuLaunchCooperativeKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void,
    ) |real| {
        let key = kernel(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the program's own call.
        launch(key, Stream::plain(stream), move || unsafe {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters)
        })
    }

    fn cuLaunchCooperativeKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void,
    ) |real| {
        let key = kernel(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the program's own call.
        launch(key, Stream::per_thread(stream), move || unsafe {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters)
        })
    }

    fn cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, count: c_uint, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        unsafe { on_devices(list, count, move || real(list, count, flags)) }
    }

    // Forms of CUDA 2, whose block size is set before by another call: one estimate for all
    // launches of a grid.
    fn cuLaunch(function: Handle) |real| {
        let key = kernel(function, [1, 1, 1], [0, 0, 0]);
        // SAFETY: the program's own call.
        launch(key, Stream::plain(core::ptr::null_mut()), move || unsafe { real(function) })
    }

    fn cuLaunchGrid(function: Handle, width: c_int, height: c_int) |real| {
        let key = kernel(function, [width.cast_unsigned(), height.cast_unsigned(), 1], [0, 0, 0]);
        // SAFETY: the program's own call.
        launch(key, Stream::plain(core::ptr::null_mut()), move || unsafe { real(function, width, height) })
    }

    fn cuLaunchGridAsync(function: Handle, width: c_int, height: c_int, stream: Handle) |real| {
        let key = kernel(function, [width.cast_unsigned(), height.cast_unsigned(), 1], [0, 0, 0]);
        // SAFETY: the program's own call.
        launch(key, Stream::plain(stream), move || unsafe { real(function, width, height, stream) })
    }

    fn cuGraphLaunch(graph: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        let make = move || unsafe { real(graph, stream) };
        with_memory(graph, || launch(Key::graph(graph as usize), Stream::plain(stream), make))
    }

    fn cuGraphLaunch_ptsz(graph: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        let make = move || unsafe { real(graph, stream) };
        with_memory(graph, || launch(Key::graph(graph as usize), Stream::per_thread(stream), make))
    }
}
