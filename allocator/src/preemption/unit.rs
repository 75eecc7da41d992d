//! The pods of a node that are evicted together.

use std::collections::{BTreeMap, BTreeSet};

use tessera_api::quantity::Quantity;

use super::{Holder, HolderGroup};
use crate::model::{PendingPod, PodUid};

/// Pods of a node that are evicted together: one, or those of a group.
pub(super) struct Unit<'h> {
    pub(super) holders: Vec<&'h Holder>,
    /// Memory that becomes free on the node with all other units gone.
    pub(super) memory: Quantity,
}

impl<'h> Unit<'h> {
    /// Returns the units that may be evicted for `pod`.
    pub(super) fn all_for(pod: &PendingPod, holders: &'h [Holder]) -> Vec<Self> {
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
        self.priority() < pod.lowest_priority()
            && !self.holders.iter().any(|holder| holder.is_fixed)
    }

    pub(super) fn priority(&self) -> i32 {
        let here = self.holders.iter().map(|holder| holder.priority).max();
        let of_group = self.group().map(|group| group.priority);
        here.max(of_group).unwrap_or(i32::MIN)
    }

    pub(super) fn created(&self) -> i64 {
        let here = self.holders.iter().map(|holder| holder.created);
        let of_group = self.group().map(|group| group.created);
        here.chain(of_group).min().unwrap_or(i64::MAX)
    }

    /// Returns the pods of it on the node.
    pub(super) fn pods(&self) -> impl Iterator<Item = &'h PodUid> {
        self.holders.iter().map(|holder| &holder.pod)
    }

    /// Returns all pods that are evicted, those of the node first.
    pub(super) fn victims(&self) -> Vec<PodUid> {
        let here: BTreeSet<&PodUid> = self.pods().collect();
        let of_group = self.group().into_iter().flat_map(|group| &group.members);
        let elsewhere = of_group.filter(|member| !here.contains(member));
        self.pods().chain(elsewhere).cloned().collect()
    }
}
