//! Device allocation: decides which devices serve which ResourceClaim, and on which node.
//!
//! ```text
//! ClusterSnapshot, or changes --> Planner        caches results per node until the node changes
//! pending pods, or a Backlog ---> Planner::plan --> AllocationPlan = decisions (pod, node, devices)
//!                                   |                    + refusals (reasons as data)
//!                                   |
//!                                   |- shape        requests of a pod's claims
//!                                   |- cluster      interned cluster state, usage
//!                                   |- search       depth-first search on one node
//!                                   |- feasibility  nodes on which a shape fits, best first
//!                                   |- predicate    node predicates           -> NodeReason
//!                                   |- policy       scoring of nodes and devices
//!                                   |- quota        what claims count against quotas
//!                                   |- preemption   pods to evict for a refused one
//!                                   |- node_demand  nodes that an autoscaler has to add
//!                                   '- explain      rejections of devices  -> Explanation
//! ```
//!
//! The crate is pure: no I/O, no clock and no randomness. The caller passes the snapshot, the time,
//! a budget in steps and a seed. Feasibility follows the structured allocator of Kubernetes
//! (`k8s.io/dynamic-resource-allocation/structured`, default features of 1.37), called "upstream"
//! in this crate. An unsupported feature is an error that names the feature.

#![forbid(unsafe_code)]

pub mod fragmentation;
pub mod model;
pub mod preemption;
pub mod relocation;
pub mod selector;
pub mod topology;

mod backlog;
mod capacity;
mod cluster;
mod drained;
mod explain;
mod feasibility;
mod features;
mod forecast;
mod node_demand;
mod node_selector;
mod outcome;
mod plan;
mod planner;
mod policy;
mod predicate;
mod quota;
mod resize;
mod search;
mod settings;
mod shape;
mod starvation;
mod wide_hash;

pub use backlog::{Backlog, PlanOrder, RefusedClass};
pub use capacity::CapacityError;
pub use explain::{ExplanationId, RefusalExplanation};
pub use features::FeatureGates;
pub use node_demand::{NodeDemand, node_demand};
pub use outcome::{
    AllocationPlan, ClaimAllocation, Decision, GroupShortfall, GroupsAlike, PlanWork, Refusal,
    RefusalCause, ReservedNode, UnsupportedFeature,
};
pub use plan::plan;
pub use planner::{AllocateError, ClassId, LONG_SEARCH, Planner};
pub use policy::Policy;
pub use quota::{Charge, Quota, QuotaShortfall, QuotaState, charges};
pub use resize::{ShareSizeError, resized};
pub use search::SearchFailure;
pub use settings::PlanSettings;
