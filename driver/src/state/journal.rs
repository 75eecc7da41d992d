//! What is prepared on this node: one file, one writer at a time.

mod schema;
mod store;

pub use schema::{ClaimRecord, ComputeCap, ComputePriority, Journal, ShareRecord, State, Taken};
pub use store::{JournalError, JournalStore, LockedJournal, Replaced};

#[cfg(test)]
mod tests;
