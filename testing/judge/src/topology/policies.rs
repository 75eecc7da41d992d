//! Who chooses.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_allocator::topology::{
    DeviceSet, LinkMatrix, ResidualValue, SetChooser, SetRequest, SizeMix, Wishes,
};

use super::best_effort::BestEffort;
use super::random::Random;

/// A way to choose GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum PolicyName {
    /// The allocator of this project: score and residual value.
    Tessera,
    /// The same, with residual values for the sizes that it has seen so far in place of the
    /// built-in prior.
    Learning,
    /// The same with estimated residual values, which large machines get.
    Estimate,
    /// The set with the highest score, of several the first.
    Greedy,
    /// NVIDIA's bestEffort: the best set of the best partition of all free GPUs into sets of the
    /// size asked for.
    BestEffort,
    /// The free GPUs with the lowest numbers.
    FirstFit,
    /// Any free GPUs.
    Random,
}

/// Chooses for one machine after the other request.
pub trait SetPolicy {
    /// The GPUs for a request of `count` of the `free` ones, which are at least so many.
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet;

    /// Whether the choice depends on nothing but its arguments.
    fn is_pure(&self) -> bool {
        true
    }
}

impl PolicyName {
    /// The word on the command line and in tables.
    pub fn word(self) -> &'static str {
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

    /// The policy for one machine. `seed` is for those that draw.
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
            Self::Random => Box::new(Drawing { random: Random::new(seed) }),
        }
    }
}

/// A pure policy that computes each answer once.
pub struct Remembering<'p> {
    policy: &'p mut dyn SetPolicy,
    answers: HashMap<(DeviceSet, usize), DeviceSet>,
}

impl<'p> Remembering<'p> {
    /// Remembers what `policy` answers, if it always answers the same.
    pub fn new(policy: &'p mut dyn SetPolicy) -> Self {
        Self { policy, answers: HashMap::new() }
    }
}

impl SetPolicy for Remembering<'_> {
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
    let request = SetRequest { count, candidates: free, free, wishes: Wishes::default() };
    let choice = chooser.choose(&request, &mut u64::MAX.clone());
    choice.ok().flatten().expect("as many GPUs are free as are asked for").devices
}

/// How many requests of the built-in prior stand beside those that were seen.
const PRIOR: u64 = 64;

struct Learning {
    chooser: SetChooser,
    matrix: Arc<LinkMatrix>,
    /// Requests of each size, from size 1.
    counts: Vec<u64>,
    seen: u64,
    /// When the values are computed again.
    due: u64,
}

impl Learning {
    fn new(matrix: Arc<LinkMatrix>) -> Self {
        let counts = vec![PRIOR / 4; 4];
        Self {
            chooser: SetChooser::new(Arc::clone(&matrix), &SizeMix::default()),
            matrix,
            counts,
            seen: 0,
            due: 32,
        }
    }
}

impl SetPolicy for Learning {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        self.counts.resize(self.counts.len().max(count), 0);
        self.counts[count - 1] += 1;
        self.seen += 1;
        if self.seen == self.due {
            self.chooser = SetChooser::new(Arc::clone(&self.matrix), &SizeMix::new(&self.counts));
            self.due *= 2;
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
        best.expect("as many GPUs are free as are asked for")
    }
}

struct FirstFit;

impl SetPolicy for FirstFit {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        free.iter().take(count).collect()
    }
}

struct Drawing {
    random: Random,
}

impl SetPolicy for Drawing {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        let mut left: Vec<usize> = free.iter().collect();
        (0..count).map(|_| left.swap_remove(self.random.below(left.len()))).collect()
    }

    fn is_pure(&self) -> bool {
        false
    }
}

/// All sets of `count` of the devices, in lexicographic order.
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
