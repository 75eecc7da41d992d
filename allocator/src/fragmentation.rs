//! Placement that keeps the future schedulable: how much of a node's GPUs is likely to stay unused,
//! and what a placement adds to that.
//!
//! ```text
//! requests that came, and those refused --RequestMix, Learner--> what is to be expected --> Potential
//! NodeView (what a node has left) --Potential::of--> thousandths of a GPU that will probably find no taker
//! before and after a placement --Potential::rise--> Rise: the node, and on it the GPUs, where it is least
//! ```
//!
//! The measure begins with F of FGD ("Beware of Fragmentation: Scheduling GPU-Sharing Workloads
//! with Fragmentation Gradient Descent", USENIX ATC'23): what of a node's free GPUs an average
//! request cannot use. Three terms are added: the waste of what is left of a GPU, at the prices of
//! the shares that still fit into it; GPUs that the node's CPU does not suffice for at the mean of
//! the mix; and GPUs that it does not suffice for even with the requests that need least.
//! [`Potential`] has the formula; `docs/benchmarks/placement.md` has what it is worth.
//!
//! Requests name the GPU types that they accept. Those for which there was no room count more, so
//! GPUs stay usable for what is short: free ones side by side, or those of a rare type.
//!
//! # Example
//! ```
//! use tessera_allocator::fragmentation::{Gpu, GpuMilli, GpuType, GpuTypes, Learner, NodeView, Request};
//!
//! let mut learner = Learner::default();
//! let request =
//!     Request { cpu_milli: 8000, gpus: 1, share: GpuMilli::new(500), types: GpuTypes::ANY };
//! learner.observe(request);
//! let potential = learner.potential();
//!
//! // The half goes beside another half, and the free GPU stays whole.
//! let node = |left: [u32; 2]| left.map(|left| Gpu { kind: GpuType(0), left: GpuMilli::new(left) });
//! let before = potential.of(&NodeView { cpu_milli: 32_000, gpus: &node([1000, 500]) });
//! let rise = |left| potential.rise(before, &NodeView { cpu_milli: 24_000, gpus: &node(left) });
//! assert!(rise([1000, 0]) < rise([500, 500]));
//! ```

pub use mix::{Learner, RequestMix};
pub use potential::{Potential, Rise};
pub use request::{Gpu, GpuMilli, GpuType, GpuTypes, NodeView, Request};

mod mix;
mod potential;
mod prices;
mod request;
mod usable;
