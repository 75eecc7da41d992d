//! Placing a pod: the best usable node, or the reasons why there is none.

use std::collections::BTreeSet;

use super::classes::ClassId;
use super::pass::{PlanningPass, Refused};
use super::pod_to_place::PodToPlace;
use super::quotas::{OverQuota, Unplaced};
use super::shape_cache::ShapeId;
use crate::cluster::NodeIndex;
use crate::outcome::{Decision, Refusal};

impl<'p> PlanningPass<'p> {
    /// Places a pod with these claims, if a node is usable and no quota is exceeded.
    pub(super) fn place(
        &mut self,
        to_place: &PodToPlace<'p>,
        class: ClassId,
        shape: ShapeId,
        steps: &mut u64,
    ) -> Result<Decision, Unplaced> {
        if self.is_known_refused(to_place, class) {
            return Err(self.refuse_and_reserve(to_place, class, steps).into());
        }
        self.planner.work.pods_searched += 1;
        let full_budget = self.settings.steps_per_pod;
        let (shapes, mut context) = self.planner.search_context();
        let entry = shapes.get_mut(shape);
        entry.feasibility.refresh(&mut entry.shape, &mut context, steps, full_budget);
        if entry.feasibility.is_partial() && !entry.feasibility.take_exhausted(full_budget) {
            self.cut_off();
            return Err(to_place.undecided().into());
        }
        if self.check_still_refused(to_place, class, shape) {
            return Err(self.refuse_and_reserve(to_place, class, steps).into());
        }
        // Nodes that could not be searched again with the steps left may have changed.
        let mut failed = BTreeSet::new();
        let mut over_quota = OverQuota::default();
        while let Some(node) = self.best_node(shape, to_place, &failed) {
            let seed = self.pod_seed(to_place.pod);
            if let Some(chosen) = self.search_again(shape, node, seed, steps) {
                let solution = self.solution(to_place, shape, node, &chosen);
                match self.shortfall_of(to_place.pod, &solution) {
                    None => return Ok(self.decide(to_place, node, solution)),
                    Some(shortfall) => over_quota.note(shortfall, &chosen),
                }
            } else if *steps == 0 {
                return Err(to_place.undecided().into());
            }
            if over_quota.is_final() {
                break;
            }
            failed.insert(node);
        }
        if let Some(over_quota) = over_quota.into_unplaced() {
            return Err(over_quota);
        }
        if self.planner.shapes.get(shape).feasibility.is_incomplete() {
            return Err(to_place.undecided().into());
        }
        if failed.is_empty() {
            self.note_refused(to_place, class, shape);
        }
        Err(self.refuse_and_reserve(to_place, class, steps).into())
    }

    fn refuse_and_reserve(
        &mut self,
        to_place: &PodToPlace<'p>,
        class: ClassId,
        steps: &mut u64,
    ) -> Refused {
        if to_place.is_beside_others() {
            // What the others of the group have, and are about to lose, is no reason.
            return Vec::new().into();
        }
        self.planner.classes.get_mut(class).over_quota = None;
        let claims = self.refuse(to_place, class, steps);
        self.reserve_for(to_place, class, &claims);
        let is_shared = to_place.has_shared_results() && !claims.iter().any(Refusal::is_undecided);
        Refused { claims, class: is_shared.then_some(class) }
    }

    /// Returns true if no node was usable for the pod's class, and nothing has changed since.
    fn is_known_refused(&self, to_place: &PodToPlace<'_>, class: ClassId) -> bool {
        let until = self.planner.classes.get(class).refused_until;
        to_place.has_shared_results() && until == Some(self.planner.cluster.last_touch())
    }

    /// Returns true if no node was usable for the pod's class, and no node that has changed since
    /// is. The feasible nodes must be up to date.
    pub(super) fn check_still_refused(
        &mut self,
        to_place: &PodToPlace<'_>,
        class: ClassId,
        shape: ShapeId,
    ) -> bool {
        let feasibility = &self.planner.shapes.get(shape).feasibility;
        let until = self.planner.classes.get(class).refused_until;
        let touched = until.and_then(|until| self.planner.cluster.touched_since(until));
        let Some(touched) = touched.filter(|_| to_place.has_shared_results()) else { return false };
        let touched: BTreeSet<NodeIndex> =
            touched.iter().copied().filter(|node| feasibility.is_feasible(*node)).collect();
        let is_accepted = |node: &NodeIndex| self.accepts(to_place, *node);
        if feasibility.is_incomplete() || touched.iter().any(is_accepted) {
            return false;
        }
        self.planner.work.nodes_tested += touched.len() as u64;
        self.planner.classes.get_mut(class).refused_until = Some(self.planner.cluster.last_touch());
        true
    }

    /// Records that no node is usable for the pod's class, unless that is due to a reservation.
    fn note_refused(&mut self, to_place: &PodToPlace<'_>, class: ClassId, shape: ShapeId) {
        let feasibility = &self.planner.shapes.get(shape).feasibility;
        let is_free = |node| feasibility.is_feasible(node) && self.accepts(to_place, node);
        if to_place.has_shared_results() && !self.reservation.node().is_some_and(is_free) {
            self.planner.classes.get_mut(class).refused_until =
                Some(self.planner.cluster.last_touch());
        }
    }

    /// Returns true if the pod can use the node, apart from devices and reservations.
    fn accepts(&self, to_place: &PodToPlace<'_>, node: NodeIndex) -> bool {
        self.node(node).is_some_and(|n| self.node_rejection(to_place, node, n, None).is_none())
    }
}
