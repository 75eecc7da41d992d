//! Interceptor: holds the programs of a container to the container's grants. Three libraries are
//! built from this crate: `libtessera_intercept.so` (`intercept/preload`), which is preloaded into
//! every program, and two proxies (`intercept/proxy-cuda`, `intercept/proxy-nvml`), which take the
//! place of `libcuda.so.1` and `libnvidia-ml.so.1`.
//!
//! ```text
//!  program --> loader (preload) or proxy --> hooks
//!                                              |-- compute: gate of the GPU (own locks) --> launch
//!                                              `-- allocation: charge, call the driver, keep or undo
//!                                                    `-- charge, pools, graph_memory, physical, driver_counted
//!                                                          `-- state (one lock, never held over a driver call)
//!                                                                |-- share: /dev/tessera/<id>/{grant,ledger}
//!                                                                `-- table: costs of pointers, handles, arrays
//!  driver: the driver's own functions, found in its ELF tables
//! ```
//!
//! The library runs in programs that do not expect it. So it has no constructor, no thread and no
//! signal handler; it prints only on request (`trace`), never panics, and gets its own memory from
//! the kernel only. As it ships (`--profile intercept`) it is `no_std` and needs nothing but libc.
//! In every unclear case it grants no memory. (The build for HAMi's variables has a thread and a
//! destructor: `hami`.)
#![cfg_attr(panic = "abort", no_std)]

mod allocation;
mod charge;
mod compute;
mod driver;
mod driver_counted;
mod grants;
mod graph_memory;
#[cfg(feature = "hami")]
mod hami;
mod hooks;
mod host_pid;
mod ledger_lock;
pub mod loader;
mod mps;
mod physical;
mod pools;
mod process_page;
pub mod proxy;
mod share;
mod state;
mod sys;
mod table;
mod terms;
mod trace;
mod unknown;

pub use hooks::entries;

/// Ends the process, as a panic without unwinding does. For the panic handlers of the libraries:
/// nothing in this crate panics.
pub fn abort() -> ! {
    // SAFETY: no arguments.
    unsafe { libc::abort() }
}
