//! The interceptor's accounting as a pure machine: no system calls, no clock, no allocation.
//!
//! ```text
//!  reserve_across(shares)      several grants on one GPU add up
//!    Account::take / give      one process's part of one ledger; notices a ledger that was tampered with
//!      change                  one numbered change of the total: exact under any interleaving and any death
//!        Book                  the words, in shared memory or in a test
//!  attach, reclaim             slots, owned by locks that die with their process (SlotLocks)
//!  compute                     who may launch when
//! ```
//!
//! What one process takes is never lost and never counted twice, wherever in a change it is killed:
//! the total carries the slot and number of its last change, so that whoever comes next can tell
//! whether it happened. Nothing waits for anyone: a process that is stopped in the middle of a
//! change holds nobody up.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod account;
mod book;
mod change;
pub mod compute;
mod exports;
mod overhead;
mod shares;
mod slots;

pub use account::{Account, Refused};
pub use book::{Book, SlotWords, Word};
pub use exports::{ExportHandle, note_export, was_exported};
pub use overhead::Overhead;
pub use shares::{Share, release_across, reserve_across};
pub use slots::{Burial, Identity, SlotLocks, adds_up, attach, reclaim};

#[cfg(test)]
mod tests;
