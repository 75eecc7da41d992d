//! Compute: decides when a launch may run.
//!
//! ```text
//!  hook: launch --> LaunchBudget::charge  from the lease: no clock, no shared word            (nearly always)
//!             \---> Meter::admit --> Bucket::take    GPU-ns of the container, one word    (about every 250 us of GPU)
//!                        |  Go: launch, between two events if the plan has them    Wait: until a time, then ask again
//!                        v
//!                   Meter::drain: measured times correct the charges, and teach Estimates
//!
//!  host: Arbiter::step   use by containers -> Published: the rate of each, and the contention of the GPU
//! ```
//!
//! Nothing here has a clock or a thread: `now` is a parameter in monotonic nanoseconds. Reasons:
//! `docs/adr/0078-compute-limits.md`.

mod arbiter;
mod bucket;
mod contention;
mod decision;
mod entitlement;
mod estimates;
mod gain;
mod launch_budget;
mod meter;
mod page;
mod part;
mod proportion;
mod published;
mod rate;
mod sample;
mod spans;

pub use arbiter::{Arbiter, Observation, Tenant, needs_metering};
pub use bucket::{BURST_GPU_NS, Bucket, charge_exited};
pub use contention::Contention;
pub use decision::{
    ComputeView, EventPair, EventTimer, Launch, LaunchDecision, LaunchPlan, LaunchTime, Marker,
    WaitUntil,
};
pub use entitlement::Entitlement;
pub use estimates::{Estimates, Key};
pub use gain::{Gain, GainEstimator, Interval};
pub use launch_budget::{LaunchBudget, LaunchCharge};
pub use meter::{LEASE_GPU_NS, MARKERS, MeasuredLaunch, Meter, RUN_AHEAD_GPU_NS};
pub use page::{busy_of, running_of};
pub use published::{Published, is_metered};
pub use rate::Rate;
pub use spans::{CALIBRATION, Streams, Submission};
pub use tessera_intercept_abi::{ComputePage, ComputeSlot, PublishedPage};
