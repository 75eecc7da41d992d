//! Preemption: the pods of lower priority to evict so that a pod gets its devices.
//!
//! Pods are evicted as a whole, from one node, and the pods of a group all together, wherever they
//! are: without one of them, the others would only hold their devices. A claim is free once all
//! pods that use it are gone. On each node, the pod is planned as if all pods of lower priority
//! were gone. If it fits, those that need not go stay, the most important first. Of all nodes, the
//! one is chosen whose victims are the least loss: the lowest highest priority, then the fewest
//! pods, the least device memory, the youngest.
//!
//! Quotas count as they are: an eviction makes no room in a quota.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{ClaimUid, NodeName, capacity};
use tessera_api::quantity::Quantity;

use crate::features::FeatureGates;
use crate::model::{
    ClusterSnapshot, DeviceId, DeviceResult, NameMap, Node, NodeChoice, PendingPod, PodUid, PoolId,
    Slice, Usage,
};
use crate::outcome::Decision;
use crate::planner::Planner;
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
    /// It is never a victim: no eviction would end it, or one was refused.
    pub is_fixed: bool,
    /// Its resource requests that are counted on the node.
    pub requests: NameMap<Quantity>,
    /// Its group, if it is in one with other pods.
    pub group: Option<Arc<HolderGroup>>,
}

/// The pods of a group that hold devices on any node, without those that are ending.
#[derive(Debug, Clone, PartialEq)]
pub struct HolderGroup {
    /// UIDs of the pods.
    pub members: BTreeSet<PodUid>,
    /// The highest `spec.priority` of them.
    pub priority: i32,
    /// Creation time of the oldest, in seconds since the epoch.
    pub created: i64,
}

/// Pods of a node that are evicted together: one, or those of a group.
struct Unit<'h> {
    holders: Vec<&'h Holder>,
    /// Memory that becomes free on the node with all other units gone.
    memory: Quantity,
}

impl<'h> Unit<'h> {
    /// Returns the units that may be evicted for `pod`.
    fn all_for(pod: &PendingPod, holders: &'h [Holder]) -> Vec<Self> {
        let mut units: BTreeMap<&PodUid, Vec<&Holder>> = BTreeMap::new();
        for holder in holders.iter().filter(|holder| !holder.is_ending) {
            let first = holder.group.as_ref().and_then(|group| group.members.first());
            units.entry(first.unwrap_or(&holder.pod)).or_default().push(holder);
        }
        let units = units.into_values().map(|holders| Self { holders, memory: Quantity::ZERO });
        units.filter(|unit| unit.is_victim_for(pod)).collect()
    }

    fn group(&self) -> Option<&'h HolderGroup> {
        self.holders.first().and_then(|holder| holder.group.as_deref())
    }

    fn is_victim_for(&self, pod: &PendingPod) -> bool {
        self.priority() < pod.priority && !self.holders.iter().any(|holder| holder.is_fixed)
    }

    fn priority(&self) -> i32 {
        let here = self.holders.iter().map(|holder| holder.priority).max();
        let of_group = self.group().map(|group| group.priority);
        here.max(of_group).unwrap_or(i32::MIN)
    }

    fn created(&self) -> i64 {
        let here = self.holders.iter().map(|holder| holder.created);
        let of_group = self.group().map(|group| group.created);
        here.chain(of_group).min().unwrap_or(i64::MAX)
    }

    /// Returns the pods of it on the node.
    fn pods(&self) -> impl Iterator<Item = &'h PodUid> {
        self.holders.iter().map(|holder| &holder.pod)
    }

    /// Returns all pods that are evicted, those of the node first.
    fn victims(&self) -> Vec<PodUid> {
        let here: BTreeSet<&PodUid> = self.pods().collect();
        let of_group = self.group().into_iter().flat_map(|group| &group.members);
        let elsewhere = of_group.filter(|member| !here.contains(member));
        self.pods().chain(elsewhere).cloned().collect()
    }
}

/// An allocated claim.
#[derive(Debug, Clone, PartialEq)]
pub struct HeldClaim {
    /// Its UID.
    pub claim: ClaimUid,
    /// All pods that use it or wait for it.
    pub users: BTreeSet<PodUid>,
    /// It stays allocated when its pods are gone: a PodGroup has reserved it.
    pub is_kept: bool,
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
    /// The pods to evict, the least important first, with those of their groups on other nodes.
    /// Empty if pods that are ending make the room.
    pub victims: Vec<PodUid>,
    /// The claims that are free once the victims, and the pods that are ending, are gone.
    pub freed: Vec<ClaimUid>,
}

/// Returns the evictions after which the pod fits, with the least loss; `None` if there are none.
///
/// Only pods with a strictly lower priority are victims, and of groups only those whose pods all
/// have one. The cost is one plan of one node for each
/// node with such pods, and two more for each such pod of a node on which the pod would fit.
pub fn preempt(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &BTreeMap<NodeName, NodeHolders>,
    settings: PlanSettings,
) -> Option<Preemption> {
    let found = candidates(snapshot, pod, holders, settings);
    found.min_by(|a, b| a.loss.cmp(&b.loss)).map(|candidate| candidate.preemption)
}

/// Returns the preemption on each node that has one.
pub(crate) fn candidates<'c>(
    snapshot: &'c ClusterSnapshot,
    pod: &'c PendingPod,
    holders: &'c BTreeMap<NodeName, NodeHolders>,
    settings: PlanSettings,
) -> impl Iterator<Item = NodePreemption> {
    let slices = SlicesByNode::new(snapshot);
    holders.iter().filter_map(move |(name, holders)| {
        let node = snapshot.nodes.get(name)?;
        preempt_on(&one_node(snapshot, &slices, node, pod), pod, holders, settings)
    })
}

/// Returns the evictions from one node after which the pod fits there, with the least loss; `None`
/// if there are none, or the steps of the settings did not suffice for all plans together.
/// `snapshot` has this node only, with the slices that it can reach.
pub fn preempt_on(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &NodeHolders,
    settings: PlanSettings,
) -> Option<NodePreemption> {
    let settings = PlanSettings { reservation_delay: None, ..settings };
    let (_, node) = snapshot.nodes.first_key_value()?;
    let is_ending = holders.pods.iter().any(|holder| holder.is_ending);
    if !is_ending && Unit::all_for(pod, &holders.pods).is_empty() {
        return None;
    }
    let planner = Planner::from_snapshot(snapshot, FeatureGates::default());
    NodeTrial { snapshot, node, holders, pod, settings, planner }.preempt()
}

/// A preemption on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePreemption {
    /// Its loss.
    pub loss: Loss,
    /// The preemption.
    pub preemption: Preemption,
    /// The number of pods with devices on the node.
    pub holders: usize,
}

/// The loss of a preemption. Smaller is better.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Loss {
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

/// Returns the cluster with this node only.
fn one_node(
    snapshot: &ClusterSnapshot,
    slices: &SlicesByNode<'_>,
    node: &Arc<Node>,
    pod: &PendingPod,
) -> ClusterSnapshot {
    let slices = slices.reachable_from(&node.name);
    let mut usage = Usage::default();
    for slice in slices.values() {
        for device in &slice.devices {
            let id = DeviceId { pool: slice.pool.clone(), device: device.name.clone() };
            if let Some(used) = snapshot.usage.get(&id) {
                usage.set(&id, Some(used.clone()));
            }
        }
    }
    let quotas = snapshot.quotas.get_key_value(&pod.namespace);
    let pools: BTreeSet<&PoolId> = slices.values().map(|slice| &slice.pool).collect();
    let topology = pools.into_iter().filter_map(|pool| snapshot.topology.get_key_value(pool));
    let topology = topology.map(|(pool, one)| (pool.clone(), Arc::clone(one))).collect();
    ClusterSnapshot {
        nodes: [(node.name.clone(), Arc::clone(node))].into(),
        slices,
        classes: snapshot.classes.clone(),
        usage,
        quotas: quotas.map(|(name, states)| (name.clone(), states.clone())).into_iter().collect(),
        topology: Arc::new(topology),
    }
}

/// The search for victims on one node.
struct NodeTrial<'t> {
    /// The cluster with this node only.
    snapshot: &'t ClusterSnapshot,
    node: &'t Arc<Node>,
    holders: &'t NodeHolders,
    pod: &'t PendingPod,
    /// With the steps that are left.
    settings: PlanSettings,
    planner: Planner,
}

impl NodeTrial<'_> {
    fn preempt(mut self) -> Option<NodePreemption> {
        let ending = self.holders.pods.iter().filter(|holder| holder.is_ending);
        let ending: BTreeSet<&PodUid> = ending.map(|holder| &holder.pod).collect();
        let mut candidates = Unit::all_for(self.pod, &self.holders.pods);
        let mut all_gone = ending.clone();
        all_gone.extend(candidates.iter().flat_map(Unit::pods));
        let first = self.decide(&all_gone)?;
        for unit in &mut candidates {
            unit.memory = self.memory(std::slice::from_ref(&&*unit), &all_gone);
        }
        let mut candidates: Vec<&Unit<'_>> = candidates.iter().collect();
        // The most important first. Of equal ones, to keep the smallest first evicts few large
        // pods, and to keep the largest first evicts small ones.
        let of_equal = |unit: &Unit<'_>| (unit.created(), unit.pods().next().cloned());
        candidates
            .sort_by_cached_key(|unit| (Reverse(unit.priority()), unit.memory, of_equal(unit)));
        let few = self.spare(&candidates, &ending, first.clone());
        candidates.sort_by_cached_key(|unit| {
            (Reverse(unit.priority()), Reverse(unit.memory), of_equal(unit))
        });
        let small = self.spare(&candidates, &ending, first);
        // A search that ran out of steps says nothing about the pods that could stay.
        if self.settings.steps_per_plan == 0 {
            return None;
        }
        [few, small].into_iter().min_by(|a, b| a.loss.cmp(&b.loss))
    }

    /// Returns the candidates that have to go, where each in this order stays if the pod fits
    /// without its eviction. `decision` is the one without all candidates.
    fn spare(
        &mut self,
        candidates: &[&Unit<'_>],
        ending: &BTreeSet<&PodUid>,
        mut decision: Decision,
    ) -> NodePreemption {
        let mut gone = ending.clone();
        gone.extend(candidates.iter().flat_map(|unit| unit.pods()));
        let mut evicted = Vec::new();
        for unit in candidates {
            for pod in unit.pods() {
                gone.remove(pod);
            }
            match self.decide(&gone) {
                Some(other) => decision = other,
                None => {
                    gone.extend(unit.pods());
                    evicted.push(*unit);
                }
            }
        }
        evicted.reverse();
        let victims: Vec<PodUid> = evicted.iter().flat_map(|unit| unit.victims()).collect();
        let loss = Loss {
            highest_priority: evicted.iter().map(|unit| unit.priority()).max(),
            victims: victims.len(),
            memory: self.memory(&evicted, &gone),
            oldest: Reverse(evicted.iter().map(|unit| unit.created()).min().unwrap_or(i64::MAX)),
        };
        let freed = self.freed(&gone).map(|held| held.claim.clone()).collect();
        let preemption = Preemption { decision, victims, freed };
        NodePreemption { loss, preemption, holders: self.holders.pods.len() }
    }

    /// Plans the pod as if these pods were gone.
    fn decide(&mut self, gone: &BTreeSet<&PodUid>) -> Option<Decision> {
        let mut usage = self.snapshot.usage.clone();
        self.freed(gone).for_each(|claim| usage.remove(&claim.results));
        // As a rule a planner for each plan takes three times as long.
        for (device, _) in self.snapshot.usage.iter() {
            self.planner.set_device_use(device, usage.get(device));
        }
        let node = node_without(self.node, self.holders, |holder| gone.contains(&holder.pod));
        self.planner.set_node(&Arc::new(node));
        let mut plan = self.planner.plan(std::slice::from_ref(self.pod), self.settings);
        self.settings.steps_per_plan = self.settings.steps_per_plan.saturating_sub(plan.steps);
        plan.decisions.pop()
    }

    /// Returns the claims that nothing uses once these pods are gone.
    fn freed<'f>(&'f self, gone: &'f BTreeSet<&PodUid>) -> impl Iterator<Item = &'f HeldClaim> {
        let is_free = |claim: &&HeldClaim| {
            !claim.is_kept && claim.users.iter().all(|user| gone.contains(user))
        };
        self.holders.claims.iter().filter(is_free)
    }

    /// Returns the memory of the victims' claims that nothing uses once these pods are gone.
    fn memory(&self, victims: &[&Unit<'_>], gone: &BTreeSet<&PodUid>) -> Quantity {
        let memory = |result: &DeviceResult| match result.shared {
            true => result.consumed.get(capacity::MEMORY).copied(),
            false => memory_of(self.snapshot, &result.device),
        };
        let victims: BTreeSet<&PodUid> = victims.iter().flat_map(|unit| unit.pods()).collect();
        let is_of_victim =
            |claim: &&HeldClaim| claim.users.iter().any(|user| victims.contains(user));
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

/// Returns the node without the requests of these pods.
pub(crate) fn node_without(
    node: &Node,
    holders: &NodeHolders,
    is_gone: impl Fn(&Holder) -> bool,
) -> Node {
    let mut node = node.clone();
    for holder in holders.pods.iter().filter(|holder| is_gone(holder)) {
        subtract(&mut node.used, &holder.requests);
        subtract(&mut node.releasable, &holder.requests);
    }
    node
}

fn subtract(sums: &mut NameMap<Quantity>, amounts: &NameMap<Quantity>) {
    for (name, amount) in amounts {
        if let Some(sum) = sums.get_mut(name) {
            *sum = sum.saturating_sub(*amount);
        }
    }
}
