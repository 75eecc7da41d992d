//! Why a claim has to wait, as data.
//!
//! The allocator tells for each device (or for a node with all its devices) the test that it fell
//! to; an [`Explanation`] counts them. Events, `kubectl tessera explain` and metrics all use the
//! one renderer here, so that they say the same words.

mod explanation;

#[cfg(test)]
mod tests;

pub use explanation::{Explanation, MAX_EVENT_BYTES, NearestMiss, Tally};

use std::fmt;

use crate::config::{Sharing, TopologyScope};

/// The test that a device fell to. Ordered from what a device falls to first to what it falls to
/// last: of several reasons the greatest came nearest to a fit.
///
/// Amounts are not part of a reason, or a thousand devices would have a thousand reasons: the least
/// that was missing is kept in its [`Tally`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Its node is out of the question for the pod.
    Node(NodeReason),
    /// Its pool is being replaced: not all of its slices are there yet.
    PoolIncomplete,
    /// Its pool contradicts itself, such as by listing a device twice.
    PoolInvalid,
    /// The selectors of the DeviceClass do not match it.
    ClassSelector {
        /// The class.
        class: String,
    },
    /// The request's own selectors do not match it.
    RequestSelector,
    /// A selector failed on it.
    SelectorError {
        /// What failed, in CEL's words.
        message: String,
    },
    /// The claim's configuration is refused.
    ConfigRefused {
        /// The error, with the field.
        message: String,
    },
    /// The claim asks for what no device can give.
    RequestRefused {
        /// What and why, with the field.
        message: String,
    },
    /// It does not carry the fence: somebody else allocates it.
    NotManaged,
    /// It publishes more memory than it has, which the claim does not say that it can do with.
    Oversubscribed,
    /// The claim is to share it by MPS, and its node runs no control daemons, or it or its driver
    /// is too old.
    NoMps,
    /// It uses something of the API that this version cannot account for.
    Unsupported {
        /// What.
        feature: String,
    },
    /// It has no capacity of that name.
    NoSuchCapacity {
        /// The capacity.
        capacity: String,
    },
    /// The amount is not one that the device gives out (its request policy).
    AgainstPolicy {
        /// The capacity.
        capacity: String,
    },
    /// All of it would not be enough.
    TooSmall {
        /// The capacity.
        capacity: String,
    },
    /// It is in use as a whole.
    InUse,
    /// It is in use with another kind of sharing.
    SharingDiffers {
        /// How it is used.
        used: Sharing,
    },
    /// Too little is left.
    Short {
        /// The capacity.
        capacity: String,
    },
    /// A shared counter of its counter set is spent.
    CountersSpent,
    /// A taint that the request does not tolerate.
    Tainted {
        /// The taint's key.
        key: String,
    },
    /// A constraint of the claim cannot hold with it.
    Constraint {
        /// The attribute that is to match, or to differ.
        attribute: String,
    },
    /// It would do, but too few of those that would share what the request requires of its devices.
    Scattered {
        /// What they are to share.
        scopes: Vec<TopologyScope>,
    },
    /// It would do, but the request wants all devices and another one would not.
    NotAll,
    /// It would do by itself, but not together with the others that the pod needs.
    Together,
}

/// Why a node is out of the question for a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeReason {
    /// There is no Node object of that name.
    Missing,
    /// Its Ready condition is not true.
    NotReady,
    /// It is cordoned.
    Cordoned,
    /// It has a taint that the pod does not tolerate.
    Tainted {
        /// The taint's key.
        key: String,
    },
    /// The pod's node selector or required affinity leaves it out.
    NotSelected,
    /// Too little is left of a resource that the node hands out itself.
    ResourceShort {
        /// The resource, such as `cpu`.
        resource: String,
    },
    /// A claim of the pod that is already allocated is usable elsewhere only.
    ClaimElsewhere {
        /// The claim.
        claim: String,
    },
    /// The pod could not run there before, and it is not tried again yet.
    BackedOff,
    /// A pod that comes first and has waited long is to have it once enough of it is free.
    KeptFree {
        /// That pod, as `namespace/name`; none where it is of another namespace than who is told.
        pod: Option<String>,
    },
}

impl Reason {
    /// Whether it may pass: once others give something back, or somebody takes a taint off.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::InUse
                | Self::SharingDiffers { .. }
                | Self::Short { .. }
                | Self::CountersSpent
                | Self::Tainted { .. }
        )
    }

    /// Whether others have what is lacking: once they give it back, the device may do.
    pub fn is_held_by_others(&self) -> bool {
        matches!(
            self,
            Self::InUse
                | Self::SharingDiffers { .. }
                | Self::Short { .. }
                | Self::CountersSpent
                | Self::Node(NodeReason::ResourceShort { .. })
        )
    }

    /// One stable word, for metrics and for programs that read explanations.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Node(node) => node.code(),
            Self::PoolIncomplete => "PoolIncomplete",
            Self::PoolInvalid => "PoolInvalid",
            Self::ClassSelector { .. } => "ClassSelector",
            Self::RequestSelector => "RequestSelector",
            Self::SelectorError { .. } => "SelectorError",
            Self::ConfigRefused { .. } => "ConfigRefused",
            Self::RequestRefused { .. } => "RequestRefused",
            Self::NotManaged => "NotManaged",
            Self::Oversubscribed => "Oversubscribed",
            Self::NoMps => "NoMps",
            Self::Unsupported { .. } => "Unsupported",
            Self::NoSuchCapacity { .. } => "NoSuchCapacity",
            Self::AgainstPolicy { .. } => "AgainstPolicy",
            Self::TooSmall { .. } => "TooSmall",
            Self::InUse => "InUse",
            Self::SharingDiffers { .. } => "SharingDiffers",
            Self::Short { .. } => "Short",
            Self::CountersSpent => "CountersSpent",
            Self::Tainted { .. } => "Tainted",
            Self::Constraint { .. } => "Constraint",
            Self::Scattered { .. } => "Scattered",
            Self::NotAll => "NotAll",
            Self::Together => "Together",
        }
    }
}

impl NodeReason {
    /// One stable word, for metrics and for programs that read explanations.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing => "NodeMissing",
            Self::NotReady => "NodeNotReady",
            Self::Cordoned => "NodeCordoned",
            Self::Tainted { .. } => "NodeTainted",
            Self::NotSelected => "NodeNotSelected",
            Self::ResourceShort { .. } => "NodeResourceShort",
            Self::ClaimElsewhere { .. } => "ClaimElsewhere",
            Self::BackedOff => "NodeBackedOff",
            Self::KeptFree { .. } => "NodeKeptFree",
        }
    }
}

impl fmt::Display for Reason {
    /// What is said of the devices, to follow `4 devices on 2 nodes: `.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => node.fmt(f),
            Self::PoolIncomplete => f.write_str("pool is being republished"),
            Self::PoolInvalid => f.write_str("pool is invalid"),
            Self::ClassSelector { class } => write!(f, "not selected by DeviceClass {class}"),
            Self::RequestSelector => f.write_str("not selected by the request's selectors"),
            Self::SelectorError { message } => write!(f, "a selector failed ({message})"),
            Self::ConfigRefused { message } => write!(f, "configuration refused ({message})"),
            Self::RequestRefused { message } => write!(f, "request refused ({message})"),
            Self::NotManaged => f.write_str("not managed by this controller"),
            Self::Oversubscribed => f.write_str(
                "memory is oversubscribed; the claim must say memory.oversubscribe: true",
            ),
            Self::NoMps => f.write_str(
                "it is not shared by MPS (mps.enabled of the chart; from Volta and CUDA 12.3 on)",
            ),
            Self::Unsupported { feature } => {
                write!(f, "{feature} is not supported in this version")
            }
            Self::NoSuchCapacity { capacity } => write!(f, "no capacity named {capacity}"),
            Self::AgainstPolicy { capacity } => {
                write!(f, "this amount of {capacity} is not given out")
            }
            Self::TooSmall { capacity } => write!(f, "too little {capacity} even when unused"),
            Self::InUse => f.write_str("in use as a whole"),
            Self::SharingDiffers { used } => write!(f, "in use with sharing {used}"),
            Self::Short { capacity } => write!(f, "too little {capacity} left"),
            Self::CountersSpent => f.write_str("shared counters spent"),
            Self::Tainted { key } => write!(f, "tainted {key}"),
            Self::Constraint { attribute } => {
                write!(f, "cannot meet the constraint on {attribute}")
            }
            Self::Scattered { scopes } => {
                let scopes: Vec<_> = scopes.iter().map(ToString::to_string).collect();
                write!(f, "fits, but too few of them share {}", scopes.join(" and "))
            }
            Self::NotAll => f.write_str("fits, but not all that are asked for do"),
            Self::Together => {
                f.write_str("fits, but not together with the rest of what the pod asks for")
            }
        }
    }
}

impl fmt::Display for NodeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("node object is missing"),
            Self::NotReady => f.write_str("node is not ready"),
            Self::Cordoned => f.write_str("node is cordoned"),
            Self::Tainted { key } => write!(f, "node is tainted {key}"),
            Self::NotSelected => f.write_str("node is not selected by the pod"),
            Self::ResourceShort { resource } => write!(f, "node has too little {resource} left"),
            Self::ClaimElsewhere { claim } => write!(f, "claim {claim} is allocated elsewhere"),
            Self::BackedOff => f.write_str("the pod could not run there; tried again later"),
            Self::KeptFree { pod: Some(pod) } => {
                write!(f, "kept free for pod {pod}, which comes first and has waited long")
            }
            Self::KeptFree { pod: None } => f.write_str(
                "kept free for a pod of another namespace, which comes first and has waited long",
            ),
        }
    }
}
