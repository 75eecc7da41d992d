//! Input of the allocator: an immutable snapshot of the cluster.
//!
//! ```text
//! Snapshot -+- nodes    Node              labels, taints, allocatable and used resources
//!           +- slices   Slice -> Device   published devices, by slice name
//!           +- classes  DeviceClass
//!           +- usage    Usage             capacity that allocated claims consume per device
//!           +- quotas   QuotaState        limits of namespaces, and what claims count there
//!           '- topology PoolTopology      links between the devices of a pool
//! PendingPod -> PodClaim -> Claim -> Request -> Alternative
//! ```
//!
//! Every object is behind an `Arc`: a clone of a snapshot costs one pointer per object, and readers
//! never see a change.

mod claim;
mod class;
mod device;
mod load;
mod node;
mod pod;
mod topology;
mod usage;

pub use claim::{AllocationMode, Alternative, Claim, Constraint, ConstraintKind, Request};
pub use class::{DeviceClass, DeviceSelector};
pub use device::{
    Attribute, BindingConditions, Capacity, CounterSet, CounterUse, Device, DeviceId,
    NODE_ALLOCATABLE, NodeChoice, PoolId, RequestPolicy, Slice, Taint, TaintEffect, Toleration,
    TolerationOperator, ValidRange,
};
pub use load::DeviceLoad;
pub(crate) use node::cpu_milli_of;
pub use node::{
    Node, NodeAffinityTerm, NodeSelector, NodeTaint, PodToleration, Requirement, SelectorOperator,
};
pub use pod::{GroupTopology, PendingPod, PodClaim, PodUid, SchedulingConstraints};
pub use topology::PoolTopology;
pub(crate) use usage::conflicting_sharing;
pub use usage::{DeviceResult, DeviceUsage, Usage};

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::{DeviceClassName, Namespace, NodeName};

use crate::quota::QuotaState;

/// Values by name, in the order of names.
///
/// A sorted vector: such a map has one to fourteen entries, and a cluster has a million of them. A
/// `BTreeMap` reserves eleven entries.
pub type NameMap<V> = litemap::LiteMap<String, V>;

/// State of the cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct ClusterSnapshot {
    /// Nodes by name.
    pub nodes: BTreeMap<NodeName, Arc<Node>>,
    /// ResourceSlices by object name, which is upstream's order of the slices of a pool.
    pub slices: BTreeMap<String, Arc<Slice>>,
    /// DeviceClasses by name.
    pub classes: BTreeMap<DeviceClassName, Arc<DeviceClass>>,
    /// Consumption by allocated claims, per device.
    pub usage: Usage,
    /// Quotas of each namespace that has one, with what allocated claims count against them.
    pub quotas: BTreeMap<Namespace, Vec<QuotaState>>,
    /// Links between the devices of a pool. A pool without an entry has an unknown topology.
    pub topology: Arc<BTreeMap<PoolId, Arc<PoolTopology>>>,
}
