//! Kubernetes objects in, allocator snapshot out.
//!
//! ```text
//!   ResourceSlice, DeviceTaintRule, DeviceClass,
//!   ResourceClaim, Node, Pod --apply/remove--> Index --snapshot()--> allocator::Snapshot
//!                                                                            |----work()------> pods to plan, and why others are not
//!                         decision --assume/confirm/forget-----------------> |
//! ```
//!
//! One [`Index`] is owned by one task, which is the only one to change it. It keeps what allocated
//! claims consume and what bound pods request up to date with every object, and never adds
//! everything up again; [`Index::audit`] does, to prove the running sums right.
//!
//! A claim's devices count as taken from the moment a decision is assumed until the claim is
//! deallocated or gone *and* no bound pod refers to it: an editor can strip a finalizer, a
//! container keeps running.

#![forbid(unsafe_code)]

pub mod convert;
pub mod message;

mod changes;
mod claims;
mod generated;
mod holdings;
mod index;
mod multimap;
mod overcommit;
mod pods;
mod repair;
mod scope;
mod standing;
mod taints;
mod topology;
mod work;

pub use changes::ClusterChanges;
pub use holdings::Holding;
pub use index::Index;
pub use overcommit::{Audit, Overcommitted};
pub use repair::{Hindrance, Misplaced, Remedy};
pub use scope::Scope;
pub use standing::{ClaimStanding, ClaimState, Stage};
pub use work::{Blocked, Obstacle, Waiting, Work};
