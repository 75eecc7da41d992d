//! Preemption: the pods of lower priority to evict so that a pod gets its devices.
//!
//! Pods are evicted as a whole, from one node. A claim is free once all pods that use it are gone.
//! On each node, the pod is planned as if all pods of lower priority were gone. If it fits, those
//! that need not go stay, the most important first. Of all nodes, the one is chosen whose victims
//! are the least loss: the lowest highest priority, then the fewest pods, the least device memory,
//! the youngest.
//!
//! Quotas count as they are: an eviction makes no room in a quota.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{NodeName, capacity};
use tessera_api::quantity::Quantity;

use crate::model::{
    ClusterSnapshot, DeviceId, DeviceResult, NameMap, Node, NodeChoice, PendingPod, PodUid, Slice,
    Usage,
};
use crate::outcome::Decision;
use crate::plan::plan;
use crate::settings::PlanSettings;

/// A pod on a node that uses allocated claims.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// UID of the pod.
    pub pod: PodUid,
    /// `spec.priority`.
    pub priority: i32,
    /// Creation time, in seconds since the epoch.
    pub created: i64,
    /// It is being deleted: what it holds becomes free without an eviction.
    pub is_ending: bool,
    /// Its resource requests that are counted on the node.
    pub requests: NameMap<Quantity>,
}

/// An allocated claim.
#[derive(Debug, Clone, PartialEq)]
pub struct HeldClaim {
    /// All pods that use it or wait for it.
    pub users: BTreeSet<PodUid>,
    /// Its devices.
    pub results: Vec<DeviceResult>,
}

/// The pods of a node that use allocated claims, and these claims.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeHolders {
    /// The pods.
    pub pods: Vec<Holder>,
    /// The claims.
    pub claims: Vec<HeldClaim>,
}

/// The result of [`preempt`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preemption {
    /// The devices that the pod gets after the evictions.
    pub decision: Decision,
    /// The pods to evict, the least important first. Empty if pods that are ending make the room.
    pub victims: Vec<PodUid>,
}

/// Returns the evictions after which the pod fits, with the least loss; `None` if there are none.
///
/// Only pods with a strictly lower priority are victims. The cost is one plan of one node for each
/// node with such pods, and two more for each such pod of a node on which the pod would fit.
pub fn preempt(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &BTreeMap<NodeName, NodeHolders>,
    settings: PlanSettings,
) -> Option<Preemption> {
    let settings = PlanSettings { reservation_delay: None, ..settings };
    let slices = SlicesByNode::new(snapshot);
    let nodes = holders.iter().filter_map(|(name, holders)| {
        let node = snapshot.nodes.get(name)?;
        Some(NodeTrial { snapshot, slices: &slices, node, holders, pod, settings })
    });
    let preemptions = nodes.filter_map(|trial| trial.preempt());
    preemptions.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, preemption)| preemption)
}

/// The loss of a preemption. Smaller is better.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Loss {
    highest_priority: Option<i32>,
    victims: usize,
    memory: Quantity,
    /// Creation of the oldest victim.
    oldest: Reverse<i64>,
}

/// Slices by the node that they belong to.
struct SlicesByNode<'s> {
    of_node: BTreeMap<&'s NodeName, Vec<(&'s String, &'s Arc<Slice>)>>,
    others: Vec<(&'s String, &'s Arc<Slice>)>,
}

impl<'s> SlicesByNode<'s> {
    fn new(snapshot: &'s ClusterSnapshot) -> Self {
        let mut sorted = Self { of_node: BTreeMap::new(), others: Vec::new() };
        for (name, slice) in &snapshot.slices {
            match &slice.nodes {
                NodeChoice::Node(node) => {
                    sorted.of_node.entry(node).or_default().push((name, slice));
                }
                _ => sorted.others.push((name, slice)),
            }
        }
        sorted
    }

    fn reachable_from(&self, node: &NodeName) -> BTreeMap<String, Arc<Slice>> {
        let own = self.of_node.get(node).into_iter().flatten();
        let all = own.chain(&self.others);
        all.map(|(name, slice)| ((*name).clone(), Arc::clone(slice))).collect()
    }
}

/// The search for victims on one node.
struct NodeTrial<'t> {
    snapshot: &'t ClusterSnapshot,
    slices: &'t SlicesByNode<'t>,
    node: &'t Arc<Node>,
    holders: &'t NodeHolders,
    pod: &'t PendingPod,
    settings: PlanSettings,
}

impl NodeTrial<'_> {
    fn preempt(&self) -> Option<(Loss, Preemption)> {
        let ending = self.holders.pods.iter().filter(|holder| holder.is_ending);
        let ending: BTreeSet<&PodUid> = ending.map(|holder| &holder.pod).collect();
        let is_lower = |holder: &&Holder| !holder.is_ending && holder.priority < self.pod.priority;
        let mut candidates: Vec<&Holder> = self.holders.pods.iter().filter(is_lower).collect();
        if candidates.is_empty() && ending.is_empty() {
            return None;
        }
        let base = self.one_node();
        let mut all_gone = ending.clone();
        all_gone.extend(candidates.iter().map(|holder| &holder.pod));
        let first = self.decide(&base, &all_gone)?;
        let memory: BTreeMap<&PodUid, Quantity> = candidates
            .iter()
            .map(|holder| (&holder.pod, self.memory(&base, &[holder], &all_gone)))
            .collect();
        let memory_of = |holder: &Holder| memory[&holder.pod];
        // The most important first. Of equal ones, to keep the smallest first evicts few large
        // pods, and to keep the largest first evicts small ones.
        candidates
            .sort_by_key(|one| (Reverse(one.priority), memory_of(one), one.created, &one.pod));
        let few = self.spare(&base, &candidates, &ending, first.clone());
        candidates.sort_by_key(|one| {
            (Reverse(one.priority), Reverse(memory_of(one)), one.created, &one.pod)
        });
        let small = self.spare(&base, &candidates, &ending, first);
        [few, small].into_iter().min_by(|(a, _), (b, _)| a.cmp(b))
    }

    /// Returns the candidates that have to go, where each in this order stays if the pod fits
    /// without its eviction. `decision` is the one without all candidates.
    fn spare(
        &self,
        base: &ClusterSnapshot,
        candidates: &[&Holder],
        ending: &BTreeSet<&PodUid>,
        mut decision: Decision,
    ) -> (Loss, Preemption) {
        let mut gone = ending.clone();
        gone.extend(candidates.iter().map(|holder| &holder.pod));
        let mut victims = Vec::new();
        for holder in candidates {
            gone.remove(&holder.pod);
            match self.decide(base, &gone) {
                Some(other) => decision = other,
                None => {
                    gone.insert(&holder.pod);
                    victims.push(*holder);
                }
            }
        }
        victims.reverse();
        let loss = Loss {
            highest_priority: victims.iter().map(|victim| victim.priority).max(),
            victims: victims.len(),
            memory: self.memory(base, &victims, &gone),
            oldest: Reverse(victims.iter().map(|victim| victim.created).min().unwrap_or(i64::MAX)),
        };
        let victims = victims.into_iter().map(|holder| holder.pod.clone()).collect();
        (loss, Preemption { decision, victims })
    }

    /// Returns the cluster with this node only.
    fn one_node(&self) -> ClusterSnapshot {
        let slices = self.slices.reachable_from(&self.node.name);
        let mut usage = Usage::default();
        for slice in slices.values() {
            for device in &slice.devices {
                let id = DeviceId { pool: slice.pool.clone(), device: device.name.clone() };
                if let Some(used) = self.snapshot.usage.get(&id) {
                    usage.set(&id, Some(used.clone()));
                }
            }
        }
        let quotas = self.snapshot.quotas.get_key_value(&self.pod.namespace);
        ClusterSnapshot {
            nodes: [(self.node.name.clone(), Arc::clone(self.node))].into(),
            slices,
            classes: self.snapshot.classes.clone(),
            usage,
            quotas: quotas
                .map(|(name, states)| (name.clone(), states.clone()))
                .into_iter()
                .collect(),
            topology: Arc::clone(&self.snapshot.topology),
        }
    }

    /// Plans the pod as if these pods were gone.
    fn decide(&self, base: &ClusterSnapshot, gone: &BTreeSet<&PodUid>) -> Option<Decision> {
        let mut usage = base.usage.clone();
        self.freed(gone).for_each(|claim| usage.remove(&claim.results));
        let mut node = Node::clone(self.node);
        for holder in self.holders.pods.iter().filter(|holder| gone.contains(&holder.pod)) {
            subtract(&mut node.used, &holder.requests);
            subtract(&mut node.releasable, &holder.requests);
        }
        let nodes = [(self.node.name.clone(), Arc::new(node))].into();
        let snapshot = ClusterSnapshot { nodes, usage, ..base.clone() };
        plan(&snapshot, std::slice::from_ref(self.pod), self.settings).decisions.pop()
    }

    /// Returns the claims that nothing uses once these pods are gone.
    fn freed<'f>(&'f self, gone: &'f BTreeSet<&PodUid>) -> impl Iterator<Item = &'f HeldClaim> {
        let is_free = |claim: &&HeldClaim| claim.users.iter().all(|user| gone.contains(user));
        self.holders.claims.iter().filter(is_free)
    }

    /// Returns the memory of the victims' claims that nothing uses once these pods are gone.
    fn memory(
        &self,
        base: &ClusterSnapshot,
        victims: &[&Holder],
        gone: &BTreeSet<&PodUid>,
    ) -> Quantity {
        let memory = |result: &DeviceResult| match result.shared {
            true => result.consumed.get(capacity::MEMORY).copied(),
            false => memory_of(base, &result.device),
        };
        let is_of_victim =
            |claim: &&HeldClaim| victims.iter().any(|victim| claim.users.contains(&victim.pod));
        let results = self.freed(gone).filter(is_of_victim).flat_map(|claim| &claim.results);
        let sum = |a: Quantity, b: Quantity| a.checked_add(b).unwrap_or(a);
        results.filter_map(memory).fold(Quantity::ZERO, sum)
    }
}

/// Returns the memory of a device.
fn memory_of(snapshot: &ClusterSnapshot, id: &DeviceId) -> Option<Quantity> {
    let slices = snapshot.slices.values().filter(|slice| slice.pool == id.pool);
    let mut devices = slices.flat_map(|slice| &slice.devices);
    let device = devices.find(|device| device.name == id.device)?;
    device.capacity.get(capacity::MEMORY).map(|memory| memory.value)
}

fn subtract(sums: &mut NameMap<Quantity>, amounts: &NameMap<Quantity>) {
    for (name, amount) in amounts {
        if let Some(sum) = sums.get_mut(name) {
            *sum = sum.saturating_sub(*amount);
        }
    }
}
