//! Discrete-event simulation of time-sliced GPUs, programs that launch on them, and limiters
//! between the two.
//!
//! ```text
//! Program   launches of a container's processes, and their synchronisation
//!   |  each launch asks the container's Limiter: Tessera's, none, or models of others
//! Gpu       one context at a time, by time slices; its streams share channels and SMs
//!   |  knows the ground truth: the run time of each context
//! Cpu       what submissions take, preemption and CPU limits: the GPU waits for the CPU meanwhile
//! World     the clock; the host that reads ledgers and publishes with a delay
//!   |
//! Record    GPU time of each container every 10 ms, and errors over any window
//! ```
//!
//! Time is virtual, in nanoseconds; the same seed gives the same run.

mod cases;
mod cpu;
mod gpu;
mod limiter;
mod nvml;
mod others;
mod program;
mod random;
mod record;
mod world;

pub use cases::{Accuracy, CoTenant, Workload, measure, run, unlimited};
pub use cpu::CpuSpec;
pub use gpu::{CHANNELS, Gpu, GpuSpec, Kernel, Spin};
pub use limiter::{ContainerLimiter, Limiter};
pub use program::{Pattern, Program};
pub use record::Record;
pub use world::{Container, Host, World};

/// Nanoseconds per microsecond.
pub const US: u64 = 1_000;
/// Nanoseconds per millisecond.
pub const MS: u64 = 1_000_000;
/// Nanoseconds per second.
pub const S: u64 = 1_000_000_000;
