//! Whether this process shares its GPU by MPS, as its grant means: then MPS holds its part of the
//! compute, and launches are let go.
//!
//! Asked once for each GPU, when the first launch on it is held. What the program's variables were
//! when it began to use CUDA is not to be known; what the driver says of itself is believed before
//! them.

use core::ffi::{CStr, c_char, c_int};
use core::ptr;

use tessera_intercept_abi::mps::{
    ACTIVE_THREAD_PERCENTAGE, PARTITION_BY_CONTEXT, PIPE_DIRECTORY, makes_client,
};

use crate::cuda;
use crate::root;

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Finds out whether the process is a client on that GPU, and has it noted.
#[cold]
pub(crate) fn find_out(gpu: usize, device: c_int) {
    /// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`, since CUDA 12.3. Of a driver that does not say, nobody is
    /// a client.
    const MPS_ENABLED: c_int = 133;
    let is_on = cuda::device_attribute(device, MPS_ENABLED) == Some(1);
    let [pipe_directory, percentage, by_context] =
        [PIPE_DIRECTORY, ACTIVE_THREAD_PERCENTAGE, PARTITION_BY_CONTEXT].map(variable);
    // Then the percentage may be another one for the next context.
    let is_constant = by_context.is_none_or(|value| value == b"0");
    let is_client =
        |percent| is_on && is_constant && makes_client(pipe_directory, percentage, percent);
    root::with_state(|state| state.note_mps(gpu, is_client));
}

/// The value of a variable of this process. Not by `getenv`, which may be the program's own.
fn variable(name: &str) -> Option<&'static [u8]> {
    // SAFETY: libc's list, ended by NULL. A program must not change it beside threads that read it,
    // and its CUDA libraries do, by `getenv`, at times of their own; so it is no worse off with
    // one more who reads, once.
    let mut at = unsafe { ptr::read_volatile(&raw const environ) };
    loop {
        // SAFETY: as above; each entry is NULL or a terminated text.
        let line = unsafe { at.as_ref() }.filter(|line| !line.is_null())?;
        // SAFETY: as above.
        let line = unsafe { CStr::from_ptr(*line) }.to_bytes();
        if let Some(value) =
            line.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
        {
            return Some(value);
        }
        // SAFETY: the list goes on until NULL.
        at = unsafe { at.add(1) };
    }
}
