//! Whether this process shares its GPU by MPS, as its grant means: then MPS holds its part of the compute, and launches are let go.
//!
//! Asked once for each GPU, when the first launch on it is held. What the program's variables were when it began to use CUDA is
//! not to be known; what the driver says of itself is believed before them.

use core::ffi::{CStr, c_char, c_int};
use core::ptr;

use tessera_intercept_abi::mps::{ACTIVE_THREAD_PERCENTAGE, PIPE_DIRECTORY, makes_client};

use crate::cuda;
use crate::root;

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Finds out whether the process is a client on that GPU, and has it noted.
#[cold]
pub(crate) fn find_out(gpu: usize, device: c_int) {
    /// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`, since CUDA 12.2; drivers from before do not say.
    const MPS_ENABLED: c_int = 133;
    let is_off = cuda::device_attribute(device, MPS_ENABLED) == Some(0);
    let [pipe_directory, percentage] = [PIPE_DIRECTORY, ACTIVE_THREAD_PERCENTAGE].map(variable);
    let is_client = |percent| !is_off && makes_client(pipe_directory, percentage, percent);
    root::with_state(|state| state.note_mps(gpu, is_client));
}

/// The value of a variable of this process. Not by `getenv`, which may be the program's own.
fn variable(name: &str) -> Option<&'static [u8]> {
    // SAFETY: libc's list, ended by NULL. A program that changes it beside other threads that read it may crash in libc's `getenv` as
    // here; the driver has done the same when it began.
    let mut at = unsafe { ptr::read_volatile(&raw const environ) };
    loop {
        // SAFETY: as above; each entry is NULL or a terminated text.
        let line = unsafe { at.as_ref() }.filter(|line| !line.is_null())?;
        // SAFETY: as above.
        let line = unsafe { CStr::from_ptr(*line) }.to_bytes();
        if let Some(value) = line.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) {
            return Some(value);
        }
        // SAFETY: the list goes on until NULL.
        at = unsafe { at.add(1) };
    }
}
