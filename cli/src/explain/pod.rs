//! One pod: from its claims to what it waits for.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::{Cause, Decision, Kept, Plan, Refusal};
use tessera_api::names::{ClaimUid, NodeName};
use tessera_index::{Blocked, ClaimState, Stage};
use tessera_messages as message;

use super::claim::{ClaimReport, Subject};
use super::{PodReport, PodState, View, outside};
use crate::output::count;

/// The report of a known pod.
pub(super) fn report(view: &View<'_>, uid: &PodUid) -> PodReport {
    let pod = OnePod::new(view, uid);
    let Outcome { state, message, node, claims } = pod.outcome();
    let findings = outside::findings(view, uid, pod.object, state);
    let (namespace, name) =
        view.index.pod_name(uid).map_or_else(Default::default, |(namespace, name)| {
            (namespace.to_string(), name.to_string())
        });
    PodReport { namespace, pod: name, state, message, node, claims, findings, events: Vec::new() }
}

/// What a report says of the pod itself.
struct Outcome {
    state: PodState,
    message: String,
    node: Option<String>,
    claims: Vec<ClaimReport>,
}

struct OnePod<'v> {
    view: &'v View<'v>,
    uid: &'v PodUid,
    object: Option<&'v Pod>,
    claims: Vec<Subject<'v>>,
}

impl<'v> OnePod<'v> {
    fn new(view: &'v View<'v>, uid: &'v PodUid) -> Self {
        let object =
            view.snapshot.pods.iter().find(|pod| pod.metadata.uid.as_deref() == Some(uid.as_str()));
        let standing = view.index.claims_standing(uid);
        let claims = standing.into_iter().map(|standing| {
            let template = object.and_then(|pod| template(view, pod, &standing.entry));
            Subject::of_pod(view, standing, template)
        });
        Self { view, uid, object, claims: claims.collect() }
    }

    fn outcome(&self) -> Outcome {
        let plain = |state, message: String, node| Outcome {
            state,
            message,
            node,
            claims: self.plain_claims(),
        };
        if self.claims.is_empty() {
            let message =
                "it uses no ResourceClaims, so Tessera has nothing to do with it".to_owned();
            return plain(PodState::NoClaims, message, None);
        }
        match self.view.index.stage(self.uid) {
            None | Some(Stage::Ended) => plain(PodState::Ended, "it has ended".to_owned(), None),
            Some(Stage::Deleting) => {
                plain(PodState::Deleting, "it is being deleted".to_owned(), None)
            }
            Some(Stage::Bound(node)) => self.bound(&node),
            Some(Stage::Gated) => self.gated(),
            Some(Stage::Waiting) => self.waiting(),
        }
    }

    fn plain_claims(&self) -> Vec<ClaimReport> {
        self.claims.iter().map(Subject::report).collect()
    }

    fn bound(&self, node: &NodeName) -> Outcome {
        let misplaced = self.view.index.misplaced().into_iter().find(|one| one.pod == *self.uid);
        let (state, message) = match misplaced {
            Some(misplaced) => {
                let claim = self.view.index.claim_called(&misplaced.claim).map(ToString::to_string);
                (PodState::Misplaced, message::misplaced(&claim.unwrap_or_default(), &misplaced))
            }
            None => (
                PodState::Bound,
                format!("it is bound to node {node}, and its claims are allocated"),
            ),
        };
        Outcome { state, message, node: Some(node.to_string()), claims: self.plain_claims() }
    }

    /// What would be if the gates were gone.
    fn gated(&self) -> Outcome {
        let gates = self
            .object
            .and_then(|pod| pod.spec.as_ref())
            .and_then(|spec| spec.scheduling_gates.as_ref());
        let gates: Vec<&str> = gates.into_iter().flatten().map(|gate| gate.name.as_str()).collect();
        let held = format!(
            "scheduling gate {} holds it back; it is planned once whoever set that has removed it",
            gates.join(", ")
        );
        let outcome = self.waiting();
        let outlook = match outcome.state {
            PodState::Placeable => {
                format!("; now it would fit on node {}", outcome.node.clone().unwrap_or_default())
            }
            PodState::Waiting => "; now it would fit nowhere".to_owned(),
            _ => String::new(),
        };
        Outcome { state: PodState::Gated, message: held + &outlook, ..outcome }
    }

    fn waiting(&self) -> Outcome {
        if let Some(lack) = self.claims.iter().find(|claim| is_lack(&claim.state)) {
            let (message, claims) = (lack.message(), self.plain_claims());
            return Outcome { state: PodState::Incomplete, message, node: None, claims };
        }
        match self.view.index.pending(self.uid) {
            Err(blocked) => self.blocked(&blocked),
            Ok(Some(pending)) => self.planned(&pending),
            Ok(None) => self.for_others(),
        }
    }

    fn blocked(&self, blocked: &Blocked) -> Outcome {
        let name = self
            .view
            .index
            .claim_called(&blocked.claim)
            .map(ToString::to_string)
            .unwrap_or_default();
        let (reason, message) = message::obstacle(&name, blocked.obstacle);
        let report = |subject: &Subject<'_>| {
            let report = subject.report();
            if subject.uid() != Some(&blocked.claim) {
                return report;
            }
            ClaimReport { reason: reason.to_owned(), message: message.clone(), ..report }
        };
        let claims = self.claims.iter().map(report).collect();
        Outcome { state: PodState::Blocked, message: message.clone(), node: None, claims }
    }

    /// The pod has claims for the controller to allocate.
    fn planned(&self, pending: &PendingPod) -> Outcome {
        let is_queued = self.view.work.pending.iter().any(|queued| queued.uid == pending.uid);
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
            return self.placeable(plan);
        }
        let of = |claim: &ClaimUid| refusals.iter().find(|refusal| refusal.claim == *claim);
        let report = |subject: &Subject<'_>| match subject.uid().and_then(of) {
            Some(refusal) => subject.refused(refusal, plan, pending),
            None => subject.report(),
        };
        let claims: Vec<ClaimReport> = self.claims.iter().map(report).collect();
        // Where nobody gets anything or has a node kept free, nobody was in the way.
        let in_the_way = is_queued && !(plan.decisions.is_empty() && plan.kept.is_none());
        let message = match in_the_way.then(alone).iter().flat_map(|plan| &plan.decisions).next() {
            Some(decision) => format!(
                "it would fit on node {}, if it were not for {} that come before it: of higher priority, or older",
                decision.node,
                count(self.before(pending), "waiting pod")
            ),
            None => self.refusal(&refusals, plan.kept_for(self.uid)),
        };
        Outcome { state: PodState::Waiting, message, node: None, claims }
    }

    /// Refusals in one sentence.
    fn refusal(&self, refusals: &[&Refusal], kept: Option<&Kept>) -> String {
        let name = |refusal: &&Refusal| {
            self.view.index.claim_called(&refusal.claim).map(ToString::to_string)
        };
        let broken = refusals.iter().find(|refusal| !matches!(*refusal.cause, Cause::NoFit(_)));
        if let Some(broken) = broken {
            return message::note(&name(broken).unwrap_or_default(), &broken.cause, None);
        }
        let names: Vec<String> = refusals.iter().filter_map(name).collect();
        let claims = if names.len() == 1 { "claim" } else { "claims" };
        let outlook =
            kept.map(|kept| format!("; {}", message::kept_free(kept))).unwrap_or_default();
        format!("no node has devices for {claims} {}{outlook}", names.join(", "))
    }

    /// How many waiting pods are planned before this one.
    fn before(&self, pending: &PendingPod) -> usize {
        let turn = |pod: &PendingPod| (std::cmp::Reverse(pod.priority), pod.created);
        self.view.work.pending.iter().filter(|other| turn(other) < turn(pending)).count()
    }

    fn placeable(&self, plan: &Plan) -> Outcome {
        let allotments: BTreeMap<&ClaimUid, (&Decision, usize)> = plan
            .decisions
            .iter()
            .flat_map(|decision| {
                decision.claims.iter().enumerate().map(move |(i, one)| (&one.claim, (decision, i)))
            })
            .collect();
        let mut node = None;
        let mut report =
            |subject: &Subject<'_>| match subject.uid().and_then(|uid| allotments.get(uid)) {
                Some((decision, i)) => {
                    node.get_or_insert_with(|| decision.node.to_string());
                    subject.placed(&decision.claims[*i], decision.node.as_str())
                }
                None => subject.report(),
            };
        let claims = self.claims.iter().map(&mut report).collect();
        let place = node.as_deref().map(|node| format!(" on node {node}")).unwrap_or_default();
        let message = format!("it fits{place}; the controller has not allocated its claims yet");
        Outcome { state: PodState::Placeable, message, node, claims }
    }

    /// There is nothing for the controller to decide.
    fn for_others(&self) -> Outcome {
        let ours = self.claims.iter().filter(|claim| {
            matches!(claim.state, ClaimState::Allocated(_))
                && claim.scope() != Some(tessera_index::Scope::Foreign)
        });
        let node = ours.clone().find_map(Subject::node);
        if ours.count() == 0 {
            let message =
                "its claims ask other drivers, so kube-scheduler allocates them".to_owned();
            return Outcome {
                state: PodState::Foreign,
                message,
                node: None,
                claims: self.plain_claims(),
            };
        }
        let place = node.as_deref().map(|node| format!(" on node {node}")).unwrap_or_default();
        let said = match self.view.index.unschedulable_message(self.uid) {
            Some(message) => format!("; its last word: {message}"),
            None => String::new(),
        };
        let message =
            format!("its claims are allocated{place}; kube-scheduler has to bind it{said}");
        Outcome { state: PodState::ForScheduler, message, node, claims: self.plain_claims() }
    }
}

fn is_lack(state: &ClaimState) -> bool {
    matches!(
        state,
        ClaimState::NotGenerated
            | ClaimState::Missing
            | ClaimState::Deleting
            | ClaimState::NotThePods
    )
}

/// The template of an entry, and whether it is there. Taken to be there where templates could not
/// be read.
fn template(view: &View<'_>, pod: &Pod, entry: &str) -> Option<(String, bool)> {
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
