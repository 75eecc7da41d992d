//! What is decided: which device serves which claim.
//!
//! ```text
//! Snapshot, or changes of it --> Planner                 remembers what it has found out, node by node
//! pending pods ----------------> Planner::plan --> Plan = decisions (pod, node, devices of each claim)
//!                                  |                     + refusals (reasons as data)
//!                                  |
//!                                  |- shape      what the claims of a pod ask for, recognised when it comes again
//!                                  |- cluster    what each node reaches and what is left of it, in numbers
//!                                  |- search     on one node: depth first over claims, requests, devices
//!                                  |- fits       per shape: the nodes on which it fits, best first
//!                                  |- predicate  nodes that the pod can go to                -> NodeReason
//!                                  |- policy     which node and which devices are preferred
//!                                  '- explain    if nothing fits: each device and the test it fell to -> Explanation
//! ```
//!
//! Pure: no I/O, no clock, no randomness; the caller brings the picture, a budget in steps and a
//! seed. Feasibility follows upstream's structured allocator
//! (`k8s.io/dynamic-resource-allocation/structured`, default features of 1.37), case by case.
//! What this version does not have is refused with those words, never guessed.

#![forbid(unsafe_code)]

pub mod fragmentation;
pub mod model;
pub mod selector;
pub mod topology;

mod capacity;
mod cluster;
mod emptied;
mod explain;
mod features;
mod fits;
mod forecast;
mod node_selector;
mod outcome;
mod patience;
mod plan;
mod planner;
mod policy;
mod predicate;
mod search;
mod shape;

pub use capacity::CapacityError;
pub use features::Features;
pub use outcome::{Allotment, Cause, Decision, Kept, NotSupported, Plan, Refusal};
pub use plan::{Settings, plan};
pub use planner::{Planner, Unallocated};
pub use policy::Policy;
pub use search::Failure;
