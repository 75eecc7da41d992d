//! One claim: what it asks for, and why it waits or what it has.

use serde::Serialize;
use tessera_allocator::model::{Alternative, Claim, Mode, NodeSelector, PendingPod, PodClaim};
use tessera_allocator::{Allotment, Cause, Plan, Refusal};
use tessera_api::names::{ClaimUid, DRIVER_NAME, RequestName};
use tessera_api::reason::Explanation;
use tessera_index::{ClaimStanding, ClaimState, Scope};
use tessera_messages as message;

use super::View;
use crate::devices::Given;

/// How it is with one claim of a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimReport {
    /// The entry of the pod's `spec.resourceClaims`.
    pub entry: String,
    /// The claim; none where it is not there yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// In one word: `Allocated`, `Placeable`, `Foreign`, `NotGenerated`, `Missing`, `Deleting`,
    /// `NotThePods`, or the reason that events give.
    pub reason: String,
    /// In one sentence, that of the event where there is one.
    pub message: String,
    /// What it asks for.
    pub asks: Vec<Ask>,
    /// What it has, or would have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Given>,
    /// The devices counted by what kept them out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasons: Option<Explanation>,
    /// Each of several requests by itself, where the claim fits nowhere.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestReport>,
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ask {
    /// The request.
    pub request: String,
    /// Its alternatives in words, as `1 x gpu.tessera.dev with memory 19Gi`.
    pub alternatives: Vec<String>,
}

/// How it is with one request by itself, without the others and the claim's constraints.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestReport {
    /// The request.
    pub request: String,
    /// It would fit.
    pub fits: bool,
    /// Otherwise the devices counted by what kept them out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasons: Option<Explanation>,
    /// Otherwise, where devices were not what it failed for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A claim with where it stands.
pub(crate) struct Subject<'v> {
    view: &'v View<'v>,
    entry: String,
    name: Option<String>,
    uid: Option<ClaimUid>,
    pub(crate) state: ClaimState,
    /// The template that it is to come from, and whether that is there.
    template: Option<(String, bool)>,
}

impl<'v> Subject<'v> {
    /// A claim of a pod.
    pub(crate) fn of_pod(
        view: &'v View<'v>,
        standing: ClaimStanding,
        template: Option<(String, bool)>,
    ) -> Self {
        let ClaimStanding { entry, name, claim, state } = standing;
        Self { view, entry, name: name.map(|name| name.to_string()), uid: claim, state, template }
    }

    /// A claim by itself.
    pub(crate) fn of_claim(view: &'v View<'v>, uid: &ClaimUid) -> Self {
        let name = view.index.claim_called(uid).map(ToString::to_string);
        let state = view.index.claim_state(uid);
        Self { view, entry: String::new(), name, uid: Some(uid.clone()), state, template: None }
    }

    /// The node that the claim is allocated on.
    pub(crate) fn node(&self) -> Option<String> {
        let ClaimState::Allocated(allocation) = &self.state else { return None };
        allocation.nodes.as_ref().and_then(NodeSelector::single_node).map(str::to_owned)
    }

    /// What there is to say without planning.
    pub(crate) fn message(&self) -> String {
        let name = self.name.as_deref().unwrap_or_default();
        match &self.state {
            ClaimState::NotGenerated => match &self.template {
                Some((template, false)) => {
                    format!("ResourceClaimTemplate {template} does not exist, so there is no claim yet")
                }
                Some((template, true)) => format!(
                    "its claim has not been made from ResourceClaimTemplate {template} yet; kube-controller-manager does that"
                ),
                None => {
                    "its claim has not been made from its template yet; kube-controller-manager does that"
                        .to_owned()
                }
            },
            ClaimState::Missing => format!("ResourceClaim {name} does not exist"),
            ClaimState::Deleting => format!("ResourceClaim {name} is being deleted"),
            ClaimState::NotThePods => format!(
                "ResourceClaim {name} has the name of this pod's claim and belongs to somebody else; delete it, or the pod"
            ),
            ClaimState::Allocated(_) => match self.node() {
                Some(node) => format!("it is allocated on node {node}"),
                None => "it is allocated".to_owned(),
            },
            ClaimState::Foreign => format!(
                "it asks other drivers than {DRIVER_NAME}, so kube-scheduler allocates it; see `kubectl describe pod`"
            ),
            ClaimState::Pending => "it is not allocated".to_owned(),
        }
    }

    /// The word for what is known without planning.
    fn word(&self) -> &'static str {
        match &self.state {
            ClaimState::NotGenerated => "NotGenerated",
            ClaimState::Missing => "Missing",
            ClaimState::Deleting => "Deleting",
            ClaimState::NotThePods => "NotThePods",
            ClaimState::Allocated(_) => "Allocated",
            ClaimState::Foreign => "Foreign",
            ClaimState::Pending => "Pending",
        }
    }

    /// The report without anything planned.
    pub(crate) fn report(&self) -> ClaimReport {
        let devices = match &self.state {
            ClaimState::Allocated(allocation) => {
                allocation.results.iter().map(Given::from).collect()
            }
            _ => Vec::new(),
        };
        ClaimReport {
            entry: self.entry.clone(),
            claim: self.name.clone(),
            reason: self.word().to_owned(),
            message: self.message(),
            asks: self
                .uid
                .as_ref()
                .and_then(|uid| self.view.index.asked(uid))
                .map_or_else(Vec::new, |c| asks(c)),
            devices,
            reasons: None,
            requests: Vec::new(),
        }
    }

    /// The report of a claim that would get these devices.
    pub(crate) fn placed(&self, allotment: &Allotment, node: &str) -> ClaimReport {
        ClaimReport {
            reason: "Placeable".to_owned(),
            message: format!("it fits on node {node}"),
            devices: allotment.results.iter().map(Given::from).collect(),
            ..self.report()
        }
    }

    /// The report of a claim that is refused.
    pub(crate) fn refused(&self, refusal: &Refusal, plan: &Plan, pod: &PendingPod) -> ClaimReport {
        let cause = &*refusal.cause;
        let name = self.name.as_deref().unwrap_or_default();
        ClaimReport {
            reason: message::reason(cause).to_owned(),
            message: message::note(name, cause, plan.kept_for(&refusal.pod)),
            reasons: explanation(cause),
            requests: match cause {
                Cause::NoFit(_) => self.each_request(pod),
                _ => Vec::new(),
            },
            ..self.report()
        }
    }

    /// Each request of the claim as if it were the only one. Of a single request the claim's own
    /// reasons say it all.
    fn each_request(&self, pod: &PendingPod) -> Vec<RequestReport> {
        let Some(claim) = self.uid.as_ref().and_then(|uid| self.view.index.asked(uid)) else {
            return Vec::new();
        };
        if claim.requests.len() < 2 {
            return Vec::new();
        }
        let alone = |request: &tessera_allocator::model::Request| {
            let claim = Claim {
                requests: vec![request.clone()],
                constraints: Vec::new(),
                ..Claim::clone(claim)
            };
            let pod = PendingPod { claims: vec![PodClaim::Pending(claim.into())], ..pod.clone() };
            let plan = self.view.plan_alone(&[pod]);
            let cause = plan.refusals.first().map(|refusal| &*refusal.cause);
            let reasons = cause.and_then(explanation);
            let told = cause.filter(|_| reasons.is_none());
            RequestReport {
                request: request.name.to_string(),
                fits: cause.is_none(),
                reasons,
                message: told.map(|cause| {
                    message::note(self.name.as_deref().unwrap_or_default(), cause, None)
                }),
            }
        };
        claim.requests.iter().map(alone).collect()
    }

    /// Whose devices it asks for.
    pub(crate) fn scope(&self) -> Option<Scope> {
        self.view.index.scope(self.uid.as_ref()?)
    }

    /// The claim's UID.
    pub(crate) fn uid(&self) -> Option<&ClaimUid> {
        self.uid.as_ref()
    }
}

fn explanation(cause: &Cause) -> Option<Explanation> {
    match cause {
        Cause::NoFit(explanation) => Some(explanation.clone()),
        _ => None,
    }
}

fn asks(claim: &Claim) -> Vec<Ask> {
    let ask = |request: &tessera_allocator::model::Request| Ask {
        request: request.name.to_string(),
        alternatives: request.alternatives.iter().map(|a| words(a, &request.name)).collect(),
    };
    claim.requests.iter().map(ask).collect()
}

/// An alternative in words.
fn words(alternative: &Alternative, request: &RequestName) -> String {
    let number = match alternative.mode {
        Mode::Exact(count) => count.to_string(),
        Mode::All => "all".to_owned(),
        Mode::Unknown => "?".to_owned(),
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
        text = format!("{text} where {}", selector.expression);
    }
    text
}
