//! A fake `libcuda.so.1` over the fake world.
//!
//! It has NVIDIA's symbol names and calling conventions, so that programs written for the CUDA
//! driver API run on it unchanged, as far as it is modelled:
//!
//! | module | what is modelled |
//! |---|---|
//! | `driver` | initialisation, versions, the names of errors |
//! | `device` | the GPUs of the world: names, UUIDs, attributes |
//! | `context` | primary and plain contexts, a stack of current ones per thread; a context takes memory |
//! | `memory`, `pool`, `vmm`, `array` | memory that is taken from the world's GPU, against all processes of the world, and given back when the process dies. Nothing is behind it: copies check their bounds, take their time and move no bytes |
//! | `bind`, `share` | what keeps physical memory without having any; memory of other processes and APIs |
//! | `timeline`, `stream`, `event`, `launch` | work takes modelled time, one kernel after the other on a GPU; synchronising really waits (times the world's `time.scale`) |
//! | `capture`, `graph` | streams record what they are given, and calls that are forbidden meanwhile spoil it; a graph takes as long as its kernels together |
//! | `module` | any image is a module and has any function; one named `..._for_250us` takes that long |
//! | `resolve` | `cuGetProcAddress`, by name, version and default stream, as a driver of the world's CUDA version (11.7 to 13.5) answers |
//!
//! `dlsym` finds what a driver of that version has (`exports`). Everything else that NVIDIA's
//! library exports answers `CUDA_ERROR_NOT_SUPPORTED`. NULL where a pointer must be answers
//! `CUDA_ERROR_INVALID_VALUE`, handles that are none `CUDA_ERROR_INVALID_HANDLE` or `_CONTEXT`;
//! nothing crashes. The function that the variable `TESSERA_FAKE_CUDA_FAILS` names answers
//! `CUDA_ERROR_DEVICE_UNAVAILABLE` and does nothing.

mod abi;
mod allocation;
mod array;
mod attribute;
mod bind;
mod capture;
mod context;
mod copy;
mod device;
mod driver;
mod event;
mod exports;
mod graph;
mod graph_memory;
mod host;
mod launch;
mod memory;
mod module;
mod mps;
mod pool;
mod resolve;
mod share;
mod state;
mod status;
mod stream;
mod timeline;
mod vmm;

/// Functions that are not modelled, and where all are.
mod symbols {
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}
