//! Keeping a node free for a pod that has waited long: a request for much is not starved by
//! requests for little.
//!
//! As in EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System", JSSPP'95) one pod at a time,
//! the first that has to wait, and nobody who comes before it is kept off. When pods will end is
//! not known here, so a node is kept and not a time: that on which the fewest grants have to end.
//! None is added to it, so it stays that one, or another comes to need even fewer.

use std::sync::Arc;

use tessera_api::reason::NodeReason;

use super::Planner;
use super::place::{Placing, ToPlace};
use super::shapes::ShapeId;
use crate::cluster::{NodeIndex, Reach};
use crate::model::{Node, NodeSelector, Scheduling};
use crate::outcome::{Cause, Kept, Refusal};
use crate::patience::{self, Turn};
use crate::predicate::{self, Room};

/// What a plan keeps free, and for whom it has looked.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    kept: Option<(NodeIndex, Kept)>,
    /// When the turn of the first pod changes that has had none.
    again: Option<i64>,
    /// Steps left for all of it.
    steps: u64,
    /// Pods for which nodes were looked at in vain: others like them are not looked at again.
    in_vain: Vec<(ShapeId, Arc<Scheduling>)>,
}

/// How many grants have to end on a node: of those devices that need the fewest, and in all.
type ToEnd = (u64, u64);

impl Keeping {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, ..Self::default() }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// What is kept, and when that changes if nothing else does.
    pub(super) fn end(self) -> (Option<Kept>, Option<i64>) {
        let until = self.kept.as_ref().map(|(_, kept)| kept.until);
        let again = until.into_iter().chain(self.again).min();
        (self.kept.map(|(_, kept)| kept), again)
    }

    /// Why the pod is to leave alone the node that is kept free; none where it may go there.
    pub(super) fn keeps_off(&self, place: &ToPlace<'_>) -> Option<NodeReason> {
        let (_, kept) = self.kept.as_ref()?;
        let is_there = |nodes: &NodeSelector| nodes.single_node() == Some(kept.node.as_str());
        let is_bound = place.bounds.iter().any(|bound| is_there(&bound.nodes));
        // Preemption has made the room for it there.
        if is_bound || place.pod.nominated.as_ref() == Some(&kept.node) {
            return None;
        }
        // Who cannot look into a namespace learns no names of it.
        let is_named = kept.namespace == place.pod.namespace;
        let pod = is_named.then(|| format!("{}/{}", kept.namespace, kept.name));
        Some(NodeReason::KeptFree { pod })
    }

    /// The node that is kept free.
    pub(super) fn node(&self) -> Option<NodeIndex> {
        self.kept.as_ref().map(|(node, _)| *node)
    }

    fn looked_in_vain(&self, place: &ToPlace<'_>, shape: ShapeId) -> bool {
        let is_like = |(known, scheduling): &(ShapeId, Arc<Scheduling>)| {
            *known == shape && *scheduling == place.pod.scheduling
        };
        place.is_common() && self.in_vain.iter().any(is_like)
    }
}

impl Placing<'_> {
    /// Keeps a node free for a pod that is refused, if it is the first that may have one.
    pub(super) fn keep_for(&mut self, place: &ToPlace<'_>, shape: ShapeId, refusals: &[Refusal]) {
        let Some(patience) = self.settings.patience.filter(|_| self.keeping.kept.is_none()) else {
            return;
        };
        if !waits_for_others(refusals) {
            return;
        }
        let pod = place.pod;
        let first = patience::first_turn(&pod.uid);
        let Turn { is_on, until } = patience::turn(pod.created, self.settings.now, patience, first);
        if !is_on {
            self.keeping.again = self.keeping.again.into_iter().chain([until]).min();
            return;
        }
        if self.keeping.looked_in_vain(place, shape) {
            return;
        }
        match self.node_to_keep(place, shape) {
            Some(node) => {
                let name = self.planner.cluster.nodes[node].name.clone();
                let (namespace, pod_name) = (pod.namespace.clone(), pod.name.clone());
                let kept =
                    Kept { pod: pod.uid.clone(), namespace, name: pod_name, node: name, until };
                self.keeping.kept = Some((node, kept));
            }
            None if place.is_common() => {
                self.keeping.in_vain.push((shape, Arc::clone(&pod.scheduling)));
            }
            None => {}
        }
    }

    /// Of the nodes on which the pod would fit once what others hold is given back, that on which
    /// the fewest grants have to end.
    fn node_to_keep(&mut self, place: &ToPlace<'_>, shape: ShapeId) -> Option<NodeIndex> {
        let known = &self.planner.shapes.get(shape).emptied;
        let cluster = &self.planner.cluster;
        let nodes = cluster
            .by_name()
            .map(|(node, _)| node)
            .filter(|node| !known.is_known_not_to(*node, cluster));
        let nodes: Vec<NodeIndex> = nodes.collect();
        let mut steps = self.keeping.steps;
        let found = self.fewest_to_end(place, shape, &nodes, &mut steps);
        self.keeping.steps = steps;
        found
    }

    fn fewest_to_end(
        &mut self,
        place: &ToPlace<'_>,
        shape: ShapeId,
        nodes: &[NodeIndex],
        steps: &mut u64,
    ) -> Option<NodeIndex> {
        let is_open =
            |n: &Node| predicate::fault(place.pod, &place.bounds, n, Room::GivenBack).is_none();
        let mut ranked = Vec::new();
        for &node in nodes {
            *steps = steps.saturating_sub(1);
            if self.node(node).is_some_and(is_open) {
                let to_end = self.planner.grants_to_end(shape, node, steps)?;
                ranked.push((to_end, self.planner.cluster.nodes[node].order, node));
            }
        }
        ranked.sort_unstable();
        for (_, _, node) in ranked {
            if self.planner.suffices_emptied(shape, node, steps, self.settings.steps_per_pod)? {
                return Some(node);
            }
        }
        None
    }
}

impl Planner {
    fn suffices_emptied(
        &mut self,
        shape: ShapeId,
        node: NodeIndex,
        steps: &mut u64,
        budget: u64,
    ) -> Option<bool> {
        let (shapes, mut ground) = self.parts();
        let entry = shapes.get_mut(shape);
        entry.emptied.suffices(&mut entry.shape, &mut ground, node, steps, budget)
    }

    /// How many grants have to end on the node until it may do for the shape. None = the steps have
    /// not sufficed to tell.
    fn grants_to_end(&mut self, shape: ShapeId, node: NodeIndex, steps: &mut u64) -> Option<ToEnd> {
        let Self { cluster, selections, shapes, .. } = self;
        let name = cluster.nodes[node].name.clone();
        let shape = &mut shapes.get_mut(shape).shape;
        let (reach, interner, features) = cluster.parts(node)?;
        *steps = steps.saturating_sub(reach.candidates.len() as u64);
        if *steps == 0 {
            return None;
        }
        shape.meet_offers(reach.candidates.iter().map(|c| c.offer), interner, features);
        let own: Vec<bool> = reach.pools.iter().map(|pool| pool.is_only_of(&name)).collect();
        let mut grants = Vec::new();
        let mut all = 0;
        for (i, candidate) in reach.candidates.iter().enumerate() {
            let given = grants_of(reach, i);
            let comes_back = own[candidate.pool as usize] && candidate.device().is_ours();
            if comes_back {
                all += given;
            }
            if (comes_back || given == 0) && shape.may_take(candidate, selections, interner, steps)
            {
                grants.push(given);
            }
        }
        grants.sort_unstable();
        let wanted = usize::try_from(shape.wanted()).unwrap_or(usize::MAX);
        Some((grants.iter().take(wanted).sum(), all))
    }
}

fn grants_of(reach: &Reach, candidate: usize) -> u64 {
    u64::from(reach.exclusive[candidate]) + u64::from(reach.shares[candidate])
}

/// Whether the pod waits for nothing but what others hold.
fn waits_for_others(refusals: &[Refusal]) -> bool {
    let is_no_fit = |refusal: &Refusal| matches!(*refusal.cause, Cause::NoFit(_));
    let lacks = |refusal: &Refusal| match &*refusal.cause {
        Cause::NoFit(explanation) => {
            explanation.tallies().any(|(reason, _)| reason.is_held_by_others())
        }
        _ => false,
    };
    refusals.iter().all(is_no_fit) && refusals.iter().any(lacks)
}
