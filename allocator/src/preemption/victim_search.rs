//! The search for victims for a pod or a group, node by node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::NodeName;

use super::{Loss, NodeHolders, NodePreemption, Preemption, node_without};
use crate::model::{ClusterSnapshot, PendingPod, PodUid};
use crate::planner::{ClassId, Planner};
use crate::policy::Policy;
use crate::settings::PlanSettings;

/// The most kinds of pods in a group, each of which is searched for on all nodes.
const MAX_KINDS: usize = 4;

/// Tries pods on a node: returns the evictions after which these pods fit there as one group, where
/// some pods are evicted in any case.
pub type Trial<'t> =
    dyn FnMut(&NodeName, &PendingPod, &BTreeSet<PodUid>) -> Option<NodePreemption> + 't;

/// A search for the pods to evict so that a pod, or all pods of a group, get their devices.
///
/// The owner [visits](Self::visit) nodes, at best all, and then has the pods
/// [placed](Self::place_next) one after the other.
#[derive(Debug)]
pub struct VictimSearch {
    group: PendingPod,
    /// The pods without a place, those of one kind after the other. The last one is the next.
    left: Vec<(ClassId, PendingPod)>,
    /// The pods with a place, as one group on each node.
    places: BTreeMap<NodeName, PendingPod>,
    /// Pods to evict for them, in the order of their choice.
    victims: Vec<PodUid>,
    /// The set of `victims`.
    evicted: BTreeSet<PodUid>,
    /// The nodes on which the next pod would fit when they were visited.
    candidates: BTreeSet<(Loss, NodeName)>,
}

/// The progress of a [`VictimSearch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchProgress {
    /// A pod has a place, or a candidate is none any more.
    Continues,
    /// The next pod is of another kind: nodes are to be visited for it.
    OtherKind,
    /// All pods have a place.
    Complete,
    /// The next pod fits on no node that was visited.
    Failed,
}

impl VictimSearch {
    /// Begins a search for a pod, or for all pods of its group. None for a group of more than four
    /// kinds of pods: of different requests or constraints.
    pub fn new(group: &PendingPod, policy: Policy) -> Option<Self> {
        let mut classes = Planner::default();
        let mut kinds: Vec<ClassId> = Vec::new();
        let mut left = Vec::new();
        for pod in group.members() {
            let kind = classes.class_of_all(pod, policy);
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
            left.push((kind, PendingPod { together_with: Vec::new(), ..pod.clone() }));
        }
        left.sort_by_key(|(kind, _)| kinds.iter().position(|one| one == kind));
        left.reverse();
        (kinds.len() <= MAX_KINDS).then(|| Self {
            group: group.clone(),
            left,
            places: BTreeMap::new(),
            victims: Vec::new(),
            evicted: BTreeSet::new(),
            candidates: BTreeSet::new(),
        })
    }

    /// Returns the pod, with those that are decided together with it.
    pub fn group(&self) -> &PendingPod {
        &self.group
    }

    /// Returns the nodes with a place.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.places.keys()
    }

    /// Returns true if further visits are of little use: this many nodes more than there are pods
    /// of the kind are candidates.
    pub fn has_candidates(&self, spare: usize) -> bool {
        let kind = self.left.last().map(|(kind, _)| *kind);
        let of_kind = self.left.iter().rev().take_while(|(one, _)| Some(*one) == kind).count();
        self.candidates.len() >= spare + of_kind.saturating_sub(1)
    }

    /// Tries the next pod on a node.
    pub fn visit(&mut self, node: &NodeName, trial: &mut Trial<'_>) {
        let found = self.pods_on(node).and_then(|pods| trial(node, &pods, &self.evicted));
        if let Some(NodePreemption { loss, .. }) = found {
            self.candidates.insert((loss, node.clone()));
        }
    }

    /// Gives the next pod the place with the least loss, if the node is as it was when it was
    /// visited.
    pub fn place_next(&mut self, trial: &mut Trial<'_>) -> SearchProgress {
        let Some((_, node)) = self.candidates.pop_first() else { return SearchProgress::Failed };
        let Some(pods) = self.pods_on(&node) else { return SearchProgress::Complete };
        let Some(found) = trial(&node, &pods, &self.evicted) else {
            return SearchProgress::Continues;
        };
        if self.candidates.first().is_some_and(|(next, _)| *next < found.loss) {
            self.candidates.insert((found.loss, node));
            return SearchProgress::Continues;
        }
        self.places.insert(node.clone(), pods);
        self.evicted.extend(found.preemption.victims.iter().cloned());
        self.victims.extend(found.preemption.victims);
        let placed = self.left.pop().map(|(kind, _)| kind);
        let next = self.left.last().map(|(kind, _)| *kind);
        if next.is_none() {
            return SearchProgress::Complete;
        }
        if next != placed {
            self.candidates.clear();
            return SearchProgress::OtherKind;
        }
        self.visit(&node, trial);
        SearchProgress::Continues
    }

    /// Returns the pods with a place on the node and the next one; none if all have a place.
    fn pods_on(&self, node: &NodeName) -> Option<PendingPod> {
        let (_, next) = self.left.last()?;
        let Some(placed) = self.places.get(node) else { return Some(next.clone()) };
        let mut pods = placed.clone();
        pods.together_with.push(next.clone());
        Some(pods)
    }

    /// Returns the evictions of a complete search, if all pods fit on the nodes with a place once
    /// the victims are gone. `snapshot` has these nodes at least, and `holders` their pods.
    pub fn outcome(
        self,
        snapshot: &ClusterSnapshot,
        holders: &BTreeMap<NodeName, NodeHolders>,
        settings: PlanSettings,
    ) -> Option<Preemption> {
        let Self { group, places, victims, evicted, .. } = self;
        let mut after = snapshot.clone();
        after.nodes.retain(|name, _| places.contains_key(name));
        let mut freed = Vec::new();
        for (name, node) in &mut after.nodes {
            let Some(holders) = holders.get(name).cloned() else { continue };
            let holders = holders.with_ending(&evicted);
            let ending = holders.pods.iter().filter(|holder| holder.is_ending);
            let gone: BTreeSet<&PodUid> = ending.map(|holder| &holder.pod).collect();
            for held in holders.freed(&gone) {
                after.usage.remove(&held.results);
                freed.push(held.claim.clone());
            }
            *node = Arc::new(node_without(node, &holders, |holder| holder.is_ending));
        }
        let settings = PlanSettings { reservation_delay: None, ..settings };
        let decisions = crate::plan::plan(&after, std::slice::from_ref(&group), settings).decisions;
        (!decisions.is_empty()).then_some(Preemption { decisions, victims, freed })
    }
}
