//! The index: the objects that planning depends on, and running sums over them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass as ApiClass, ResourceClaim};
use tessera_allocator::ClaimAllocation;
use tessera_allocator::model::{
    ClusterSnapshot, DeviceClass, NameMap, NodeSelector, PodUid, PoolId, Request,
    SchedulingConstraints, Slice,
};
use tessera_api::names::{
    ClaimName, ClaimUid, DeviceClassName, ManagedDrivers, Namespace, NodeName, PodName,
};
use tessera_api::quantity::Quantity;

use crate::audit::AuditPlace;
use crate::changes::Changed;
use crate::claims::{ClaimEntry, UsageSums};
use crate::convert::{self, AllocatedClaim, ConvertError};
use crate::defaults::Defaults;
use crate::generated::{Generated, generated_for};
use crate::groups::Groups;
use crate::interner::Interner;
use crate::loads::Loads;
use crate::multimap::Multimap;
use crate::nodes::NodeEntry;
use crate::pod_groups::PodGroups;
use crate::pods::PodEntry;
use crate::quotas::Quotas;
use crate::room::Room;
use crate::scope::{self, Scope};
use crate::taints::TaintRules;
use crate::topology::Topologies;
use crate::troubled::TroubledDevices;
use crate::waiting::WaitingChanges;

pub(crate) type ClaimKey = (Namespace, ClaimName);

/// The state that follows from objects. It has one owner, its only writer.
#[derive(Debug, Default)]
pub struct Index {
    /// The drivers whose devices are planned.
    pub(crate) managed: ManagedDrivers,
    pub(crate) nodes: BTreeMap<NodeName, NodeEntry>,
    /// Slices as published, by object name.
    pub(crate) published: BTreeMap<String, Arc<Slice>>,
    /// Slices with the taints of rules.
    pub(crate) slices: BTreeMap<String, Arc<Slice>>,
    /// The names of the slices of each pool.
    pub(crate) slices_of: Multimap<PoolId, String>,
    pub(crate) rules: TaintRules,
    /// Names of slices to which rules for all pools are not applied yet.
    pub(crate) untainted: BTreeSet<String>,
    pub(crate) topologies: Topologies,
    pub(crate) classes: BTreeMap<DeviceClassName, (Arc<DeviceClass>, Arc<ApiClass>)>,
    /// The number of changes of classes: results for another number are outdated.
    classes_version: u64,
    pub(crate) claims: BTreeMap<ClaimUid, Box<ClaimEntry>>,
    pub(crate) claim_names: BTreeMap<ClaimKey, ClaimUid>,
    pub(crate) pods: BTreeMap<PodUid, PodEntry>,
    pub(crate) pods_by_claim: Multimap<ClaimKey, PodUid>,
    pub(crate) groups: Groups,
    pub(crate) pod_groups: PodGroups,
    interned: Interned,
    pub(crate) generated: Generated,
    /// Pods with claims that wait for a node: all that planning reads.
    pub(crate) unbound: BTreeSet<PodUid>,
    /// Unbound pods with a claim that has devices of ours.
    pub(crate) holding: BTreeSet<PodUid>,
    /// Pods whose planning may have changed since
    /// [`take_changed_pods`](Self::take_changed_pods).
    pub(crate) changed_pods: BTreeSet<PodUid>,
    /// Version of the classes at that time.
    planned_classes: u64,
    /// Bound pods of which a claim may be misplaced.
    pub(crate) stranded: BTreeSet<PodUid>,
    /// Claims that lost their allocation since [`take_deallocated`](Self::take_deallocated).
    deallocated: BTreeSet<ClaimUid>,
    /// Claims that have changed, or whose pods have, since [`check_claims`](Self::check_claims).
    pub(crate) unchecked: BTreeSet<ClaimUid>,
    /// Claims that hold devices and that no pod needs, as of then.
    pub(crate) unneeded: BTreeSet<ClaimUid>,
    pub(crate) waiting_changes: WaitingChanges,
    pub(crate) sums: UsageSums,
    pub(crate) room: Room,
    /// The number of pods with devices on a node, by priority.
    pub(crate) holder_priorities: BTreeMap<i32, usize>,
    /// The place at which the audit of the sums continues.
    pub(crate) audited: AuditPlace,
    pub(crate) troubled: TroubledDevices,
    pub(crate) changed: Changed,
    pub(crate) quotas: Quotas,
    pub(crate) defaults: Defaults,
    pub(crate) loads: Loads,
}

/// Values that many objects have.
#[derive(Debug, Default)]
struct Interned {
    /// The requests of claims.
    requests: Interner<[Request]>,
    /// The nodes of allocations.
    nodes: Interner<NodeSelector>,
    constraints: Interner<SchedulingConstraints>,
}

impl Index {
    /// Returns an empty index for the devices of these drivers.
    pub fn new(managed: ManagedDrivers) -> Self {
        Self { managed, ..Self::default() }
    }

    /// Takes over a DeviceClass.
    ///
    /// # Errors
    /// It cannot be read; it then counts as deleted.
    pub fn apply_class(&mut self, object: ApiClass) -> Result<(), ConvertError> {
        let class = convert::class(&object);
        if let Ok(class) = &class
            && let Some((known, known_object)) = self.classes.get_mut(&class.name)
            && **known == *class
        {
            // Labels, for example: results that follow from the class stay valid.
            *known_object = Arc::new(object);
            return Ok(());
        }
        self.remove_class(&object);
        let class = class?;
        self.classes.insert(class.name.clone(), (Arc::new(class), Arc::new(object)));
        Ok(())
    }

    /// Removes a deleted DeviceClass.
    pub fn remove_class(&mut self, object: &ApiClass) {
        if let Some(name) =
            object.metadata.name.as_deref().and_then(|n| DeviceClassName::new(n).ok())
        {
            self.classes.remove(&name);
            self.classes_version += 1;
            self.changed.classes.insert(name);
        }
    }

    /// Takes over a Pod. Returns true if anything changed that planning reads: most changes of pods
    /// are statuses of containers.
    pub fn apply_pod(&mut self, object: &Pod) -> bool {
        let Some(mut pod) = PodEntry::new(object) else { return false };
        let old = self.pods.get(&pod.uid);
        if let Some(old) = old {
            pod.links.clone_from(&old.links);
            pod.counted_on.clone_from(&old.counted_on);
            pod.counted.clone_from(&old.counted);
            pod.counted_as_holder = old.counted_as_holder;
        }
        self.name_claims(&mut pod);
        if old == Some(&pod) {
            return false;
        }
        pod.scheduling = self.interned.constraints.intern(pod.scheduling);
        let is_news = old.is_none_or(|old| !pod.differs_only_by_own_nomination(old));
        if let Some(old) = self.pods.remove(&pod.uid) {
            self.unlink(&old);
            self.leave_group(&old);
        }
        self.list_by_claims(&pod);
        self.join_group(&pod);
        let uid = pod.uid.clone();
        if pod.is_waiting() && !pod.claims.is_empty() {
            self.unbound.insert(uid.clone());
        } else {
            self.unbound.remove(&uid);
        }
        self.pods.insert(uid.clone(), pod);
        self.update_pod(&uid);
        // A nomination for a node where the pod has no devices is to be removed.
        let is_stale = |node: &NodeName| !self.has_devices_on(&uid, node);
        is_news || self.nomination(&uid).is_some_and(|nomination| is_stale(&nomination.node))
    }

    /// Removes a deleted Pod.
    pub fn remove_pod(&mut self, object: &Pod) {
        let Some(uid) = object.metadata.uid.as_deref().map(PodUid::new) else { return };
        let Some(mut pod) = self.pods.remove(&uid) else { return };
        self.changed_pods.insert(uid.clone());
        self.unbound.remove(&uid);
        self.holding.remove(&uid);
        self.stranded.remove(&uid);
        self.unlink(&pod);
        self.leave_group(&pod);
        self.count_requests(&mut pod, None);
        for claim in pod.links.values() {
            self.release_user(claim, &uid);
        }
    }

    /// Takes over a ResourceClaim.
    ///
    /// # Errors
    /// It cannot be read. The last readable version stays.
    pub fn apply_claim(&mut self, object: &Arc<ResourceClaim>) -> Result<(), ConvertError> {
        let known = object.metadata.uid.as_deref().and_then(|uid| self.claims.get_key_value(uid));
        let uid = match known {
            Some((uid, _)) => uid.clone(),
            None => {
                let mut fresh = ClaimEntry::new(object, &mut self.interned.requests)?;
                let defaults = self.defaults.get(&fresh.claim.namespace);
                Arc::make_mut(&mut fresh.claim).defaults = defaults.cloned();
                let fresh = Box::new(fresh);
                let uid = fresh.claim.uid.clone();
                self.claims.insert(uid.clone(), fresh);
                uid
            }
        };
        let Some(entry) = self.claims.get_mut(&uid) else { return Ok(()) };
        let was_allocated = entry.observed.is_some();
        let was_generated_for = entry.generated_for();
        if !entry.observe(object)? {
            return Ok(());
        }
        if let Some(nodes) = entry.observed.as_mut().and_then(|observed| observed.nodes.as_mut()) {
            *nodes = self.interned.nodes.intern(Arc::clone(nodes));
        }
        if was_allocated && entry.observed.is_none() {
            self.deallocated.insert(uid.clone());
        }
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.claim_names.insert(key.clone(), uid.clone());
        self.regenerate(&uid, was_generated_for, generated_for(object));
        self.update_claim(&uid, &key);
        Ok(())
    }

    /// Returns the pods whose planning may have changed since the last call, also those that do not
    /// wait any more or do not exist.
    pub fn take_changed_pods(&mut self) -> BTreeSet<PodUid> {
        let mut changed = std::mem::take(&mut self.changed_pods);
        if std::mem::replace(&mut self.planned_classes, self.classes_version)
            != self.classes_version
        {
            // The drivers that a claim requests follow from its classes.
            changed.extend(self.unbound.iter().chain(&self.stranded).cloned());
        }
        changed
    }

    /// Returns the claims that lost their allocation since the last call.
    pub fn take_deallocated(&mut self) -> BTreeSet<ClaimUid> {
        std::mem::take(&mut self.deallocated)
    }

    /// Takes over the answer to a write of ours. It is ignored for a claim that does not exist: its
    /// deletion may have been seen before the answer.
    ///
    /// # Errors
    /// As [`apply_claim`](Self::apply_claim).
    pub fn apply_written_claim(&mut self, object: &Arc<ResourceClaim>) -> Result<(), ConvertError> {
        let uid = object.metadata.uid.as_deref().unwrap_or_default();
        if self.claims.get(uid).is_some_and(|entry| entry.object.is_some()) {
            self.apply_claim(object)
        } else {
            Ok(())
        }
    }

    /// Removes a deleted ResourceClaim.
    pub fn remove_claim(&mut self, object: &ResourceClaim) {
        let Some(uid) = object.metadata.uid.as_deref().and_then(|u| ClaimUid::new(u).ok()) else {
            return;
        };
        let Some(entry) = self.claims.get_mut(&uid) else { return };
        let was_generated_for = entry.generated_for();
        entry.object = None;
        entry.observed = None;
        entry.assumed = None;
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        if self.claim_names.get(&key) == Some(&uid) {
            self.claim_names.remove(&key);
        }
        self.regenerate(&uid, was_generated_for, None);
        self.update_claim(&uid, &key);
    }

    /// Counts the devices of a decision as taken, before it is stored.
    pub fn assume(&mut self, claim_allocation: &ClaimAllocation) {
        let Some(entry) = self.claims.get_mut(&claim_allocation.claim) else { return };
        entry.assumed = Some(AllocatedClaim {
            results: claim_allocation.results.as_slice().into(),
            nodes: claim_allocation.nodes.clone().map(Arc::new),
        });
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.update_claim(&claim_allocation.claim, &key);
    }

    /// Ends an assumption: the decision was dropped, or its result was
    /// [taken over](Self::apply_claim).
    pub fn forget(&mut self, claim: &ClaimUid) {
        let Some(entry) = self.claims.get_mut(claim) else { return };
        entry.assumed = None;
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.update_claim(claim, &key);
    }

    /// Returns a snapshot for the allocator.
    pub fn snapshot(&self) -> ClusterSnapshot {
        let nodes =
            self.nodes.iter().filter_map(|(name, entry)| Some((name.clone(), entry.node.clone()?)));
        ClusterSnapshot {
            nodes: nodes.collect(),
            slices: self.slices.clone(),
            classes: self
                .classes
                .iter()
                .map(|(name, (class, _))| (name.clone(), Arc::clone(class)))
                .collect(),
            usage: self.sums.usage.clone(),
            quotas: self.quota_snapshot(),
            topology: self.topologies.snapshot(),
        }
    }

    /// Returns the drivers whose devices a claim requests; none if the claim is not known.
    pub fn scope(&self, claim: &ClaimUid) -> Option<Scope> {
        let entry = self.claims.get(claim)?;
        let known = entry.scope.get().filter(|(version, _)| *version == self.classes_version);
        if let Some((_, scope)) = known {
            return Some(scope);
        }
        let class =
            |name: &DeviceClassName| self.classes.get(name).map(|(class, _)| class.as_ref());
        let scope = scope::of_claim(&entry.claim, class, &self.managed);
        entry.scope.set(Some((self.classes_version, scope)));
        Some(scope)
    }

    /// Returns true if the claim is known and not deleted.
    pub fn claim_exists(&self, claim: &ClaimUid) -> bool {
        self.claims.get(claim).is_some_and(|entry| entry.object.is_some())
    }

    /// Returns the claims of a namespace. Visits all claims.
    pub(crate) fn claims_in(&self, namespace: &Namespace) -> Vec<ClaimUid> {
        let claims = self.claims.iter().filter(|(_, entry)| entry.claim.namespace == *namespace);
        claims.map(|(uid, _)| uid.clone()).collect()
    }

    /// Returns the claim as last seen; none if it is not known or deleted. Of an allocated claim it
    /// has only what a write needs: name, UID, version, allocation, `reservedFor`, changed sizes.
    pub fn claim_object(&self, claim: &ClaimUid) -> Option<Arc<ResourceClaim>> {
        let entry = self.claims.get(claim)?;
        Some(entry.object.as_ref()?.object(&entry.claim))
    }

    /// Returns the name of the pod; none if it does not exist.
    pub fn pod_name(&self, pod: &PodUid) -> Option<(&Namespace, &PodName)> {
        self.pods.get(pod).map(|p| (&p.namespace, &p.name))
    }

    /// Returns the node that the pod is bound to.
    pub fn node_of(&self, pod: &PodUid) -> Option<&NodeName> {
        self.pods.get(pod)?.node.as_ref()
    }

    /// Returns the name of the claim, also of a deleted one in use.
    pub fn claim_called(&self, claim: &ClaimUid) -> Option<&ClaimName> {
        self.claims.get(claim).map(|entry| &entry.claim.name)
    }

    /// Updates what follows from a claim that has changed: links of bound pods, usage, requests of
    /// waiting pods.
    pub(crate) fn update_claim(&mut self, uid: &ClaimUid, key: &ClaimKey) {
        self.unchecked.insert(uid.clone());
        let pods: Vec<PodUid> = self.pods_by_claim.get(key).cloned().collect();
        for pod in &pods {
            self.link(pod);
        }
        self.count_claim(uid);
        for pod in &pods {
            self.recount_requests(pod);
        }
        self.changed_pods.extend(pods);
    }

    /// Updates what follows from a pod that has changed.
    fn update_pod(&mut self, uid: &PodUid) {
        self.changed_pods.insert(uid.clone());
        self.link(uid);
        let Some(pod) = self.pods.get(uid) else { return };
        if !pod.is_running() && !pod.links.is_empty() {
            let links: Vec<ClaimUid> = pod.links.values().cloned().collect();
            for claim in links {
                self.release_user(&claim, uid);
            }
            if let Some(pod) = self.pods.get_mut(uid) {
                pod.links.clear();
            }
        }
        self.recount_requests(uid);
    }

    /// Links a bound pod to the claims of its names. A link stays until the pod has ended.
    fn link(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get_mut(uid).filter(|p| p.is_running()) else { return };
        let mut linked = Vec::new();
        for name in pod.claims.iter().filter_map(|c| c.name.as_ref()) {
            if pod.links.contains_key(name) {
                continue;
            }
            let key = (pod.namespace.clone(), name.clone());
            let Some(claim) = self.claim_names.get(&key) else { continue };
            if let Some((entry, node)) = self.claims.get_mut(claim).zip(pod.node.as_ref()) {
                entry.users.insert(uid.clone(), node.clone());
                entry.count(&mut self.sums, &self.managed);
                self.unchecked.insert(claim.clone());
                self.changed_pods.extend(self.pods_by_claim.get(&key).cloned());
                pod.links.insert(name.clone(), claim.clone());
                linked.push(claim.clone());
            }
        }
        linked.iter().for_each(|claim| self.charge(claim));
    }

    fn release_user(&mut self, claim: &ClaimUid, pod: &PodUid) {
        let Some(entry) = self.claims.get_mut(claim) else { return };
        self.unchecked.insert(claim.clone());
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.changed_pods.extend(self.pods_by_claim.get(&key).cloned());
        entry.remove_user(pod);
        self.count_claim(claim);
    }

    /// Updates the sums with a claim, and forgets one on which nothing depends any more.
    fn count_claim(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.claims.get_mut(uid) else { return };
        entry.count(&mut self.sums, &self.managed);
        let is_alive = entry.is_alive();
        self.charge(uid);
        if !is_alive {
            self.claims.remove(uid);
        }
    }

    /// Adds the pod to the lists of its claims' names.
    pub(crate) fn list_by_claims(&mut self, pod: &PodEntry) {
        for name in pod.claims.iter().filter_map(|c| c.name.clone()) {
            let key = (pod.namespace.clone(), name);
            self.unchecked.extend(self.claim_names.get(&key).cloned());
            self.pods_by_claim.insert(key, pod.uid.clone());
        }
    }

    /// Removes the pod from the lists of its claims' names.
    pub(crate) fn unlink(&mut self, pod: &PodEntry) {
        for name in pod.claims.iter().filter_map(|c| c.name.clone()) {
            let key = (pod.namespace.clone(), name);
            self.unchecked.extend(self.claim_names.get(&key).cloned());
            self.pods_by_claim.remove(&key, &pod.uid);
        }
    }

    /// Counts the requests of the pod on its node, or on the node of its allocated claims.
    pub(crate) fn recount_requests(&mut self, uid: &PodUid) {
        let Some(mut pod) = self.pods.remove(uid) else { return };
        let node = if pod.is_running() {
            pod.node.clone()
        } else if pod.is_waiting() {
            self.expected_node(&pod)
        } else {
            None
        };
        self.count_requests(&mut pod, node);
        if pod.is_waiting() && self.holds_devices(&pod) {
            self.holding.insert(uid.clone());
        } else {
            self.holding.remove(uid);
        }
        if self.is_stranded(&pod) {
            self.stranded.insert(uid.clone());
        } else {
            self.stranded.remove(uid);
        }
        self.pods.insert(uid.clone(), pod);
    }

    fn expected_node(&self, pod: &PodEntry) -> Option<NodeName> {
        let names = pod.claims.iter().filter_map(|c| c.name.clone());
        let mut claims =
            names.filter_map(|name| self.claim_names.get(&(pod.namespace.clone(), name)));
        claims.find_map(|claim| {
            self.claims.get(claim)?.nodes()?.single_node().and_then(|n| NodeName::new(n).ok())
        })
    }

    /// Returns true if a claim of the pod has devices of ours.
    fn holds_devices(&self, pod: &PodEntry) -> bool {
        let named = pod.claims.iter().filter_map(|c| self.claim_named(pod, c.name.as_ref()?));
        let linked = pod.links.values().filter_map(|claim| self.claims.get(claim).map(Box::as_ref));
        named.chain(linked).any(|entry| !entry.counted().is_empty())
    }

    fn count_requests(&mut self, pod: &mut PodEntry, node: Option<NodeName>) {
        let as_holder = node.is_some() && self.holds_devices(pod);
        let is_same =
            pod.counted.as_ref().is_some_and(|counted| counted.requests == pod.scheduling.requests)
                && pod.counted_as_holder == as_holder;
        if pod.counted_on == node && (node.is_none() || is_same) {
            return;
        }
        if let Some(old) = pod.counted_on.take() {
            self.change_requests(&old, pod, false);
        }
        if let Some(new) = &node {
            pod.counted = Some(Arc::clone(&pod.scheduling));
            pod.counted_as_holder = as_holder;
            self.change_requests(new, pod, true);
        }
        pod.counted_on = node;
    }

    /// Adds the counted requests of the pod to the sums of the node, or subtracts them.
    fn change_requests(&mut self, node: &NodeName, pod: &PodEntry, add: bool) {
        self.changed.nodes.insert(node.clone());
        let entry = self.nodes.entry(node.clone()).or_default();
        if let Some(counted) = &pod.counted {
            change(&mut entry.used, &counted.requests, add);
            if pod.counted_as_holder {
                change_count(&mut self.holder_priorities, pod.priority, add);
                change(&mut entry.held, &counted.requests, add);
            }
        }
        if let Some(node) = &mut entry.node {
            let node = Arc::make_mut(node);
            node.used.clone_from(&entry.used);
            node.releasable.clone_from(&entry.held);
        } else if entry.used.is_empty() {
            self.nodes.remove(node);
        }
    }
}

fn change_count(counts: &mut BTreeMap<i32, usize>, priority: i32, add: bool) {
    let count = counts.entry(priority).or_default();
    *count = if add { *count + 1 } else { count.saturating_sub(1) };
    if *count == 0 {
        counts.remove(&priority);
    }
}

fn change(sums: &mut NameMap<Quantity>, requests: &NameMap<Quantity>, add: bool) {
    for (name, amount) in requests {
        let sum = sums.entry(name.clone()).or_default();
        let changed = if add { sum.checked_add(*amount) } else { sum.checked_sub(*amount) };
        *sum = changed.unwrap_or(*sum);
    }
    sums.retain(|_, sum| !sum.is_zero());
}
