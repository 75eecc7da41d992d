//! Modules and libraries: a kernel may get the address of one that is gone.
//!
//! Memory of code and variables is not counted here: how much it is, and when the CUDA driver takes
//! it, is known to the host only, which publishes it (docs/adr/0110-host-measurement.md).

use core::ffi::c_int;

use crate::compute;
use crate::cuda::{Handle, SUCCESS};
use crate::route::hooks;

fn unloaded(result: c_int) -> c_int {
    if result == SUCCESS {
        compute::code_is_gone();
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
