//! Memory that processes of the claim share with each other: one of them is charged for it
//! (docs/adr/0111-imports-within-a-claim.md, docs/adr/0115-shared-physical-memory.md).

use tessera_intercept_limiter::{ExportHandle, note_export, was_exported};

use crate::state::State;

/// Notes that a process of the claim has exported memory of a GPU under a handle.
pub(crate) fn note(state: &mut State, gpu: u32, handle: &ExportHandle) {
    state.shares(gpu as usize).iter().for_each(|share| note_export(share.ledger(), handle));
}

/// Returns true if a process of the claim has exported memory of a GPU under a handle.
pub(crate) fn is_noted(state: &mut State, gpu: u32, handle: &ExportHandle) -> bool {
    state.shares(gpu as usize).iter().any(|share| was_exported(share.ledger(), handle))
}

/// Returns the handle under which physical memory is noted. Its file descriptors differ in each
/// process, and nothing but the size identifies what they refer to.
pub(crate) fn physical_memory(bytes: u64) -> ExportHandle {
    let mut handle = *b"physical memory of the claim, without a name of its own;        ";
    handle[56..].copy_from_slice(&bytes.to_ne_bytes());
    handle
}
