//! Policies that choose GPU sets.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_allocator::topology::{
    DeviceSet, LinkMatrix, ResidualValue, SetChooser, SetRequest, SizeMix, TopologyPreferences,
};

use super::best_effort::BestEffort;
use crate::random::Random;

/// Name of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum PolicyName {
    /// Tessera's allocator: score and residual value.
    Tessera,
    /// Tessera's allocator with residual values for the observed sizes instead of the built-in
    /// prior.
    Learning,
    /// Tessera's allocator with estimated residual values, as on large machines.
    Estimate,
    /// The set with the highest score; ties go to the first.
    Greedy,
    /// NVIDIA's bestEffort: the best set of the best partition of all free GPUs into sets of the
    /// requested size.
    BestEffort,
    /// The free GPUs with the lowest indexes.
    FirstFit,
    /// Random free GPUs.
    Random,
}

/// Chooses GPU sets on one machine for consecutive requests.
pub trait SetPolicy {
    /// Returns `count` GPUs of the `free` ones, of which there are enough.
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet;

    /// Returns true if the choice depends only on the arguments.
    fn is_pure(&self) -> bool {
        true
    }
}

impl PolicyName {
    /// Returns the name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tessera => "tessera",
            Self::Learning => "learning",
            Self::Estimate => "estimate",
            Self::Greedy => "greedy",
            Self::BestEffort => "best-effort",
            Self::FirstFit => "first-fit",
            Self::Random => "random",
        }
    }

    /// Returns the policy for one machine. `seed` is for random policies.
    pub fn on(self, matrix: &Arc<LinkMatrix>, seed: u64) -> Box<dyn SetPolicy> {
        match self {
            Self::Tessera => Box::new(Tessera {
                chooser: SetChooser::new(Arc::clone(matrix), &SizeMix::default()),
            }),
            Self::Learning => Box::new(Learning::new(Arc::clone(matrix))),
            Self::Estimate => Box::new(Tessera {
                chooser: SetChooser::with_value(Arc::clone(matrix), ResidualValue::estimated()),
            }),
            Self::Greedy => Box::new(Greedy { matrix: Arc::clone(matrix) }),
            Self::BestEffort => Box::new(BestEffort::new(Arc::clone(matrix))),
            Self::FirstFit => Box::new(FirstFit),
            Self::Random => Box::new(RandomChoice { random: Random::new(seed) }),
        }
    }
}

/// A policy that computes each choice of a pure policy once.
pub struct CachedPolicy<'p> {
    policy: &'p mut dyn SetPolicy,
    answers: HashMap<(DeviceSet, usize), DeviceSet>,
}

impl<'p> CachedPolicy<'p> {
    /// Returns a policy that caches the choices of `policy`, if it is pure.
    pub fn new(policy: &'p mut dyn SetPolicy) -> Self {
        Self { policy, answers: HashMap::new() }
    }
}

impl SetPolicy for CachedPolicy<'_> {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        if !self.policy.is_pure() {
            return self.policy.choose(free, count);
        }
        *self.answers.entry((free, count)).or_insert_with(|| self.policy.choose(free, count))
    }

    fn is_pure(&self) -> bool {
        self.policy.is_pure()
    }
}

struct Tessera {
    chooser: SetChooser,
}

impl SetPolicy for Tessera {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        choose(&self.chooser, free, count)
    }
}

fn choose(chooser: &SetChooser, free: DeviceSet, count: usize) -> DeviceSet {
    let request =
        SetRequest { count, candidates: free, free, preferences: TopologyPreferences::default() };
    let choice = chooser.choose(&request, &mut u64::MAX.clone());
    choice.ok().flatten().expect("enough GPUs are free").devices
}

/// Weight of the built-in prior in requests.
const PRIOR: u64 = 64;

struct Learning {
    chooser: SetChooser,
    matrix: Arc<LinkMatrix>,
    /// Requests of each size, from size 1.
    counts: Vec<u64>,
    observed: u64,
    /// Number of requests at which the values are computed again.
    next_update: u64,
}

impl Learning {
    fn new(matrix: Arc<LinkMatrix>) -> Self {
        let counts = vec![PRIOR / 4; 4];
        Self {
            chooser: SetChooser::new(Arc::clone(&matrix), &SizeMix::default()),
            matrix,
            counts,
            observed: 0,
            next_update: 32,
        }
    }
}

impl SetPolicy for Learning {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        self.counts.resize(self.counts.len().max(count), 0);
        self.counts[count - 1] += 1;
        self.observed += 1;
        if self.observed == self.next_update {
            self.chooser = SetChooser::new(Arc::clone(&self.matrix), &SizeMix::new(&self.counts));
            self.next_update *= 2;
        }
        choose(&self.chooser, free, count)
    }

    fn is_pure(&self) -> bool {
        false
    }
}

struct Greedy {
    matrix: Arc<LinkMatrix>,
}

impl SetPolicy for Greedy {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        let sets = subsets(free, count);
        let best = sets.into_iter().rev().max_by_key(|set| self.matrix.score(*set));
        best.expect("enough GPUs are free")
    }
}

struct FirstFit;

impl SetPolicy for FirstFit {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        free.iter().take(count).collect()
    }
}

struct RandomChoice {
    random: Random,
}

impl SetPolicy for RandomChoice {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        let mut left: Vec<usize> = free.iter().collect();
        (0..count).map(|_| left.swap_remove(self.random.below(left.len()))).collect()
    }

    fn is_pure(&self) -> bool {
        false
    }
}

/// Returns all sets of `count` devices, in lexicographic order.
pub(super) fn subsets(of: DeviceSet, count: usize) -> Vec<DeviceSet> {
    let devices: Vec<usize> = of.iter().collect();
    let mut found = Vec::new();
    extend(&devices, count, DeviceSet::EMPTY, &mut found);
    found
}

fn extend(devices: &[usize], count: usize, set: DeviceSet, found: &mut Vec<DeviceSet>) {
    if count == 0 {
        found.push(set);
        return;
    }
    for at in 0..devices.len().saturating_sub(count - 1) {
        extend(&devices[at + 1..], count - 1, set | DeviceSet::one(devices[at]), found);
    }
}
