//! The journal of prepared claims: one file, one writer at a time.

mod schema;
mod store;

pub use schema::{
    ClaimRecord, ComputeCap, ComputeInstanceRecord, ComputePriority, GpuUsage, Journal,
    MigDeviceRecord, RecordState, Reserved, ShareRecord,
};
pub use store::{JournalError, JournalStore, LockedJournal, Replaced};

#[cfg(test)]
mod tests;
