//! Pods that wait for kube-scheduler with devices of ours, and which of them have changed.

use std::collections::BTreeSet;

use tessera_allocator::model::{DeviceId, PodUid, PoolId};
use tessera_api::names::{ClaimUid, NodeName};

use crate::claims::ClaimEntry;
use crate::index::{ClaimKey, Index};
use crate::pods::{Nominator, PodEntry};

/// The objects other than pods that have changed since [`Index::take_affected`].
#[derive(Debug, Default)]
pub(crate) struct WaitingChanges {
    /// Claims that have changed, or whose pods have.
    pub(crate) claims: BTreeSet<ClaimUid>,
    /// Pools of which a slice or its taints have changed.
    pub(crate) pools: BTreeSet<PoolId>,
    /// Nodes that were created or deleted.
    pub(crate) nodes: BTreeSet<NodeName>,
}

/// An unbound pod with a claim that has devices of ours: it waits for kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The pod.
    pub pod: PodUid,
    /// Its claims with devices of ours that are not reserved and that no other pod needs where
    /// they are.
    pub movable: Vec<ClaimUid>,
    /// The node of the claims.
    pub node: Option<NodeName>,
    /// The node of a claim does not exist any more.
    pub node_gone: bool,
    /// None of its claims waits for an allocation by us.
    pub is_complete: bool,
    /// The component that set `status.nominatedNodeName`, if it is set.
    pub nominated_by: Option<Nominator>,
    /// The message of the condition `PodScheduled`, if it is `False` with reason `Unschedulable`.
    pub unschedulable: Option<String>,
    /// The first device of a movable claim with a taint that the claim does not tolerate.
    pub repelled: Option<Repelled>,
}

/// A device that was tainted after its allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repelled {
    /// The device.
    pub device: DeviceId,
    /// The key of the taint.
    pub taint: String,
}

impl Index {
    /// Returns the state of a pod that waits for kube-scheduler; none if it is bound or gated,
    /// lacks a claim or has no devices of ours.
    pub fn waiting(&self, pod: &PodUid) -> Option<Waiting> {
        let pod = self.holding.get(pod).and_then(|uid| self.pods.get(uid))?;
        if pod.gated { None } else { self.waiting_of(pod) }
    }

    /// Returns the pods whose [state](Self::waiting) or [misplaced claims](Self::misplaced) may
    /// have changed since the last call, and others. `changed` is what
    /// [`take_changed_pods`](Self::take_changed_pods) has returned since.
    ///
    /// The cost is that of these pods and of those that share claims with them; where a node or a
    /// slice has changed, that of all pods that wait for kube-scheduler.
    pub fn take_affected(&mut self, changed: &BTreeSet<PodUid>) -> BTreeSet<PodUid> {
        self.check_claims();
        let WaitingChanges { claims, pools, nodes } = std::mem::take(&mut self.waiting_changes);
        let mut pods: BTreeSet<PodUid> = changed.clone();
        pods.extend(claims.iter().flat_map(|claim| self.pods_with(claim)));
        let shared: Vec<PodUid> = self.sharing_with(&pods).cloned().collect();
        pods.extend(shared);
        if !pools.is_empty() || !nodes.is_empty() {
            let affected = self.holding.iter().filter(|pod| {
                nodes.iter().any(|node| self.has_devices_on(pod, node))
                    || self.has_devices_in(pod, &pools)
            });
            pods.extend(affected.cloned());
        }
        pods
    }

    /// Returns the pods that share claims with those of these that are not bound: the
    /// [precedence](Self::precedence) of a pod among them depends on all of its claims.
    fn sharing_with(&self, pods: &BTreeSet<PodUid>) -> impl Iterator<Item = &PodUid> {
        let pods = pods.iter().filter(|pod| self.unbound.contains(*pod));
        let pods = pods.filter_map(|pod| self.pods.get(pod));
        let keys = pods.flat_map(|pod| {
            let names = pod.claims.iter().filter_map(|reference| reference.name.clone());
            names.map(|name| (pod.namespace.clone(), name))
        });
        let keys: BTreeSet<ClaimKey> =
            keys.filter(|key| self.pods_by_claim.get(key).nth(1).is_some()).collect();
        keys.into_iter().flat_map(|key| self.pods_by_claim.get(&key))
    }

    /// Returns true if a claim of the pod has devices in one of the pools.
    fn has_devices_in(&self, pod: &PodUid, pools: &BTreeSet<PoolId>) -> bool {
        let claims = self.pods.get(pod).and_then(|pod| self.claims_of(pod));
        let mut results = claims.into_iter().flatten().flat_map(|entry| entry.counted());
        results.any(|result| pools.contains(&result.device.pool))
    }

    fn waiting_of(&self, pod: &PodEntry) -> Option<Waiting> {
        let entries = self.claims_of(pod)?;
        let ours: Vec<&&ClaimEntry> = entries.iter().filter(|e| !e.counted().is_empty()).collect();
        if ours.is_empty() {
            return None;
        }
        let node_of = |e: &ClaimEntry| e.nodes()?.single_node().and_then(|n| NodeName::new(n).ok());
        let node_gone = ours.iter().filter_map(|e| node_of(e)).any(|node| !self.has_node(&node));
        let movable = || ours.iter().filter(|e| self.is_movable(e, pod));
        Some(Waiting {
            pod: pod.uid.clone(),
            movable: movable().map(|entry| entry.claim.uid.clone()).collect(),
            repelled: movable().find_map(|entry| self.repelled(entry)),
            node: ours.iter().find_map(|e| node_of(e)),
            node_gone,
            is_complete: !entries.iter().any(|entry| self.lacks_allocation(entry)),
            nominated_by: pod.nomination.as_ref().map(|nomination| nomination.by),
            unschedulable: pod.unschedulable.clone(),
        })
    }

    /// Returns the first device of the claim that repels it.
    fn repelled(&self, entry: &ClaimEntry) -> Option<Repelled> {
        entry.counted().iter().find_map(|result| {
            let request = entry.request_of(result)?;
            let device = self.published_device(&result.device)?;
            let taint = device.untolerated_taint(&request.tolerations)?;
            Some(Repelled { device: result.device.clone(), taint: taint.key.clone() })
        })
    }

    /// Returns true if the allocation may be released for `pod`: it is not reserved, not being
    /// written and not in use by a bound pod, and of the pods that wait for it `pod` is the
    /// first.
    fn is_movable(&self, entry: &ClaimEntry, pod: &PodEntry) -> bool {
        let others = self.pods_of(entry).filter(|uid| **uid != pod.uid);
        let mut others =
            others.filter_map(|uid| self.pods.get(uid)).filter(|other| other.is_waiting());
        entry.is_idle() && !others.any(|other| self.precedence(other) < self.precedence(pod))
    }

    /// Returns the precedence of a pod among those that wait for the same claim. The oldest is
    /// first, but after all that could be bound where the claim is: a pod that lacks another
    /// claim would otherwise move this one again and again.
    fn precedence<'p>(&self, pod: &'p PodEntry) -> (bool, i64, &'p PodUid) {
        let lacks = |entry: &&ClaimEntry| self.lacks_allocation(entry);
        let complete =
            !pod.gated && self.claims_of(pod).is_some_and(|entries| !entries.iter().any(lacks));
        (!complete, pod.created, &pod.uid)
    }
}
