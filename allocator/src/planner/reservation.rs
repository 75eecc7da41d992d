//! Node reservation: small requests do not starve a large request.
//!
//! As in EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System", JSSPP'95), one pod at a time
//! has a reservation: the first pod that is refused. Pods before it in the order are not affected.
//! The end of running pods is unknown here. So a node is reserved and not a time: the node on which
//! the fewest allocations have to be released. No allocation is added to it. So it stays that node,
//! unless another one comes to need even fewer releases.

use std::collections::BTreeSet;

use tessera_api::reason::NodeReason;

use super::Planner;
use super::classes::ClassId;
use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use super::shape_cache::ShapeId;
use crate::cluster::{NodeIndex, ReachableDevices};
use crate::model::{Node, NodeSelector};
use crate::outcome::{Refusal, RefusalCause, ReservedNode};
use crate::predicate::{self, CountedUsage};
use crate::starvation::{self, Window};

/// Node reservation of a plan.
#[derive(Debug, Default)]
pub(super) struct NodeReservation {
    reserved: Option<(NodeIndex, ReservedNode)>,
    /// Next start of a reservation window, over the pods that had none open.
    next_change: Option<i64>,
    /// Steps left for all reservation searches.
    steps: u64,
    /// Classes without a suitable node: equal pods are not searched again.
    without_node: BTreeSet<ClassId>,
}

/// Allocations to release on a node: on the devices that need the fewest, and in total.
type Releases = (u64, u64);

impl NodeReservation {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, ..Self::default() }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the reserved node and the time of the next change.
    pub(super) fn end(self) -> (Option<ReservedNode>, Option<i64>) {
        let until = self.reserved.as_ref().map(|(_, reserved)| reserved.until);
        let next_change = until.into_iter().chain(self.next_change).min();
        (self.reserved.map(|(_, reserved)| reserved), next_change)
    }

    /// Returns the reason why the pod may not use the reserved node; `None` if it may.
    pub(super) fn rejection_for(&self, to_place: &PodToPlace<'_>) -> Option<NodeReason> {
        let (_, reserved) = self.reserved.as_ref()?;
        let is_there = |nodes: &NodeSelector| nodes.single_node() == Some(reserved.node.as_str());
        let is_bound = to_place.claim_nodes.iter().any(|claim| is_there(&claim.nodes));
        // Preemption freed the capacity there for this pod.
        if is_bound || to_place.pod.nominated_node.as_ref() == Some(&reserved.node) {
            return None;
        }
        // Users without access to a namespace must not learn names of its objects.
        let is_named = reserved.namespace == to_place.pod.namespace;
        let pod = is_named.then(|| format!("{}/{}", reserved.namespace, reserved.name));
        Some(NodeReason::Reserved { pod })
    }

    /// Returns the reserved node.
    pub(super) fn node(&self) -> Option<NodeIndex> {
        self.reserved.as_ref().map(|(node, _)| *node)
    }
}

impl PlanningPass<'_> {
    /// Reserves a node for a refused pod if none is reserved and its window is open.
    pub(super) fn reserve_for(
        &mut self,
        to_place: &PodToPlace<'_>,
        class: ClassId,
        refusals: &[Refusal],
    ) {
        let Some(min_wait) =
            self.settings.reservation_delay.filter(|_| self.reservation.reserved.is_none())
        else {
            return;
        };
        if !lacks_held_capacity(refusals) {
            return;
        }
        let pod = to_place.pod;
        let first = starvation::first_window_length(&pod.uid);
        let Window { is_open, until } =
            starvation::window_at(pod.created, self.settings.now, min_wait, first);
        if !is_open {
            self.reservation.next_change =
                self.reservation.next_change.into_iter().chain([until]).min();
            return;
        }
        let is_shared = to_place.has_shared_results();
        if is_shared && self.reservation.without_node.contains(&class) {
            return;
        }
        let shape = self.cached_shape(to_place, class);
        match self.node_to_reserve(to_place, shape) {
            Some(node) => {
                let name = self.planner.cluster.nodes[node].name.clone();
                let (namespace, pod_name) = (pod.namespace.clone(), pod.name.clone());
                let reserved = ReservedNode {
                    pod: pod.uid.clone(),
                    namespace,
                    name: pod_name,
                    node: name,
                    until,
                };
                self.reservation.reserved = Some((node, reserved));
            }
            None if is_shared => {
                self.reservation.without_node.insert(class);
            }
            None => {}
        }
    }

    /// Returns the node with the fewest allocations to release on which the pod would then fit.
    fn node_to_reserve(&mut self, to_place: &PodToPlace<'_>, shape: ShapeId) -> Option<NodeIndex> {
        let known = &self.planner.shapes.get(shape).drained;
        let cluster = &self.planner.cluster;
        let nodes = cluster
            .by_name()
            .map(|(node, _)| node)
            .filter(|node| !known.is_known_infeasible(*node, cluster));
        let nodes: Vec<NodeIndex> = nodes.collect();
        let mut steps = self.reservation.steps;
        let found = self.node_with_fewest_releases(to_place, shape, &nodes, &mut steps);
        self.reservation.steps = steps;
        found
    }

    fn node_with_fewest_releases(
        &mut self,
        to_place: &PodToPlace<'_>,
        shape: ShapeId,
        nodes: &[NodeIndex],
        steps: &mut u64,
    ) -> Option<NodeIndex> {
        let is_accepted = |n: &Node| {
            predicate::rejection(to_place.pod, &to_place.claim_nodes, n, CountedUsage::AfterRelease)
                .is_none()
        };
        let mut ranked = Vec::new();
        for &node in nodes {
            *steps = steps.saturating_sub(1);
            if self.node(node).is_some_and(is_accepted) {
                let releases = self.planner.releases_needed(shape, node, steps)?;
                ranked.push((releases, self.planner.cluster.nodes[node].order, node));
            }
        }
        ranked.sort_unstable();
        for (_, _, node) in ranked {
            if self.planner.fits_if_drained(shape, node, steps, self.settings.steps_per_pod)? {
                return Some(node);
            }
        }
        None
    }
}

impl Planner {
    fn fits_if_drained(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        steps: &mut u64,
        budget: u64,
    ) -> Option<bool> {
        let (shapes, mut context) = self.search_context();
        let entry = shapes.get_mut(shape);
        entry.drained.would_fit(&mut entry.shape, &mut context, node, steps, budget)
    }

    /// Counts the allocations to release until the node may suffice. `None` means that the steps
    /// did not suffice.
    fn releases_needed(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        steps: &mut u64,
    ) -> Option<Releases> {
        let Self { cluster, selections, shapes, .. } = self;
        let name = cluster.nodes[node].name.clone();
        let shape = &mut shapes.get_mut(shape).shape;
        let (reachable, interner, features) = cluster.search_inputs(node)?;
        *steps = steps.saturating_sub(reachable.candidates.len() as u64);
        if *steps == 0 {
            return None;
        }
        shape.resolve_profiles(reachable.candidates.iter().map(|c| c.profile), interner, features);
        let own: Vec<bool> = reachable.pools.iter().map(|pool| pool.is_only_of(&name)).collect();
        let mut counts = Vec::new();
        let mut all = 0;
        for (i, candidate) in reachable.candidates.iter().enumerate() {
            let allocations = allocation_count(reachable, i);
            let is_releasable = own[candidate.pool as usize] && candidate.device().is_allocatable();
            if is_releasable {
                all += allocations;
            }
            if (is_releasable || allocations == 0)
                && shape.may_serve(candidate, selections, interner, steps)
            {
                counts.push(allocations);
            }
        }
        counts.sort_unstable();
        let wanted = usize::try_from(shape.device_count()).unwrap_or(usize::MAX);
        Some((counts.iter().take(wanted).sum(), all))
    }
}

fn allocation_count(reachable: &ReachableDevices, candidate: usize) -> u64 {
    u64::from(reachable.exclusive[candidate]) + u64::from(reachable.shares[candidate])
}

/// Returns true if the pod lacks only capacity that others hold.
fn lacks_held_capacity(refusals: &[Refusal]) -> bool {
    let is_no_fit = |refusal: &Refusal| matches!(*refusal.cause, RefusalCause::NoFit(_));
    let lacks = |refusal: &Refusal| match &*refusal.cause {
        RefusalCause::NoFit(explanation) => {
            explanation.totals().keys().any(tessera_api::reason::Reason::is_contended)
        }
        _ => false,
    };
    refusals.iter().all(is_no_fit) && refusals.iter().any(lacks)
}
