//! Preemption: the pods of lower priority to evict so that a pod gets its devices.
//!
//! Pods are evicted as a whole, from one node, and the pods of a group all together, wherever they
//! are: without one of them, the others would only hold their devices. A claim is free once all
//! pods that use it are gone. On each node, the pod is planned as if all pods of lower priority
//! were gone. If it fits, those that need not go stay, the most important first. Of all nodes, the
//! one is chosen whose victims are the least loss: the lowest highest priority, then the fewest
//! pods, the least device memory, the youngest.
//!
//! The pods of a group get their places one after the other, each on the node where the loss is
//! least with those before it in place. Finally the group is planned on these nodes, as it will be
//! once the victims are gone.
//!
//! Quotas count as they are: an eviction makes no room in a quota.

mod node_trial;
mod one_node;
mod unit;
mod victim_search;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{ClaimUid, NodeName};
use tessera_api::quantity::Quantity;

use crate::model::{ClusterSnapshot, DeviceResult, NameMap, Node, PendingPod, PodUid};
use crate::outcome::Decision;
use crate::settings::PlanSettings;

pub use node_trial::preempt_on;
use one_node::{SlicesByNode, one_node};
use unit::Unit;
pub use victim_search::{SearchProgress, Trial, VictimSearch};

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

/// The evictions after which a pod, or all pods of a group, get their devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preemption {
    /// The devices after the evictions, of each pod on one node.
    pub decisions: Vec<Decision>,
    /// The pods to evict, with those of their groups on other nodes, of one node the least
    /// important first. Empty if pods that are ending make the room.
    pub victims: Vec<PodUid>,
    /// The claims that are free once the victims, and the pods that are ending, are gone.
    pub freed: Vec<ClaimUid>,
}

/// Returns the evictions after which the pod, or all pods of its group, fit; `None` if there are
/// none. For one pod they are those with the least loss.
///
/// Only pods with a strictly lower priority are victims, and of groups only those whose pods all
/// have one. The cost is one plan of one node for each node with such pods, and two more for each
/// such pod of a node on which the pod would fit; for a group, that of each of its kinds of pods,
/// and as much on one node, twice for each of its pods.
pub fn preempt(
    snapshot: &ClusterSnapshot,
    pod: &PendingPod,
    holders: &BTreeMap<NodeName, NodeHolders>,
    settings: PlanSettings,
) -> Option<Preemption> {
    let mut search = VictimSearch::new(pod, settings.policy)?;
    let slices = SlicesByNode::new(snapshot);
    let mut trial = |name: &NodeName, pods: &PendingPod, evicted: &BTreeSet<PodUid>| {
        let node = snapshot.nodes.get(name)?;
        let holders = holders.get(name).cloned().unwrap_or_default().with_ending(evicted);
        let is_possible = pod.is_group() || holders.may_make_room_for(pods);
        let snapshot = is_possible.then(|| one_node(snapshot, &slices, node, pods))?;
        preempt_on(&snapshot, pods, &holders, settings)
    };
    loop {
        snapshot.nodes.keys().for_each(|node| search.visit(node, &mut trial));
        let progress = loop {
            match search.place_next(&mut trial) {
                SearchProgress::Continues => {}
                progress => break progress,
            }
        };
        match progress {
            SearchProgress::OtherKind => {}
            SearchProgress::Complete => return search.outcome(snapshot, holders, settings),
            SearchProgress::Continues | SearchProgress::Failed => return None,
        }
    }
}

/// Returns the preemption on each node that has one.
pub(crate) fn candidates<'c>(
    snapshot: &'c ClusterSnapshot,
    pod: &'c PendingPod,
    holders: &'c BTreeMap<NodeName, NodeHolders>,
    settings: PlanSettings,
) -> impl Iterator<Item = NodePreemption> {
    let slices = SlicesByNode::new(snapshot);
    let possible = holders.iter().filter(|(_, holders)| holders.may_make_room_for(pod));
    possible.filter_map(move |(name, holders)| {
        let node = snapshot.nodes.get(name)?;
        preempt_on(&one_node(snapshot, &slices, node, pod), pod, holders, settings)
    })
}

impl NodeHolders {
    /// Returns true if pods of the node are ending, or may be evicted for `pod`.
    pub fn may_make_room_for(&self, pod: &PendingPod) -> bool {
        self.pods.iter().any(|holder| holder.is_ending)
            || !Unit::all_for(pod, &self.pods).is_empty()
    }

    /// Returns them with these pods ending, too.
    #[must_use]
    pub fn with_ending(mut self, pods: &BTreeSet<PodUid>) -> Self {
        self.pods.iter_mut().for_each(|holder| holder.is_ending |= pods.contains(&holder.pod));
        self
    }

    /// Returns the claims that nothing uses once these pods are gone.
    fn freed<'f>(&'f self, gone: &'f BTreeSet<&PodUid>) -> impl Iterator<Item = &'f HeldClaim> {
        let is_free = |claim: &&HeldClaim| {
            !claim.is_kept && claim.users.iter().all(|user| gone.contains(user))
        };
        self.claims.iter().filter(is_free)
    }
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
    pub(super) highest_priority: Option<i32>,
    pub(super) victims: usize,
    pub(super) memory: Quantity,
    /// Creation of the oldest victim.
    pub(super) oldest: Reverse<i64>,
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
