//! Fragmentation model: capacity of a node's GPUs that future requests probably cannot use.
//!
//! ```text
//! requests, and refused requests --RequestMix, Learner--> expected requests --> Potential
//! NodeView (free capacity of a node) --Potential::of--> fragmentation in thousandths of a GPU
//! before and after a placement --Potential::rise--> Rise (the least rise is chosen)
//! ```
//!
//! The measure starts with F of FGD ("Beware of Fragmentation: Scheduling GPU-Sharing Workloads
//! with Fragmentation Gradient Descent", USENIX ATC'23): the free GPU capacity that an average
//! request cannot use. Three terms are added: the waste in the remainder of a GPU, at the prices of
//! the shares that still fit; GPUs without enough CPU at the mean of the mix; and GPUs without
//! enough CPU even for the least demanding requests. [`Potential`] has the formula, and
//! `docs/benchmarks/placement.md` has measurements.
//!
//! Requests list the GPU types that they accept. Refused requests have a higher weight, so scarce
//! capacity stays usable: several free GPUs on one node, or a rare type.
//!
//! # Example
//! ```
//! use tessera_allocator::fragmentation::{
//!     GpuFraction, GpuRequest, GpuState, GpuType, GpuTypes, NodeCapacity, RequestMixLearner,
//! };
//!
//! let mut learner = RequestMixLearner::default();
//! let share = GpuFraction::new(500);
//! let request = GpuRequest { cpu_milli: 8000, gpus: 1, share, types: GpuTypes::ANY };
//! learner.observe(request);
//! let potential = learner.potential();
//!
//! // A half share is placed beside another half, and the free GPU stays whole.
//! let gpu = |left| GpuState { gpu_type: GpuType(0), free: GpuFraction::new(left) };
//! let node = |left: [u32; 2]| left.map(gpu);
//! let before = potential.of(&NodeCapacity { cpu_milli: 32_000, gpus: &node([1000, 500]) });
//! let rise = |left| potential.rise(before, &NodeCapacity { cpu_milli: 24_000, gpus: &node(left) });
//! assert!(rise([1000, 0]) < rise([500, 500]));
//! ```

pub use mix::{RequestMix, RequestMixLearner};
pub use potential::{Potential, PotentialRise};
pub use request::{GpuFraction, GpuRequest, GpuState, GpuType, GpuTypes, NodeCapacity};

mod mix;
mod potential;
mod prices;
mod request;
mod usable;
