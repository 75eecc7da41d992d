//! The shapes that are known, found again by what claims say.

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use crate::cluster::{Cluster, FastMap};
use crate::fits::Fits;
use crate::model::Claim;
use crate::policy::Policy;
use crate::shape::{Selections, Shape};

/// Shapes kept. Beyond, all are given up.
const MAX_SHAPES: usize = 1024;

/// All shapes that are known.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    entries: Vec<ShapeEntry>,
    by_hash: FastMap<u64, Vec<usize>>,
}

/// A shape and what is known of it.
#[derive(Debug)]
pub(super) struct ShapeEntry {
    pub(super) shape: Shape,
    policy: Policy,
    pub(super) fits: Fits,
}

impl Shapes {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.by_hash.clear();
    }

    pub(super) fn get(&self, at: usize) -> &ShapeEntry {
        &self.entries[at]
    }

    pub(super) fn get_mut(&mut self, at: usize) -> &mut ShapeEntry {
        &mut self.entries[at]
    }

    /// The shape of these claims, by its place. What was a place before may be another one after.
    pub(super) fn of(
        &mut self,
        claims: &[Arc<Claim>],
        cluster: &Cluster,
        selections: &mut Selections,
        policy: Policy,
    ) -> usize {
        let hash = hash(claims, policy);
        let alike = self.by_hash.get(&hash).into_iter().flatten();
        if let Some(known) = alike.copied().find(|&at| self.entries[at].is_of(claims, policy)) {
            return known;
        }
        if self.entries.len() >= MAX_SHAPES || selections.is_full() {
            self.clear();
            *selections = Selections::default();
        }
        let shape = Shape::new(claims, cluster, selections, policy);
        self.entries.push(ShapeEntry { shape, policy, fits: Fits::default() });
        self.by_hash.entry(hash).or_default().push(self.entries.len() - 1);
        self.entries.len() - 1
    }
}

impl ShapeEntry {
    fn is_of(&self, claims: &[Arc<Claim>], policy: Policy) -> bool {
        let own = self.shape.claims.iter().map(|c| &c.claim);
        self.policy == policy
            && own.len() == claims.len()
            && own.zip(claims).all(|(a, b)| asks_the_same(a, b))
    }
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
