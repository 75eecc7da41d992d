//! Planned faults of the API server, drawn from one seed.
//!
//! ```text
//! seed -> plan.rs (pure): episodes on a time line, and a draw for every request and event
//!      -> injector.rs: injects them into an API server, and counts the faults that happened
//! ```
//!
//! A seed replays the plan: the episodes, their times and lengths, and the fault of the n-th
//! request or event of each stream (one user, one verb, one resource). The speed of the programs is
//! not replayed, so a failure may need a few attempts.

mod injector;
mod plan;

pub use injector::{FaultCounts, Injector};
pub use plan::{Episode, EpisodeKind, FaultKind, FaultPlan};
