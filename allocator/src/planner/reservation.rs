//! Node reservation: small requests do not starve a large request.
//!
//! As in EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System", JSSPP'95), one pod at a time
//! has a reservation: the first pod that is refused. Pods before it in the order are not affected.
//! The end of running pods is unknown here. So a node is reserved and not a time: the node on which
//! the fewest allocations have to be released. No allocation is added to it. So it stays that node,
//! unless another one comes to need even fewer releases.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_api::reason::{NodeReason, Reason};

use super::Planner;
use super::classes::ClassId;
use super::node_tests::NodeRejections;
use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use super::shape_cache::ShapeId;
use crate::backlog::{OrderedPod, PlanOrder, Queue};
use crate::cluster::{Cluster, FastMap, NameId, NodeIndex, ReachableDevices};
use crate::drained;
use crate::model::{Node, NodeSelector, PendingPod};
use crate::outcome::{Refusal, RefusalCause, ReservedNode};
use crate::predicate::{self, CountedUsage};
use crate::starvation::{self, Window};
use crate::wide_hash::{WideHash, hash_all, mix};

/// Node reservation of a plan.
#[derive(Debug, Default)]
pub(super) struct NodeReservation {
    reserved: Option<Reserved>,
    /// End of the window of a group for which capacity is kept until the plan ends.
    of_group: Option<i64>,
    /// Next start of a reservation window, over the pods that had none open.
    next_change: Option<i64>,
    /// Steps left for all reservation searches.
    steps: u64,
    /// True if they did not suffice: the next plan continues.
    is_cut_off: bool,
    /// Classes without a suitable node: equal pods are not searched again.
    without_node: BTreeSet<ClassId>,
}

/// A reserved node.
#[derive(Debug)]
struct Reserved {
    index: NodeIndex,
    node: ReservedNode,
    /// Place of its pod in the order of planning.
    order: PlanOrder,
    /// Reasons of other pods on it: in the namespace of its pod, and in others. Users without
    /// access to a namespace must not learn names of its objects.
    reasons: [NodeReason; 2],
}

/// Allocations to release on a node: on the devices that need the fewest, and in total.
type Releases = (u64, u64);

/// Results that the nodes of one ranking share.
#[derive(Default)]
struct SharedReleases {
    /// Results of the node predicates, if many nodes are ranked.
    tested: Option<NodeRejections>,
    /// Attributes that decide about releases; `None` if they are not known, or names decide too.
    attributes: Option<Arc<[NameId]>>,
    /// By the state of a node and of its pools.
    releases: FastMap<WideHash, Releases>,
}

impl NodeReservation {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, ..Self::default() }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the reserved node and the time of the next change. `now` is the present time.
    pub(super) fn end(self, now: i64) -> (Option<ReservedNode>, Option<i64>) {
        let until = self.reserved.as_ref().map(|reserved| reserved.node.until);
        let until = until.or(self.of_group);
        let continued = self.is_cut_off.then_some(now);
        let next_change = until.into_iter().chain(self.next_change).chain(continued).min();
        (self.reserved.map(|reserved| reserved.node), next_change)
    }

    /// Has no other reservation made in this plan if capacity is kept for a group, until the end of
    /// its window.
    pub(super) fn keep_for_group(&mut self, until: Option<i64>) {
        self.of_group = self.of_group.or(until);
    }

    /// Returns true if nothing is reserved.
    fn is_free(&self) -> bool {
        self.reserved.is_none() && self.of_group.is_none()
    }

    fn set(&mut self, index: NodeIndex, node: ReservedNode, order: PlanOrder) {
        let pod = Some(format!("{}/{}", node.namespace, node.name));
        let reasons = [NodeReason::Reserved { pod }, NodeReason::Reserved { pod: None }];
        self.reserved = Some(Reserved { index, node, order, reasons });
    }

    /// Returns the reason why the pod may not use the reserved node; `None` if it may.
    pub(super) fn rejection_for(&self, to_place: &PodToPlace<'_>) -> Option<&NodeReason> {
        let Reserved { node: reserved, reasons, .. } = self.reserved.as_ref()?;
        let is_there = |nodes: &NodeSelector| nodes.single_node() == Some(reserved.node.as_str());
        let is_bound = to_place.claim_nodes.iter().any(|claim| is_there(&claim.nodes));
        // Preemption freed the capacity there for this pod.
        if is_bound || to_place.pod.nominated_node.as_ref() == Some(&reserved.node) {
            return None;
        }
        let [named, unnamed] = reasons;
        Some(if reserved.namespace == to_place.pod.namespace { named } else { unnamed })
    }

    /// Returns the reason why a pod that has no turn may not use the reserved node. Pods that come
    /// before that of the reservation may use it.
    pub(super) fn rejection_without_turn(
        &self,
        (order, pod): OrderedPod<'_>,
    ) -> Option<&NodeReason> {
        let is_later = self.reserved.as_ref().is_some_and(|reserved| reserved.order < *order);
        let to_place = PodToPlace::without_claims(pod);
        is_later.then(|| self.rejection_for(&to_place)).flatten()
    }

    /// Returns the reserved node.
    pub(super) fn node(&self) -> Option<NodeIndex> {
        self.reserved.as_ref().map(|reserved| reserved.index)
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
        let pod = to_place.pod;
        let lacks = lacks_held_capacity(refusals.iter().map(|refusal| &*refusal.cause));
        let is_single = lacks && to_place.beside.is_none();
        let Some(until) = is_single.then(|| self.open_window(pod)).flatten() else { return };
        let is_shared = to_place.has_shared_results();
        if is_shared && self.reservation.without_node.contains(&class) {
            return;
        }
        let shape = self.cached_shape(to_place, class);
        match self.node_to_reserve(to_place, class, shape) {
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
                self.reservation.set(node, reserved, PlanOrder::of(pod));
            }
            None if is_shared => {
                self.reservation.without_node.insert(class);
            }
            None => {}
        }
    }

    /// Returns the end of the pod's reservation window if it is open and no node is reserved;
    /// otherwise notes when it opens.
    pub(super) fn open_window(&mut self, pod: &PendingPod) -> Option<i64> {
        let reservation = &mut self.reservation;
        let min_wait = self.settings.reservation_delay.filter(|_| reservation.is_free())?;
        let first = starvation::first_window_length(&pod.uid);
        let Window { is_open, until } =
            starvation::window_at(pod.created, self.settings.now, min_wait, first);
        if !is_open {
            reservation.next_change = reservation.next_change.into_iter().chain([until]).min();
        }
        is_open.then_some(until)
    }

    /// Returns the first pod of the queue after `order` whose window is open, if a node may be
    /// reserved for it. All of them are refused like a pod of `class`.
    pub(super) fn next_to_reserve_for<'q>(
        &mut self,
        queue: &'q Queue,
        order: &PlanOrder,
        class: ClassId,
    ) -> Option<OrderedPod<'q>> {
        let min_wait = self.settings.reservation_delay?;
        let now = self.settings.now;
        let reservation = &mut self.reservation;
        if !reservation.is_free() || reservation.without_node.contains(&class) {
            return None;
        }
        let mut next_change = queue.no_window_before.get().filter(|next| *next > now);
        if next_change.is_none() {
            for (order, pod) in queue.after(order) {
                let first = starvation::first_window_length(&pod.uid);
                let window = starvation::window_at(pod.created, now, min_wait, first);
                if window.is_open {
                    return Some((order, pod));
                }
                next_change = next_change.into_iter().chain([window.until]).min();
            }
            queue.no_window_before.set(next_change);
        }
        reservation.next_change = reservation.next_change.into_iter().chain(next_change).min();
        None
    }

    /// Returns the node with the fewest allocations to release on which the pod would then fit.
    /// `None` also means that the steps did not suffice.
    fn node_to_reserve(
        &mut self,
        to_place: &PodToPlace<'_>,
        class: ClassId,
        shape: ShapeId,
    ) -> Option<NodeIndex> {
        let is_shared = to_place.has_shared_results();
        let known = is_shared.then(|| self.planner.classes.get_mut(class).releases.take());
        let mut ranks = known.flatten().unwrap_or_default();
        let mut steps = self.reservation.steps;
        let is_current = self.update_ranks(&mut ranks, to_place, shape, &mut steps);
        let found = is_current.then(|| self.first_that_fits(&mut ranks, shape, &mut steps));
        self.reservation.steps = steps;
        let found = found.flatten();
        if is_shared {
            self.reservation.is_cut_off |= found.is_none() && !ranks.are_all_excluded();
            self.planner.classes.get_mut(class).releases = Some(ranks);
        }
        found
    }

    /// Ranks the nodes that have changed. Returns false if the steps did not suffice for all.
    fn update_ranks(
        &mut self,
        ranks: &mut ReleaseRanks,
        to_place: &PodToPlace<'_>,
        shape: ShapeId,
        steps: &mut u64,
    ) -> bool {
        ranks.begin_update(&self.planner.cluster);
        let counted = CountedUsage::AfterRelease;
        let tested = self.take_tested_nodes(to_place, counted, ranks.outdated.len());
        let mut shared = SharedReleases { tested, ..SharedReleases::default() };
        let mut is_current = true;
        let mut found = Vec::new();
        while let Some(node) = ranks.outdated.pop_first() {
            let Some(rank) = self.rank_of(node, to_place, shape, &mut shared, steps) else {
                ranks.outdated.insert(node);
                is_current = false;
                break;
            };
            found.push((node, rank));
        }
        ranks.set_all(found);
        self.put_tested_nodes(to_place, counted, shared.tested);
        is_current
    }

    /// Returns the rank of a node; `Some(None)` if the pod cannot use it even after the release,
    /// `None` if the steps did not suffice.
    fn rank_of(
        &mut self,
        node: NodeIndex,
        to_place: &PodToPlace<'_>,
        shape: ShapeId,
        shared: &mut SharedReleases,
        steps: &mut u64,
    ) -> Option<Option<Rank>> {
        let known = &self.planner.shapes.get(shape).drained;
        if known.is_known_infeasible(node, &self.planner.cluster) {
            return Some(None);
        }
        *steps = steps.saturating_sub(1);
        let is_accepted = |n: &Node| {
            predicate::rejection(to_place.pod, &to_place.claim_nodes, n, CountedUsage::AfterRelease)
                .is_none()
        };
        let is_rejected = match &shared.tested {
            Some(tested) => tested.get(node).is_some(),
            None => !self.node(node).is_some_and(is_accepted),
        };
        if is_rejected || self.node(node).is_none() {
            return Some(None);
        }
        let releases = self.planner.releases_needed(shape, node, shared, steps)?;
        Some(Some((releases, self.planner.cluster.order(node), node)))
    }

    /// Returns the first of the ranked nodes on which the shape fits after the release. Forgets
    /// those on which it does not, until they change.
    fn first_that_fits(
        &mut self,
        ranks: &mut ReleaseRanks,
        shape: ShapeId,
        steps: &mut u64,
    ) -> Option<NodeIndex> {
        let limit = drained::step_limit(self.settings);
        while let Some((_, _, node)) = ranks.first() {
            if self.planner.fits_if_drained(shape, node, steps, limit)? {
                return Some(node);
            }
            ranks.set(node, None);
        }
        None
    }
}

/// Nodes by the allocations to release, then by name.
type Rank = (Releases, u64, NodeIndex);

/// The ranks of all nodes for a class of pods; only nodes that have changed are ranked again.
#[derive(Debug, Default)]
pub(super) struct ReleaseRanks {
    ranked: BTreeSet<Rank>,
    of_node: Vec<Option<Rank>>,
    /// Nodes to rank again.
    outdated: BTreeSet<NodeIndex>,
    /// Time up to which changed nodes are included in `outdated`; `None` if no node is.
    until: Option<u64>,
    /// Number of times that the nodes were numbered in their order.
    reordered: u64,
}

impl ReleaseRanks {
    fn begin_update(&mut self, cluster: &Cluster) {
        if self.reordered != cluster.reordered() {
            *self = Self { reordered: cluster.reordered(), ..Self::default() };
        }
        match self.until.and_then(|until| cluster.touched_since(until)) {
            Some(touched) => self.outdated.extend(touched),
            None => self.outdated.extend(0..cluster.nodes.len()),
        }
        self.until = Some(cluster.last_touch());
    }

    fn set_all(&mut self, ranks: Vec<(NodeIndex, Option<Rank>)>) {
        if !self.ranked.is_empty() {
            return ranks.into_iter().for_each(|(node, rank)| self.set(node, rank));
        }
        // Building the set at once takes a tenth of the time of single insertions.
        self.ranked = ranks.iter().filter_map(|(_, rank)| *rank).collect();
        let nodes = ranks.iter().map(|(node, _)| node + 1).max().unwrap_or(0);
        self.of_node.resize(self.of_node.len().max(nodes), None);
        ranks.into_iter().for_each(|(node, rank)| self.of_node[node] = rank);
    }

    fn set(&mut self, node: NodeIndex, rank: Option<Rank>) {
        if self.of_node.len() <= node {
            self.of_node.resize(node + 1, None);
        }
        if let Some(old) = std::mem::replace(&mut self.of_node[node], rank) {
            self.ranked.remove(&old);
        }
        self.ranked.extend(rank);
    }

    fn first(&self) -> Option<Rank> {
        self.ranked.first().copied()
    }

    /// Returns true if the pods fit on no node, whatever is released.
    fn are_all_excluded(&self) -> bool {
        self.outdated.is_empty() && self.ranked.is_empty()
    }

    /// Returns the number of nodes that ranks are kept for.
    pub(super) fn len(&self) -> usize {
        self.of_node.len()
    }
}

impl Planner {
    fn fits_if_drained(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        steps: &mut u64,
        limit: u64,
    ) -> Option<bool> {
        let (shapes, mut context) = self.search_context();
        let entry = shapes.get_mut(shape);
        entry.drained.would_fit(&mut entry.shape, &mut context, node, steps, limit)
    }

    /// Counts the allocations to release until the node may suffice. `None` means that the steps
    /// did not suffice.
    fn releases_needed(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        shared: &mut SharedReleases,
        steps: &mut u64,
    ) -> Option<Releases> {
        let Self { cluster, selections, shapes, .. } = self;
        let shape = &mut shapes.get_mut(shape).shape;
        if *steps == 0 {
            return None;
        }
        if shared.attributes.is_none() {
            shared.attributes = shape.decisive_attributes(selections, &mut cluster.interner);
        }
        let (reachable, state, interner, features) =
            cluster.search_inputs_with_state(node, shared.attributes.as_deref())?;
        let is_own = &reachable.is_own;
        let of_pools = hash_all(is_own.iter().map(|own| u128::from(*own)));
        let key = state.map(|state| mix(state.node(), of_pools));
        if let Some(known) = key.and_then(|key| shared.releases.get(&key)) {
            return Some(*known);
        }
        *steps = steps.saturating_sub(reachable.candidates.len() as u64);
        shape.resolve_profiles(reachable.candidates.iter().map(|c| c.profile), interner, features);
        let mut counts = Vec::new();
        let mut all = 0;
        for (i, candidate) in reachable.candidates.iter().enumerate() {
            let allocations = allocation_count(reachable, i);
            let is_releasable =
                is_own[candidate.pool as usize] && candidate.device().is_allocatable();
            if is_releasable {
                all += allocations;
            }
            if (is_releasable || allocations == 0)
                && shape.may_serve(candidate, selections, interner, steps)
            {
                counts.push(allocations);
            }
            if *steps == 0 {
                return None;
            }
        }
        counts.sort_unstable();
        let wanted = usize::try_from(shape.device_count()).unwrap_or(usize::MAX);
        let releases = (counts.iter().take(wanted).sum(), all);
        shared.releases.extend(key.map(|key| (key, releases)));
        Some(releases)
    }
}

fn allocation_count(reachable: &ReachableDevices, candidate: usize) -> u64 {
    u64::from(reachable.exclusive[candidate]) + u64::from(reachable.shares[candidate])
}

/// Returns true if another pod holds the missing capacity, or the node that may have it.
fn is_held(reason: &Reason) -> bool {
    reason.is_contended() || matches!(reason, Reason::Node(NodeReason::Reserved { .. }))
}

/// Returns true if a pod with these causes lacks only capacity that others hold.
pub(super) fn lacks_held_capacity<'c>(causes: impl Iterator<Item = &'c RefusalCause>) -> bool {
    let mut is_contended = false;
    for cause in causes {
        let RefusalCause::NoFit(explanation) = cause else { return false };
        is_contended |= explanation.totals().keys().any(is_held);
    }
    is_contended
}
