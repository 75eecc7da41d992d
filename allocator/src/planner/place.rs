//! Planning: pods in order of priority and age, each against what the ones before it have left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName};
use tessera_api::reason::NodeReason;

use super::Planner;
use super::fair_share::CommonExplanation;
use super::keep::Keeping;
use super::shapes::ShapeId;
use crate::cluster::NodeIndex;
use crate::explain::Explainer;
use crate::fits;
use crate::model::{
    Claim, DeviceId, DeviceResult, DeviceUse, Node, NodeSelector, PendingPod, PodClaim,
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
    order
        .sort_by_key(|p| (std::cmp::Reverse(p.priority), p.created, &p.namespace, &p.name, &p.uid));
    let mut budget = Budget::new(settings);
    planner.observe(&order, settings.policy, &mut (budget.of_plan / 2));
    planner.fair_share.begin_plan(&order, budget.of_plan);
    let mut placing = Placing::new(planner, settings);
    let mut plan = Plan::default();
    let mut deferred = Vec::new();
    for pod in order {
        if placing.is_deferred(pod, &budget) {
            deferred.push(pod);
        } else {
            placing.plan_pod(pod, &mut budget, &mut plan);
        }
    }
    // Pods that were refused come last, or those that were not reached since would never be.
    deferred.sort_by_key(|pod| placing.planner.fair_share.was_refused(&pod.uid));
    for pod in deferred {
        placing.plan_pod(pod, &mut budget, &mut plan);
    }
    plan.steps = budget.of_plan - budget.left + (settings.steps_per_pod - placing.keeping.steps());
    let is_cut = !plan.unreached.is_empty();
    if !is_cut {
        placing.explain_again(&mut plan);
    }
    let explained = placing.explained.drain(..).map(|explained| explained.common).collect();
    (plan.kept, plan.again) = std::mem::take(&mut placing.keeping).end();
    placing.undo();
    let refused = plan.refusals.iter().map(|refusal| &refusal.pod);
    let Planner { fair_share, cluster, .. } = planner;
    fair_share.end_plan(budget.spent, refused, cluster.now(), is_cut.then_some(explained));
    plan
}

/// Decides on the claims of a pod that is bound to `node`: see [`Planner::plan_on`].
pub(super) fn plan_on(
    planner: &mut Planner,
    node: &NodeName,
    pod: &PendingPod,
    settings: Settings,
) -> Plan {
    let mut placing = Placing::new(planner, settings);
    let mut plan = Plan::default();
    let mut steps = settings.steps_per_pod;
    match placing.place_on(node, pod, &mut steps) {
        Ok(decision) => plan.decisions.extend(decision),
        Err(refusals) => plan.refusals = refusals,
    }
    plan.steps = settings.steps_per_pod - steps;
    placing.undo();
    plan
}

/// The steps of a plan.
struct Budget {
    of_plan: u64,
    of_pod: u64,
    left: u64,
    /// By namespace.
    spent: BTreeMap<Namespace, u64>,
}

impl Budget {
    fn new(settings: Settings) -> Self {
        let of_pod = settings.steps_per_pod;
        let of_plan = settings.steps_per_plan.max(of_pod);
        Self { of_plan, of_pod, left: of_plan, spent: BTreeMap::new() }
    }

    fn spent_by(&self, namespace: &Namespace) -> u64 {
        self.spent.get(namespace).copied().unwrap_or(0)
    }

    fn spend(&mut self, namespace: &Namespace, steps: u64) {
        if steps > 0 {
            self.left -= steps;
            *self.spent.entry(namespace.clone()).or_default() += steps;
        }
    }
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
    /// Claims decided in this plan, and where they can be used: a second pod that shares one
    /// follows it.
    decided: BTreeMap<ClaimUid, Option<NodeSelector>>,
    /// What has been said to pods that have to wait.
    explained: Vec<Explained<'p>>,
    /// How many decisions this plan has.
    decisions: usize,
    /// The node that is kept free for a pod that was refused.
    pub(super) keeping: Keeping,
}

/// An explanation of this plan that holds for every pod like the one that it was made for.
struct Explained<'p> {
    common: CommonExplanation,
    /// The first of these pods.
    place: ToPlace<'p>,
    /// How many decisions there were when it was made.
    decisions: usize,
}

/// A pod that is being placed.
#[derive(Clone)]
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
            decisions: 0,
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

    /// Returns `true` if the pod is planned after the others: its claims have to be searched for,
    /// and its namespace exceeds its share, or the pod was refused already. A pod whose answer
    /// is remembered costs nothing and keeps its place.
    fn is_deferred(&self, pod: &PendingPod, budget: &Budget) -> bool {
        let fair_share = &self.planner.fair_share;
        let spent = budget.spent_by(&pod.namespace);
        (fair_share.exceeds_share(&pod.namespace, spent, budget.of_plan)
            || fair_share.was_refused(&pod.uid))
            && !self.is_remembered(pod)
    }

    /// Returns `true` if it is known on which nodes the pod's claims fit.
    fn is_remembered(&self, pod: &PendingPod) -> bool {
        let place = self.to_place(pod);
        let cpu = cpu_milli_of(&pod.scheduling.requests);
        self.planner.shapes.remembers(&place.pending, cpu, self.settings.policy)
    }

    /// Plans one pod with what is left of the budget.
    fn plan_pod(&mut self, pod: &'p PendingPod, budget: &mut Budget, plan: &mut Plan) {
        let given = budget.of_pod.min(budget.left);
        // One that was refused, on the cluster as it is now, is not what the next plan goes on for.
        let is_answered = self.planner.fair_share.is_answered(&pod.uid, self.planner.cluster.now());
        if given < budget.of_pod / 2 && !self.is_remembered(pod) || given == 0 {
            plan.unreached.extend((!is_answered).then(|| pod.uid.clone()));
            return;
        }
        let mut steps = given;
        match self.place(pod, &mut steps, given < budget.of_pod) {
            Ok(decision) => plan.decisions.extend(decision),
            // The steps of the plan were not enough; those of a pod may be.
            Err(refusals)
                if given < budget.of_pod && refusals.iter().any(Refusal::is_undecided) =>
            {
                plan.unreached.extend((!is_answered).then(|| pod.uid.clone()));
            }
            Err(refusals) => {
                if refusals.iter().any(|refusal| lacks_room(&refusal.cause)) {
                    self.planner.forecast.refused(&pod.uid);
                }
                plan.refusals.extend(refusals);
            }
        }
        budget.spend(&pod.namespace, given - steps);
    }

    /// Places one pod. `None` = nothing of it is left to be decided. A pod that `is_cut` gets fewer
    /// steps than a pod may take: it is not placed on what they suffice to see.
    fn place(
        &mut self,
        pod: &'p PendingPod,
        steps: &mut u64,
        is_cut: bool,
    ) -> Result<Option<Decision>, Vec<Refusal>> {
        let place = self.to_place(pod);
        if place.pending.is_empty() {
            return Ok(None);
        }
        let shape = self.shape_of(&place)?;
        let whole = self.settings.steps_per_pod;
        let (shapes, mut ground) = self.planner.parts();
        let entry = shapes.get_mut(shape);
        entry.fits.refresh(&mut entry.shape, &mut ground, steps, whole);
        if is_cut && entry.fits.is_cut_short() {
            return Err(place.undecided());
        }
        // A node of which the steps did not suffice to ask again may not be what it was.
        let mut in_vain = BTreeSet::new();
        while let Some(node) = self.choose(shape, &place, &in_vain) {
            let seed = self.seed(pod);
            if let Some(chosen) = self.search_again(shape, node, seed, steps) {
                return Ok(Some(self.decide(&place, shape, node, &chosen)));
            }
            if *steps == 0 {
                return Err(place.undecided());
            }
            in_vain.insert(node);
        }
        let refusals = self.refuse(&place, shape, steps);
        self.keep_for(&place, shape, &refusals);
        Err(refusals)
    }

    /// Places one pod on this node, whatever the state of the node.
    fn place_on(
        &mut self,
        node: &NodeName,
        pod: &'p PendingPod,
        steps: &mut u64,
    ) -> Result<Option<Decision>, Vec<Refusal>> {
        let place = self.to_place(pod);
        if place.pending.is_empty() {
            return Ok(None);
        }
        let shape = self.shape_of(&place)?;
        let index = self.planner.cluster.node_index(node);
        if let Some(index) = index {
            let (shapes, mut ground) = self.planner.parts();
            let entry = shapes.get_mut(shape);
            entry.fits.refresh_node(index, &mut entry.shape, &mut ground, steps);
            let fits = matches!(entry.fits.answer(index), fits::Answer::Fits(_));
            if fits && let Some(chosen) = self.search_again(shape, index, self.seed(pod), steps) {
                return Ok(Some(self.decide(&place, shape, index, &chosen)));
            }
            let answer = self.planner.shapes.get(shape).fits.answer(index);
            if matches!(answer, fits::Answer::Undecided) || *steps == 0 {
                return Err(place.undecided());
            }
        }
        let mut explainer = Explainer::new(&self.planner.shapes.get(shape).shape);
        if let Some(index) = index {
            self.planner.cluster.gather(index);
            self.explain_node(&mut explainer, shape, index, None, steps);
        }
        let causes = shared(explainer.causes());
        Err(place.refused(&causes))
    }

    /// The shape of the pod's claims.
    ///
    /// # Errors
    /// They cannot be served on any node.
    fn shape_of(&mut self, place: &ToPlace<'_>) -> Result<ShapeId, Vec<Refusal>> {
        let Planner { cluster, selections, shapes, .. } = &mut *self.planner;
        let cpu = cpu_milli_of(&place.pod.scheduling.requests);
        let shape = shapes.of(&place.pending, cpu, cluster, selections, self.settings.policy);
        let Some((claim, cause)) = shapes.get(shape).shape.defect() else { return Ok(shape) };
        let (claim, cause) = (place.pending[claim].uid.clone(), Arc::new(cause.clone()));
        Err(vec![Refusal { pod: place.pod.uid.clone(), claim, cause }])
    }

    /// Why the pod cannot go to a node, whatever its devices; `kept_off` is said of the node that
    /// is kept free.
    fn fault(
        &self,
        place: &ToPlace<'_>,
        index: NodeIndex,
        node: &Node,
        kept_off: Option<&NodeReason>,
    ) -> Option<NodeReason> {
        let kept_off = || kept_off.filter(|_| self.keeping.node() == Some(index)).cloned();
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
        let kept_off = self.keeping.keeps_off(place);
        let is_open =
            |node: NodeIndex, n: &Node| self.fault(place, node, n, kept_off.as_ref()).is_none();
        let can_go = |node: &NodeIndex| {
            !in_vain.contains(node) && self.node(*node).is_some_and(|n| is_open(*node, n))
        };
        // Room has been made there, and nowhere else.
        let nominated =
            place.pod.nominated.as_ref().and_then(|name| self.planner.cluster.node_index(name));
        if let Some(node) = nominated
            .filter(|n| matches!(entry.fits.answer(*n), fits::Answer::Fits(_)) && can_go(n))
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

    /// The devices on a node on which the shape is known to fit. Each search gets what a pod gets,
    /// whatever is left of `steps`, which it takes its steps of.
    fn search_again(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        seed: u64,
        steps: &mut u64,
    ) -> Option<Vec<Vec<Chosen>>> {
        let budget = self.settings.steps_per_pod;
        let (shapes, mut ground) = self.planner.parts();
        let shape = &mut shapes.get_mut(shape).shape;
        let mut search = |seed| {
            let mut left = budget;
            let ended = fits::search(shape, &mut ground, node, seed, &mut left);
            *steps = steps.saturating_sub(budget - left);
            match ended {
                Ended::Found(chosen) => Some(chosen),
                _ => None,
            }
        };
        // With another seed it may take longer than there are steps; the order that is known does
        // not.
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
        self.decisions += 1;
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
    fn refuse(&mut self, place: &ToPlace<'p>, shape: ShapeId, steps: &mut u64) -> Vec<Refusal> {
        if self.planner.shapes.get(shape).fits.is_incomplete() {
            return place.undecided();
        }
        // What is particular to the pod makes its explanation particular.
        let is_common = place.is_common();
        let kept_off = self.keeping.keeps_off(place);
        if is_common {
            let of_this_plan = self.explained.iter().map(|explained| &explained.common);
            let mut known = of_this_plan.chain(self.planner.fair_share.explained());
            let scheduling = &place.pod.scheduling;
            if let Some(known) =
                known.find(|known| known.is_for(shape, scheduling, kept_off.as_ref()))
            {
                return place.refused(&known.causes);
            }
        }
        let Some(causes) = self.explain(place, shape, kept_off.as_ref(), steps) else {
            return place.undecided();
        };
        let refusals = place.refused(&causes);
        if is_common {
            let scheduling = Arc::clone(&place.pod.scheduling);
            let common = CommonExplanation { shape, scheduling, kept_off, causes };
            self.explained.push(Explained {
                common,
                place: place.clone(),
                decisions: self.decisions,
            });
        }
        refusals
    }

    /// Explains anew what decisions that were made since have changed: once for each explanation,
    /// whatever was decided in between.
    fn explain_again(&mut self, plan: &mut Plan) {
        let mut renewed: BTreeMap<*const Cause, Arc<Cause>> = BTreeMap::new();
        for old in std::mem::take(&mut self.explained) {
            if old.decisions == self.decisions {
                continue;
            }
            // Others may have taken its place among the shapes.
            let Ok(shape) = self.shape_of(&old.place) else { continue };
            let mut steps = self.settings.steps_per_pod;
            let causes = self.explain(&old.place, shape, old.common.kept_off.as_ref(), &mut steps);
            let pairs = old.common.causes.iter().zip(causes.into_iter().flatten());
            renewed.extend(pairs.map(|(old, new)| (Arc::as_ptr(old), new)));
        }
        for refusal in &mut plan.refusals {
            if let Some(cause) = renewed.get(&Arc::as_ptr(&refusal.cause)) {
                refusal.cause = Arc::clone(cause);
            }
        }
    }

    /// Per claim why it has to wait; none if the steps have not sufficed.
    fn explain(
        &mut self,
        place: &ToPlace<'_>,
        shape: ShapeId,
        kept_off: Option<&NodeReason>,
        steps: &mut u64,
    ) -> Option<Vec<Arc<Cause>>> {
        let nodes: Vec<NodeIndex> =
            self.planner.cluster.by_name().map(|(index, _)| index).collect();
        let mut explainer = Explainer::new(&self.planner.shapes.get(shape).shape);
        for index in nodes {
            self.planner.cluster.gather(index);
            let Some(node) = self.node(index) else { continue };
            let fault = self.fault(place, index, node, kept_off);
            self.explain_node(&mut explainer, shape, index, fault, steps);
            if *steps == 0 {
                return None;
            }
        }
        Some(shared(explainer.causes()))
    }

    fn explain_node(
        &mut self,
        explainer: &mut Explainer,
        shape: ShapeId,
        index: NodeIndex,
        fault: Option<NodeReason>,
        steps: &mut u64,
    ) {
        let Planner { cluster, selections, shapes, .. } = &mut *self.planner;
        let name = &cluster.nodes[index].name.clone();
        let entry = shapes.get_mut(shape);
        let failed = match entry.fits.answer(index) {
            fits::Answer::Failed(claim, failure) => Some((*claim, failure.as_ref())),
            _ => None,
        };
        let Some((reach, interner, features)) = cluster.parts(index) else { return };
        entry.shape.meet_offers(reach.candidates.iter().map(|c| c.offer), interner, features);
        explainer.node(&mut crate::explain::OnNode {
            name,
            shape: &entry.shape,
            reach,
            interner,
            selections,
            fault,
            failed,
            steps,
        });
    }
}

/// Causes that refusals share.
fn shared(causes: Vec<Cause>) -> Vec<Arc<Cause>> {
    causes.into_iter().map(Arc::new).collect()
}

impl ToPlace<'_> {
    /// Whether what holds for it holds for every pod with the same claims and demands.
    pub(super) fn is_common(&self) -> bool {
        self.bounds.is_empty() && self.pod.excluded.is_empty()
    }

    fn bind(&mut self, claim: &ClaimName, nodes: Option<&NodeSelector>) {
        self.bounds.extend(nodes.map(|nodes| Bound { claim: claim.clone(), nodes: nodes.clone() }));
    }

    /// Refuses each of the pending claims, for its cause.
    fn refused(&self, causes: &[Arc<Cause>]) -> Vec<Refusal> {
        let refuse = |(claim, cause): (&Arc<Claim>, &Arc<Cause>)| Refusal {
            pod: self.pod.uid.clone(),
            claim: claim.uid.clone(),
            cause: Arc::clone(cause),
        };
        self.pending.iter().zip(causes).map(refuse).collect()
    }

    /// Refuses each of the pending claims because the steps have not sufficed to tell.
    fn undecided(&self) -> Vec<Refusal> {
        let cause = Arc::new(Cause::NotDecided);
        self.refused(&self.pending.iter().map(|_| Arc::clone(&cause)).collect::<Vec<_>>())
    }
}
