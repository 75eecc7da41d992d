//! The pods that hold devices, by node: the candidates of preemptions.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::PodUid;
use tessera_allocator::preemption::{HeldClaim, Holder, NodeHolders};
use tessera_api::names::NodeName;

use crate::index::Index;
use crate::pods::PodEntry;

impl Index {
    /// Returns the bound pods with devices of ours, and their claims. Pods that wait for a claim
    /// are among its users, and on no node.
    pub fn holders(&self) -> BTreeMap<NodeName, NodeHolders> {
        let mut holders: BTreeMap<NodeName, NodeHolders> = BTreeMap::new();
        let mut seen: BTreeSet<&PodUid> = BTreeSet::new();
        for entry in self.claims.values().filter(|entry| !entry.counted().is_empty()) {
            let users: Vec<&PodEntry> =
                self.pods_of(entry).filter_map(|uid| self.pods.get(uid)).collect();
            let users = || users.iter().filter(|pod| pod.is_running() || pod.is_waiting());
            let nodes: BTreeSet<&NodeName> = users().filter_map(|pod| pod.node.as_ref()).collect();
            let claim = HeldClaim {
                users: users().map(|pod| pod.uid.clone()).collect(),
                results: entry.counted().to_vec(),
            };
            for node in nodes {
                holders.entry(node.clone()).or_default().claims.push(claim.clone());
            }
            for pod in users() {
                if let Some(node) = &pod.node
                    && seen.insert(&pod.uid)
                {
                    holders.entry(node.clone()).or_default().pods.push(holder(pod));
                }
            }
        }
        holders
    }
}

fn holder(pod: &PodEntry) -> Holder {
    let counted = pod.counted.as_ref().map(|counted| counted.requests.clone());
    Holder {
        pod: pod.uid.clone(),
        priority: pod.priority,
        created: pod.created,
        is_ending: pod.deleting,
        requests: counted.unwrap_or_default(),
    }
}
