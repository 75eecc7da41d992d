//! The index of Kubernetes objects: the facts that planning depends on.
//!
//! ```text
//!   ResourceSlice, DeviceTaintRule, DeviceClass, GpuQuota, GpuDefaults,
//!   ResourceClaim, Node, Pod --apply/remove--> Index --take_changes()--> allocator::Planner
//!                                               |----work()----------> pods to plan, blocked pods
//!               decision --assume, forget-----> |
//! ```
//!
//! An [`Index`] has one owner, which is its only writer. It keeps running sums of the capacity of
//! allocated claims and of the requests of bound pods; [`Index::audit_part`] recounts them. It
//! decides nothing and owns no planner.
//!
//! The devices of a claim count as taken from the moment a decision is assumed until the claim is
//! deallocated or deleted *and* no bound pod refers to it: a client can remove a finalizer while a
//! container keeps running.

#![forbid(unsafe_code)]

pub mod convert;

mod audit;
mod barrier;
mod changes;
mod claims;
mod defaults;
mod generated;
mod groups;
mod holders;
mod holdings;
mod index;
mod interner;
mod loads;
mod multimap;
mod node_groups;
mod nodes;
mod overcommit;
mod pod_groups;
mod pods;
mod quotas;
mod repair;
mod resize;
mod room;
mod scope;
mod slices;
mod standing;
mod stored;
mod taints;
mod topology;
mod troubled;
mod waiting;
mod work;

pub use audit::Audit;
pub use barrier::{GroupBarrier, has_barrier};
pub use changes::ClusterChanges;
pub use groups::{
    GROUP_ANNOTATIONS, GROUP_LABELS, GroupKey, GroupProblem, GroupWork, MAX_GROUP_SIZE,
};
pub use holdings::Holding;
pub use index::Index;
pub use overcommit::Overcommitted;
pub use pod_groups::PodGroupApi;
pub use pods::{Nomination, Nominator};
pub use quotas::QuotaStanding;
pub use repair::{Misplaced, RepairAction, RepairBlocker};
pub use resize::{ResizePlan, ResizeRefusal};
pub use scope::Scope;
pub use standing::{ClaimStanding, ClaimState, PodStage};
pub use troubled::{DeviceTrouble, TroubledPod};
pub use waiting::{Repelled, Waiting};
pub use work::{Blocked, PlanningBlocker, Work};
