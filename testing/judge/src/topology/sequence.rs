//! Requests of random sizes until the first that does not fit: the sum of their scores relative to
//! a clairvoyant's. The sizes alone determine which requests fit, so every policy serves the same
//! ones.

use tessera_allocator::topology::{DeviceSet, LinkMatrix, Score};

use super::clairvoyant::Clairvoyant;
use super::policies::SetPolicy;
use crate::random::Random;

/// Distribution of request sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Sizes, each repeated by its weight.
    drawn: Vec<usize>,
}

/// Sums over sequences.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sequences {
    score: f64,
    best: f64,
    ratios: f64,
    rated: f64,
    weakest: f64,
    pairs: f64,
    /// Lowest score of a pair in any request; `None` without requests for two or more.
    pub weakest_pair: Option<Score>,
}

impl Sizes {
    /// Returns the distribution of equally likely sizes; repeated ones are more likely. Returns
    /// `None` for an empty list or a size of 0.
    pub fn new(drawn: Vec<usize>) -> Option<Self> {
        (!drawn.is_empty() && !drawn.contains(&0)).then_some(Self { drawn })
    }

    /// Draws a size; sizes above the machine's are rejected by every machine.
    fn draw(&self, random: &mut Random) -> usize {
        self.drawn[random.below(self.drawn.len())]
    }

    fn probability(&self, holds: impl Fn(usize) -> bool) -> f64 {
        self.drawn.iter().filter(|size| holds(**size)).count() as f64 / self.drawn.len() as f64
    }

    fn different(&self) -> Vec<usize> {
        let mut sizes = self.drawn.clone();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

impl Sequences {
    /// Returns the sum of scores / the clairvoyant's sum: the primary figure.
    pub fn ratio(&self) -> f64 {
        if self.best > 0.0 { self.score / self.best } else { 1.0 }
    }

    /// Returns the mean over sequences of score / the clairvoyant's score.
    pub fn mean_ratio(&self) -> f64 {
        if self.rated > 0.0 { self.ratios / self.rated } else { 1.0 }
    }

    /// Returns the mean score of the weakest pair, over requests for two or more GPUs.
    pub fn mean_weakest_pair(&self) -> f64 {
        if self.pairs > 0.0 { self.weakest / self.pairs } else { 0.0 }
    }

    fn end(&mut self, weight: f64, score: Score, best: Score) {
        self.score += weight * f64::from(score);
        self.best += weight * f64::from(best);
        if best > 0 {
            self.rated += weight;
            self.ratios += weight * f64::from(score) / f64::from(best);
        }
    }

    fn request(&mut self, weight: f64, weakest: Option<Score>) {
        let Some(weakest) = weakest else { return };
        self.pairs += weight;
        self.weakest += weight * f64::from(weakest);
        self.weakest_pair = Some(self.weakest_pair.map_or(weakest, |least| least.min(weakest)));
    }
}

/// Returns the sums over `count` sequences of one seed.
pub fn sampled(
    matrix: &LinkMatrix,
    policy: &mut dyn SetPolicy,
    clairvoyant: &mut Clairvoyant,
    sizes: &Sizes,
    (seed, count): (u64, usize),
) -> Sequences {
    let mut random = Random::new(seed);
    let mut sums = Sequences::default();
    for _ in 0..count {
        let (mut free, mut served, mut score) = (matrix.devices(), Vec::new(), 0);
        loop {
            let size = sizes.draw(&mut random);
            if size > free.len() {
                break;
            }
            let set = policy.choose(free, size);
            free = free - set;
            score += matrix.score(set);
            served.push(size);
            sums.request(1.0, matrix.weakest_pair(set));
        }
        sums.end(1.0, score, clairvoyant.best(&served));
    }
    sums
}

/// Returns the expectation over all sequences, for a policy that depends only on the free GPUs and
/// the size.
pub fn expected(
    matrix: &LinkMatrix,
    policy: &mut dyn SetPolicy,
    clairvoyant: &mut Clairvoyant,
    sizes: &Sizes,
) -> Sequences {
    let different = sizes.different();
    let mut tree = SequenceTree {
        matrix,
        policy,
        clairvoyant,
        sizes,
        different,
        served: Vec::new(),
        sums: Sequences::default(),
    };
    tree.visit(matrix.devices(), 1.0, 0);
    tree.sums
}

struct SequenceTree<'w> {
    matrix: &'w LinkMatrix,
    policy: &'w mut dyn SetPolicy,
    clairvoyant: &'w mut Clairvoyant,
    sizes: &'w Sizes,
    different: Vec<usize>,
    served: Vec<usize>,
    sums: Sequences,
}

impl SequenceTree<'_> {
    /// Visits all continuations for these free GPUs.
    fn visit(&mut self, free: DeviceSet, probability: f64, score: Score) {
        let rejected = self.sizes.probability(|size| size > free.len());
        if rejected > 0.0 {
            let best = self.clairvoyant.best(&self.served);
            self.sums.end(probability * rejected, score, best);
        }
        for at in 0..self.different.len() {
            let size = self.different[at];
            if size > free.len() {
                return;
            }
            let probability = probability * self.sizes.probability(|drawn| drawn == size);
            let set = self.policy.choose(free, size);
            self.sums.request(probability, self.matrix.weakest_pair(set));
            self.served.push(size);
            self.visit(free - set, probability, score + self.matrix.score(set));
            self.served.pop();
        }
    }
}
