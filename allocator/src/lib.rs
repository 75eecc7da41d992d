//! What is decided: which device serves which claim.
//!
//! ```text
//! Snapshot, pending pods --plan--> Plan = decisions (pod, node, devices of each claim) + refusals (reasons as data)
//!
//!   plan      pods in order; each takes from what the ones before left
//!    |- request    classes and configurations resolved          -> Cause
//!    |- predicate  nodes that the pod can go to                 -> NodeReason
//!    |- policy     in which order nodes and devices are tried
//!    |- pools      what a node reaches: generations, completeness
//!    |- search     depth first over claims, requests, devices; capacity, constraints, selectors
//!    '- explain    if nothing fits: each device and the test it fell to  -> Explanation
//! ```
//!
//! Pure: no I/O, no clock, no randomness; the caller brings the picture and a budget in steps. Feasibility follows upstream's
//! structured allocator (`k8s.io/dynamic-resource-allocation/structured`, default features of 1.37). What is not there yet
//! (`firstAvailable`, `adminAccess`, shared counters, binding conditions) is refused with those words, never guessed.

#![forbid(unsafe_code)]

pub mod model;
pub mod selector;

mod capacity;
mod constraint;
mod explain;
mod outcome;
mod plan;
mod policy;
mod pools;
mod predicate;
mod request;
mod search;

pub use outcome::{Allotment, Cause, Decision, Plan, Refusal};
pub use plan::{Settings, plan};
pub use policy::Policy;
