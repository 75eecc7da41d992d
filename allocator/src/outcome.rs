//! What planning gives: decisions to carry out, and reasons for pods that have to wait.

use std::sync::Arc;

use tessera_api::ConfigError;
use tessera_api::names::{ClaimUid, DeviceClassName, Namespace, NodeName, PodName, RequestName};
use tessera_api::reason::Explanation;

use crate::model::{DeviceResult, NodeSelector, PodUid};

/// The result of [`plan`](crate::plan).
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Pods whose claims can be allocated, in the order in which they were decided.
    pub decisions: Vec<Decision>,
    /// Pods that have to wait, and why.
    pub refusals: Vec<Refusal>,
    /// Pods that are not decided on because the steps of the plan were spent: the next plan goes
    /// on with them.
    pub unreached: Vec<PodUid>,
    /// Steps spent: devices looked at by the search.
    pub steps: u64,
    /// The node that is kept free for a pod that has to wait.
    pub kept: Option<Kept>,
    /// When the plan may be another one although nothing has changed, in seconds since the epoch;
    /// none = never.
    pub again: Option<i64>,
}

/// A node that is kept free for a pod: see [`plan`](crate::plan()).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The pod.
    pub pod: PodUid,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: PodName,
    /// The node.
    pub node: NodeName,
    /// Until when at least, in seconds since the epoch, if nothing changes.
    pub until: i64,
}

impl Plan {
    /// The node that is kept free for this pod.
    pub fn kept_for(&self, pod: &PodUid) -> Option<&Kept> {
        self.kept.as_ref().filter(|kept| kept.pod == *pod)
    }
}

/// All pending claims of one pod, placed on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The pod.
    pub pod: PodUid,
    /// The node.
    pub node: NodeName,
    /// Its claims that were pending, in pod order.
    pub claims: Vec<Allotment>,
}

/// The devices of one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allotment {
    /// The claim.
    pub claim: ClaimUid,
    /// Its devices, in upstream's order: by request, within a request as found.
    pub results: Vec<DeviceResult>,
    /// From where they can be used; none = everywhere.
    pub nodes: Option<NodeSelector>,
}

/// A pod that has to wait.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// The pod.
    pub pod: PodUid,
    /// The claim to which the reasons apply.
    pub claim: ClaimUid,
    /// Why. Pods of one shape share it.
    pub cause: Arc<Cause>,
}

impl Refusal {
    /// Returns `true` if the search ended before it could tell.
    pub fn is_undecided(&self) -> bool {
        matches!(*self.cause, Cause::NotDecided)
    }
}

/// Why a claim has to wait.
#[derive(Debug, Clone, PartialEq)]
pub enum Cause {
    /// The request's class does not exist.
    UnknownClass {
        /// The request.
        request: RequestName,
        /// The class it names.
        class: DeviceClassName,
    },
    /// The claim uses something that this version does not have.
    NotSupported {
        /// The request.
        request: RequestName,
        /// What it uses.
        what: NotSupported,
    },
    /// A configuration of the class or the claim is wrong.
    Config {
        /// The request.
        request: RequestName,
        /// What is wrong with it.
        error: ConfigError,
    },
    /// No node has the devices.
    NoFit(Explanation),
    /// The search was longer than the budget allows.
    NotDecided,
}

/// Something in a request that this version does not have. Its text names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotSupported {
    /// A field.
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
    /// An allocation mode of the future.
    #[error("this allocation mode")]
    Mode,
    /// A way of sharing in which a claim has one GPU.
    #[error(
        "sharing: MPS with several GPUs (limit: one GPU per claim, one such claim per container)"
    )]
    MpsOfSeveral,
}
