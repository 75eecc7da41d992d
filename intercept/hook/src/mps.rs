//! Detection of MPS: if this process is a client as its grant says, MPS limits its part of the GPU,
//! and launches are not held.
//!
//! Checked once for each GPU, at the first launch. The program's variables may have changed since
//! it initialized CUDA, so the driver's own answer comes first.

use core::ffi::{CStr, c_char, c_int};
use core::ptr;

use tessera_intercept_abi::mps::{
    ACTIVE_THREAD_PERCENTAGE, PARTITION_BY_CONTEXT, PIPE_DIRECTORY, makes_client,
};

use crate::driver::cuda;
use crate::state::with_state;

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Checks if the process is a client on a GPU, and notes it.
#[cold]
pub(crate) fn check(gpu: usize, device: c_int) {
    /// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`, from CUDA 12.3 on. With an older driver, no process
    /// is a client.
    const MPS_ENABLED: c_int = 133;
    let is_on = cuda::device_attribute(device, MPS_ENABLED) == Some(1);
    let [pipe_directory, percentage, by_context] =
        [PIPE_DIRECTORY, ACTIVE_THREAD_PERCENTAGE, PARTITION_BY_CONTEXT].map(variable);
    // Otherwise the percentage may differ for each context.
    let is_constant = by_context.is_none_or(|value| value == b"0");
    let is_client =
        |percent| is_on && is_constant && makes_client(pipe_directory, percentage, percent);
    with_state(|state| state.note_mps(gpu, is_client));
}

/// Returns a variable of this process. Not by `getenv`, which the program may replace.
fn variable(name: &str) -> Option<&'static [u8]> {
    // SAFETY: libc's list, ended by NULL. A program must not change it while other threads read it;
    // its CUDA libraries read it with `getenv` at any time, and this reads it once more.
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
