//! Cache of shapes, looked up by the requests of claims.

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use tessera_api::names::DeviceClassName;

use crate::cluster::{Cluster, FastMap};
use crate::drained::FeasibilityIfDrained;
use crate::feasibility::Feasibility;
use crate::model::Claim;
use crate::policy::Policy;
use crate::shape::{Selections, Shape};

/// Maximum size of the cached node results of all shapes, in bytes.
const MAX_BYTES: usize = 200 << 20;

/// Minimum number of cached shapes, whatever their size.
const MIN_SHAPES: usize = 64;

/// Maximum number of cached shapes.
const MAX_SHAPES: usize = 4096;

/// Identity of a shape; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ShapeId(u64);

/// Cache of shapes. The least recently used ones are evicted first.
#[derive(Debug, Default)]
pub(super) struct ShapeCache {
    entries: FastMap<ShapeId, ShapeEntry>,
    by_hash: FastMap<u64, Vec<ShapeId>>,
    /// Number of look-ups so far.
    clock: u64,
}

/// A shape and its cached results.
#[derive(Debug)]
pub(super) struct ShapeEntry {
    pub(super) shape: Shape,
    policy: Policy,
    pub(super) feasibility: Feasibility,
    pub(super) drained: FeasibilityIfDrained,
    hash: u64,
    last_used: u64,
}

impl ShapeCache {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.by_hash.clear();
    }

    /// Returns a shape, unless it was evicted.
    pub(super) fn find(&self, id: ShapeId) -> Option<&ShapeEntry> {
        self.entries.get(&id)
    }

    /// Returns an entry. The most recently used shape is always present.
    pub(super) fn get(&self, id: ShapeId) -> &ShapeEntry {
        self.entries.get(&id).expect("invariant: the most recently used shape is cached")
    }

    pub(super) fn get_mut(&mut self, id: ShapeId) -> &mut ShapeEntry {
        self.entries.get_mut(&id).expect("invariant: the most recently used shape is cached")
    }

    /// Marks a shape as used. Returns false if it is no longer cached.
    pub(super) fn reuse(&mut self, id: ShapeId) -> bool {
        self.clock += 1;
        let clock = self.clock;
        self.entries.get_mut(&id).map(|entry| entry.last_used = clock).is_some()
    }

    /// Drops the shapes that request this DeviceClass.
    pub(super) fn forget_device_class(&mut self, name: &DeviceClassName) {
        self.entries.retain(|_, entry| !entry.shape.claims.iter().any(|c| c.claim.has_class(name)));
        self.index();
    }

    /// Returns the shape of these claims. `cpu_milli` is the CPU request of the pod, in millicores.
    pub(super) fn of(
        &mut self,
        claims: &[Arc<Claim>],
        cpu_milli: u64,
        cluster: &mut Cluster,
        selections: &mut Selections,
        policy: Policy,
    ) -> ShapeId {
        self.clock += 1;
        let hash = hash_of_claims(claims, policy);
        let candidates = self.by_hash.get(&hash).into_iter().flatten();
        for id in candidates {
            if let Some(entry) = self
                .entries
                .get_mut(id)
                .filter(|entry| entry.has_requests(claims, cpu_milli, policy))
            {
                entry.last_used = self.clock;
                return *id;
            }
        }
        if selections.is_full() {
            self.clear();
            selections.clear();
        }
        self.evict();
        selections.count_bytes(claims);
        let mut shape = Shape::new(claims, cluster, selections, policy);
        if shape.uses_forecast() {
            shape.cpu_milli = rounded_cpu(cpu_milli);
            cluster.rank_by_cpu();
        }
        if shape.uses_load() {
            cluster.rank_by_load();
        }
        let id = ShapeId(self.clock);
        let entry = ShapeEntry {
            shape,
            policy,
            feasibility: Feasibility::default(),
            drained: FeasibilityIfDrained::default(),
            hash,
            last_used: self.clock,
        };
        self.entries.insert(id, entry);
        self.by_hash.entry(hash).or_default().push(id);
        id
    }

    /// Evicts the older half if the cache is full.
    fn evict(&mut self) {
        let bytes = || self.entries.values().map(|entry| entry.feasibility.bytes()).sum::<usize>();
        let is_full = self.entries.len() >= MAX_SHAPES
            || self.entries.len() >= MIN_SHAPES && bytes() > MAX_BYTES;
        if !is_full {
            return;
        }
        let mut last_used: Vec<u64> = self.entries.values().map(|entry| entry.last_used).collect();
        last_used.sort_unstable();
        let median = last_used[last_used.len() / 2];
        self.entries.retain(|_, entry| entry.last_used > median);
        self.index();
    }

    /// Rebuilds the index by hash.
    fn index(&mut self) {
        self.by_hash.clear();
        for (id, entry) in &self.entries {
            self.by_hash.entry(entry.hash).or_default().push(*id);
        }
    }
}

impl ShapeEntry {
    fn has_requests(&self, claims: &[Arc<Claim>], cpu_milli: u64, policy: Policy) -> bool {
        let own = self.shape.claims.iter().map(|c| &c.claim);
        self.policy == policy
            && (self.shape.cpu_milli == rounded_cpu(cpu_milli) || !self.shape.uses_forecast())
            && own.len() == claims.len()
            && own.zip(claims).all(|(a, b)| has_same_requests(a, b))
    }
}

/// Rounds up to four significant binary digits. Otherwise each recommendation of a vertical
/// autoscaler would create another shape.
fn rounded_cpu(cpu_milli: u64) -> u64 {
    let digits = 64 - cpu_milli.leading_zeros();
    let step = 1 << digits.saturating_sub(4);
    cpu_milli.checked_next_multiple_of(step).unwrap_or(cpu_milli)
}

pub(super) fn has_same_requests(a: &Arc<Claim>, b: &Arc<Claim>) -> bool {
    Arc::ptr_eq(a, b)
        || (a.requests == b.requests
            && a.constraints == b.constraints
            && a.configs == b.configs
            && a.defaults == b.defaults)
}

/// Returns a hash that is equal for claims with equal requests.
pub(super) fn hash_of_claims(claims: &[Arc<Claim>], policy: Policy) -> u64 {
    let mut hasher = foldhash::quality::FixedState::default().build_hasher();
    policy.hash(&mut hasher);
    for claim in claims {
        claim.requests.hash(&mut hasher);
        claim.constraints.hash(&mut hasher);
    }
    hasher.finish()
}
