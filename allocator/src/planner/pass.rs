//! A planning pass: pods in order of priority and age, each with the capacity left by those before.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tessera_api::names::{ClaimUid, Namespace, NodeName};
use tessera_api::reason::NodeReason;

use super::Planner;
use super::budget::{Budget, NoSteps};
use super::classes::ClassId;
use super::group_kinds::{GroupKind, RefusedKind};
use super::group_topology::ChosenDomain;
use super::pod_to_place::PodToPlace;
use super::quotas::Solution;
use super::refusals::RefusedClasses;
use super::reservation::{NodeReservation, lacks_held_capacity};
use super::shape_cache::{ShapeEntry, ShapeId};
use super::turns::{Turn, Turns};
use super::unchanged::UnchangedClass;
use crate::cluster::NodeIndex;
use crate::model::{
    DeviceId, DeviceResult, DeviceUsage, Node, NodeSelector, PendingPod, PodClaim, PodUid,
    cpu_milli_of,
};
use crate::outcome::{AllocationPlan, Decision, GroupShortfall, Refusal, RefusalCause};
use crate::policy::seeded_hash;
use crate::predicate::{self, CountedUsage};
use crate::quota::QuotaState;
use crate::settings::PlanSettings;
use crate::shape::Chosen;

/// Plans the pods. Decisions count as usage during the pass and are undone at its end. Also returns
/// the pods that were refused with their class.
pub(super) fn plan(
    planner: &mut Planner,
    mut turns: Turns<'_>,
    settings: PlanSettings,
) -> (AllocationPlan, Vec<(PodUid, ClassId)>) {
    let mut budget = Budget::new(settings, planner.without_long_searches.clone());
    planner.begin_plan();
    planner.fair_share.begin_plan(|| turns.pods(), budget.of_plan);
    planner.observe(&turns, settings.policy, &mut budget);
    let group_causes_before = std::mem::take(&mut planner.group_causes);
    let mut pass = PlanningPass { group_causes_before, ..PlanningPass::new(planner, settings) };
    let mut plan = AllocationPlan::default();
    let mut with_class = Vec::new();
    let mut planned = 0;
    while let Some(turn) = turns.next() {
        if pass.refuse_as_before(&turn, turns.queue(&turn), &mut budget)
            || pass.refuse_like_others(&turn)
        {
            continue;
        }
        if !turn.is_deferred && pass.defers(turn.pod, &budget) {
            let was_refused = pass.planner.fair_share.was_refused(&turn.pod.uid);
            turns.defer(turn, was_refused);
            continue;
        }
        // What is decided is written before the pods of namespaces that exceed their share.
        if turn.is_deferred && !plan.decisions.is_empty() {
            pass.leave_unreached(turn.pod, &mut plan);
            continue;
        }
        planned += 1;
        let outcome = pass.plan_pod(turn.pod, &mut budget, &mut plan);
        if let PodOutcome::Refused { class, .. } = outcome {
            with_class.push((turn.pod.uid.clone(), class));
        }
        pass.give_next_turn(&mut turns, &turn, outcome);
    }
    plan.steps =
        budget.of_plan - budget.left + reservation_steps(settings) - pass.reservation.steps();
    let is_partial = !plan.unreached.is_empty();
    let unchanged = pass.unchanged.len();
    if !is_partial {
        pass.renew_causes(&mut plan, &mut budget);
    }
    plan.alike = pass.end_groups(&plan.refusals, is_partial);
    pass.planner.selections.begin_pod(false);
    (plan.reserved, plan.replan_at) = std::mem::take(&mut pass.reservation).end(settings.now);
    pass.undo();
    budget.report(&mut plan);
    let refused = plan.refusals.iter().map(|refusal| &refusal.pod);
    let Planner { fair_share, cluster, .. } = planner;
    fair_share.end_plan(budget.spent, refused, cluster.now(), is_partial);
    plan.work = planner.end_plan(planned, unchanged);
    (plan, with_class)
}

/// Decides on the claims of a pod that is bound to `node`: see [`Planner::plan_on`].
pub(super) fn plan_on(
    planner: &mut Planner,
    node: &NodeName,
    pod: &PendingPod,
    settings: PlanSettings,
) -> AllocationPlan {
    planner.begin_plan();
    let mut pass = PlanningPass::new(planner, settings);
    let mut plan = AllocationPlan::default();
    let mut budget = Budget::new(settings, pass.planner.without_long_searches.clone());
    let needed = pass.needed_steps(pod);
    let Ok(given) = budget.for_pod(&pod.namespace, needed) else {
        plan.refusals = pass.undecided_part(pod).undecided();
        return plan;
    };
    let mut steps = given;
    pass.begin_pod(pod);
    match pass.place_pod_on(node, pod, &mut steps) {
        Ok(decision) => plan.decisions.extend(decision),
        Err(_) if pass.is_cut_off => plan.unreached.push(pod.uid.clone()),
        Err(_) if pass.is_uncompiled() => {}
        Err(refused) => plan.refusals = refused.claims,
    }
    plan.steps = pass.charge(pod, needed, given - steps, &mut budget);
    budget.report(&mut plan);
    pass.undo();
    plan.work = planner.take_work();
    plan
}

/// Returns the steps of a plan for the search of a node to reserve.
fn reservation_steps(settings: PlanSettings) -> u64 {
    settings.steps_per_pod.min(settings.steps_per_plan)
}

/// Returns true if the pod is pending for lack of capacity that can become free.
pub(super) fn lacks_capacity(cause: &RefusalCause) -> bool {
    let RefusalCause::NoFit(explanation) = cause else { return false };
    explanation.totals().keys().any(tessera_api::reason::Reason::is_transient)
}

/// The claims of a pod that cannot be allocated.
pub(super) struct Refused {
    pub(super) claims: Vec<Refusal>,
    /// Class of the pod, if every pod of it that comes later is refused too.
    pub(super) class: Option<ClassId>,
}

impl Refused {
    /// Returns true if the search for a claim did not end.
    pub(super) fn is_undecided(&self) -> bool {
        self.claims.iter().any(Refusal::is_undecided)
    }
}

impl From<Vec<Refusal>> for Refused {
    fn from(claims: Vec<Refusal>) -> Self {
        Self { claims, class: None }
    }
}

/// Outcome of a pod's turn, for the pods of its class that come later.
#[derive(Clone, Copy)]
enum PodOutcome {
    /// Nothing: the pod was decided, or needs nothing.
    Decided,
    /// They are refused too.
    Refused {
        class: ClassId,
        /// The pods lack capacity that others hold, so a node may be reserved for one of them.
        lacks_held_capacity: bool,
    },
    /// They would not be decided either: the steps were spent, or the pod was refused for a reason
    /// of its own.
    Open,
}

/// A node before a decision.
struct NodeBefore {
    index: NodeIndex,
    /// Its free CPU.
    cpu_milli: u64,
    /// The node with the requests of pods decided before; `None` if there were none.
    node: Option<Node>,
}

/// A place in the record of what decisions have changed.
#[derive(Clone, Copy, Default)]
pub(super) struct Mark {
    usage: usize,
    nodes: usize,
}

/// A planning pass: its decisions on top of the cluster state.
pub(super) struct PlanningPass<'p> {
    pub(super) planner: &'p mut Planner,
    pub(super) settings: PlanSettings,
    /// Nodes with the requests of pods decided in this pass.
    nodes: BTreeMap<NodeIndex, Node>,
    /// Device consumption before each decision.
    usage_before: Vec<(DeviceId, Option<DeviceUsage>)>,
    /// Nodes before each decision.
    nodes_before: Vec<NodeBefore>,
    /// Claims decided in this pass and their nodes. A later pod that shares a claim is restricted
    /// to them.
    pub(super) decided: BTreeMap<ClaimUid, Option<NodeSelector>>,
    /// Quotas before the pass, of the namespaces with decided pods.
    pub(super) quotas_before: BTreeMap<Namespace, Vec<QuotaState>>,
    /// Classes of refused pods.
    pub(super) refused: RefusedClasses<'p>,
    /// Classes that are refused as before.
    pub(super) unchanged: Vec<UnchangedClass<'p>>,
    /// Number of decisions of this pass.
    pub(super) decisions: usize,
    /// Steps spent on the reasons of refusals since the last pod, and their limit.
    pub(super) explained_steps: u64,
    pub(super) max_explained_steps: u64,
    /// True if the limit was exceeded.
    pub(super) is_cut_off: bool,
    /// Reservation of a node for a refused pod.
    pub(super) reservation: NodeReservation,
    /// The causes of refused groups in the plan before.
    pub(super) group_causes_before: HashMap<GroupShortfall, Arc<RefusalCause>>,
    /// Groups that were refused in this pass.
    pub(super) refused_groups: HashMap<Arc<GroupKind>, RefusedKind>,
    /// The domain in which the pods of a group are being placed.
    pub(super) domain: Option<ChosenDomain>,
}

impl<'p> PlanningPass<'p> {
    fn new(planner: &'p mut Planner, settings: PlanSettings) -> Self {
        Self {
            planner,
            settings,
            nodes: BTreeMap::new(),
            usage_before: Vec::new(),
            nodes_before: Vec::new(),
            decided: BTreeMap::new(),
            quotas_before: BTreeMap::new(),
            refused: RefusedClasses::default(),
            unchanged: Vec::new(),
            decisions: 0,
            explained_steps: 0,
            max_explained_steps: u64::MAX,
            is_cut_off: false,
            reservation: NodeReservation::new(reservation_steps(settings)),
            group_causes_before: HashMap::new(),
            refused_groups: HashMap::new(),
            domain: None,
        }
    }

    fn undo(mut self) {
        self.roll_back(Mark::default());
        self.planner.quotas.extend(self.quotas_before);
    }

    /// Returns the present place in the record of what decisions have changed.
    pub(super) fn mark(&self) -> Mark {
        Mark { usage: self.usage_before.len(), nodes: self.nodes_before.len() }
    }

    /// Undoes what decisions since the mark have changed on devices and nodes.
    pub(super) fn roll_back(&mut self, to: Mark) {
        for (device, used) in self.usage_before.drain(to.usage..).rev() {
            self.planner.cluster.set_use(&device, used.as_ref());
        }
        for NodeBefore { index, cpu_milli, node } in self.nodes_before.drain(to.nodes..).rev() {
            self.planner.cluster.set_cpu(index, cpu_milli);
            self.planner.cluster.touch(index);
            match node {
                Some(node) => self.nodes.insert(index, node),
                None => self.nodes.remove(&index),
            };
        }
    }

    /// Returns true if the pod is planned after the others.
    ///
    /// It is deferred if its namespace exceeds its share, or if the pod was refused already, and
    /// its claims have to be searched. A pod with cached results costs nothing and keeps its
    /// position.
    fn defers(&mut self, pod: &PendingPod, budget: &Budget) -> bool {
        let fair_share = &self.planner.fair_share;
        let spent = budget.spent_by(&pod.namespace);
        let may_be = fair_share.exceeds_share(&pod.namespace, spent, budget.of_plan)
            || fair_share.was_refused(&pod.uid);
        may_be && !self.finds_cached_result(pod)
    }

    /// Returns true if the pod's claims are not searched again, and not explained for it alone.
    fn finds_cached_result(&mut self, pod: &PendingPod) -> bool {
        self.undecided_part(pod).has_shared_results()
            && self.known_shape(pod).is_some_and(|shape| !shape.feasibility.is_incomplete())
    }

    /// Returns the number of steps that the search of the pod's claims needs to get further.
    fn needed_steps(&mut self, pod: &PendingPod) -> u64 {
        self.known_shape(pod).map_or(0, |shape| shape.feasibility.needed_steps())
    }

    /// Returns the shape of the pod's claims if it is cached.
    fn known_shape(&mut self, pod: &PendingPod) -> Option<&ShapeEntry> {
        let to_place = self.undecided_part(pod);
        let class = self.planner.class_of(pod, &to_place.pending, self.settings.policy);
        self.planner.shapes.find(self.planner.classes.get(class).shape?)
    }

    /// Plans one pod, or its group, with the rest of the budget.
    fn plan_pod(
        &mut self,
        pod: &'p PendingPod,
        budget: &mut Budget,
        plan: &mut AllocationPlan,
    ) -> PodOutcome {
        let needed = self.needed_steps(pod);
        let given = match budget.for_pod(&pod.namespace, needed) {
            Ok(given) => given,
            Err(NoSteps::OfPlan) => {
                self.leave_unreached(pod, plan);
                return PodOutcome::Open;
            }
            Err(NoSteps::OfNamespace) => {
                plan.refusals.extend(self.undecided_part(pod).undecided());
                return PodOutcome::Open;
            }
        };
        let mut steps = given;
        (self.explained_steps, self.max_explained_steps) = (0, budget.left);
        self.is_cut_off = false;
        self.begin_pod(pod);
        let placed = match pod.is_group() {
            true => self.place_group(pod, &mut steps),
            false => self.place_pod(pod, None, &mut steps).map(Vec::from_iter),
        };
        self.charge(pod, needed, given - steps, budget);
        match placed {
            Ok(decisions) => {
                plan.decisions.extend(decisions);
                PodOutcome::Decided
            }
            Err(Refused { claims, .. })
                if self.is_cut_off && claims.iter().any(Refusal::is_undecided) =>
            {
                self.leave_unreached(pod, plan);
                PodOutcome::Open
            }
            Err(Refused { claims, .. })
                if self.is_uncompiled() && claims.iter().any(Refusal::is_undecided) =>
            {
                PodOutcome::Open
            }
            Err(Refused { claims, class }) => {
                let class = class.filter(|_| !pod.is_group());
                if claims.iter().any(|refusal| lacks_capacity(&refusal.cause)) {
                    self.planner.forecast.count_refusal(&pod.uid);
                }
                let causes = claims.iter().map(|refusal| &*refusal.cause);
                let lacks_held_capacity = lacks_held_capacity(causes);
                plan.refusals.extend(claims);
                class.map_or(PodOutcome::Open, |class| PodOutcome::Refused {
                    class,
                    lacks_held_capacity,
                })
            }
        }
    }

    /// Charges the namespace of a pod with the steps of its search, which needed `needed` steps to
    /// get further, of the reasons and of the selectors. Returns the steps of the search.
    pub(super) fn charge(
        &self,
        pod: &PendingPod,
        needed: u64,
        searched: u64,
        budget: &mut Budget,
    ) -> u64 {
        let selections = &self.planner.selections;
        // A search that was withheld has ended the steps without spending them.
        let spent = searched.saturating_sub(selections.withheld_steps());
        budget.spend(&pod.namespace, spent + self.explained_steps);
        budget.charge(&pod.namespace, selections.charged().saturating_sub(spent));
        budget.charge_selectors(&pod.namespace, selections);
        budget.charge_long(&pod.namespace, needed, spent);
        spent
    }

    /// Begins the search for a pod.
    pub(super) fn begin_pod(&mut self, pod: &PendingPod) {
        let Planner { selections, withheld, .. } = &mut *self.planner;
        selections.begin_pod(withheld.contains(&pod.namespace));
    }

    /// Returns true if the search for the present pod ended because a selector is not compiled.
    fn is_uncompiled(&self) -> bool {
        self.planner.selections.uncompiled().is_some()
    }

    /// Has the next plan continue with the pod, unless its selectors are not to be evaluated.
    pub(super) fn cut_off(&mut self) {
        self.is_cut_off = !self.planner.selections.was_withheld();
    }

    /// Has the next plan continue with the pod, unless it was refused on the same state of the
    /// cluster.
    fn leave_unreached(&self, pod: &PendingPod, plan: &mut AllocationPlan) {
        let Planner { fair_share, cluster, .. } = &*self.planner;
        let was_refused = fair_share.was_refused_at(&pod.uid, cluster.now());
        plan.unreached.extend((!was_refused).then(|| pod.uid.clone()));
    }

    /// Gives a turn to the next pod of the queue that may have another result than the pod of
    /// `turn`.
    fn give_next_turn<'t>(&mut self, turns: &mut Turns<'t>, turn: &Turn<'t>, outcome: PodOutcome) {
        let Some(queue) = turns.queue(turn) else { return };
        let next = match outcome {
            PodOutcome::Decided => queue.after(&turn.order).next(),
            PodOutcome::Open => None,
            PodOutcome::Refused { class, lacks_held_capacity } => {
                let candidate = lacks_held_capacity
                    .then(|| self.next_to_reserve_for(queue, &turn.order, class))
                    .flatten();
                // The last pod has the reasons of all: a node may have been reserved in between.
                candidate.or(queue.last().filter(|(_, last)| last.uid != turn.pod.uid))
            }
        };
        if let Some(next) = next {
            turns.follow(turn, next);
        }
    }

    /// Places one pod. `None` means that nothing is left to decide. Partial search results are used
    /// when the steps of the pod are spent; until then the next plan continues.
    pub(super) fn place_pod(
        &mut self,
        pod: &'p PendingPod,
        beside: Option<usize>,
        steps: &mut u64,
    ) -> Result<Option<Decision>, Refused> {
        let to_place = PodToPlace { beside, ..self.undecided_part(pod) };
        if to_place.pending.is_empty() {
            return Ok(None);
        }
        let (class, shape) = self.shape_of(&to_place)?;
        self.place_within_quotas(&to_place, class, shape, steps).map(Some)
    }

    /// Places one pod on this node, whatever the conditions of the node.
    fn place_pod_on(
        &mut self,
        node: &NodeName,
        pod: &'p PendingPod,
        steps: &mut u64,
    ) -> Result<Option<Decision>, Refused> {
        let to_place = self.undecided_part(pod);
        if to_place.pending.is_empty() {
            return Ok(None);
        }
        let (class, shape) = self.shape_of(&to_place)?;
        if let Some(shortfall) = self.least_shortfall(pod, shape) {
            return Err(self.refuse_over_quota(&to_place, class, shortfall));
        }
        let index = self.planner.cluster.node_index(node);
        if let Some(index) = index {
            let full_budget = self.settings.steps_per_pod;
            let (shapes, mut context) = self.planner.search_context();
            let ShapeEntry { shape: searched, feasibility, .. } = shapes.get_mut(shape);
            if !feasibility.refresh_node(index, searched, &mut context, steps, full_budget) {
                self.cut_off();
                return Err(to_place.undecided().into());
            }
            let fits = feasibility.is_feasible(index);
            if fits && let Some(chosen) = self.search_again(shape, index, self.pod_seed(pod), steps)
            {
                let solution = self.solution(&to_place, shape, index, &chosen);
                return match self.shortfall_of(pod, &solution) {
                    None => Ok(Some(self.decide(&to_place, index, solution))),
                    Some(shortfall) => Err(self.refuse_over_quota(&to_place, class, shortfall)),
                };
            }
            if self.planner.shapes.get(shape).feasibility.is_undecided(index) {
                return Err(to_place.undecided().into());
            }
        }
        let causes = self.explain_on(shape, index, steps);
        if *steps == 0 {
            self.cut_off();
            return Err(to_place.undecided().into());
        }
        Err(to_place.refused(&causes).into())
    }

    /// Returns the class and the shape of the pod's claims.
    ///
    /// # Errors
    /// Returns refusals if the claims cannot be allocated on any node.
    pub(super) fn shape_of(
        &mut self,
        to_place: &PodToPlace<'_>,
    ) -> Result<(ClassId, ShapeId), Refused> {
        let class = self.planner.class_of(to_place.pod, &to_place.pending, self.settings.policy);
        let shape = self.cached_shape(to_place, class);
        let Some((claim, cause)) = self.planner.shapes.get(shape).shape.defect() else {
            return Ok((class, shape));
        };
        let (claim, cause) = (to_place.pending[claim].uid.clone(), Arc::new(cause.clone()));
        let claims = vec![Refusal { pod: to_place.pod.uid.clone(), claim, cause }];
        Err(Refused { claims, class: to_place.has_shared_results().then_some(class) })
    }

    /// Returns the shape of the class.
    pub(super) fn cached_shape(&mut self, to_place: &PodToPlace<'_>, class: ClassId) -> ShapeId {
        let cpu = cpu_milli_of(&to_place.pod.scheduling.requests);
        self.planner.shape_of_class(class, &to_place.pending, cpu, self.settings.policy)
    }

    /// Returns the reason why the pod cannot use the node, apart from devices. `reserved_reason`
    /// applies to the reserved node.
    pub(super) fn node_rejection(
        &self,
        to_place: &PodToPlace<'_>,
        index: NodeIndex,
        node: &Node,
        reserved_reason: Option<&NodeReason>,
    ) -> Option<NodeReason> {
        let if_reserved =
            || reserved_reason.filter(|_| self.reservation.node() == Some(index)).cloned();
        predicate::rejection(to_place.pod, &to_place.claim_nodes, node, CountedUsage::Current)
            .or_else(if_reserved)
    }

    /// Returns the part of a pod that this pass has not decided yet.
    pub(super) fn undecided_part<'s>(&self, pod: &'s PendingPod) -> PodToPlace<'s> {
        let mut to_place = PodToPlace::without_claims(pod);
        for claim in &pod.claims {
            match claim {
                PodClaim::Pending(claim) => match self.decided.get(&claim.uid) {
                    Some(nodes) => to_place.restrict_to(&claim.name, nodes.as_ref()),
                    None => to_place.add(claim),
                },
                PodClaim::Allocated { name, nodes, .. } => {
                    to_place.restrict_to(name, nodes.as_ref())
                }
            }
        }
        to_place
    }

    pub(super) fn pod_seed(&self, pod: &PendingPod) -> u64 {
        seeded_hash(self.settings.seed, pod.uid.as_str())
    }

    /// Returns a node including the pods of this pass.
    pub(super) fn node(&self, node: NodeIndex) -> Option<&Node> {
        self.nodes.get(&node).or_else(|| self.planner.cluster.nodes[node].node.as_deref())
    }

    /// Converts the devices that a search has chosen on a node.
    pub(super) fn solution(
        &self,
        to_place: &PodToPlace<'_>,
        shape: ShapeId,
        node: NodeIndex,
        chosen: &[Vec<Chosen>],
    ) -> Solution {
        let claims = self.planner.claim_allocations(shape, &to_place.pending, node, chosen);
        let charges = match self.has_quotas(to_place.pod) {
            true => self.charges(to_place, &claims, node, chosen),
            false => Vec::new(),
        };
        Solution { claims, charges }
    }

    /// Records a solution and converts it to a decision.
    pub(super) fn decide(
        &mut self,
        to_place: &PodToPlace<'_>,
        node: NodeIndex,
        found: Solution,
    ) -> Decision {
        let Solution { claims, charges } = found;
        self.count_against_quotas(to_place.pod, &charges);
        for allocation in &claims {
            self.decided.insert(allocation.claim.clone(), allocation.nodes.clone());
            allocation.results.iter().filter(|r| !r.admin).for_each(|result| self.consume(result));
        }
        if let Some(mut changed) = self.node(node).cloned() {
            changed.add_requests(&to_place.pod.scheduling.requests);
            let cpu_milli = self.planner.cluster.nodes[node].cpu_milli;
            self.planner.cluster.set_cpu(node, changed.cpu_milli_left());
            self.planner.cluster.touch(node);
            let before = self.nodes.insert(node, changed);
            self.nodes_before.push(NodeBefore { index: node, cpu_milli, node: before });
        }
        self.decisions += 1;
        let node = self.planner.cluster.nodes[node].name.clone();
        Decision { pod: to_place.pod.uid.clone(), node, claims }
    }

    fn consume(&mut self, result: &DeviceResult) {
        let before = self.planner.cluster.used(&result.device).cloned();
        let mut used = before.clone().unwrap_or_default();
        used.add(result);
        self.usage_before.push((result.device.clone(), before));
        self.planner.cluster.set_use(&result.device, Some(&used));
    }
}
