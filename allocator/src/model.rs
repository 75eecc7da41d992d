//! What the allocator looks at: an immutable picture of the cluster, in terms of its own.
//!
//! ```text
//! Snapshot -+- nodes    Node        what a pod needs of a machine
//!           +- slices   Slice -> Device   what is published, by slice name
//!           +- classes  DeviceClass
//!           +- usage    Usage       what allocated claims take of each device
//!           '- topology PoolTopology    how the devices of a pool are joined
//! PendingPod -> PodClaim -> Claim -> Request -> Alternative
//! ```
//!
//! Everything is behind an `Arc`, so that a picture costs one pointer per object and is never
//! changed under a reader.

mod claim;
mod class;
mod device;
mod node;
mod pod;
mod topology;
mod usage;

pub use claim::{Alternative, Claim, Constraint, ConstraintKind, Mode, Request};
pub use class::{DeviceClass, Selector};
pub use device::{
    Attribute, Binding, Capacity, CounterSet, CounterUse, Device, DeviceId, NODE_ALLOCATABLE,
    NodeChoice, PoolId, RequestPolicy, Slice, Taint, TaintEffect, Toleration, TolerationOperator,
    ValidRange,
};
pub(crate) use node::cpu_milli_of;
pub use node::{
    Node, NodeAffinityTerm, NodeSelector, NodeTaint, PodToleration, Requirement, SelectorOperator,
};
pub use pod::{PendingPod, PodClaim, PodUid, Scheduling};
pub use topology::PoolTopology;
pub(crate) use usage::differing;
pub use usage::{DeviceResult, DeviceUse, Usage};

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::{DeviceClassName, NodeName};

/// The cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Nodes by name.
    pub nodes: BTreeMap<NodeName, Arc<Node>>,
    /// ResourceSlices by object name: the order in which upstream visits the slices of a pool.
    pub slices: BTreeMap<String, Arc<Slice>>,
    /// DeviceClasses by name.
    pub classes: BTreeMap<DeviceClassName, Arc<DeviceClass>>,
    /// What allocated claims consume.
    pub usage: Usage,
    /// How the devices of a pool are joined. A pool without an entry tells nothing of it.
    pub topology: Arc<BTreeMap<PoolId, Arc<PoolTopology>>>,
}
