//! Faults by plan: everything that the API server can do to its clients, drawn from one seed.
//!
//! ```text
//! seed -> plan.rs (pure): episodes on a time line, and a draw for every request and event
//!      -> injector.rs: does it to an API server, and counts what has really happened
//! ```
//!
//! A seed replays the plan: the episodes, their times and lengths, and what becomes of the n-th
//! request or event of each stream (one user, one verb, one resource). It does not replay how fast
//! the programs run, so a failure may need a few tries.

mod injector;
mod plan;

pub use injector::{Injector, Report};
pub use plan::{Episode, FaultPlan, Kind};
