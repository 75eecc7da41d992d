//! One claim of a pod: its requests, and the reasons why it is pending or its devices.

use serde::Serialize;
use tessera_allocator::model::{
    AllocationMode, Alternative, Claim, NodeSelector, PendingPod, PodClaim,
};
use tessera_allocator::{AllocationPlan, ClaimAllocation, Refusal, RefusalCause};
use tessera_api::names::{ClaimUid, DRIVER_NAME, RequestName};
use tessera_api::reason::Explanation;
use tessera_index::{ClaimStanding, ClaimState, Scope};
use tessera_messages as message;

use super::PlanView;
use crate::devices::AllocatedDevice;
use crate::terminal::one_line;

/// Longest selector in the text of a request, in characters. A selector may have 10 KiB.
const MAX_SELECTOR: usize = 200;

/// The explanation of one claim of a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodClaimReport {
    /// The entry of the pod's `spec.resourceClaims`.
    pub entry: String,
    /// Name of the ResourceClaim; none if it does not exist yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The claim's state, in one word: `Allocated`, `Schedulable`, `NotManaged`, `NotGenerated`,
    /// `Missing`, `Terminating`, `NotOwnedByPod`, `Pending`, or the reason of the event.
    pub reason: String,
    /// The answer, in one sentence: the message of the event if there is one.
    pub message: String,
    /// The claim's requests.
    #[serde(rename = "asks")]
    pub specs: Vec<RequestSpec>,
    /// Devices that are allocated, or would be.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<AllocatedDevice>,
    /// Devices by the reason that excludes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasons: Option<Explanation>,
    /// Each of several requests by itself, for a claim that fits nowhere.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestReport>,
}

/// A request of a claim as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestSpec {
    /// The request.
    pub request: String,
    /// Its alternatives, as `1 x gpu.tessera.dev with memory 19Gi`.
    pub alternatives: Vec<String>,
}

/// The explanation of one request, without the claim's other requests and constraints.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestReport {
    /// The request.
    pub request: String,
    /// True if the request fits.
    pub fits: bool,
    /// Devices by the reason that excludes them, for a request that does not fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasons: Option<Explanation>,
    /// The error of a request that cannot be planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A claim with its state.
pub(crate) struct ClaimContext<'v> {
    view: &'v PlanView<'v>,
    entry: String,
    name: Option<String>,
    uid: Option<ClaimUid>,
    pub(crate) state: ClaimState,
    /// Name of the template that generates the claim, and true if the template exists.
    template: Option<(String, bool)>,
}

impl<'v> ClaimContext<'v> {
    /// Returns the context of a claim of a pod.
    pub(crate) fn of_pod(
        view: &'v PlanView<'v>,
        standing: ClaimStanding,
        template: Option<(String, bool)>,
    ) -> Self {
        let ClaimStanding { entry, name, claim, state } = standing;
        Self { view, entry, name: name.map(|name| name.to_string()), uid: claim, state, template }
    }

    /// Returns the context of a claim without a pod.
    pub(crate) fn of_claim(view: &'v PlanView<'v>, uid: &ClaimUid) -> Self {
        let name = view.index.claim_called(uid).map(ToString::to_string);
        let state = view.index.claim_state(uid);
        Self { view, entry: String::new(), name, uid: Some(uid.clone()), state, template: None }
    }

    /// Returns the node on which the claim is allocated.
    pub(crate) fn node(&self) -> Option<String> {
        let ClaimState::Allocated(allocation) = &self.state else { return None };
        allocation.nodes.as_deref().and_then(NodeSelector::single_node).map(str::to_owned)
    }

    /// Returns the answer that needs no plan.
    pub(crate) fn message(&self) -> String {
        let name = self.name.as_deref().unwrap_or_default();
        match &self.state {
            ClaimState::NotGenerated => match &self.template {
                Some((template, false)) => {
                    format!(
                        "ResourceClaimTemplate {template} does not exist, so the claim is not \
                         generated"
                    )
                }
                Some((template, true)) => format!(
                    "its claim is not generated from ResourceClaimTemplate {template} yet; \
                     kube-controller-manager does that"
                ),
                None => {
                    "its claim is not generated from its template yet; kube-controller-manager \
                     does that"
                        .to_owned()
                }
            },
            ClaimState::Missing => format!("ResourceClaim {name} does not exist"),
            ClaimState::Deleting => format!("ResourceClaim {name} is being deleted"),
            ClaimState::ForeignOwner => format!(
                "ResourceClaim {name} has the name of this pod's claim but another owner; delete the \
                 claim or the pod"
            ),
            ClaimState::Allocated(_) => match self.node() {
                Some(node) => format!("it is allocated on node {node}"),
                None => "it is allocated".to_owned(),
            },
            ClaimState::Foreign => format!(
                "it requests devices of other drivers than {DRIVER_NAME}, so kube-scheduler allocates \
                 it; see `kubectl describe pod`"
            ),
            ClaimState::Pending => "it is not allocated".to_owned(),
        }
    }

    /// Returns the state that needs no plan, in one word.
    fn state_word(&self) -> &'static str {
        match &self.state {
            ClaimState::NotGenerated => "NotGenerated",
            ClaimState::Missing => "Missing",
            ClaimState::Deleting => "Terminating",
            ClaimState::ForeignOwner => "NotOwnedByPod",
            ClaimState::Allocated(_) => "Allocated",
            ClaimState::Foreign => "NotManaged",
            ClaimState::Pending => "Pending",
        }
    }

    /// Returns the report that needs no plan.
    pub(crate) fn report(&self) -> PodClaimReport {
        let devices = match &self.state {
            ClaimState::Allocated(allocation) => {
                allocation.results.iter().map(AllocatedDevice::from).collect()
            }
            _ => Vec::new(),
        };
        PodClaimReport {
            entry: self.entry.clone(),
            claim: self.name.clone(),
            reason: self.state_word().to_owned(),
            message: self.message(),
            specs: self
                .uid
                .as_ref()
                .and_then(|uid| self.view.index.requests_of(uid))
                .map_or_else(Vec::new, |c| request_specs(c)),
            devices,
            reasons: None,
            requests: Vec::new(),
        }
    }

    /// Returns the report of a claim that would get these devices.
    pub(crate) fn placed(&self, claim_allocation: &ClaimAllocation, node: &str) -> PodClaimReport {
        PodClaimReport {
            reason: "Schedulable".to_owned(),
            message: format!("it fits on node {node}"),
            devices: claim_allocation.results.iter().map(AllocatedDevice::from).collect(),
            ..self.report()
        }
    }

    /// Returns the report of a claim that fits nowhere.
    pub(crate) fn refused(
        &self,
        refusal: &Refusal,
        plan: &AllocationPlan,
        pod: &PendingPod,
    ) -> PodClaimReport {
        let cause = &*refusal.cause;
        let name = self.name.as_deref().unwrap_or_default();
        PodClaimReport {
            reason: message::refusal_reason(cause).name().to_owned(),
            message: message::refusal_message(name, cause, plan.reserved_for(&refusal.pod)),
            reasons: explanation(cause),
            requests: match cause {
                RefusalCause::NoFit(_) => self.each_request(pod),
                _ => Vec::new(),
            },
            ..self.report()
        }
    }

    /// Explains each request of the claim as if it were the only one. Empty for a claim with one
    /// request, which the claim's own reasons explain.
    fn each_request(&self, pod: &PendingPod) -> Vec<RequestReport> {
        let Some(claim) = self.uid.as_ref().and_then(|uid| self.view.index.requests_of(uid)) else {
            return Vec::new();
        };
        if claim.requests.len() < 2 {
            return Vec::new();
        }
        let alone = |request: &tessera_allocator::model::Request| {
            let claim = Claim {
                requests: [request.clone()].into(),
                constraints: Vec::new(),
                ..Claim::clone(claim)
            };
            let pod = PendingPod { claims: vec![PodClaim::Pending(claim.into())], ..pod.clone() };
            let plan = self.view.plan_alone(&[pod]);
            let cause = plan.refusals.first().map(|refusal| &*refusal.cause);
            let reasons = cause.and_then(explanation);
            let other = cause.filter(|_| reasons.is_none());
            RequestReport {
                request: request.name.to_string(),
                fits: cause.is_none(),
                reasons,
                message: other.map(|cause| {
                    message::refusal_message(self.name.as_deref().unwrap_or_default(), cause, None)
                }),
            }
        };
        claim.requests.iter().map(alone).collect()
    }

    /// Returns the drivers that the claim requests devices of.
    pub(crate) fn scope(&self) -> Option<Scope> {
        self.view.index.scope(self.uid.as_ref()?)
    }

    /// Returns the claim's UID.
    pub(crate) fn uid(&self) -> Option<&ClaimUid> {
        self.uid.as_ref()
    }
}

fn explanation(cause: &RefusalCause) -> Option<Explanation> {
    match cause {
        RefusalCause::NoFit(explanation) => Some(Explanation::clone(explanation)),
        _ => None,
    }
}

fn request_specs(claim: &Claim) -> Vec<RequestSpec> {
    let spec = |request: &tessera_allocator::model::Request| RequestSpec {
        request: request.name.to_string(),
        alternatives: request
            .alternatives
            .iter()
            .map(|a| alternative_text(a, &request.name))
            .collect(),
    };
    claim.requests.iter().map(spec).collect()
}

/// Returns an alternative as text: `1 x gpu.tessera.dev with memory 19Gi`.
fn alternative_text(alternative: &Alternative, request: &RequestName) -> String {
    let number = match alternative.mode {
        AllocationMode::Exact(count) => count.to_string(),
        AllocationMode::All => "all".to_owned(),
        AllocationMode::Unknown => "?".to_owned(),
    };
    let class = alternative.class.as_ref().map_or("no class", |class| class.as_str());
    let mut text = format!("{number} x {class}");
    if alternative.name != *request {
        text = format!("{}: {text}", alternative.name.subrequest().unwrap_or_default());
    }
    let amounts: Vec<String> =
        alternative.capacity.iter().map(|(name, amount)| format!("{name} {amount}")).collect();
    if !amounts.is_empty() {
        text = format!("{text} with {}", amounts.join(", "));
    }
    for selector in &alternative.selectors {
        text = format!("{text} where {}", one_line(&selector.expression, MAX_SELECTOR));
    }
    text
}
