//! Compute: who may launch when.
//!
//! ```text
//!  hook: launch --> Till::spend           from the lease: no clock, nothing shared        (nearly always)
//!             \---> Meter::admit --> Bucket::take    GPU-ns of the container, one word    (about every 250 us of GPU)
//!                        |  Go: launch it, between two events where asked    Wait: until when, then ask again
//!                        v
//!                   Meter::drain: what events measured settles what was prepaid, and teaches Estimates
//!
//!  host: Arbiter::step   what containers used -> Published: each one's rate, and how crowded the GPU is
//! ```
//!
//! Nothing here has a clock or a thread: `now` is monotonic nanoseconds, handed in. Why it is done
//! this way: `docs/adr/0078-compute-limits.md`.

mod arbiter;
mod bucket;
mod crowd;
mod decision;
mod estimates;
mod gain;
mod meter;
mod page;
mod proportion;
mod published;
mod rate;
mod sample;
mod spans;
mod till;

pub use arbiter::{Arbiter, Observation, Tenant};
pub use bucket::{BURST_GPU_NS, Bucket, bury};
pub use crowd::Crowd;
pub use decision::{
    Asked, Decision, Launch, Marker, Pair, Plan, Surroundings, Timer, Waiting, rate_of,
};
pub use estimates::{Estimates, Key};
pub use gain::{Gain, GainEstimator, Interval};
pub use meter::{LEASE_GPU_NS, MARKERS, Meter, RUN_AHEAD_GPU_NS};
pub use page::{busy_of, running_of};
pub use published::Published;
pub use rate::Rate;
pub use spans::{CALIBRATION, Streams, Submission};
pub use tessera_intercept_abi::{ComputePage, ComputeSlot, PublishedPage};
pub use till::{Paid, Till};
