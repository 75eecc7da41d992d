//! Accounting of the interceptor as a pure machine: no system calls, no clock, no allocation.
//!
//! ```text
//!  reserve_across(shares)      adds up several grants of one GPU
//!    Account::take / give      one process's part of one ledger; detects a ledger that was tampered with
//!      change                  one numbered change of the total: exact under any interleaving and any kill
//!        LedgerWords           the words, in shared memory or in a test
//!  attach, reclaim             slots, owned by locks that end with their process (SlotLocks)
//!  compute                     decides when a launch may run
//! ```
//!
//! Memory that one process takes is never lost and never counted twice, wherever in a change the
//! process is killed: the total carries the slot and the number of its last change, so the next
//! process can tell if the change was applied. No process waits for another: a process that is
//! stopped in the middle of a change does not block the others.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod account;
mod change;
pub mod compute;
mod exports;
mod ledger_words;
mod overhead;
mod shares;
mod slots;

pub use account::{Account, Refused};
pub use exports::{ExportHandle, note_export, was_exported};
pub use ledger_words::{LedgerWords, SlotWords, Word};
pub use overhead::Overhead;
pub use shares::{Share, release_across, reserve_across};
pub use slots::{Identity, ReclaimContext, SlotLocks, adds_up, attach, reclaim};

#[cfg(test)]
mod tests;
