//! `libtessera_intercept.so`: loaded into every program of a container, it holds the program to the
//! container's grants. And its two proxies, which do the same in the place of `libcuda.so.1` and
//! `libnvidia-ml.so.1`: see `proxy`.
//!
//! ```text
//!  program ----------> hook (memory, pool, vmm, array, context, info, nvml, launch, capture)
//!    dlsym, cuGetProcAddress --> loader, resolve: hand out hooks for the driver's functions
//!                        |
//!                        v  charge, then call the driver, then keep or undo
//!   launch, capture, wait: compute --> gate of the GPU (its own locks)
//!                      charge --> state (one lock, never held over a driver call)
//!                                   |-- shares: /dev/tessera/<id>/{grant,ledger}, by GPU UUID
//!                                   |-- pointers: what each pointer costs
//!                                   `-- gauge: what the driver counts itself, read after calls
//!                        |
//!                        v
//!                      route: the driver's own functions, found in its ELF tables
//! ```
//!
//! It is a guest in programs that know nothing of it. So it has no constructor, no thread and no
//! signal handler; it prints only if it is asked to (`trace`), never panics, and takes memory for
//! itself from the kernel only. As it ships (`--profile intercept`) it is `no_std` and needs
//! nothing but libc. Where anything is unclear it gives no memory.
#![cfg_attr(panic = "abort", no_std)]

mod array;
mod bind;
mod capture;
mod charge;
mod compute;
mod context;
mod cuda;
mod elf;
mod gauge;
mod grants;
mod graph;
mod host_pid;
mod import;
mod info;
mod launch;
mod ledger_lock;
mod limit;
#[cfg(artefact = "preload")]
mod loader;
mod memory;
mod module;
mod mps;
mod nvml;
mod pointers;
mod pool;
mod processes;
#[cfg(not(artefact = "preload"))]
mod proxy;
mod resolve;
mod root;
mod route;
mod shares;
mod state;
mod sys;
mod trace;
mod unknown;
mod utilization;
#[cfg(feature = "hami")]
mod variables;
mod vmm;
mod wait;

/// Nothing in here panics; the language wants to know what if.
#[cfg(panic = "abort")]
#[panic_handler]
fn panicked(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the process, as a panic without unwinding does.
    unsafe { libc::abort() }
}
