//! Result of planning: decisions, and refusals with their reasons.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::ConfigError;
use tessera_api::names::{ClaimUid, DeviceClassName, Namespace, NodeName, PodName, RequestName};

use crate::explain::RefusalExplanation;
use crate::model::{DeviceResult, NodeSelector, PodUid};
use crate::quota::QuotaShortfall;

/// Result of [`plan`](crate::plan()).
#[derive(Debug, Clone, Default)]
pub struct AllocationPlan {
    /// Pods whose claims can be allocated, in the order of decision.
    pub decisions: Vec<Decision>,
    /// Claims that cannot be allocated, with the reasons. Those of classes that are refused as
    /// before are left out: see [`Planner::plan_backlog`](crate::Planner::plan_backlog).
    pub refusals: Vec<Refusal>,
    /// Claims of pods without a turn whose reasons have changed: those of the last pod of each
    /// class.
    pub renewed: Vec<Refusal>,
    /// Groups of a backlog that were refused like an equal one, which was tried. They have no
    /// refusals: see [`Planner::refusals_in`](crate::Planner::refusals_in).
    pub alike: Vec<GroupsAlike>,
    /// Pods that were not planned because the steps of the plan were spent. The next plan
    /// continues with them.
    pub unreached: Vec<PodUid>,
    /// True if some refusals have the reasons of an earlier plan, because the steps for reasons
    /// were spent, or if reasons of an earlier plan decided if a node is reserved. The next plan
    /// continues.
    pub has_old_reasons: bool,
    /// Steps spent, in devices tested by the search.
    pub steps: u64,
    /// Steps charged for compiling and evaluating selectors, per namespace of the pods.
    pub selector_steps: BTreeMap<Namespace, u64>,
    /// Steps of searches of one node that needed more than [`LONG_SEARCH`](crate::LONG_SEARCH)
    /// steps, per namespace of the pods.
    pub long_search_steps: BTreeMap<Namespace, u64>,
    /// A selector per namespace that has to be compiled before its pods can be planned; empty
    /// unless the planner [leaves them](crate::Planner::leave_long_selectors). Pods that need one
    /// are neither decided nor refused. The caller compiles it with
    /// [`CompiledSelector::cached`](crate::selector::CompiledSelector::cached), and plans again.
    pub to_compile: BTreeMap<Namespace, Arc<str>>,
    /// Work of the plan, for tests and benchmarks.
    pub work: PlanWork,
    /// Node that is reserved for a refused pod.
    pub reserved: Option<ReservedNode>,
    /// Next time at which the plan can change by itself, in seconds since the epoch.
    ///
    /// `None` means never.
    pub replan_at: Option<i64>,
}

/// Work of a plan, by kind. It depends on what has changed, not on the number of equal pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanWork {
    /// Pods that had a turn in the plan.
    pub turns: u64,
    /// Classes of pods without a turn, because they are refused as before.
    pub unchanged: u64,
    /// Pods whose claims were compared with those of other pods.
    pub pods_classified: u64,
    /// Searches for a node for a pod.
    pub pods_searched: u64,
    /// Nodes on which devices were searched.
    pub nodes_searched: u64,
    /// Nodes whose conditions were tested for a pod.
    pub nodes_tested: u64,
    /// Nodes whose devices were counted by the reasons that exclude them.
    pub nodes_explained: u64,
    /// Evaluations of a list of selectors on a device.
    pub selector_evaluations: u64,
}

/// Groups that were refused like an equal one.
#[derive(Debug, Clone)]
pub struct GroupsAlike {
    /// The refusals of the group that was tried.
    pub tried: Vec<Refusal>,
    /// Number of the other groups.
    pub others: usize,
    /// True if one of them was not refused before, or for another reason.
    pub is_news: bool,
}

/// A node reserved for a pod: see [`plan`](crate::plan()).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedNode {
    /// UID of the pod.
    pub pod: PodUid,
    /// Namespace of the pod.
    pub namespace: Namespace,
    /// Name of the pod.
    pub name: PodName,
    /// Reserved node.
    pub node: NodeName,
    /// End of the reservation if nothing else changes, in seconds since the epoch.
    pub until: i64,
}

impl AllocationPlan {
    /// Returns the node reserved for this pod.
    pub fn reserved_for(&self, pod: &PodUid) -> Option<&ReservedNode> {
        self.reserved.as_ref().filter(|reserved| reserved.pod == *pod)
    }
}

/// Allocations of all pending claims of one pod, on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// UID of the pod.
    pub pod: PodUid,
    /// Node on which the devices are allocated.
    pub node: NodeName,
    /// Allocations of the pending claims, in pod order.
    pub claims: Vec<ClaimAllocation>,
}

/// Allocation of one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimAllocation {
    /// UID of the claim.
    pub claim: ClaimUid,
    /// Devices in upstream's order: by request, within a request in the order of the search.
    pub results: Vec<DeviceResult>,
    /// Nodes on which the devices can be used; `None` means all nodes.
    pub nodes: Option<NodeSelector>,
}

/// A claim of a pod that cannot be allocated.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// UID of the pod.
    pub pod: PodUid,
    /// Claim to which the cause applies.
    pub claim: ClaimUid,
    /// Cause of the refusal, shared by pods with equal claims.
    pub cause: Arc<RefusalCause>,
}

impl Refusal {
    /// Returns true if the step budget was spent before the search ended.
    pub fn is_undecided(&self) -> bool {
        matches!(*self.cause, RefusalCause::BudgetExceeded)
    }
}

/// Cause of a refusal.
#[derive(Debug, Clone, PartialEq)]
pub enum RefusalCause {
    /// The DeviceClass of the request does not exist.
    UnknownClass {
        /// Request name.
        request: RequestName,
        /// Missing class.
        class: DeviceClassName,
    },
    /// The claim uses an unsupported feature.
    NotSupported {
        /// Request name.
        request: RequestName,
        /// Unsupported feature.
        what: UnsupportedFeature,
    },
    /// A configuration of the class or the claim is invalid.
    Config {
        /// Request name.
        request: RequestName,
        /// Error in the configuration.
        error: ConfigError,
    },
    /// No node has suitable devices.
    NoFit(RefusalExplanation),
    /// The claims of the pod would exceed a quota of the namespace.
    OverQuota(Box<QuotaShortfall>),
    /// The pods of a group are allocated together or not at all, and not all of them fit.
    GroupDoesNotFit(GroupShortfall),
    /// The search exceeded the step budget.
    BudgetExceeded,
}

/// A group of pods that does not fit as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupShortfall {
    /// Number of pods that are to be placed together.
    pub pods: usize,
    /// Number of those that fit at the same time.
    pub placed: usize,
    /// First pod that does not fit beside them.
    pub first: PodName,
    /// The label of nodes that is required to have one value: the pods would fit without it, and
    /// `placed` fit with it. None if they do not fit at all.
    pub topology: Option<String>,
}

/// An unsupported feature of a request. Its text names the feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedFeature {
    /// An unsupported field.
    #[error("{0}")]
    Field(&'static str),
    /// A field whose feature gate is off.
    #[error("a field of the disabled feature gate {0}")]
    Gate(&'static str),
    /// A selector that is not CEL.
    #[error("a selector other than CEL")]
    Selector,
    /// A kind of request without a class.
    #[error("a request without a DeviceClass")]
    NoClass,
    /// An unknown allocation mode.
    #[error("this allocation mode")]
    Mode,
    /// Sharing by MPS with more than one GPU in the claim.
    #[error(
        "sharing: MPS with several GPUs (limit: one GPU per claim, one such claim per container)"
    )]
    MpsWithSeveralGpus,
}
