//! Planning: pods in order of priority and age, each against what the ones before it have left.

use std::collections::BTreeMap;
use std::rc::Rc;

use tessera_api::names::{ClaimName, ClaimUid, NodeName};

use crate::explain;
use crate::model::{Claim, DeviceResult, Node, NodeSelector, PendingPod, PodClaim, Request, Snapshot, Usage};
use crate::outcome::{Allotment, Cause, Decision, Plan, Refusal};
use crate::policy::{self, Policy, Ppm};
use crate::pools::{self, BadNodeSelector, Candidate, Catalogue, NodePool, PoolState};
use crate::predicate::{self, Bound};
use crate::request::PodTask;
use crate::search::{Chosen, Ended, Failure, Search};

/// What the caller decides about a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Devices that may be looked at for one pod, on all nodes together. Beyond that the pod is "not decided".
    pub steps_per_pod: u64,
    /// The policy of pods whose configuration names none.
    pub policy: Policy,
}

impl Default for Settings {
    fn default() -> Self {
        Self { steps_per_pod: 1_000_000, policy: Policy::default() }
    }
}

/// Decides for each pod on which node its pending claims get which devices, or says why it has to wait.
///
/// Pods are taken by priority, then age, then namespace and name; what one gets is gone for the next. All pending claims of
/// a pod are placed on one node, or none is. The same arguments give the same plan.
pub fn plan(snapshot: &Snapshot, pods: &[PendingPod], settings: Settings) -> Plan {
    let mut order: Vec<&PendingPod> = pods.iter().collect();
    order.sort_by_key(|p| (std::cmp::Reverse(p.priority), p.created, &p.namespace, &p.name, &p.uid));
    let mut planner = Planner::new(snapshot, settings);
    let mut plan = Plan::default();
    for pod in order {
        let mut steps = settings.steps_per_pod;
        match planner.place(pod, &mut steps) {
            Ok(Some(decision)) => plan.decisions.push(decision),
            Ok(None) => {}
            Err(refusals) => plan.refusals.extend(refusals),
        }
        plan.steps += settings.steps_per_pod - steps;
    }
    plan
}

/// The state of one plan: the snapshot and what has been decided on top of it.
pub(crate) struct Planner<'s> {
    snapshot: &'s Snapshot,
    settings: Settings,
    catalogue: Catalogue<'s>,
    reach: BTreeMap<NodeName, Rc<Reach<'s>>>,
    nodes: BTreeMap<NodeName, Node>,
    usage: Usage,
    /// Claims decided in this plan, and where they can be used: a second pod that shares one follows it.
    decided: BTreeMap<ClaimUid, Option<NodeSelector>>,
}

/// A pod that is being placed.
pub(crate) struct ToPlace<'s> {
    pub(crate) pod: &'s PendingPod,
    /// The claims to decide.
    pub(crate) pending: Vec<&'s Claim>,
    /// Where its other claims are.
    pub(crate) bounds: Vec<Bound>,
}

/// What a node can reach.
pub(crate) struct Reach<'s> {
    pub(crate) pools: Vec<NodePool<'s>>,
    /// The devices that may be taken, in upstream's order.
    pub(crate) candidates: Vec<Candidate<'s>>,
    pub(crate) defect: Option<BadNodeSelector>,
}

impl<'s> Planner<'s> {
    fn new(snapshot: &'s Snapshot, settings: Settings) -> Self {
        Self {
            snapshot,
            settings,
            catalogue: Catalogue::new(snapshot),
            reach: BTreeMap::new(),
            nodes: snapshot.nodes.iter().map(|(name, node)| (name.clone(), Node::clone(node))).collect(),
            usage: snapshot.usage.clone(),
            decided: BTreeMap::new(),
        }
    }

    /// Places one pod. `None` = nothing of it is left to be decided.
    fn place(&mut self, pod: &'s PendingPod, steps: &mut u64) -> Result<Option<Decision>, Vec<Refusal>> {
        let place = self.to_place(pod);
        if place.pending.is_empty() {
            return Ok(None);
        }
        let task = PodTask::new(self.snapshot, &place.pending, self.settings.policy)
            .map_err(|(claim, cause)| vec![Refusal { pod: pod.uid.clone(), claim, cause }])?;
        let mut failures = BTreeMap::new();
        let mut best: Option<Solution<'s>> = None;
        for name in self.node_order(&place, &task) {
            match self.search(&name, &task, steps) {
                Ended::Found(chosen) => {
                    // Room has been made there, and nowhere else.
                    let is_nominated = pod.nominated.as_ref() == Some(&name);
                    let rank = if task.has_alternatives() { rank(&chosen) } else { 0 };
                    if best.as_ref().is_none_or(|best| rank < best.rank) {
                        best = Some(Solution { rank, node: name, chosen });
                    }
                    if rank == 0 || is_nominated {
                        break;
                    }
                }
                Ended::None => {}
                Ended::Failed(claim, failure) => {
                    failures.insert(name, (claim, failure));
                }
                Ended::OutOfSteps if best.is_some() => break,
                Ended::OutOfSteps => return Err(place.refused(|_| Cause::NotDecided)),
            }
        }
        if let Some(Solution { node, chosen, .. }) = best {
            return Ok(Some(self.decide(&place, &node, chosen)));
        }
        Err(explain::refusals(self, &place, &task, &failures))
    }

    /// What is left to decide of a pod, after what this plan has decided before.
    fn to_place(&self, pod: &'s PendingPod) -> ToPlace<'s> {
        let mut place = ToPlace { pod, pending: Vec::new(), bounds: Vec::new() };
        for claim in &pod.claims {
            match claim {
                PodClaim::Pending(claim) => match self.decided.get(&claim.uid) {
                    Some(nodes) => place.bind(&claim.name, nodes.as_ref()),
                    None if place.pending.iter().any(|c| c.uid == claim.uid) => {}
                    None => place.pending.push(claim),
                },
                PodClaim::Allocated { name, nodes, .. } => place.bind(name, nodes.as_ref()),
            }
        }
        place
    }

    /// The nodes that the pod could go to, in the order in which they are tried.
    fn node_order(&mut self, place: &ToPlace<'_>, task: &PodTask<'_>) -> Vec<NodeName> {
        let possible: Vec<NodeName> = self
            .nodes
            .values()
            .filter(|node| predicate::fault(place.pod, &place.bounds, node).is_none())
            .map(|node| node.name.clone())
            .collect();
        let mut ranked: Vec<(Ppm, NodeName)> =
            possible.into_iter().map(|name| (self.taken(&name), name)).collect();
        task.node_policy().sort_nodes(&mut ranked);
        let mut names: Vec<NodeName> = ranked.into_iter().map(|(_, name)| name).collect();
        let nominated = place.pod.nominated.as_ref();
        if let Some(position) = nominated.and_then(|n| names.iter().position(|name| name == n)) {
            let nominated = names.remove(position);
            names.insert(0, nominated);
        }
        names
    }

    /// How much of a node's devices is taken, on average.
    fn taken(&mut self, node: &NodeName) -> Ppm {
        let reach = self.reach(node);
        let taken = reach.candidates.iter().map(|c| policy::taken(c.device, self.usage.of(&c.id), None));
        taken.sum::<Ppm>() / Ppm::try_from(reach.candidates.len().max(1)).unwrap_or(Ppm::MAX)
    }

    fn search(&mut self, node: &NodeName, task: &PodTask<'s>, steps: &mut u64) -> Ended<'s> {
        let reach = self.reach(node);
        if let Some(defect) = &reach.defect {
            return Ended::Failed(0, Failure::NodeSelector(defect.problem.clone()));
        }
        let mut tasks = task.claims();
        for (c, claim) in tasks.iter_mut().enumerate() {
            if let Err(failure) = claim.prepare(&reach.pools, &reach.candidates) {
                return Ended::Failed(c, failure);
            }
        }
        Search { tasks: &tasks, candidates: &reach.candidates, usage: &self.usage }.run(steps)
    }

    /// What the node reaches, gathered once per plan.
    pub(crate) fn reach(&mut self, node: &NodeName) -> Rc<Reach<'s>> {
        if let Some(known) = self.reach.get(node) {
            return Rc::clone(known);
        }
        let reach = Rc::new(match self.nodes.get(node).map(|n| self.catalogue.gather(n)) {
            Some(Ok(pools)) => Reach::new(pools),
            Some(Err(defect)) => Reach { pools: Vec::new(), candidates: Vec::new(), defect: Some(defect) },
            None => Reach::new(Vec::new()),
        });
        self.reach.insert(node.clone(), Rc::clone(&reach));
        reach
    }

    /// Books a solution and turns it into a decision.
    fn decide(&mut self, place: &ToPlace<'s>, node: &NodeName, chosen: Vec<Vec<Chosen<'s>>>) -> Decision {
        let mut claims = Vec::with_capacity(place.pending.len());
        for (claim, devices) in place.pending.iter().zip(chosen) {
            let candidates: Vec<Candidate<'_>> = devices.iter().map(|d| d.candidate.clone()).collect();
            let results: Vec<DeviceResult> =
                devices.into_iter().map(|d| result(&claim.requests, d)).collect();
            let nodes = pools::node_selector(&candidates, node);
            self.usage.add(&results);
            self.decided.insert(claim.uid.clone(), nodes.clone());
            claims.push(Allotment { claim: claim.uid.clone(), results, nodes });
        }
        if let Some(node) = self.nodes.get_mut(node) {
            node.take(&place.pod.scheduling.requests);
        }
        Decision { pod: place.pod.uid.clone(), node: node.clone(), claims }
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    pub(crate) fn usage(&self) -> &Usage {
        &self.usage
    }
}

impl<'s> Reach<'s> {
    fn new(pools: Vec<NodePool<'s>>) -> Self {
        let complete = pools.iter().filter(|p| p.state == PoolState::Complete);
        let candidates = complete.flat_map(|p| p.devices.iter().cloned()).collect();
        Self { pools, candidates, defect: None }
    }
}

impl<'s> ToPlace<'s> {
    fn bind(&mut self, claim: &ClaimName, nodes: Option<&NodeSelector>) {
        self.bounds.extend(nodes.map(|nodes| Bound { claim: claim.clone(), nodes: nodes.clone() }));
    }

    /// Refuses each of the pending claims.
    pub(crate) fn refused(&self, cause: impl Fn(usize) -> Cause) -> Vec<Refusal> {
        let refuse = |(c, claim): (usize, &&Claim)| Refusal {
            pod: self.pod.uid.clone(),
            claim: claim.uid.clone(),
            cause: cause(c),
        };
        self.pending.iter().enumerate().map(refuse).collect()
    }
}

/// What would be placed on a node.
struct Solution<'s> {
    rank: usize,
    node: NodeName,
    chosen: Vec<Vec<Chosen<'s>>>,
}

/// How far down the lists of preference a solution had to go: kube-scheduler, too, prefers the node with the least.
fn rank(chosen: &[Vec<Chosen<'_>>]) -> usize {
    let of_claim = |devices: &Vec<Chosen<'_>>| {
        let choices: BTreeMap<usize, usize> = devices.iter().map(|d| (d.request, d.alternative)).collect();
        choices.into_values().sum::<usize>()
    };
    chosen.iter().map(of_claim).sum()
}

fn result(requests: &[Request], chosen: Chosen<'_>) -> DeviceResult {
    DeviceResult {
        request: requests[chosen.request].alternatives[chosen.alternative].name.clone(),
        device: chosen.candidate.id,
        shared: chosen.candidate.device.shared,
        consumed: chosen.consumed,
        admin: false,
    }
}
