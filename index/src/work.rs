//! What there is to do: pods to plan, pods that cannot be planned and why, claims to give back.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_allocator::model::{PendingPod, PodClaim, PodUid};
use tessera_api::names::{ClaimName, ClaimUid, NodeName};

use crate::claims::ClaimEntry;
use crate::index::Index;
use crate::pods::PodEntry;
use crate::scope::Scope;

/// What the index has to say to whoever plans.
#[derive(Debug, Default)]
pub struct Work {
    /// Pods with claims of ours to allocate.
    pub pending: Vec<PendingPod>,
    /// Pods that will not be planned until somebody changes something.
    pub blocked: Vec<Blocked>,
}

/// A pod that cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// The pod.
    pub pod: PodUid,
    /// The claim that stands in the way.
    pub claim: ClaimUid,
    /// Why.
    pub obstacle: Obstacle,
}

/// Why a pod cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// One claim asks our driver and another for devices, and a claim is allocated as a whole or
    /// not at all.
    MixedDrivers,
    /// A pod that is bound already has the claim without an allocation, and it has to be allocated
    /// on that pod's node.
    BoundPod,
}

/// A pod whose claims of ours are all allocated and that is not bound: kube-scheduler's turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The pod.
    pub pod: PodUid,
    /// Its claims that hold devices of ours, that nobody has reserved, and that no other pod needs
    /// where they are.
    pub movable: Vec<ClaimUid>,
    /// The node that the claims are on.
    pub node: Option<NodeName>,
    /// The node of one of the claims does not exist any more.
    pub node_gone: bool,
    /// `status.nominatedNodeName` is set: the scheduler is making room.
    pub nominated: bool,
    /// Condition `PodScheduled` is `False` with reason `Unschedulable`: its message.
    pub unschedulable: Option<String>,
}

impl Index {
    /// The pods to plan and those that cannot be planned.
    pub fn work(&self) -> Work {
        let mut work = Work::default();
        for pod in self.unbound_entries() {
            match self.plan_of(pod) {
                Ok(Some(pending)) => work.pending.push(pending),
                Ok(None) => {}
                Err(blocked) => work.blocked.push(blocked),
            }
        }
        work
    }

    /// The pod as the allocator is to see it; none if it is not complete yet or has nothing to be
    /// decided.
    pub(crate) fn plan_of(&self, pod: &PodEntry) -> Result<Option<PendingPod>, Blocked> {
        let Some(entries) = self.claims_of(pod) else { return Ok(None) };
        let mut claims = Vec::with_capacity(entries.len());
        let mut ours = false;
        for entry in entries {
            let uid = entry.claim.uid.clone();
            if let Some(allocation) = entry.allocation() {
                claims.push(PodClaim::Allocated {
                    uid,
                    name: entry.claim.name.clone(),
                    nodes: allocation.nodes.clone(),
                });
                continue;
            }
            match self.scope(&uid) {
                Some(Scope::Ours | Scope::Any) if !entry.users.is_empty() => {
                    return Err(Blocked {
                        pod: pod.uid.clone(),
                        claim: uid,
                        obstacle: Obstacle::BoundPod,
                    });
                }
                Some(Scope::Ours | Scope::Any) => {
                    ours = true;
                    claims.push(PodClaim::Pending(Arc::clone(&entry.claim)));
                }
                Some(Scope::Mixed) => {
                    return Err(Blocked {
                        pod: pod.uid.clone(),
                        claim: uid,
                        obstacle: Obstacle::MixedDrivers,
                    });
                }
                // kube-scheduler allocates it, at the node that our claims will force.
                Some(Scope::Foreign) | None => {}
            }
        }
        Ok(ours.then(|| pod.pending(claims)))
    }

    /// The claims of a pod; none unless all are there, alive and the pod's to use.
    pub(crate) fn claims_of(&self, pod: &PodEntry) -> Option<Vec<&ClaimEntry>> {
        let mut entries = Vec::with_capacity(pod.claims.len());
        for reference in &pod.claims {
            let entry = self.claim_named(pod, reference.name.as_ref()?)?;
            if entry.is_deleting() || (reference.generated && !is_owned_by(entry, pod)) {
                return None;
            }
            entries.push(entry);
        }
        Some(entries)
    }

    pub(crate) fn claim_named(&self, pod: &PodEntry, name: &ClaimName) -> Option<&ClaimEntry> {
        let uid = self.claim_names.get(&(pod.namespace.clone(), name.clone()))?;
        self.claims.get(uid)
    }

    /// Pods that have all they need from us and are not bound.
    pub fn waiting(&self) -> Vec<Waiting> {
        self.unbound_entries().filter_map(|pod| self.waiting_of(pod)).collect()
    }

    /// Pods that wait for a node, without those that somebody else's scheduling gate still holds
    /// back.
    fn unbound_entries(&self) -> impl Iterator<Item = &PodEntry> {
        self.unbound.iter().filter_map(|uid| self.pods.get(uid)).filter(|pod| !pod.gated)
    }

    fn waiting_of(&self, pod: &PodEntry) -> Option<Waiting> {
        let entries = self.claims_of(pod)?;
        let ours: Vec<&&ClaimEntry> = entries.iter().filter(|e| !e.booked().is_empty()).collect();
        if ours.is_empty() {
            return None;
        }
        let node_of = |e: &ClaimEntry| e.nodes()?.single_node().and_then(|n| NodeName::new(n).ok());
        let node_gone = ours.iter().filter_map(|e| node_of(e)).any(|node| !self.has_node(&node));
        let movable = ours.iter().filter(|e| self.is_movable(e, pod)).map(|e| e.claim.uid.clone());
        Some(Waiting {
            pod: pod.uid.clone(),
            movable: movable.collect(),
            node: ours.iter().find_map(|e| node_of(e)),
            node_gone,
            nominated: pod.nominated.is_some(),
            unschedulable: pod.unschedulable.clone(),
        })
    }

    /// Whether the allocation may be taken back for the sake of `pod`: nobody has reserved it, it
    /// is not in the middle of being written, no other pod is bound to it, and of the pods that
    /// wait for it `pod` is the first.
    fn is_movable(&self, entry: &ClaimEntry, pod: &PodEntry) -> bool {
        let others = self.pods_of(entry).filter(|uid| **uid != pod.uid);
        let mut others =
            others.filter_map(|uid| self.pods.get(uid)).filter(|other| other.is_waiting());
        entry.is_idle() && !others.any(|other| self.turn(other) < self.turn(pod))
    }

    /// Whose failure counts among pods that wait for the same claim. The older comes first, but
    /// after all those that could be bound where the claim is: a pod that lacks something else
    /// would otherwise take the claim from them again and again.
    fn turn<'p>(&self, pod: &'p PodEntry) -> (bool, i64, &'p PodUid) {
        let lacks = |entry: &&ClaimEntry| {
            entry.allocation().is_none()
                && matches!(
                    self.scope(&entry.claim.uid),
                    Some(Scope::Ours | Scope::Any | Scope::Mixed)
                )
        };
        let complete =
            !pod.gated && self.claims_of(pod).is_some_and(|entries| !entries.iter().any(lacks));
        (!complete, pod.created, &pod.uid)
    }

    /// The pods with claims that wait for a node.
    pub fn unbound_pods(&self) -> &BTreeSet<PodUid> {
        &self.unbound
    }

    /// What kube-scheduler says about a pod that it could not place.
    pub fn unschedulable_message(&self, pod: &PodUid) -> Option<String> {
        self.pods.get(pod)?.unschedulable.clone()
    }

    /// Claims that hold devices of ours although no living pod needs them and nobody ever reserved
    /// them. Nobody else gives them back: kube-controller-manager acts when the last
    /// reservation goes, and there was none.
    ///
    /// Costs what has changed since the last call, and what is found.
    pub fn abandoned(&mut self) -> Vec<ClaimUid> {
        self.check_claims();
        self.abandoned.iter().cloned().collect()
    }

    /// Brings what follows from claims up to date with those that have changed.
    pub(crate) fn check_claims(&mut self) {
        for claim in std::mem::take(&mut self.unchecked) {
            let entry = self.claims.get(&claim);
            if let Some(entry) = entry {
                let exceeded = entry
                    .booked()
                    .iter()
                    .map(|r| &r.device)
                    .filter(|d| self.exceeded.contains_key(d));
                self.books.touched.extend(exceeded.cloned());
            }
            if entry.is_some_and(|entry| self.is_abandoned(entry)) {
                self.abandoned.insert(claim);
            } else {
                self.abandoned.remove(&claim);
            }
        }
    }

    fn is_abandoned(&self, entry: &ClaimEntry) -> bool {
        let mut pods = self.pods_of(entry).filter_map(|uid| self.pods.get(uid));
        entry.is_idle()
            && !entry.booked().is_empty()
            && !pods.any(|p| p.is_waiting() || p.is_running())
    }
}

pub(crate) fn is_owned_by(entry: &ClaimEntry, pod: &PodEntry) -> bool {
    let owners = entry.object.as_ref().and_then(|o| o.metadata.owner_references.as_ref());
    owners.into_iter().flatten().any(|o| o.controller == Some(true) && o.uid == pod.uid.as_str())
}
