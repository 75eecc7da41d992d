//! Reasons why no device fits a claim, as data and as text.
//!
//! The allocator assigns each device (or a node with all its devices) the first check that excludes
//! it; an [`Explanation`] counts them. Events, `kubectl tessera explain` and metrics share the
//! renderer of this module, so their texts agree. The texts follow a number, in the form of
//! kube-scheduler: `4 insufficient memory`.

mod counts;
mod explanation;

#[cfg(test)]
mod tests;

pub use counts::{MAX_EVENT_BYTES, ReasonCount, ReasonCounts, clause};
pub use explanation::{Explanation, NearestMiss, NodeTally, Tally};

use std::fmt;

use crate::config::{Sharing, TopologyScope};

/// The first check that excludes a device. Ordered by the search: the greatest of several reasons
/// is nearest to a fit.
///
/// Amounts are not part of a reason, or a thousand devices would have a thousand reasons: the least
/// missing amount is in the [`Tally`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The pod cannot run on the device's node.
    Node(NodeReason),
    /// The device's pool is being replaced: some of its slices are missing.
    PoolIncomplete,
    /// The device's pool contradicts itself, for example by listing a device twice.
    PoolInvalid,
    /// The selectors of the DeviceClass do not match the device.
    ClassSelector {
        /// The class.
        class: String,
    },
    /// The request's own selectors do not match the device.
    RequestSelector,
    /// A selector failed on the device.
    SelectorError {
        /// The error of the CEL evaluator.
        message: String,
    },
    /// No device can satisfy the request.
    RequestRefused {
        /// The error, with the field.
        message: String,
    },
    /// The device lacks the managed taint: another allocator allocates it.
    NotManaged,
    /// The device publishes more memory than it has, and the claim does not allow that.
    Oversubscribed,
    /// The claim asks for sharing by MPS, and the node or the device does not support it.
    NoMps,
    /// The device uses an API feature that this version cannot account for.
    Unsupported {
        /// The feature.
        feature: String,
    },
    /// The device has no capacity of that name.
    NoSuchCapacity {
        /// The capacity.
        capacity: String,
    },
    /// The amount violates the device's request policy.
    AgainstPolicy {
        /// The capacity.
        capacity: String,
    },
    /// The device's total capacity is insufficient.
    InsufficientTotal {
        /// The capacity.
        capacity: String,
    },
    /// The device is allocated exclusively.
    AllocatedExclusively,
    /// The device is allocated with another mode of sharing.
    SharingDiffers {
        /// The mode in use.
        used: Sharing,
    },
    /// The device's free capacity is insufficient.
    Insufficient {
        /// The capacity.
        capacity: String,
    },
    /// A shared counter of the device's counter set is exhausted.
    InsufficientCounters,
    /// The device has a taint that the request does not tolerate.
    Tainted {
        /// The taint's key.
        key: String,
    },
    /// The device cannot meet a constraint of the claim.
    Constraint {
        /// The attribute of the constraint.
        attribute: String,
    },
    /// The device is available, and its node has fewer such devices than the request asks for.
    TooFewOnNode {
        /// Number of devices that the request asks for.
        requested: u64,
    },
    /// The device is available, and too few devices share the topology that the request requires.
    TopologyTooSmall {
        /// The topology to share.
        scopes: Vec<TopologyScope>,
    },
    /// The device is available, but the request asks for all devices and another one is not.
    NotAllAvailable,
    /// The device is available, but not in a combination that satisfies the pod's requests.
    NoCombination,
}

/// The reason why a pod cannot run on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeReason {
    /// There is no Node object of that name.
    Missing,
    /// The node's Ready condition is not true.
    NotReady,
    /// The node is cordoned.
    Cordoned,
    /// The node has a taint that the pod does not tolerate.
    Tainted {
        /// The taint's key.
        key: String,
    },
    /// The pod's node selector or required affinity excludes the node.
    NotSelected,
    /// The node's free amount of a resource is insufficient.
    ResourceShort {
        /// The resource, such as `cpu`.
        resource: String,
    },
    /// An allocated claim of the pod is not usable on the node.
    ClaimNodeMismatch {
        /// The claim.
        claim: String,
    },
    /// The pod failed on the node before; the node is retried later.
    BackedOff,
    /// The node is reserved for a starved pod of higher precedence.
    Reserved {
        /// The starved pod, as `namespace/name`; none if it is in another namespace than the
        /// pending pod.
        pod: Option<String>,
    },
}

impl Reason {
    /// Returns true if a release of other claims or the removal of a taint can end the reason.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::AllocatedExclusively
                | Self::SharingDiffers { .. }
                | Self::Insufficient { .. }
                | Self::InsufficientCounters
                | Self::Tainted { .. }
        )
    }

    /// Returns true if other claims or pods hold the missing capacity.
    pub fn is_contended(&self) -> bool {
        matches!(
            self,
            Self::AllocatedExclusively
                | Self::SharingDiffers { .. }
                | Self::Insufficient { .. }
                | Self::InsufficientCounters
                | Self::Node(NodeReason::ResourceShort { .. })
        )
    }

    /// Returns true if the device by itself satisfies the request.
    pub fn is_available(&self) -> bool {
        matches!(
            self,
            Self::TooFewOnNode { .. }
                | Self::TopologyTooSmall { .. }
                | Self::NotAllAvailable
                | Self::NoCombination
        )
    }

    /// Returns a stable word, for metrics and for programs that read explanations.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Node(node) => node.code(),
            Self::PoolIncomplete => "PoolIncomplete",
            Self::PoolInvalid => "PoolInvalid",
            Self::ClassSelector { .. } => "ClassSelector",
            Self::RequestSelector => "RequestSelector",
            Self::SelectorError { .. } => "SelectorError",
            Self::RequestRefused { .. } => "RequestRefused",
            Self::NotManaged => "NotManaged",
            Self::Oversubscribed => "Oversubscribed",
            Self::NoMps => "NoMps",
            Self::Unsupported { .. } => "Unsupported",
            Self::NoSuchCapacity { .. } => "NoSuchCapacity",
            Self::AgainstPolicy { .. } => "AgainstPolicy",
            Self::InsufficientTotal { .. } => "TooSmall",
            Self::AllocatedExclusively => "InUse",
            Self::SharingDiffers { .. } => "SharingDiffers",
            Self::Insufficient { .. } => "Short",
            Self::InsufficientCounters => "CountersSpent",
            Self::Tainted { .. } => "Tainted",
            Self::Constraint { .. } => "Constraint",
            Self::TooFewOnNode { .. } => "TooFewOnNode",
            Self::TopologyTooSmall { .. } => "Scattered",
            Self::NotAllAvailable => "NotAll",
            Self::NoCombination => "Together",
        }
    }
}

impl NodeReason {
    /// Returns a stable word, for metrics and for programs that read explanations.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing => "NodeMissing",
            Self::NotReady => "NodeNotReady",
            Self::Cordoned => "NodeCordoned",
            Self::Tainted { .. } => "NodeTainted",
            Self::NotSelected => "NodeNotSelected",
            Self::ResourceShort { .. } => "NodeResourceShort",
            Self::ClaimNodeMismatch { .. } => "ClaimNodeMismatch",
            Self::BackedOff => "NodeBackedOff",
            Self::Reserved { .. } => "NodeReserved",
        }
    }
}

impl fmt::Display for Reason {
    /// Writes the text that follows a number of devices.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => node.fmt(f),
            Self::PoolIncomplete => f.write_str("in a pool that is being republished"),
            Self::PoolInvalid => f.write_str("in an invalid pool"),
            Self::ClassSelector { class } => write!(f, "not selected by DeviceClass {class}"),
            Self::RequestSelector => f.write_str("not selected by the request's selectors"),
            Self::SelectorError { message } => write!(f, "with a selector error ({message})"),
            Self::RequestRefused { message } => {
                write!(f, "excluded by an invalid request ({message})")
            }
            Self::NotManaged => f.write_str("not managed by Tessera"),
            Self::Oversubscribed => {
                f.write_str("oversubscribed (the claim must set memory.oversubscribe: true)")
            }
            Self::NoMps => f.write_str(
                "without MPS (needs mps.enabled of the chart, Volta or newer, CUDA 12.3 or newer)",
            ),
            Self::Unsupported { feature } => write!(f, "with unsupported {feature}"),
            Self::NoSuchCapacity { capacity } => write!(f, "without capacity {capacity}"),
            Self::AgainstPolicy { capacity } => {
                write!(f, "with a request policy that refuses this amount of {capacity}")
            }
            Self::InsufficientTotal { capacity } => write!(f, "insufficient total {capacity}"),
            Self::AllocatedExclusively => f.write_str("allocated exclusively"),
            Self::SharingDiffers { used } => write!(f, "allocated with sharing {used}"),
            Self::Insufficient { capacity } => write!(f, "insufficient {capacity}"),
            Self::InsufficientCounters => f.write_str("insufficient shared counters"),
            Self::Tainted { key } => write!(f, "with untolerated taint {key}"),
            Self::Constraint { attribute } => {
                write!(f, "not meeting the constraint on {attribute}")
            }
            Self::TooFewOnNode { requested } => {
                write!(f, "available but fewer than {requested} on one node")
            }
            Self::TopologyTooSmall { scopes } => {
                let scopes: Vec<_> = scopes.iter().map(ToString::to_string).collect();
                write!(f, "available but too few share {}", scopes.join(" and "))
            }
            Self::NotAllAvailable => f.write_str("available but not all requested GPUs are"),
            Self::NoCombination => f.write_str("available but not in the requested combination"),
        }
    }
}

impl fmt::Display for NodeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("on nodes without a Node object"),
            Self::NotReady => f.write_str("on nodes that are not ready"),
            Self::Cordoned => f.write_str("on cordoned nodes"),
            Self::Tainted { key } => write!(f, "on nodes with untolerated taint {key}"),
            Self::NotSelected => f.write_str("on nodes not selected by the pod"),
            Self::ResourceShort { resource } => write!(f, "on nodes with insufficient {resource}"),
            Self::ClaimNodeMismatch { claim } => {
                write!(f, "on other nodes than allocated claim {claim}")
            }
            Self::BackedOff => f.write_str("on nodes where the pod failed (retried later)"),
            Self::Reserved { pod: Some(pod) } => {
                write!(f, "on nodes reserved for long-pending pod {pod}")
            }
            Self::Reserved { pod: None } => {
                f.write_str("on nodes reserved for a long-pending pod of another namespace")
            }
        }
    }
}
