//! GPUs shared in time, programs that launch on them, and limiters between the two, by discrete
//! events.
//!
//! ```text
//!  Program   what a container's processes launch, and when they wait for it
//!    |  each launch asks the container's Limiter: ours, none, or models of others'
//!  Gpu       one context at a time, a slice each in turn; streams within a context run side by side
//!    |  knows the truth: which context ran when
//!  World     the clock; the host that looks at ledgers and publishes, late
//!    |
//!  Record    GPU time of each container every 10 ms, and errors over any window
//! ```
//!
//! Time is in nanoseconds and does not pass by itself; the same seed gives the same run.

mod cases;
mod gpu;
mod limiter;
mod others;
mod program;
mod random;
mod record;
mod world;

pub use cases::{Company, Judged, Workload, judge, run_alone_or_beside, unlimited};
pub use gpu::{Gpu, GpuSpec};
pub use limiter::{Enforced, Limiter};
pub use program::{Pattern, Program};
pub use record::Record;
pub use world::{Container, Host, World};

/// Nanoseconds of a microsecond.
pub const US: u64 = 1_000;
/// Nanoseconds of a millisecond.
pub const MS: u64 = 1_000_000;
/// Nanoseconds of a second.
pub const S: u64 = 1_000_000_000;
