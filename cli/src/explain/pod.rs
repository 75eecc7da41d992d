//! The explanation of one pod, derived from the state of its claims.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::{AllocationPlan, Decision, Refusal, RefusalCause, ReservedNode};
use tessera_api::names::{ClaimUid, NodeName};
use tessera_api::reason::Reason;
use tessera_index::{Blocked, ClaimState, GroupBarrier, PodStage};
use tessera_messages as message;

use super::claim::{ClaimContext, PodClaimReport};
use super::extended::ExtendedResource;
use super::{PlanView, PodReport, PodState, outside};
use crate::preemption::Preemptions;

/// Returns the report of a pod of the index.
pub(super) fn report(view: &PlanView<'_>, uid: &PodUid) -> PodReport {
    let pod = PodContext::new(view, uid);
    let PodAnswer { state, message, node, claims, hint } = pod.answer();
    let findings = outside::findings(view, uid, pod.object, state);
    let (namespace, name) =
        view.index.pod_name(uid).map_or_else(Default::default, |(namespace, name)| {
            (namespace.to_string(), name.to_string())
        });
    // A finding names the cause, which has to be solved first.
    let hint = hint.filter(|_| findings.is_empty());
    let events = Vec::new();
    PodReport { namespace, pod: name, state, message, node, claims, findings, events, hint }
}

/// The parts of a report that depend on the state of the pod.
struct PodAnswer {
    state: PodState,
    message: String,
    node: Option<String>,
    claims: Vec<PodClaimReport>,
    hint: Option<String>,
}

/// A pod with its claims.
struct PodContext<'v> {
    view: &'v PlanView<'v>,
    uid: &'v PodUid,
    object: Option<&'v Pod>,
    claims: Vec<ClaimContext<'v>>,
}

impl<'v> PodContext<'v> {
    fn new(view: &'v PlanView<'v>, uid: &'v PodUid) -> Self {
        let object = super::find_object(view, uid);
        let standing = view.index.claim_standings(uid);
        let claims = standing.into_iter().map(|standing| {
            let template = object.and_then(|pod| template(view, pod, &standing.entry));
            ClaimContext::of_pod(view, standing, template)
        });
        Self { view, uid, object, claims: claims.collect() }
    }

    fn answer(&self) -> PodAnswer {
        let plain = |state, message: &str| PodAnswer {
            state,
            message: message.to_owned(),
            node: None,
            claims: self.unplanned_claims(),
            hint: None,
        };
        if self.claims.is_empty() {
            let asked = self.object.and_then(|pod| ExtendedResource::of(self.view, pod));
            return match asked {
                None => plain(PodState::NoClaims, "it uses no ResourceClaims"),
                Some(ExtendedResource { message, hint, .. }) => {
                    PodAnswer { hint: Some(hint), ..plain(PodState::NoClaims, &message) }
                }
            };
        }
        match self.view.index.stage(self.uid) {
            None | Some(PodStage::Ended) => {
                plain(PodState::Completed, "it has succeeded or failed")
            }
            Some(PodStage::Deleting) => plain(PodState::Terminating, "it is being deleted"),
            Some(PodStage::Bound(node)) => self.bound(&node),
            Some(PodStage::Gated) => self.gated(),
            Some(PodStage::Waiting) => self.unbound(),
        }
    }

    fn unplanned_claims(&self) -> Vec<PodClaimReport> {
        self.claims.iter().map(ClaimContext::report).collect()
    }

    fn bound(&self, node: &NodeName) -> PodAnswer {
        let misplaced = self.view.index.misplaced(self.uid).into_iter().next();
        let (state, message) = match misplaced {
            Some(misplaced) => {
                let claim = self.view.index.claim_called(&misplaced.claim).map(ToString::to_string);
                (
                    PodState::NodeMismatch,
                    message::node_mismatch_message(&claim.unwrap_or_default(), &misplaced),
                )
            }
            None => (
                PodState::Bound,
                format!("it is bound to node {node}, and its claims are allocated"),
            ),
        };
        PodAnswer {
            state,
            message,
            node: Some(node.to_string()),
            claims: self.unplanned_claims(),
            hint: None,
        }
    }

    /// Returns the answer for a gated pod, with the placement that it would get without gates.
    fn gated(&self) -> PodAnswer {
        let gates = self
            .object
            .and_then(|pod| pod.spec.as_ref())
            .and_then(|spec| spec.scheduling_gates.as_ref());
        let gates: Vec<&str> = gates.into_iter().flatten().map(|gate| gate.name.as_str()).collect();
        let gated = format!(
            "it has scheduling gate {} and is planned when its owner removes the gate",
            gates.join(", ")
        );
        let answer = self.unbound();
        let forecast = match answer.state {
            PodState::Schedulable => {
                format!("; it would fit on node {}", answer.node.clone().unwrap_or_default())
            }
            PodState::Pending => "; it would fit nowhere".to_owned(),
            _ => String::new(),
        };
        PodAnswer { state: PodState::SchedulingGated, message: gated + &forecast, ..answer }
    }

    fn unbound(&self) -> PodAnswer {
        if let Some(missing) = self.claims.iter().find(|claim| is_missing(&claim.state)) {
            let (message, claims) = (missing.message(), self.unplanned_claims());
            let state = PodState::MissingClaim;
            return PodAnswer { state, message, node: None, claims, hint: None };
        }
        let mut blocked = self.view.work.blocked.iter();
        if let Some(blocked) = blocked.find(|blocked| blocked.pod == *self.uid) {
            return self.blocked(blocked);
        }
        match self.view.index.pending(self.uid) {
            Err(blocked) => self.blocked(&blocked),
            Ok(Some(pending)) => self.planned(&pending),
            Ok(None) => self.allocated(),
        }
    }

    fn blocked(&self, blocked: &Blocked) -> PodAnswer {
        let name = self
            .view
            .index
            .claim_called(&blocked.claim)
            .map(ToString::to_string)
            .unwrap_or_default();
        let reason = message::blocker_reason(blocked.blocker);
        let message = message::blocker_message(&name, blocked.blocker);
        let report = |claim: &ClaimContext<'_>| {
            let report = claim.report();
            if claim.uid() != Some(&blocked.claim) {
                return report;
            }
            PodClaimReport { reason: reason.name().to_owned(), message: message.clone(), ..report }
        };
        let claims = self.claims.iter().map(report).collect();
        PodAnswer {
            state: PodState::Blocked,
            message: message.clone(),
            node: None,
            claims,
            hint: None,
        }
    }

    /// Returns the answer for a pod with claims that the controller has to allocate.
    fn planned(&self, pending: &PendingPod) -> PodAnswer {
        let is_member = |unit: &&PendingPod| unit.members().any(|one| one.uid == pending.uid);
        let unit = self.view.work.pending.iter().find(is_member);
        let is_queued = unit.is_some();
        let alone = || self.view.plan_alone(std::slice::from_ref(pending));
        let by_itself;
        let plan = if is_queued {
            &self.view.plan
        } else {
            by_itself = alone();
            &by_itself
        };
        let refusals: Vec<&Refusal> =
            plan.refusals.iter().filter(|refusal| refusal.pod == *self.uid).collect();
        if refusals.is_empty() {
            return self.schedulable(plan);
        }
        let of = |claim: &ClaimUid| refusals.iter().find(|refusal| refusal.claim == *claim);
        let report = |claim: &ClaimContext<'_>| match claim.uid().and_then(of) {
            Some(refusal) => claim.refused(refusal, plan, pending),
            None => claim.report(),
        };
        let claims: Vec<PodClaimReport> = self.claims.iter().map(report).collect();
        // Without decisions and reservations no other pod takes devices before this one.
        let competes = is_queued && !(plan.decisions.is_empty() && plan.reserved.is_none());
        let before = self.pods_before(pending);
        let reserved = plan.reserved_for(self.uid);
        let advice = hint(&refusals, reserved);
        if let Some(group) = unit.filter(|unit| unit.is_group()) {
            // That it would fit without the others of its group is of no use.
            let refusal = self.refusal(&refusals, reserved);
            let (message, hint) = self.with_preemption(group, refusal, advice);
            let (state, hint) = (PodState::Pending, Some(hint));
            return PodAnswer { state, message, node: None, claims, hint };
        }
        let (message, hint) =
            match competes.then(alone).iter().flat_map(|plan| &plan.decisions).next() {
                Some(decision) => {
                    let message = format!(
                        "it would fit on node {}, but pods of higher priority or age get the \
                         devices first ({before} pending)",
                        decision.node,
                    );
                    (message, advice)
                }
                None => self.with_preemption(pending, self.refusal(&refusals, reserved), advice),
            };
        PodAnswer { state: PodState::Pending, message, node: None, claims, hint: Some(hint) }
    }

    /// Returns the message about a refused pod and the advice, with the evictions after which it,
    /// or its group, would fit.
    fn with_preemption(
        &self,
        pending: &PendingPod,
        refusal: String,
        advice: String,
    ) -> (String, String) {
        let PlanView { index, settings, .. } = self.view;
        let has_lower =
            index.lowest_priority().is_some_and(|lowest| lowest < pending.lowest_priority());
        let found = has_lower.then(|| Preemptions::new(index, *settings).of(pending)).flatten();
        match found {
            Some(found) => (format!("{refusal}. {}", found.text()), found.hint().to_owned()),
            None => (refusal, advice),
        }
    }

    /// Returns the refusals of the pod's claims in one sentence.
    fn refusal(&self, refusals: &[&Refusal], reserved: Option<&ReservedNode>) -> String {
        let name = |refusal: &&Refusal| {
            self.view.index.claim_called(&refusal.claim).map(ToString::to_string)
        };
        let invalid =
            refusals.iter().find(|refusal| !matches!(*refusal.cause, RefusalCause::NoFit(_)));
        if let Some(invalid) = invalid {
            return message::refusal_message(
                &name(invalid).unwrap_or_default(),
                &invalid.cause,
                None,
            );
        }
        let names: Vec<String> = refusals.iter().filter_map(name).collect();
        let reserved = reserved
            .map(|reserved| format!("; {}", message::reservation_message(reserved)))
            .unwrap_or_default();
        let answer = match refusals {
            [Refusal { cause, .. }] if let RefusalCause::NoFit(explanation) = &**cause => {
                explanation.summary(&format!("claim {}", names.join(", ")))
            }
            _ => format!("no node has the GPUs of claims {}", names.join(", ")),
        };
        answer + &reserved
    }

    /// Returns the number of pending pods that are planned before this one.
    fn pods_before(&self, pending: &PendingPod) -> usize {
        let turn = |pod: &PendingPod| (std::cmp::Reverse(pod.priority), pod.created);
        self.view.work.pending.iter().filter(|other| turn(other) < turn(pending)).count()
    }

    fn schedulable(&self, plan: &AllocationPlan) -> PodAnswer {
        let claim_allocations: BTreeMap<&ClaimUid, (&Decision, usize)> = plan
            .decisions
            .iter()
            .flat_map(|decision| {
                decision.claims.iter().enumerate().map(move |(i, one)| (&one.claim, (decision, i)))
            })
            .collect();
        let mut node = None;
        let mut report =
            |claim: &ClaimContext<'_>| match claim.uid().and_then(|uid| claim_allocations.get(uid))
            {
                Some((decision, i)) => {
                    node.get_or_insert_with(|| decision.node.to_string());
                    claim.placed(&decision.claims[*i], decision.node.as_str())
                }
                None => claim.report(),
            };
        let claims = self.claims.iter().map(&mut report).collect();
        let place = node.as_deref().map(|node| format!(" on node {node}")).unwrap_or_default();
        let message = format!("it fits{place}; the controller has not allocated its claims yet");
        PodAnswer { state: PodState::Schedulable, message, node, claims, hint: None }
    }

    /// Returns the barrier at which the pod's group waits.
    fn barrier(&self) -> Option<GroupBarrier> {
        let index = &self.view.index;
        let barrier = index.barrier_of(index.group_of(self.uid)?);
        (!barrier.waiting.is_empty() && !barrier.is_complete).then_some(barrier)
    }

    /// Returns the answer for a pod without claims that the controller has to allocate.
    fn allocated(&self) -> PodAnswer {
        let managed = self.claims.iter().filter(|claim| {
            matches!(claim.state, ClaimState::Allocated(_))
                && claim.scope() != Some(tessera_index::Scope::Foreign)
        });
        let node = managed.clone().find_map(ClaimContext::node);
        if managed.count() == 0 {
            let message =
                "its claims request devices of other drivers, so kube-scheduler allocates them"
                    .to_owned();
            return PodAnswer {
                state: PodState::NotManaged,
                message,
                node: None,
                claims: self.unplanned_claims(),
                hint: None,
            };
        }
        let place = node.as_deref().map(|node| format!(" on node {node}")).unwrap_or_default();
        let message = match self.view.index.unschedulable_message(self.uid) {
            None if let Some(barrier) = self.barrier() => format!(
                "its claims are allocated{place}; it is bound once kube-scheduler has nodes for all \
                 {} pods of its group, so far it has them for {}",
                barrier.size, barrier.arrived
            ),
            Some(refused) => format!(
                "its claims are allocated{place}, but kube-scheduler does not bind it: {refused}"
            ),
            None => {
                format!("its claims are allocated{place}; kube-scheduler has not bound it yet")
            }
        };
        PodAnswer {
            state: PodState::PendingScheduling,
            message,
            node,
            claims: self.unplanned_claims(),
            hint: None,
        }
    }
}

/// Returns advice for the user of a pending pod.
fn hint(refusals: &[&Refusal], reserved: Option<&ReservedNode>) -> String {
    let is_over_quota = |refusal: &&Refusal| matches!(*refusal.cause, RefusalCause::OverQuota(_));
    if refusals.iter().any(is_over_quota) {
        return "wait until other claims of the namespace end, ask for less, or have the quota \
                raised; `kubectl tessera quota` shows it"
            .to_owned();
    }
    let is_of_group =
        |refusal: &&Refusal| matches!(*refusal.cause, RefusalCause::GroupDoesNotFit(_));
    if refusals.iter().any(is_of_group) {
        return "wait until other pods release GPUs, or make the group smaller; explain the pod \
                that the message names, too"
            .to_owned();
    }
    let invalid = "correct the claim or its template, and create the pod again".to_owned();
    let explanations = refusals.iter().map(|refusal| match &*refusal.cause {
        RefusalCause::NoFit(explanation) => Some(explanation),
        _ => None,
    });
    let Some(explanations) = explanations.collect::<Option<Vec<_>>>() else { return invalid };
    let has = |test: fn(&Reason) -> bool| {
        explanations.iter().any(|e| e.tallies().any(|(reason, _)| test(reason)))
    };
    if has(Reason::is_contended) {
        let wait = "wait until other pods release GPUs; `kubectl tessera tree` shows them";
        return match reserved {
            Some(_) => wait.to_owned(),
            None => format!("{wait}. A pod that stays pending gets a node reservation"),
        };
    }
    if has(|reason| matches!(reason, Reason::Tainted { .. } | Reason::Node(_))) {
        return "make the nodes or GPUs usable again, or tolerate their taints".to_owned();
    }
    if has(Reason::is_available) {
        return "request fewer GPUs, or GPUs in another combination".to_owned();
    }
    "no GPU of the cluster can satisfy the claim; change its request and create the pod again"
        .to_owned()
}

fn is_missing(state: &ClaimState) -> bool {
    matches!(
        state,
        ClaimState::NotGenerated
            | ClaimState::Missing
            | ClaimState::Deleting
            | ClaimState::ForeignOwner
    )
}

/// Returns the template of an entry, and true if it exists or templates could not be read.
fn template(view: &PlanView<'_>, pod: &Pod, entry: &str) -> Option<(String, bool)> {
    let entries = pod.spec.as_ref()?.resource_claims.as_ref()?;
    let name =
        entries.iter().find(|one| one.name == entry)?.resource_claim_template_name.as_ref()?;
    let is_it = |metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta| {
        metadata.name.as_ref() == Some(name) && metadata.namespace == pod.metadata.namespace
    };
    let is_there =
        view.snapshot.resource_claim_templates.iter().any(|template| is_it(&template.metadata));
    let unknown = view.snapshot.not_read("resourceclaimtemplates.resource.k8s.io").is_some();
    Some((name.clone(), is_there || unknown))
}
