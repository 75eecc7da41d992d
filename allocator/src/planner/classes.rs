//! Classes of pending pods with equal requests and constraints.
//!
//! What a plan finds out about a refused pod applies to its whole class: that no node is usable,
//! and why. Both are kept between plans, and only nodes that have changed are examined again.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use tessera_api::names::{DeviceClassName, Namespace};

use super::class_reasons::ClassReasons;
use super::reservation::ReleaseRanks;
use super::shape_cache::{ShapeId, has_same_requests, hash_of_claims};
use crate::cluster::FastMap;
use crate::model::{Claim, PendingPod, PodUid, SchedulingConstraints};
use crate::outcome::RefusalCause;
use crate::policy::Policy;

/// Default of [`PodClasses::max_reasons`].
const MAX_REASONS: usize = 400_000;

/// Number of pods and classes that are kept although the last plan did not contain them.
const MIN_KEPT: usize = 1024;

/// Maximum number of nodes that are kept ranked, over all classes, about 100 bytes each.
const MAX_RANKS: usize = 1_000_000;

/// Identity of a class of pods with equal requests and constraints; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(u64);

/// Classes of pending pods.
#[derive(Debug)]
pub(super) struct PodClasses {
    members: HashMap<PodUid, Member>,
    classes: FastMap<ClassId, PodClass>,
    by_hash: FastMap<u64, Vec<ClassId>>,
    /// Number of plans so far.
    plan: u64,
    next: u64,
    /// Number of states of reasons so far, of all classes.
    versions: u64,
    /// Maximum number of node reasons that are kept for all classes, 200 to 300 bytes each.
    pub(super) max_reasons: usize,
    /// Class of which the steps sufficed for some nodes only: the next plan continues.
    pub(super) in_progress: Option<ClassId>,
    /// Class whose reasons were renewed last.
    pub(super) last_renewed: Option<ClassId>,
}

/// The class of a pod, as long as its claims and constraints are the same objects.
#[derive(Debug)]
struct Member {
    claims: Vec<Arc<Claim>>,
    scheduling: Arc<SchedulingConstraints>,
    policy: Policy,
    class: ClassId,
    /// Number of the last plan with the pod.
    plan: u64,
}

/// Pods with equal requests and constraints in one namespace.
#[derive(Debug)]
pub(super) struct PodClass {
    /// Claims of one of the pods, as an example.
    claims: Vec<Arc<Claim>>,
    scheduling: Arc<SchedulingConstraints>,
    namespace: Namespace,
    policy: Policy,
    hash: u64,
    plan: u64,
    /// Shape of the claims; the cache may have evicted it.
    pub(super) shape: Option<ShapeId>,
    /// Time up to which the class is known to have no usable node.
    pub(super) refused_until: Option<u64>,
    /// The quota that the last refused pod of the class would exceed.
    pub(super) over_quota: Option<Arc<RefusalCause>>,
    pub(super) reasons: ClassReasons,
    /// Nodes by the allocations to release for a pod of the class, if one was asked for lately.
    pub(super) releases: Option<ReleaseRanks>,
}

impl Default for PodClasses {
    fn default() -> Self {
        Self {
            members: HashMap::default(),
            classes: FastMap::default(),
            by_hash: FastMap::default(),
            plan: 0,
            next: 0,
            versions: 0,
            max_reasons: MAX_REASONS,
            in_progress: None,
            last_renewed: None,
        }
    }
}

impl PodClasses {
    /// Begins a plan: classes used from now on are kept.
    pub(super) fn begin_plan(&mut self) {
        self.plan += 1;
    }

    /// Ends a plan with this number of pods: forgets most of what it did not use.
    pub(super) fn end_plan(&mut self, pods: usize) {
        let plan = self.plan;
        if self.members.len() > 2 * pods + MIN_KEPT {
            self.members.retain(|_, member| member.plan == plan);
        }
        if self.classes.len() > 2 * pods + MIN_KEPT {
            self.classes.retain(|_, class| class.plan == plan);
            self.by_hash.clear();
            for (id, class) in &self.classes {
                self.by_hash.entry(class.hash).or_default().push(*id);
            }
        }
        self.bound_reasons();
        self.bound_releases();
    }

    /// Drops ranks of the newest classes if there are too many. Classes take turns in a
    /// reservation: if the least recently used ranks were dropped, each class would lose its own
    /// before its next turn.
    fn bound_releases(&mut self) {
        let ranks = self.classes.values().filter_map(|class| class.releases.as_ref());
        if ranks.map(ReleaseRanks::len).sum::<usize>() <= MAX_RANKS {
            return;
        }
        let mut ranked: Vec<_> =
            self.classes.iter_mut().filter(|(_, class)| class.releases.is_some()).collect();
        ranked.sort_unstable_by_key(|(id, _)| **id);
        let mut total = 0;
        for (_, class) in ranked {
            total += class.releases.as_ref().map_or(0, ReleaseRanks::len);
            if total > MAX_RANKS {
                class.releases = None;
            }
        }
    }

    /// Reduces the reasons of the newest classes to their counts if there are too many. All classes
    /// are explained in turn: if the least recently used reasons were dropped, each class would
    /// lose its own before its next turn.
    fn bound_reasons(&mut self) {
        let total: usize = self.classes.values().map(|class| class.reasons.len()).sum();
        if total <= self.max_reasons {
            return;
        }
        let mut by_id: Vec<_> = self.classes.iter_mut().collect();
        by_id.sort_unstable_by_key(|(id, _)| **id);
        let mut total = 0;
        for (id, class) in by_id {
            total += class.reasons.len();
            if total > self.max_reasons && self.in_progress != Some(*id) {
                total -= class.reasons.reduce_to_counts();
            }
        }
    }

    /// Forgets all results of the classes, but not the classes.
    pub(super) fn forget_results(&mut self) {
        self.classes.values_mut().for_each(PodClass::forget_results);
    }

    /// Forgets the results of the classes that request this DeviceClass.
    pub(super) fn forget_device_class(&mut self, name: &DeviceClassName) {
        let requests = |class: &&mut PodClass| class.claims.iter().any(|c| c.has_class(name));
        self.classes.values_mut().filter(requests).for_each(PodClass::forget_results);
    }

    /// Returns a number of a state of reasons that was never used.
    pub(super) fn next_version(&mut self) -> u64 {
        self.versions += 1;
        self.versions
    }

    /// Keeps the class for the next plans. Returns false if it is unknown or of another policy.
    pub(super) fn keep(&mut self, id: ClassId, policy: Policy) -> bool {
        let Some(class) = self.classes.get_mut(&id) else { return false };
        class.plan = self.plan;
        class.policy == policy
    }

    /// Returns a class, if it is known.
    pub(super) fn find_class(&self, id: ClassId) -> Option<&PodClass> {
        self.classes.get(&id)
    }

    pub(super) fn get(&self, id: ClassId) -> &PodClass {
        self.classes.get(&id).expect("invariant: classes of this plan are kept until its end")
    }

    pub(super) fn get_mut(&mut self, id: ClassId) -> &mut PodClass {
        self.classes.get_mut(&id).expect("invariant: classes of this plan are kept until its end")
    }

    /// Returns the class of a pod with these pending claims. `classified` counts comparisons with
    /// other pods: none is needed for a pod whose objects have not changed.
    pub(super) fn of(
        &mut self,
        pod: &PendingPod,
        claims: &[Arc<Claim>],
        policy: Policy,
        classified: &mut u64,
    ) -> ClassId {
        let plan = self.plan;
        if let Some(member) = self.members.get_mut(&pod.uid)
            && member.is_current(pod, claims, policy)
            && let Some(class) = self.classes.get_mut(&member.class)
        {
            (member.plan, class.plan) = (plan, plan);
            return member.class;
        }
        *classified += 1;
        let class = self.find(pod, claims, policy);
        self.members.insert(
            pod.uid.clone(),
            Member {
                claims: claims.to_vec(),
                scheduling: Arc::clone(&pod.scheduling),
                policy,
                class,
                plan,
            },
        );
        class
    }

    fn find(&mut self, pod: &PendingPod, claims: &[Arc<Claim>], policy: Policy) -> ClassId {
        let hash = hash(pod, claims, policy);
        for id in self.by_hash.get(&hash).into_iter().flatten() {
            if let Some(class) = self.classes.get_mut(id)
                && class.contains(pod, claims, policy)
            {
                class.plan = self.plan;
                return *id;
            }
        }
        self.next += 1;
        let id = ClassId(self.next);
        let class = PodClass {
            claims: claims.to_vec(),
            scheduling: Arc::clone(&pod.scheduling),
            namespace: pod.namespace.clone(),
            policy,
            hash,
            plan: self.plan,
            shape: None,
            refused_until: None,
            over_quota: None,
            reasons: ClassReasons::default(),
            releases: None,
        };
        self.classes.insert(id, class);
        self.by_hash.entry(hash).or_default().push(id);
        id
    }
}

impl Member {
    fn is_current(&self, pod: &PendingPod, claims: &[Arc<Claim>], policy: Policy) -> bool {
        self.policy == policy
            && Arc::ptr_eq(&self.scheduling, &pod.scheduling)
            && self.claims.len() == claims.len()
            && self.claims.iter().zip(claims).all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

impl PodClass {
    fn contains(&self, pod: &PendingPod, claims: &[Arc<Claim>], policy: Policy) -> bool {
        self.policy == policy
            && self.namespace == pod.namespace
            && self.scheduling == pod.scheduling
            && self.claims.len() == claims.len()
            && self.claims.iter().zip(claims).all(|(a, b)| has_same_requests(a, b))
    }

    fn forget_results(&mut self) {
        self.refused_until = None;
        self.over_quota = None;
        self.reasons = ClassReasons::default();
        self.releases = None;
    }
}

fn hash(pod: &PendingPod, claims: &[Arc<Claim>], policy: Policy) -> u64 {
    let mut hasher = foldhash::quality::FixedState::default().build_hasher();
    hash_of_claims(claims, policy).hash(&mut hasher);
    pod.namespace.hash(&mut hasher);
    pod.scheduling.hash(&mut hasher);
    hasher.finish()
}
