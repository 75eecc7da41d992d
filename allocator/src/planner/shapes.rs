//! The shapes that are known, found again by what claims say.

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use crate::cluster::{Cluster, FastMap};
use crate::emptied::Emptied;
use crate::fits::Fits;
use crate::model::Claim;
use crate::policy::Policy;
use crate::shape::{Selections, Shape};

/// Nodes of all shapes together of which something is remembered: some 100 bytes each.
const MAX_REMEMBERED: usize = 2_000_000;

/// Shapes that are kept however many nodes there are.
const MIN_SHAPES: usize = 64;

/// Shapes that are kept at most.
const MAX_SHAPES: usize = 4096;

/// A shape, by a number that no other one ever gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ShapeId(u64);

/// All shapes that are known. Those that were not asked for longest are given up first.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    entries: FastMap<ShapeId, ShapeEntry>,
    by_hash: FastMap<u64, Vec<ShapeId>>,
    /// Shapes made and asked for so far.
    clock: u64,
}

/// A shape and what is known of it.
#[derive(Debug)]
pub(super) struct ShapeEntry {
    pub(super) shape: Shape,
    policy: Policy,
    pub(super) fits: Fits,
    pub(super) emptied: Emptied,
    hash: u64,
    asked: u64,
}

impl Shapes {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.by_hash.clear();
    }

    /// The shape that was asked for last, and others that are still known.
    pub(super) fn get(&self, id: ShapeId) -> &ShapeEntry {
        self.entries.get(&id).expect("invariant: the shape that was asked for last is known")
    }

    pub(super) fn get_mut(&mut self, id: ShapeId) -> &mut ShapeEntry {
        self.entries.get_mut(&id).expect("invariant: the shape that was asked for last is known")
    }

    /// Whether it is known on which nodes the shape of these claims fits.
    pub(super) fn remembers(&self, claims: &[Arc<Claim>], cpu_milli: u64, policy: Policy) -> bool {
        let alike = self.by_hash.get(&hash(claims, policy)).into_iter().flatten();
        alike
            .filter_map(|id| self.entries.get(id))
            .any(|entry| entry.is_of(claims, cpu_milli, policy) && !entry.fits.is_incomplete())
    }

    /// The shape of these claims, of a pod that takes so much CPU of its node (thousandths of a
    /// core).
    pub(super) fn of(
        &mut self,
        claims: &[Arc<Claim>],
        cpu_milli: u64,
        cluster: &mut Cluster,
        selections: &mut Selections,
        policy: Policy,
    ) -> ShapeId {
        self.clock += 1;
        let hash = hash(claims, policy);
        let alike = self.by_hash.get(&hash).into_iter().flatten();
        for id in alike {
            if let Some(entry) =
                self.entries.get_mut(id).filter(|entry| entry.is_of(claims, cpu_milli, policy))
            {
                entry.asked = self.clock;
                return *id;
            }
        }
        if selections.is_full() {
            self.clear();
            *selections = Selections::default();
        }
        self.make_room(cluster.nodes.len());
        selections.count_bytes(claims);
        let mut shape = Shape::new(claims, cluster, selections, policy);
        if shape.looks_ahead() {
            shape.cpu_milli = coarse(cpu_milli);
            cluster.rank_by_cpu();
        }
        let id = ShapeId(self.clock);
        let entry = ShapeEntry {
            shape,
            policy,
            fits: Fits::default(),
            emptied: Emptied::default(),
            hash,
            asked: self.clock,
        };
        self.entries.insert(id, entry);
        self.by_hash.entry(hash).or_default().push(id);
        id
    }

    /// Gives up the older half where there is no room for one more.
    fn make_room(&mut self, nodes: usize) {
        let room = (MAX_REMEMBERED / nodes.max(1)).clamp(MIN_SHAPES, MAX_SHAPES);
        if self.entries.len() < room {
            return;
        }
        let mut asked: Vec<u64> = self.entries.values().map(|entry| entry.asked).collect();
        asked.sort_unstable();
        let median = asked[asked.len() / 2];
        self.entries.retain(|_, entry| entry.asked > median);
        self.by_hash.clear();
        for (id, entry) in &self.entries {
            self.by_hash.entry(entry.hash).or_default().push(*id);
        }
    }
}

impl ShapeEntry {
    fn is_of(&self, claims: &[Arc<Claim>], cpu_milli: u64, policy: Policy) -> bool {
        let own = self.shape.claims.iter().map(|c| &c.claim);
        self.policy == policy
            && (self.shape.cpu_milli == coarse(cpu_milli) || !self.shape.looks_ahead())
            && own.len() == claims.len()
            && own.zip(claims).all(|(a, b)| asks_the_same(a, b))
    }
}

/// Rounded up to four binary digits: amounts of CPU that differ by less make no shapes of their
/// own, or every recommendation of a vertical autoscaler would.
fn coarse(cpu_milli: u64) -> u64 {
    let digits = 64 - cpu_milli.leading_zeros();
    let step = 1 << digits.saturating_sub(4);
    cpu_milli.checked_next_multiple_of(step).unwrap_or(cpu_milli)
}

fn asks_the_same(a: &Arc<Claim>, b: &Arc<Claim>) -> bool {
    Arc::ptr_eq(a, b)
        || (a.requests == b.requests && a.constraints == b.constraints && a.configs == b.configs)
}

fn hash(claims: &[Arc<Claim>], policy: Policy) -> u64 {
    let mut hasher = foldhash::quality::FixedState::default().build_hasher();
    policy.hash(&mut hasher);
    for claim in claims {
        claim.requests.hash(&mut hasher);
        claim.constraints.hash(&mut hasher);
    }
    hasher.finish()
}
