//! What decides where a pod goes, and the kind of it that scores every node.

use std::collections::HashMap;

use super::cluster::{Cluster, Demand, Node, Placement};

/// Decides where pods go, and keeps its own books of what is where.
pub trait Placer {
    /// Places a pod. `None` = it fits nowhere.
    fn place(&mut self, demand: &Demand) -> Option<Placement>;

    /// A pod that was placed has gone.
    fn release(&mut self, demand: &Demand, placement: &Placement);
}

/// How well a pod would sit on a node. The greatest score wins; ties go to the node of the lowest
/// rank.
pub trait Score {
    /// What nodes are compared by.
    type Value: PartialOrd + Copy;

    /// A pod has arrived and is about to be placed. `true` if scores given before do not hold any
    /// more.
    fn arrival(&mut self, demand: &Demand) -> bool {
        let _ = demand;
        false
    }

    /// The pod that arrived fits nowhere.
    fn refused(&mut self, demand: &Demand) {
        let _ = demand;
    }

    /// The score of the demand on a node on which it fits, and the GPUs it would get there.
    fn score(&mut self, demand: &Demand, node: &Node) -> (Self::Value, Vec<usize>);
}

/// Places each pod on the node that scores best.
#[derive(Debug)]
pub struct Scoring<S: Score> {
    policy: S,
    cluster: Cluster,
    /// The nodes in the order of their ranks.
    ranked: Vec<usize>,
    /// How often each node has changed.
    generations: Vec<u64>,
    /// What is known by demand and node, and of which generation: equal demands are scored once
    /// per state of a node.
    known: HashMap<Demand, Vec<Known<S::Value>>>,
}

#[derive(Debug, Clone)]
struct Known<V> {
    generation: u64,
    score: Option<(V, Vec<usize>)>,
}

const NEVER: u64 = u64::MAX;

impl<S: Score> Scoring<S> {
    /// Places into `cluster`, whose nodes have these ranks.
    #[must_use]
    pub fn new(policy: S, cluster: Cluster, node_rank: &[usize]) -> Self {
        let mut ranked: Vec<usize> = (0..cluster.nodes().len()).collect();
        ranked.sort_by_key(|&node| node_rank[node]);
        let generations = vec![0; cluster.nodes().len()];
        Self { policy, cluster, ranked, generations, known: HashMap::new() }
    }

    /// The policy that scores.
    pub fn policy(&self) -> &S {
        &self.policy
    }

    fn best(&mut self, demand: &Demand) -> Option<Placement> {
        let unknown = || vec![Known { generation: NEVER, score: None }; self.generations.len()];
        let known = self.known.entry(*demand).or_insert_with(unknown);
        let mut best: Option<(S::Value, usize)> = None;
        for &at in &self.ranked {
            let entry = &mut known[at];
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
        let gpus = known[node].score.as_ref().map(|(_, gpus)| gpus.clone())?;
        Some(Placement { node, gpus })
    }
}

impl<S: Score> Placer for Scoring<S> {
    fn place(&mut self, demand: &Demand) -> Option<Placement> {
        if self.policy.arrival(demand) {
            self.known.clear();
        }
        let Some(placement) = self.best(demand) else {
            self.policy.refused(demand);
            return None;
        };
        self.cluster.take(demand, &placement).ok()?;
        self.generations[placement.node] += 1;
        Some(placement)
    }

    fn release(&mut self, demand: &Demand, placement: &Placement) {
        self.cluster.give_back(demand, placement);
        self.generations[placement.node] += 1;
    }
}
