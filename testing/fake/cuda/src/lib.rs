//! A fake `libcuda.so.1` over the fake world.
//!
//! It has NVIDIA's symbol names and calling conventions, so that programs for the CUDA driver API
//! run on it unchanged, as far as the API is modelled:
//!
//! | module | model |
//! |---|---|
//! | `driver` | initialisation, versions, error names |
//! | `device` | the GPUs of the world: names, UUIDs, attributes |
//! | `context` | primary and plain contexts, a stack of current ones per thread; a context uses memory |
//! | `memory`, `pool`, `vmm`, `array` | memory of the world's GPU, shared by all processes of the world and released when a process exits. It has no backing store: copies check their bounds, take modelled time and move no bytes |
//! | `bind`, `share` | references that keep physical memory alive; memory of other processes and APIs |
//! | `timeline`, `stream`, `event`, `launch` | work takes modelled time, kernels beside each other as far as they fit on a GPU; synchronisation waits in real time (scaled by the world's `time.scale`) |
//! | `capture`, `graph`, `user_object` | streams record work, events take other streams into a capture, and forbidden calls invalidate it; a graph takes the sum of its nodes' times |
//! | `module` | any image is a valid module with every function; one named `..._for_250us` takes that long |
//! | `export_tables`, `integrity`, `context_storage` | functions without names, which NVIDIA's libraries above the driver call |
//! | `resolve` | `cuGetProcAddress`, by name, version and default stream, as a driver of the world's CUDA version (11.7 to 13.5) does |
//!
//! `dlsym` finds the symbols of a driver of that version (`exports`). All other exports of NVIDIA's
//! library return `CUDA_ERROR_NOT_SUPPORTED`. A NULL pointer returns `CUDA_ERROR_INVALID_VALUE`, an
//! invalid handle `CUDA_ERROR_INVALID_HANDLE` or `_CONTEXT`; nothing crashes. The function that the
//! variable `TESSERA_FAKE_CUDA_FAILS` names returns `CUDA_ERROR_DEVICE_UNAVAILABLE` and does
//! nothing.

mod abi;
mod allocation;
mod array;
mod attribute;
mod bind;
mod capture;
mod context;
mod context_storage;
mod copy;
mod device;
mod driver;
mod event;
mod export_tables;
mod exports;
mod graph;
mod graph_memory;
mod host;
mod integrity;
mod kernel;
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
mod tensor_map;
mod timeline;
mod user_object;
mod vmm;

/// Stubs of functions that are not modelled, and the addresses of all.
mod symbols {
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}
