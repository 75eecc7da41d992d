//! Placers, and the placer that scores every node.

use std::collections::HashMap;

use super::cluster::{Cluster, Demand, Node, Placement};

/// Decides the placement of pods, with its own record of the cluster.
pub trait Placer {
    /// Places a pod. Returns `None` if it fits nowhere.
    fn place(&mut self, demand: &Demand) -> Option<Placement>;

    /// Releases the resources of a pod.
    fn release(&mut self, demand: &Demand, placement: &Placement);
}

/// A scoring policy for a pod on a node. The highest score wins; ties go to the node of the lowest
/// rank.
pub trait Score {
    /// Type of a score.
    type Value: PartialOrd + Copy;

    /// Observes the arrival of a pod before it is placed. Returns true if earlier scores are
    /// invalid.
    fn arrival(&mut self, demand: &Demand) -> bool {
        let _ = demand;
        false
    }

    /// Observes that a pod fits nowhere.
    fn rejected(&mut self, demand: &Demand) {
        let _ = demand;
    }

    /// Returns the score of a demand on a node where it fits, and the GPUs that it would get.
    fn score(&mut self, demand: &Demand, node: &Node) -> (Self::Value, Vec<usize>);
}

/// Places each pod on the node with the highest score.
#[derive(Debug)]
pub struct ScoringPlacer<S: Score> {
    policy: S,
    cluster: Cluster,
    /// Nodes sorted by rank.
    ranked: Vec<usize>,
    /// Number of changes of each node.
    generations: Vec<u64>,
    /// Cached scores by demand and node: equal demands are scored once per state of a node.
    cache: HashMap<Demand, Vec<CachedScore<S::Value>>>,
}

#[derive(Debug, Clone)]
struct CachedScore<V> {
    generation: u64,
    score: Option<(V, Vec<usize>)>,
}

const NEVER: u64 = u64::MAX;

impl<S: Score> ScoringPlacer<S> {
    /// Returns a placer for `cluster`, whose nodes have these ranks.
    #[must_use]
    pub fn new(policy: S, cluster: Cluster, node_rank: &[usize]) -> Self {
        let mut ranked: Vec<usize> = (0..cluster.nodes().len()).collect();
        ranked.sort_by_key(|&node| node_rank[node]);
        let generations = vec![0; cluster.nodes().len()];
        Self { policy, cluster, ranked, generations, cache: HashMap::new() }
    }

    fn best(&mut self, demand: &Demand) -> Option<Placement> {
        let unknown =
            || vec![CachedScore { generation: NEVER, score: None }; self.generations.len()];
        let cache = self.cache.entry(*demand).or_insert_with(unknown);
        let mut best: Option<(S::Value, usize)> = None;
        for &at in &self.ranked {
            let entry = &mut cache[at];
            if entry.generation != self.generations[at] {
                let node = &self.cluster.nodes()[at];
                entry.generation = self.generations[at];
                entry.score = node.fits(demand).then(|| self.policy.score(demand, node));
            }
            let Some((score, _)) = &entry.score else { continue };
            if best.is_none_or(|(best, _)| *score > best) {
                best = Some((*score, at));
            }
        }
        let (_, node) = best?;
        let gpus = cache[node].score.as_ref().map(|(_, gpus)| gpus.clone())?;
        Some(Placement { node, gpus })
    }
}

impl<S: Score> Placer for ScoringPlacer<S> {
    fn place(&mut self, demand: &Demand) -> Option<Placement> {
        if self.policy.arrival(demand) {
            self.cache.clear();
        }
        let Some(placement) = self.best(demand) else {
            self.policy.rejected(demand);
            return None;
        };
        self.cluster.allocate(demand, &placement).ok()?;
        self.generations[placement.node] += 1;
        Some(placement)
    }

    fn release(&mut self, demand: &Demand, placement: &Placement) {
        self.cluster.release(demand, placement);
        self.generations[placement.node] += 1;
    }
}
