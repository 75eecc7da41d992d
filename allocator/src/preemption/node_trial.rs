//! The search for victims on one node.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_api::names::capacity;
use tessera_api::quantity::Quantity;

use super::unit::Unit;
use super::{HeldClaim, Loss, NodeHolders, NodePreemption, Preemption, node_without};
use crate::features::FeatureGates;
use crate::model::{ClusterSnapshot, DeviceId, DeviceResult, Node, PendingPod, PodUid};
use crate::outcome::Decision;
use crate::planner::Planner;
use crate::settings::PlanSettings;

/// Returns the evictions from one node after which the pod, with those that are decided together
/// with it, fits there, with the least loss; `None` if there are none, or the steps of the settings
/// did not suffice for all plans together. Without need, no pod is evicted. `snapshot` has this
/// node only, with the slices that it can reach.
pub fn preempt_on(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &NodeHolders,
    settings: PlanSettings,
) -> Option<NodePreemption> {
    let settings = PlanSettings { reservation_delay: None, ..settings };
    let (_, node) = snapshot.nodes.first_key_value()?;
    let planner = Planner::from_snapshot(snapshot, FeatureGates::default());
    NodeTrial { snapshot, node, holders, pod, settings, planner }.preempt()
}

/// The search for victims on one node, for a pod or several that are all to fit there.
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
        if let Some(decisions) = self.decide(&ending) {
            return Some(self.preemption(decisions, &[], &ending));
        }
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
    /// without its eviction. `decisions` are those without all candidates.
    fn spare(
        &mut self,
        candidates: &[&Unit<'_>],
        ending: &BTreeSet<&PodUid>,
        mut decisions: Vec<Decision>,
    ) -> NodePreemption {
        let mut gone = ending.clone();
        gone.extend(candidates.iter().flat_map(|unit| unit.pods()));
        let mut evicted = Vec::new();
        for unit in candidates {
            for pod in unit.pods() {
                gone.remove(pod);
            }
            match self.decide(&gone) {
                Some(other) => decisions = other,
                None => {
                    gone.extend(unit.pods());
                    evicted.push(*unit);
                }
            }
        }
        evicted.reverse();
        self.preemption(decisions, &evicted, &gone)
    }

    /// Returns the preemption that evicts these pods, once all of these are gone.
    fn preemption(
        &self,
        decisions: Vec<Decision>,
        evicted: &[&Unit<'_>],
        gone: &BTreeSet<&PodUid>,
    ) -> NodePreemption {
        let victims: Vec<PodUid> = evicted.iter().flat_map(|unit| unit.victims()).collect();
        let loss = Loss {
            highest_priority: evicted.iter().map(|unit| unit.priority()).max(),
            victims: victims.len(),
            memory: self.memory(evicted, gone),
            oldest: Reverse(evicted.iter().map(|unit| unit.created()).min().unwrap_or(i64::MAX)),
        };
        let freed = self.holders.freed(gone).map(|held| held.claim.clone()).collect();
        let preemption = Preemption { decisions, victims, freed };
        NodePreemption { loss, preemption, holders: self.holders.pods.len() }
    }

    /// Plans the pods as if these pods were gone.
    fn decide(&mut self, gone: &BTreeSet<&PodUid>) -> Option<Vec<Decision>> {
        let mut usage = self.snapshot.usage.clone();
        self.holders.freed(gone).for_each(|claim| usage.remove(&claim.results));
        // As a rule a planner for each plan takes three times as long.
        for (device, _) in self.snapshot.usage.iter() {
            self.planner.set_device_use(device, usage.get(device));
        }
        let node = node_without(self.node, self.holders, |holder| gone.contains(&holder.pod));
        self.planner.set_node(&Arc::new(node));
        let plan = self.planner.plan(std::slice::from_ref(self.pod), self.settings);
        self.settings.steps_per_plan = self.settings.steps_per_plan.saturating_sub(plan.steps);
        (!plan.decisions.is_empty()).then_some(plan.decisions)
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
        let results =
            self.holders.freed(gone).filter(is_of_victim).flat_map(|claim| &claim.results);
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
