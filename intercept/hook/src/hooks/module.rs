//! Modules and libraries: after one is unloaded, another kernel may get an address of it.
//!
//! Memory of code and variables is not charged here: only the host can measure it, and publishes it
//! (docs/adr/0110-host-measurement.md).

use core::ffi::c_int;

use super::route::hooks;
use crate::compute;
use crate::driver::cuda::{Handle, SUCCESS};

fn unloaded(result: c_int) -> c_int {
    if result == SUCCESS {
        compute::code_unloaded();
    }
    result
}

hooks! {
    fn cuModuleUnload(module: Handle) |real| {
        // SAFETY: the program's own call.
        unloaded(unsafe { real(module) })
    }

    fn cuLibraryUnload(library: Handle) |real| {
        // SAFETY: the program's own call.
        unloaded(unsafe { real(library) })
    }
}
