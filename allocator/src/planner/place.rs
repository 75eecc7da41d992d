//! Planning: pods in order of priority and age, each against what the ones before it have left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{ClaimName, ClaimUid};
use tessera_api::reason::NodeReason;

use super::Planner;
use super::keep::Keeping;
use super::shapes::ShapeId;
use crate::cluster::NodeIndex;
use crate::explain::Explainer;
use crate::fits;
use crate::model::{
    Claim, DeviceId, DeviceResult, DeviceUse, Node, NodeSelector, PendingPod, PodClaim, Scheduling,
    cpu_milli_of,
};
use crate::outcome::{Cause, Decision, Plan, Refusal};
use crate::plan::Settings;
use crate::policy::lot;
use crate::predicate::{self, Bound, Room};
use crate::search::{Chosen, Ended};

/// Plans the pods. What is decided counts as taken until the end, and then as before.
pub(super) fn plan(planner: &mut Planner, pods: &[PendingPod], settings: Settings) -> Plan {
    let mut order: Vec<&PendingPod> = pods.iter().collect();
    order.sort_by_key(|p| (std::cmp::Reverse(p.priority), p.created, &p.namespace, &p.name, &p.uid));
    planner.observe(&order, settings.policy);
    let mut placing = Placing::new(planner, settings);
    let mut plan = Plan::default();
    for pod in order {
        let mut steps = settings.steps_per_pod;
        match placing.place(pod, &mut steps) {
            Ok(Some(decision)) => plan.decisions.push(decision),
            Ok(None) => {}
            Err(refusals) => {
                if refusals.iter().any(|refusal| lacks_room(&refusal.cause)) {
                    placing.planner.forecast.refused(&pod.uid);
                }
                plan.refusals.extend(refusals);
            }
        }
        plan.steps += settings.steps_per_pod - steps;
    }
    plan.steps += settings.steps_per_pod - placing.keeping.steps();
    (plan.kept, plan.again) = std::mem::take(&mut placing.keeping).end();
    placing.undo();
    plan
}

/// Whether the pod waits for room, and not for somebody to change something.
fn lacks_room(cause: &Cause) -> bool {
    matches!(cause, Cause::NoFit(explanation) if explanation.tallies().any(|(reason, _)| reason.may_pass()))
}

/// One plan in the making: what has been decided on top of the cluster.
pub(super) struct Placing<'p> {
    pub(super) planner: &'p mut Planner,
    pub(super) settings: Settings,
    /// Nodes with the requests of pods that have been decided for them.
    nodes: BTreeMap<NodeIndex, Node>,
    /// What was taken of devices before.
    before: Vec<(DeviceId, Option<DeviceUse>)>,
    /// What was left of the CPU of nodes before.
    cpu_before: Vec<(NodeIndex, u64)>,
    /// Claims decided in this plan, and where they can be used: a second pod that shares one follows it.
    decided: BTreeMap<ClaimUid, Option<NodeSelector>>,
    /// What has been said to pods that have to wait, since the last decision.
    explained: Vec<Explained>,
    /// The node that is kept free for a pod that was refused.
    pub(super) keeping: Keeping,
}

/// An explanation that holds for every pod like this one.
struct Explained {
    shape: ShapeId,
    scheduling: Arc<Scheduling>,
    /// What is said of the node that is kept free.
    kept_off: Option<NodeReason>,
    causes: Vec<Cause>,
}

/// A pod that is being placed.
pub(crate) struct ToPlace<'s> {
    pub(crate) pod: &'s PendingPod,
    /// The claims to decide.
    pub(crate) pending: Vec<Arc<Claim>>,
    /// Where its other claims are.
    pub(crate) bounds: Vec<Bound>,
}

impl<'p> Placing<'p> {
    fn new(planner: &'p mut Planner, settings: Settings) -> Self {
        Self {
            planner,
            settings,
            nodes: BTreeMap::new(),
            before: Vec::new(),
            cpu_before: Vec::new(),
            decided: BTreeMap::new(),
            explained: Vec::new(),
            keeping: Keeping::new(settings.steps_per_pod),
        }
    }

    fn undo(self) {
        for (device, used) in self.before.iter().rev() {
            self.planner.cluster.set_use(device, used.as_ref());
        }
        for (node, cpu) in self.cpu_before.iter().rev() {
            self.planner.cluster.set_cpu(*node, *cpu);
        }
    }

    /// Places one pod. `None` = nothing of it is left to be decided.
    fn place(&mut self, pod: &PendingPod, steps: &mut u64) -> Result<Option<Decision>, Vec<Refusal>> {
        let place = self.to_place(pod);
        if place.pending.is_empty() {
            return Ok(None);
        }
        let Planner { cluster, selections, shapes, .. } = &mut *self.planner;
        let cpu = cpu_milli_of(&pod.scheduling.requests);
        let shape = shapes.of(&place.pending, cpu, cluster, selections, self.settings.policy);
        let (shapes, mut ground) = self.planner.parts();
        let entry = shapes.get_mut(shape);
        if let Some((claim, cause)) = entry.shape.defect() {
            let (claim, cause) = (place.pending[claim].uid.clone(), cause.clone());
            return Err(vec![Refusal { pod: pod.uid.clone(), claim, cause }]);
        }
        entry.fits.refresh(&mut entry.shape, &mut ground, steps);
        // A node of which the steps did not suffice to ask again may not be what it was.
        let mut in_vain = BTreeSet::new();
        while let Some(node) = self.choose(shape, &place, &in_vain) {
            let seed = self.seed(pod);
            if let Some(chosen) = self.search_again(shape, node, seed) {
                return Ok(Some(self.decide(&place, shape, node, &chosen)));
            }
            in_vain.insert(node);
        }
        let refusals = self.refuse(&place, shape);
        self.keep_for(&place, shape, &refusals);
        Err(refusals)
    }

    /// Why the pod cannot go to a node, whatever its devices.
    fn fault(&self, place: &ToPlace<'_>, index: NodeIndex, node: &Node) -> Option<NodeReason> {
        let is_kept = self.keeping.node() == Some(index);
        let kept_off = || is_kept.then(|| self.keeping.keeps_off(place)).flatten();
        predicate::fault(place.pod, &place.bounds, node, Room::Now).or_else(kept_off)
    }

    /// What is left to decide of a pod, after what this plan has decided before.
    fn to_place<'s>(&self, pod: &'s PendingPod) -> ToPlace<'s> {
        let mut place = ToPlace { pod, pending: Vec::new(), bounds: Vec::new() };
        for claim in &pod.claims {
            match claim {
                PodClaim::Pending(claim) => match self.decided.get(&claim.uid) {
                    Some(nodes) => place.bind(&claim.name, nodes.as_ref()),
                    None if place.pending.iter().any(|c| c.uid == claim.uid) => {}
                    None => place.pending.push(Arc::clone(claim)),
                },
                PodClaim::Allocated { name, nodes, .. } => place.bind(name, nodes.as_ref()),
            }
        }
        place
    }

    fn seed(&self, pod: &PendingPod) -> u64 {
        lot(self.settings.seed, pod.uid.as_str())
    }

    /// The best node on which the claims fit and to which the pod can go.
    fn choose(
        &self,
        shape: ShapeId,
        place: &ToPlace<'_>,
        in_vain: &BTreeSet<NodeIndex>,
    ) -> Option<NodeIndex> {
        let entry = self.planner.shapes.get(shape);
        let can_go = |node: &NodeIndex| {
            !in_vain.contains(node) && self.node(*node).is_some_and(|n| self.fault(place, *node, n).is_none())
        };
        // Room has been made there, and nowhere else.
        let nominated = place.pod.nominated.as_ref().and_then(|name| self.planner.cluster.node_index(name));
        if let Some(node) =
            nominated.filter(|n| matches!(entry.fits.answer(*n), fits::Answer::Fits(_)) && can_go(n))
        {
            return Some(node);
        }
        let mut ranked = entry.fits.ranked();
        if !entry.shape.node_policy().draws_lots() {
            return ranked.map(|(_, node)| node).find(can_go);
        }
        let seed = self.seed(place.pod);
        let names = &self.planner.cluster.nodes;
        let (best, _) = ranked.next()?;
        let equals = entry.fits.ranked().take_while(|(rank, _)| rank.0 == best.0);
        let mut lots: Vec<(u64, NodeIndex)> =
            equals.map(|(_, node)| (lot(seed, names[node].name.as_str()), node)).collect();
        lots.sort_unstable();
        let drawn = lots.into_iter().map(|(_, node)| node).find(can_go);
        drawn.or_else(|| entry.fits.ranked().map(|(_, node)| node).find(can_go))
    }

    /// A node as it is now: with the pods of this plan.
    pub(super) fn node(&self, node: NodeIndex) -> Option<&Node> {
        self.nodes.get(&node).or_else(|| self.planner.cluster.nodes[node].node.as_deref())
    }

    /// The devices on a node on which the shape is known to fit.
    fn search_again(&mut self, shape: ShapeId, node: NodeIndex, seed: u64) -> Option<Vec<Vec<Chosen>>> {
        let budget = self.settings.steps_per_pod;
        let (shapes, mut ground) = self.planner.parts();
        let shape = &mut shapes.get_mut(shape).shape;
        let mut search = |seed| match fits::search(shape, &mut ground, node, seed, &mut budget.clone()) {
            Ended::Found(chosen) => Some(chosen),
            _ => None,
        };
        // With another seed it may take longer than there are steps; the order that is known does not.
        search(seed).or_else(|| search(0))
    }

    /// Books a solution and turns it into a decision.
    fn decide(
        &mut self,
        place: &ToPlace<'_>,
        shape: ShapeId,
        node: NodeIndex,
        chosen: &[Vec<Chosen>],
    ) -> Decision {
        let claims = self.planner.allotments(shape, &place.pending, node, chosen);
        for allotment in &claims {
            self.decided.insert(allotment.claim.clone(), allotment.nodes.clone());
            allotment.results.iter().filter(|r| !r.admin).for_each(|result| self.book(result));
        }
        if let Some(mut changed) = self.node(node).cloned() {
            changed.take(&place.pod.scheduling.requests);
            self.cpu_before.push((node, self.planner.cluster.nodes[node].cpu_milli));
            self.planner.cluster.set_cpu(node, changed.cpu_milli_left());
            self.nodes.insert(node, changed);
        }
        self.explained.clear();
        let node = self.planner.cluster.nodes[node].name.clone();
        Decision { pod: place.pod.uid.clone(), node, claims }
    }

    fn book(&mut self, result: &DeviceResult) {
        let before = self.planner.cluster.used(&result.device).cloned();
        let mut used = before.clone().unwrap_or_default();
        used.add(result);
        self.before.push((result.device.clone(), before));
        self.planner.cluster.set_use(&result.device, Some(&used));
    }

    /// Why the pod has to wait.
    fn refuse(&mut self, place: &ToPlace<'_>, shape: ShapeId) -> Vec<Refusal> {
        if self.planner.shapes.get(shape).fits.is_incomplete() {
            return place.refused(|_| Cause::NotDecided);
        }
        // What is particular to the pod makes its explanation particular.
        let is_common = place.is_common();
        let kept_off = self.keeping.keeps_off(place);
        let is_like = |e: &&Explained| {
            e.shape == shape && e.scheduling == place.pod.scheduling && e.kept_off == kept_off
        };
        if let Some(known) = self.explained.iter().find(is_like).filter(|_| is_common) {
            return place.refused(|c| known.causes[c].clone());
        }
        let causes = self.explain(place, shape);
        let refusals = place.refused(|c| causes[c].clone());
        if is_common {
            let scheduling = Arc::clone(&place.pod.scheduling);
            self.explained.push(Explained { shape, scheduling, kept_off, causes });
        }
        refusals
    }

    fn explain(&mut self, place: &ToPlace<'_>, shape: ShapeId) -> Vec<Cause> {
        let nodes: Vec<NodeIndex> = self.planner.cluster.by_name().map(|(index, _)| index).collect();
        let mut explainer = Explainer::new(&self.planner.shapes.get(shape).shape);
        for index in nodes {
            self.planner.cluster.gather(index);
            let Some(node) = self.nodes.get(&index).cloned().map(Arc::new) else {
                let Some(node) = self.planner.cluster.nodes[index].node.clone() else { continue };
                self.explain_node(&mut explainer, place, shape, index, &node);
                continue;
            };
            self.explain_node(&mut explainer, place, shape, index, &node);
        }
        explainer.causes()
    }

    fn explain_node(
        &mut self,
        explainer: &mut Explainer,
        place: &ToPlace<'_>,
        shape: ShapeId,
        index: NodeIndex,
        node: &Node,
    ) {
        let fault = self.fault(place, index, node);
        let Planner { cluster, selections, shapes, .. } = &mut *self.planner;
        let entry = shapes.get_mut(shape);
        let failed = match entry.fits.answer(index) {
            fits::Answer::Failed(claim, failure) => Some((*claim, failure.as_ref())),
            _ => None,
        };
        let Some((reach, interner, features)) = cluster.parts(index) else { return };
        entry.shape.meet_offers(reach.candidates.iter().map(|c| c.offer), interner, features);
        explainer.node(&mut crate::explain::OnNode {
            name: &node.name,
            shape: &entry.shape,
            reach,
            interner,
            selections,
            fault,
            failed,
        });
    }
}

impl ToPlace<'_> {
    /// Whether what holds for it holds for every pod with the same claims and demands.
    pub(super) fn is_common(&self) -> bool {
        self.bounds.is_empty() && self.pod.excluded.is_empty()
    }

    fn bind(&mut self, claim: &ClaimName, nodes: Option<&NodeSelector>) {
        self.bounds.extend(nodes.map(|nodes| Bound { claim: claim.clone(), nodes: nodes.clone() }));
    }

    /// Refuses each of the pending claims.
    fn refused(&self, cause: impl Fn(usize) -> Cause) -> Vec<Refusal> {
        let refuse = |(c, claim): (usize, &Arc<Claim>)| Refusal {
            pod: self.pod.uid.clone(),
            claim: claim.uid.clone(),
            cause: cause(c),
        };
        self.pending.iter().enumerate().map(refuse).collect()
    }
}
