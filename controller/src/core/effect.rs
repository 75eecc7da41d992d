//! Effects: everything that the core has done by others, as data.
//!
//! An executor performs effects in any order and reports each by its id, once, as an
//! [`Event`](super::event::Event).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimTemplateSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_allocator::ClaimAllocation;
use tessera_allocator::model::PodUid;
use tessera_api::GpuConfig;
use tessera_api::events::EventReason;
use tessera_api::names::{
    ClaimName, Namespace, NodeGroupName, NodeName, PodName, QuotaName, ShareId,
};
use tessera_api::quantity::Quantity;
use tessera_api::quota::{GpuQuotaStatus, QuotaResource};
use tessera_api::resize::{GpuResizeStatus, SizedShare};
use tessera_index::convert;

use super::clock::Moment;

/// The result of one step of the core.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// The effects to perform.
    pub effects: Vec<Effect>,
    /// The figures to publish.
    pub figures: Figures,
    /// The time of the next step if no event comes before; none = an event has to come.
    pub wake: Option<Moment>,
}

/// Something to be done outside of the core.
#[derive(Debug, Clone)]
pub enum Effect {
    /// Write a claim; reported by [`Event::WriteEnded`](super::event::Event::WriteEnded).
    Write(ClaimWrite),
    /// Publish a Kubernetes event about a pod; reported by
    /// [`Event::NoticeEnded`](super::event::Event::NoticeEnded).
    Notify(Notice),
    /// Write or remove the nomination of a pod, before the writes of claims that follow it where
    /// that is possible; reported by
    /// [`Event::NominationEnded`](super::event::Event::NominationEnded).
    Nominate(NominationWrite),
    /// Create or delete a claim template; reported by
    /// [`Event::TemplateEnded`](super::event::Event::TemplateEnded).
    WriteTemplate(TemplateWrite),
    /// Write the status of a GpuQuota; reported by
    /// [`Event::QuotaStatusEnded`](super::event::Event::QuotaStatusEnded).
    WriteQuotaStatus(QuotaStatusWrite),
    /// Write the controller's part of the status of a GpuResize; reported by
    /// [`Event::ResizeStatusEnded`](super::event::Event::ResizeStatusEnded).
    WriteResizeStatus(ResizeStatusWrite),
    /// Create or delete a placeholder pod; reported by
    /// [`Event::PlaceholderEnded`](super::event::Event::PlaceholderEnded).
    WritePlaceholder(PlaceholderWrite),
    /// Evict pods; reported by [`Event::EvictionsEnded`](super::event::Event::EvictionsEnded).
    Evict(Evictions),
    /// Compile a selector of a pod in the namespace, so that it is cached; reported by
    /// [`Event::Compiled`](super::event::Event::Compiled).
    Compile {
        /// The namespace. It has one selector at a time.
        namespace: Namespace,
        /// The CEL expression.
        expression: Arc<str>,
    },
}

/// Upper bound of the nominations that wait to be sent. Further ones fail: allocations must not
/// wait for them.
pub const MAX_QUEUED_NOMINATIONS: usize = 4096;

/// A write of `status.nominatedNodeName` of a pod. Nothing is written unless the field has the
/// value that is replaced, and the controller has set it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NominationWrite {
    /// The pod.
    pub pod: PodReference,
    /// The node; none removes the nomination.
    pub node: Option<NodeName>,
    /// The controller's own nomination that is replaced; none = the field is empty.
    pub replaced: Option<NodeName>,
}

/// The name of a claim template.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TemplateReference {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: String,
}

/// A write of a claim template. A template has one at a time.
#[derive(Debug, Clone)]
pub struct TemplateWrite {
    /// The template.
    pub template: TemplateReference,
    /// The change.
    pub change: TemplateChange,
}

/// A change of a claim template.
#[derive(Debug, Clone)]
pub enum TemplateChange {
    /// Creates it.
    Create(Arc<ResourceClaimTemplateSpec>),
    /// Deletes the one with this UID.
    Delete(String),
}

/// A write of a placeholder pod. A pod has one at a time.
#[derive(Debug, Clone, PartialEq)]
pub struct PlaceholderWrite {
    /// Namespace of the pod.
    pub namespace: Namespace,
    /// Name of the pod.
    pub pod: PodName,
    /// The change.
    pub change: PlaceholderChange,
}

/// A change of a placeholder pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PlaceholderChange {
    /// Creates it.
    Create(Box<Pod>),
    /// Deletes the one with this UID.
    Delete(String),
}

/// The name of a GpuQuota.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct QuotaReference {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: QuotaName,
}

/// A write of the status of a GpuQuota. A quota has one at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaStatusWrite {
    /// The quota.
    pub quota: QuotaReference,
    /// Its status from now on.
    pub status: GpuQuotaStatus,
}

/// The name of a GpuResize.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResizeReference {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name, which is that of the claim.
    pub name: ClaimName,
    /// Its UID.
    pub uid: String,
}

/// A write of the controller's part of the status of a GpuResize. A resize has one at a time.
#[derive(Debug, Clone, PartialEq)]
pub struct ResizeStatusWrite {
    /// The resize.
    pub resize: ResizeReference,
    /// Its status from now on. Fields of the driver are empty, and stay as they are.
    pub status: GpuResizeStatus,
}

/// Evictions of pods. None is carried out if the API server would refuse one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evictions {
    /// The purpose.
    pub purpose: EvictionPurpose,
    /// The pods to evict, the least important first.
    pub victims: Vec<PodReference>,
}

/// The purpose of evictions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionPurpose {
    /// A pod of a higher priority gets the devices.
    Preemption {
        /// The pod of the higher priority. It has one such effect at a time.
        preemptor: PodReference,
    },
    /// The device of the pod is not fit for use any more.
    Recovery,
}

/// One resource of a quota, for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaFigure {
    /// The quota.
    pub quota: QuotaName,
    /// The resource.
    pub resource: QuotaResource,
    /// The limit.
    pub hard: Quantity,
    /// The amount that allocated claims hold.
    pub used: Quantity,
}

/// The number of a write. An outcome ends the write of this number and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteId(pub u64);

/// The number of a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NoticeId(pub u64);

/// Upper bound of the notices that are sent and have not ended. The executor's queue has room for
/// all of them.
pub const MAX_OPEN_NOTICES: usize = 1024;

/// A write of one claim.
#[derive(Debug, Clone)]
pub struct ClaimWrite {
    /// The number of the write.
    pub id: WriteId,
    /// The object that it was decided on. Its `resourceVersion` is the precondition.
    pub object: Arc<ResourceClaim>,
    /// The change of its status.
    pub change: ClaimChange,
}

/// A change of a claim's status.
#[derive(Debug, Clone)]
pub enum ClaimChange {
    /// Adds the finalizer and writes a new allocation.
    Allocate(AllocationDraft),
    /// Writes an allocation that the claim had before.
    Restore(Box<AllocationResult>),
    /// Clears the allocation of a claim that is not reserved.
    Release,
    /// Clears the allocation and `reservedFor`. Only for a claim that is reserved by nothing but
    /// pods that are bound elsewhere.
    Deallocate,
    /// Ends the wait of the claim's pod at the barrier of its group, by a condition of its devices.
    Conclude(BarrierOutcome),
    /// Changes the sizes that count for its shares.
    Resize(Vec<SizedShare>),
}

/// The end of a group's wait at its barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarrierOutcome {
    /// kube-scheduler has a node for all pods of the group: they may be bound.
    Complete,
    /// It has not found one for all of them: none may be bound.
    Failed,
}

/// A decision, and the classes that it takes to write it as an allocation.
#[derive(Debug, Clone)]
pub struct AllocationDraft {
    /// The decision.
    pub claim_allocation: ClaimAllocation,
    /// The classes that the claim names.
    pub classes: BTreeMap<String, Arc<DeviceClass>>,
    /// The parameters of the namespace.
    pub defaults: Option<Arc<GpuConfig>>,
}

impl AllocationDraft {
    /// Returns the allocation of `claim`, the object of the write, made at `at`. `share` returns a
    /// new ID for each share.
    pub fn render(
        &self,
        claim: &ResourceClaim,
        at: Time,
        share: impl FnMut() -> ShareId,
    ) -> AllocationResult {
        let classes =
            self.classes.iter().map(|(name, class)| (name.clone(), class.as_ref())).collect();
        let defaults = self.defaults.as_deref();
        convert::allocation(&self.claim_allocation, claim, &classes, defaults, at, share)
    }
}

/// A Kubernetes event about a pod, to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The number of the notice.
    pub id: NoticeId,
    /// The pod.
    pub pod: PodReference,
    /// The node that it also refers to.
    pub node: Option<NodeName>,
    /// The reason.
    pub reason: EventReason,
    /// The message.
    pub note: String,
}

/// A pod as events refer to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodReference {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: PodName,
    /// Its UID.
    pub uid: PodUid,
}

/// The figures of one step. Counters are increments; a gauge is absent where it was not determined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Figures {
    /// The step planned pods.
    pub is_planned: bool,
    /// Claims allocated, each with the time from the first event to the answer.
    pub allocations: Vec<Duration>,
    /// Allocations released.
    pub releases: u64,
    /// Writes that moved or restored claims of bound pods.
    pub repairs: u64,
    /// Changes of the sizes of a claim's shares.
    pub resizes: u64,
    /// Writes dropped because the claim had changed.
    pub conflicts: u64,
    /// Writes that failed for another reason.
    pub write_errors: u64,
    /// Plans that ended before all pods were reached.
    pub cut_plans: u64,
    /// Searches that ended without a decision.
    pub undecided_plans: u64,
    /// Steps spent on selectors, per namespace of the pods.
    pub selector_steps: BTreeMap<Namespace, u64>,
    /// Steps spent on long searches, per namespace of the pods.
    pub long_search_steps: BTreeMap<Namespace, u64>,
    /// Claim templates created and deleted.
    pub template_writes: u64,
    /// Writes of claim templates that were refused or had no answer.
    pub template_errors: u64,
    /// Quotas of the namespaces in which one has changed.
    pub quotas: BTreeMap<Namespace, Vec<QuotaFigure>>,
    /// Times that the running sums differed from a fresh count.
    pub drifts: u64,
    /// Nominations written or removed.
    pub nominations: u64,
    /// Nominations that were refused or had no answer.
    pub nomination_errors: u64,
    /// Searches for pods to evict that have ended.
    pub preemption_attempts: u64,
    /// Pods evicted.
    pub evictions: u64,
    /// Evictions that a PodDisruptionBudget did not allow.
    pub evictions_refused: u64,
    /// Evictions that were refused for another reason or had no answer.
    pub eviction_errors: u64,
    /// Groups of pods that kube-scheduler could not place as a whole.
    pub failed_groups: u64,
    /// Writes of placeholder pods that were refused or had no answer.
    pub placeholder_errors: u64,
    /// Placeholder pods of each group of nodes.
    pub placeholders: Option<BTreeMap<NodeGroupName, i64>>,
    /// Pods for which others were evicted and that have no devices yet.
    pub preemptions: Option<i64>,
    /// Pending claims by reason.
    pub pending: Option<BTreeMap<&'static str, i64>>,
    /// Reserved nodes.
    pub reserved_nodes: Option<i64>,
    /// Devices of which more is allocated than they have.
    pub overcommitted: Option<i64>,
    /// Claims of bound pods that are on another node.
    pub misplaced: Option<i64>,
    /// Deleted claims that bound pods use.
    pub orphaned: Option<i64>,
    /// Writes that have been open for long.
    pub unanswered: Option<i64>,
    /// Nodes whose load is known.
    pub measured_nodes: Option<i64>,
}
