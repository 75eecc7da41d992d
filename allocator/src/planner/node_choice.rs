//! Choice of the node for a pod among the feasible ones, and of the devices there.

use std::cell::Cell;
use std::collections::BTreeSet;

use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use super::shape_cache::ShapeId;
use crate::cluster::NodeIndex;
use crate::feasibility;
use crate::model::Node;
use crate::policy::seeded_hash;
use crate::search::SearchOutcome;
use crate::shape::Chosen;

impl PlanningPass<'_> {
    /// Returns the best feasible node that the pod can use.
    pub(super) fn best_node(
        &mut self,
        shape: ShapeId,
        to_place: &PodToPlace<'_>,
        failed: &BTreeSet<NodeIndex>,
    ) -> Option<NodeIndex> {
        let tested = Cell::new(0);
        let found = self.find_node(shape, to_place, failed, &tested);
        self.planner.work.nodes_tested += tested.get();
        found
    }

    /// Like [`best_node`](Self::best_node), and counts the tested nodes.
    fn find_node(
        &self,
        shape: ShapeId,
        to_place: &PodToPlace<'_>,
        failed: &BTreeSet<NodeIndex>,
        tested: &Cell<u64>,
    ) -> Option<NodeIndex> {
        let entry = self.planner.shapes.get(shape);
        let reserved_reason = self.reservation.rejection_for(to_place);
        let is_accepted = |node: NodeIndex, n: &Node| {
            self.node_rejection(to_place, node, n, reserved_reason).is_none()
        };
        let is_usable = |node: &NodeIndex| {
            tested.set(tested.get() + 1);
            self.domain.as_ref().is_none_or(|domain| domain.contains(*node))
                && !failed.contains(node)
                && self.node(*node).is_some_and(|n| is_accepted(*node, n))
        };
        // Preemption freed capacity on this node only.
        let nominated = to_place
            .pod
            .nominated_node
            .as_ref()
            .and_then(|name| self.planner.cluster.node_index(name));
        if let Some(node) = nominated.filter(|n| entry.feasibility.is_feasible(*n) && is_usable(n))
        {
            return Some(node);
        }
        let mut ranked = entry.feasibility.ranked();
        if !entry.shape.node_policy().is_randomized() {
            return ranked.map(|(_, node)| node).find(is_usable);
        }
        let seed = self.pod_seed(to_place.pod);
        let names = &self.planner.cluster.nodes;
        let (best, _) = ranked.next()?;
        let equals = entry.feasibility.ranked().take_while(|(rank, _)| rank.0 == best.0);
        let mut hashed: Vec<(u64, NodeIndex)> =
            equals.map(|(_, node)| (seeded_hash(seed, names[node].name.as_str()), node)).collect();
        hashed.sort_unstable();
        let random = hashed.into_iter().map(|(_, node)| node).find(is_usable);
        random.or_else(|| entry.feasibility.ranked().map(|(_, node)| node).find(is_usable))
    }

    /// Returns the devices on a node that is known to be feasible. Each search has the full budget
    /// of a pod, and its steps are charged to `steps`.
    pub(super) fn search_again(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        seed: u64,
        steps: &mut u64,
    ) -> Option<Vec<Vec<Chosen>>> {
        let budget = self.settings.steps_per_pod;
        let (shapes, mut context) = self.planner.search_context();
        let shape = &mut shapes.get_mut(shape).shape;
        let mut search = |seed| {
            let mut left = budget;
            let outcome = feasibility::search(shape, &mut context, node, seed, &mut left);
            *steps = steps.saturating_sub(budget - left);
            match outcome {
                SearchOutcome::Found(chosen) => Some(chosen),
                _ => None,
            }
        };
        // With another seed the search may exhaust the steps; with seed 0 it is known to succeed.
        search(seed).or_else(|| search(0))
    }
}
