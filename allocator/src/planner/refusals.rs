//! Refusals of pods, with the reasons of their class.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::reason::NodeReason;

use super::Planner;
use super::class_reasons::{ClassReasons, ReservedReason};
use super::classes::ClassId;
use super::node_tests::NodeRejections;
use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use super::shape_cache::{ShapeEntry, ShapeId};
use crate::cluster::{NodeIndex, StateKey};
use crate::explain::{NodeReasons, OnNode, ReasonsByNode, RejectionCache};
use crate::model::PendingPod;
use crate::outcome::{Refusal, RefusalCause};
use crate::predicate::CountedUsage;

/// Classes refused in a pass.
#[derive(Default)]
pub(super) struct RefusedClasses<'p> {
    all: Vec<RefusedClass<'p>>,
    /// Index of the last entry per class.
    latest: BTreeMap<ClassId, usize>,
}

/// A node to explain.
struct NodeToExplain {
    index: NodeIndex,
    /// The reason why the pod cannot use the node, apart from devices.
    rejection: Option<NodeReason>,
}

/// Reasons why a pod cannot use nodes, apart from devices.
struct KnownRejections<'r> {
    /// The reason on the reserved node.
    reserved_reason: Option<&'r NodeReason>,
    /// Results of the node predicates, if many nodes are explained.
    tested: Option<NodeRejections>,
}

/// A class refused in a pass.
pub(super) struct RefusedClass<'p> {
    pub(super) class: ClassId,
    /// One of its pods.
    pub(super) to_place: PodToPlace<'p>,
    /// Reason for its pods on the reserved node.
    pub(super) reserved_reason: Option<NodeReason>,
    pub(super) causes: Vec<Arc<RefusalCause>>,
    /// Number of decisions of the pass when it was explained; `None` if it was by an earlier plan.
    pub(super) explained_at: Option<usize>,
}

impl<'p> RefusedClasses<'p> {
    fn get(&self, class: ClassId) -> Option<&RefusedClass<'p>> {
        self.all.get(*self.latest.get(&class)?)
    }

    /// Returns all entries, in the order of refusal.
    pub(super) fn all(&self) -> &[RefusedClass<'p>] {
        &self.all
    }

    /// Returns all entries, in the order of refusal.
    pub(super) fn into_all(self) -> Vec<RefusedClass<'p>> {
        self.all
    }

    fn push(&mut self, refused: RefusedClass<'p>) {
        self.latest.insert(refused.class, self.all.len());
        self.all.push(refused);
    }
}

impl<'p> PlanningPass<'p> {
    /// Returns the refusals of a pod.
    pub(super) fn refuse(
        &mut self,
        to_place: &PodToPlace<'p>,
        class: ClassId,
        steps: &mut u64,
    ) -> Vec<Refusal> {
        let reserved_reason = self.reservation.rejection_for(to_place).cloned();
        // Pods with claims on other nodes or excluded nodes have reasons of their own.
        if !to_place.has_shared_results() {
            return match self.explain_pod(to_place, class, reserved_reason.as_ref(), steps) {
                Some(causes) => to_place.refused(&causes),
                None => to_place.undecided(),
            };
        }
        if let Some(known) =
            self.refused.get(class).filter(|known| known.reserved_reason == reserved_reason)
        {
            return to_place.refused(&known.causes);
        }
        let earlier = self.earlier_causes(class);
        let is_earlier = earlier.is_some();
        let causes = earlier
            .or_else(|| self.explain_class(to_place, class, reserved_reason.as_ref(), steps));
        let Some(causes) = causes else { return to_place.undecided() };
        let refusals = to_place.refused(&causes);
        let explained_at = (!is_earlier).then_some(self.decisions);
        let to_place = to_place.clone();
        self.refused.push(RefusedClass { class, to_place, reserved_reason, causes, explained_at });
        refusals
    }

    /// Returns the known causes of a class if they are [renewed](Self::renew_causes) at the end of
    /// the plan.
    fn earlier_causes(&self, class: ClassId) -> Option<Vec<Arc<RefusalCause>>> {
        self.settings.steps_for_reasons?;
        let known = self.planner.classes.get(class).reasons.known_causes()?;
        // Pods refused before and after a reservation get causes of their own.
        let is_second = self.refused.get(class).is_some();
        let copy = |cause: &Arc<RefusalCause>| match is_second {
            true => Arc::new(RefusalCause::clone(cause)),
            false => Arc::clone(cause),
        };
        Some(known.iter().map(copy).collect())
    }

    /// Explains per claim why it cannot be allocated for this pod; `None` if the steps did not
    /// suffice.
    fn explain_pod(
        &mut self,
        to_place: &PodToPlace<'_>,
        class: ClassId,
        reserved_reason: Option<&NodeReason>,
        steps: &mut u64,
    ) -> Option<Vec<Arc<RefusalCause>>> {
        let shape = self.cached_shape(to_place, class);
        let nodes: Vec<NodeIndex> =
            self.planner.cluster.by_name().map(|(index, _)| index).collect();
        let (mut reasons, mut cache) = (ReasonsByNode::default(), RejectionCache::default());
        for index in nodes {
            let rejection = self.rejection_on(to_place, index, reserved_reason);
            let node = NodeToExplain { index, rejection };
            self.explain_node(&mut reasons, shape, node, steps, &mut cache);
            if *steps == 0 {
                self.cut_off();
                return None;
            }
        }
        Some(self.causes_of_pod(&mut reasons, shape))
    }

    /// Like [`explain_pod`](Self::explain_pod), for all pods of a class: only nodes that have
    /// changed are examined. Also returns `None` if the steps of the plan did not suffice; the next
    /// plan continues.
    fn explain_class(
        &mut self,
        to_place: &PodToPlace<'_>,
        class: ClassId,
        reserved_reason: Option<&NodeReason>,
        steps: &mut u64,
    ) -> Option<Vec<Arc<RefusalCause>>> {
        let shape = self.cached_shape(to_place, class);
        let mut reasons = std::mem::take(&mut self.planner.classes.get_mut(class).reasons);
        reasons.collect_outdated(&self.planner.cluster, self.reserved_for(reserved_reason));
        if !reasons.outdated.is_empty() {
            reasons.release_causes();
        }
        let is_current = self.update(&mut reasons, to_place, shape, reserved_reason, steps);
        let causes = is_current.then(|| self.make_causes(&mut reasons, shape));
        self.planner.classes.get_mut(class).reasons = reasons;
        self.note_progress(class, is_current);
        causes
    }

    /// Records if the next plan continues with the reasons of the class.
    pub(super) fn note_progress(&mut self, class: ClassId, is_complete: bool) {
        let Planner { classes, selections, .. } = &mut *self.planner;
        if !is_complete && !selections.was_withheld() {
            classes.in_progress = Some(class);
        } else if classes.in_progress == Some(class) {
            classes.in_progress = None;
        }
    }

    /// Makes causes of the reasons of a class.
    pub(super) fn make_causes(
        &mut self,
        reasons: &mut ClassReasons,
        shape: ShapeId,
    ) -> Vec<Arc<RefusalCause>> {
        let Planner { classes, cluster, shapes, .. } = &mut *self.planner;
        reasons.make_causes(&shapes.get(shape).shape, cluster, || classes.next_version())
    }

    /// Returns the reserved node with this reason.
    pub(super) fn reserved_for(&self, reserved_reason: Option<&NodeReason>) -> ReservedReason {
        self.reservation.node().zip(reserved_reason.cloned())
    }

    /// Explains the outdated nodes. Returns false if the steps did not suffice for all.
    pub(super) fn update(
        &mut self,
        reasons: &mut ClassReasons,
        to_place: &PodToPlace<'_>,
        shape: ShapeId,
        reserved_reason: Option<&NodeReason>,
        steps: &mut u64,
    ) -> bool {
        let counted = CountedUsage::Current;
        let tested = self.take_tested_nodes(to_place, counted, reasons.outdated.len());
        let known = KnownRejections { reserved_reason, tested };
        let is_current = self.explain_outdated(reasons, to_place, shape, &known, steps);
        self.put_tested_nodes(to_place, counted, known.tested);
        is_current
    }

    fn explain_outdated(
        &mut self,
        reasons: &mut ClassReasons,
        to_place: &PodToPlace<'_>,
        shape: ShapeId,
        known: &KnownRejections<'_>,
        steps: &mut u64,
    ) -> bool {
        let mut cache = RejectionCache::default();
        while let Some(index) = reasons.outdated.pop_first() {
            let is_reserved = self.reservation.node() == Some(index);
            let rejection = match known.tested.as_ref().filter(|_| !is_reserved) {
                Some(tested) => tested.get(index).cloned(),
                None => self.rejection_on(to_place, index, known.reserved_reason),
            };
            let node = NodeToExplain { index, rejection };
            if self.explain_node(&mut reasons.by_node, shape, node, steps, &mut cache) {
                reasons.note_change();
            }
            if *steps == 0 {
                // The selectors may not have been evaluated.
                reasons.outdated.insert(index);
                self.cut_off();
                return false;
            }
            if self.explained_steps >= self.max_explained_steps && !reasons.outdated.is_empty() {
                self.is_cut_off = true;
                return false;
            }
        }
        true
    }

    /// Returns the reason why the pod cannot use the node, apart from devices.
    fn rejection_on(
        &self,
        to_place: &PodToPlace<'_>,
        index: NodeIndex,
        reserved_reason: Option<&NodeReason>,
    ) -> Option<NodeReason> {
        self.node_rejection(to_place, index, self.node(index)?, reserved_reason)
    }

    fn causes_of_pod(&self, reasons: &mut ReasonsByNode, shape: ShapeId) -> Vec<Arc<RefusalCause>> {
        let Planner { shapes, cluster, .. } = &*self.planner;
        reasons.sum_up();
        reasons.causes(None, &shapes.get(shape).shape, cluster.names())
    }

    /// Sets the reasons of a node, which are those of its devices if the pod can use the node; none
    /// if the node was removed. Returns true if they have changed. Without steps left
    /// they are not to be used.
    fn explain_node(
        &mut self,
        reasons: &mut ReasonsByNode,
        shape: ShapeId,
        NodeToExplain { index, rejection }: NodeToExplain,
        steps: &mut u64,
        cache: &mut RejectionCache,
    ) -> bool {
        let Planner { cluster, selections, shapes, work, .. } = &mut *self.planner;
        work.nodes_explained += 1;
        self.explained_steps += 1;
        let ShapeEntry { shape, feasibility, .. } = shapes.get_mut(shape);
        let failed = feasibility.failure(index);
        let names = cache.attributes.take();
        cache.attributes =
            names.or_else(|| shape.decisive_attributes(selections, &mut cluster.interner));
        let shared = cache.attributes.clone().filter(|_| rejection.is_none() && failed.is_none());
        if shared.is_some() && shape.uses_topology() {
            cluster.gather_positions(index);
        }
        let inputs = cluster.search_inputs_with_state(index, shared.as_deref());
        let Some((reach, state, interner, features)) = inputs else {
            return reasons.set(index, None);
        };
        let key = state.as_ref().map(StateKey::node);
        if let Some(other) = key.and_then(|key| cache.nodes.get(&key)) {
            return reasons.set_like(index, *other);
        }
        if rejection.is_none() {
            self.explained_steps += (reach.candidates.len() * shape.alternatives.len()) as u64;
        }
        shape.resolve_profiles(reach.candidates.iter().map(|c| c.profile), interner, features);
        let on = OnNode {
            shape: &*shape,
            reach,
            state,
            interner,
            selections,
            fault: rejection,
            failed,
            steps: &mut *steps,
            cache: &mut *cache,
        };
        let has_changed = reasons.set(index, Some(NodeReasons::of(on)));
        if let Some(key) = key.filter(|_| *steps > 0) {
            cache.nodes.insert(key, index);
        }
        has_changed
    }

    /// Explains per claim why it cannot be allocated on the node of a bound pod.
    pub(super) fn explain_on(
        &mut self,
        shape: ShapeId,
        index: Option<NodeIndex>,
        steps: &mut u64,
    ) -> Vec<Arc<RefusalCause>> {
        let mut reasons = ReasonsByNode::default();
        if let Some(index) = index {
            let mut cache = RejectionCache::default();
            let node = NodeToExplain { index, rejection: None };
            self.explain_node(&mut reasons, shape, node, steps, &mut cache);
        }
        self.causes_of_pod(&mut reasons, shape)
    }
}

impl Planner {
    /// Returns the refusals of a pod that waits in the queue of its class, with the reasons of the
    /// last plan; none if they are not kept.
    pub fn refusals_of(&self, pod: &PendingPod, class: ClassId) -> Option<Vec<Refusal>> {
        let to_place = PodToPlace::all_of(pod);
        let class = self.classes.find_class(class)?;
        let shape = &self.shapes.find(class.shape?)?.shape;
        if let Some((claim, cause)) = shape.defect() {
            let (pod, claim) = (pod.uid.clone(), to_place.pending.get(claim)?.uid.clone());
            return Some(vec![Refusal { pod, claim, cause: Arc::new(cause.clone()) }]);
        }
        match &class.over_quota {
            Some(cause) => Some(to_place.refused_for(cause)),
            None => Some(to_place.refused(class.reasons.known_causes()?)),
        }
    }
}
