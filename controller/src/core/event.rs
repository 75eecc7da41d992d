//! Events: everything that the core learns.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::api::scheduling::v1beta1::PodGroup;

use tessera_allocator::model::PodUid;
use tessera_api::defaults::GpuDefaults;
use tessera_api::load::NodeLoad;
use tessera_api::names::{Namespace, NodeName, PodName};
use tessera_api::quota::GpuQuota;
use tessera_api::resize::GpuResize;
use tessera_api::volcano::VolcanoPodGroup;
use tessera_index::PodGroupApi;

use super::clock::Moment;
use super::effect::{
    EvictionPurpose, NoticeId, PodReference, QuotaReference, ResizeReference, TemplateReference,
    WriteId,
};

/// Something that happened outside of the core.
#[derive(Debug, Clone)]
pub enum Event {
    /// A watch delivered a change.
    Changed {
        /// The change.
        change: Change,
        /// The time of its arrival.
        at: Moment,
    },
    /// A write of a claim has ended.
    WriteEnded {
        /// The write.
        id: WriteId,
        /// Its outcome.
        outcome: WriteOutcome,
    },
    /// The API server has taken a notice, or it is certain that it has not.
    NoticeEnded {
        /// The notice.
        id: NoticeId,
        /// True if the event is stored.
        is_delivered: bool,
    },
    /// The write of a nomination has ended.
    NominationEnded {
        /// The pod.
        pod: PodUid,
        /// The node that was to be written; none = the nomination was to be removed.
        node: Option<NodeName>,
        /// The outcome.
        outcome: NominationOutcome,
    },
    /// The write of a claim template has ended.
    TemplateEnded {
        /// The template.
        template: TemplateReference,
        /// The outcome.
        outcome: TemplateOutcome,
    },
    /// The write of the status of a GpuQuota has ended.
    QuotaStatusEnded {
        /// The quota.
        quota: QuotaReference,
        /// The outcome.
        outcome: QuotaStatusOutcome,
    },
    /// The write of the status of a GpuResize has ended.
    ResizeStatusEnded {
        /// The resize.
        resize: ResizeReference,
        /// True if it is stored; otherwise it may be stored or not.
        is_stored: bool,
    },
    /// The write of a placeholder pod has ended.
    PlaceholderEnded {
        /// Name of the pod.
        pod: PodName,
        /// True if it is as it was to be; otherwise it may be or not.
        is_done: bool,
    },
    /// Evictions have ended: those of these pods. Further ones were not tried.
    EvictionsEnded {
        /// Their purpose.
        purpose: EvictionPurpose,
        /// The outcomes.
        outcomes: Vec<(PodReference, EvictionOutcome)>,
    },
    /// The selector of a namespace is compiled, or it is known that it does not compile.
    Compiled {
        /// The namespace.
        namespace: Namespace,
    },
}

/// The outcome of the write of a claim template.
#[derive(Debug, Clone)]
pub enum TemplateOutcome {
    /// It is created; the object as it was answered.
    Created(Arc<ResourceClaimTemplate>),
    /// It does not exist, or not as the one that was to be deleted.
    Gone,
    /// It existed already: a watch will deliver it.
    Exists,
    /// The API server refused the write.
    Refused {
        /// The answer.
        message: String,
    },
    /// It may be carried out or not: there was no answer.
    Failed,
}

/// The outcome of the write of the status of a GpuQuota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaStatusOutcome {
    /// It is stored.
    Stored,
    /// It may be stored or not: there was no answer, or a refusal.
    Failed,
}

/// The outcome of an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionOutcome {
    /// The pod is being deleted.
    Evicted,
    /// The pod does not exist any more.
    Gone,
    /// A PodDisruptionBudget does not allow it now.
    Refused {
        /// The API server's message.
        message: String,
    },
    /// It may be carried out or not: there was no answer, or an error.
    Failed {
        /// The error.
        message: String,
    },
}

/// The outcome of the write of a nomination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NominationOutcome {
    /// It is stored.
    Stored,
    /// The pod is gone or bound, or its nomination is another one.
    Outdated,
    /// The controller may not write nominations.
    Denied,
    /// It may be stored or not: there was no answer, or an error.
    Failed,
}

/// A change that a watch or a driver delivers.
#[derive(Debug, Clone)]
pub enum Change {
    /// An object exists, in a new version.
    Applied(WatchedObject),
    /// An object does not exist any more.
    Deleted(WatchedObject),
    /// All objects of the kind have been delivered once.
    Listed(WatchedKind),
    /// The API server does not have the kind.
    NotServed(WatchedKind),
    /// The driver of a node has reported the load of its GPUs.
    Measured {
        /// The node.
        node: NodeName,
        /// The load.
        load: NodeLoad,
    },
    /// A watch failed and will be retried: the API server is away, or has expired our version.
    Interrupted,
}

/// The kinds that are watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchedKind {
    /// ResourceSlice.
    Slice,
    /// DeviceTaintRule, in `resource.k8s.io/v1` from Kubernetes 1.37 on.
    TaintRule,
    /// DeviceClass.
    Class,
    /// ResourceClaim.
    Claim,
    /// ResourceClaimTemplate.
    Template,
    /// GpuQuota.
    Quota,
    /// GpuDefaults.
    Defaults,
    /// GpuResize.
    Resize,
    /// PodGroup of Kubernetes, in `scheduling.k8s.io/v1beta1`; off by default in Kubernetes 1.37.
    PodGroup,
    /// PodGroup of Volcano.
    VolcanoPodGroup,
    /// Node.
    Node,
    /// Pod.
    Pod,
}

impl WatchedKind {
    /// All kinds. Nothing is planned before each has been listed.
    pub const ALL: [Self; 12] = [
        Self::Slice,
        Self::TaintRule,
        Self::Class,
        Self::Claim,
        Self::Template,
        Self::Quota,
        Self::Defaults,
        Self::Resize,
        Self::PodGroup,
        Self::VolcanoPodGroup,
        Self::Node,
        Self::Pod,
    ];

    /// Returns the name of the kind in Kubernetes' API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slice => "ResourceSlice",
            Self::TaintRule => "DeviceTaintRule",
            Self::Class => "DeviceClass",
            Self::Claim => "ResourceClaim",
            Self::Template => "ResourceClaimTemplate",
            Self::Quota => "GpuQuota",
            Self::Defaults => "GpuDefaults",
            Self::Resize => "GpuResize",
            Self::PodGroup => "PodGroup",
            Self::VolcanoPodGroup => "PodGroup.scheduling.volcano.sh",
            Self::Node => "Node",
            Self::Pod => "Pod",
        }
    }

    /// Returns the API of a kind of PodGroup; none for other kinds.
    pub(crate) const fn pod_group_api(self) -> Option<PodGroupApi> {
        match self {
            Self::PodGroup => Some(PodGroupApi::Kubernetes),
            Self::VolcanoPodGroup => Some(PodGroupApi::Volcano),
            _ => None,
        }
    }
}

/// An object of one of the watched kinds.
#[derive(Debug, Clone)]
pub enum WatchedObject {
    /// ResourceSlice.
    Slice(Arc<ResourceSlice>),
    /// DeviceTaintRule.
    TaintRule(Arc<DeviceTaintRule>),
    /// DeviceClass.
    Class(Arc<DeviceClass>),
    /// ResourceClaim.
    Claim(Arc<ResourceClaim>),
    /// ResourceClaimTemplate.
    Template(Arc<ResourceClaimTemplate>),
    /// GpuQuota.
    Quota(Arc<GpuQuota>),
    /// GpuDefaults.
    Defaults(Arc<GpuDefaults>),
    /// GpuResize.
    Resize(Arc<GpuResize>),
    /// PodGroup of Kubernetes.
    PodGroup(Arc<PodGroup>),
    /// PodGroup of Volcano.
    VolcanoPodGroup(Arc<VolcanoPodGroup>),
    /// Node.
    Node(Arc<Node>),
    /// Pod.
    Pod(Arc<Pod>),
}

/// The outcome of a write of a claim. It is final: nothing of the write is under way any more.
#[derive(Debug, Clone)]
pub enum WriteOutcome {
    /// The write is stored; the claim as it was answered.
    Stored(Arc<ResourceClaim>),
    /// Nothing is stored, because the claim was changed by another writer; the claim as it is now,
    /// if it was read.
    Conflict(Option<Arc<ResourceClaim>>),
    /// The API server dropped a field of the allocation, so it was released again.
    FieldsDropped {
        /// The claim after the release, if that succeeded.
        current: Option<Arc<ResourceClaim>>,
        /// The message for the pod.
        message: String,
    },
    /// The API server refused the write.
    Refused {
        /// True if it will refuse again: a policy, a missing permission, a missing feature.
        is_lasting: bool,
    },
}
