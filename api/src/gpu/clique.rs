//! NVLink cliques: groups of GPUs that are pairwise connected by NVLink.

use std::collections::{BTreeMap, BTreeSet};

use super::Link;
use crate::names::GpuUuid;

/// Steps that the search for one largest clique may take. Real machines need a few dozen: each
/// GPU is connected to all others or to a few. Beyond it the largest clique found so far is taken,
/// which is still a clique and still deterministic.
const STEP_BUDGET: u32 = 200_000;

/// A group of at least two GPUs in which every two are joined by NVLink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvlinkClique {
    /// Number of the clique on its node, by size (largest first), then by the lowest position of a
    /// member.
    pub number: u32,
    /// Its members, in the order in which the GPUs were given.
    pub members: Vec<GpuUuid>,
}

/// Partitions GPUs into NVLink cliques: the largest first, of equally large ones the one with the
/// lowest members, by the order of `gpus`; then repeated for the remaining GPUs. On a mesh that is
/// not complete (DGX-1V: two quads with single links between them) a GPU belongs to the largest
/// group only, so that a constraint on the clique never pairs GPUs without a link. A GPU without a
/// partner is in no clique.
pub fn nvlink_cliques<'g>(
    gpus: impl IntoIterator<Item = &'g GpuUuid>,
    links: &[Link],
) -> Vec<NvlinkClique> {
    let gpus: Vec<&GpuUuid> = gpus.into_iter().collect();
    let graph = Graph::new(&gpus, links);
    let mut left: Vec<usize> = (0..gpus.len()).collect();
    let mut cliques = Vec::new();
    loop {
        let clique = graph.largest_clique(&left);
        if clique.len() < 2 {
            return cliques;
        }
        left.retain(|gpu| !clique.contains(gpu));
        let members = clique.iter().map(|gpu| gpus[*gpu].clone()).collect();
        cliques.push(NvlinkClique { number: cliques.len() as u32, members });
    }
}

/// Links between GPUs, by position.
struct Graph {
    neighbours: Vec<BTreeSet<usize>>,
}

impl Graph {
    fn new(gpus: &[&GpuUuid], links: &[Link]) -> Self {
        let positions: BTreeMap<&GpuUuid, usize> =
            gpus.iter().enumerate().map(|(at, gpu)| (*gpu, at)).collect();
        let mut neighbours = vec![BTreeSet::new(); gpus.len()];
        for link in links.iter().filter(|link| link.nvlinks() > 0) {
            if let (Some(a), Some(b)) = (positions.get(&link.a), positions.get(&link.b))
                && a != b
            {
                neighbours[*a].insert(*b);
                neighbours[*b].insert(*a);
            }
        }
        Self { neighbours }
    }

    /// The largest clique among `gpus` (ascending); of several the lexicographically first.
    fn largest_clique(&self, gpus: &[usize]) -> Vec<usize> {
        let mut search = Search { graph: self, best: Vec::new(), steps: 0 };
        search.extend(&mut Vec::new(), gpus);
        search.best
    }
}

/// Branch and bound in ascending order: the first clique found of a size is the lexicographically
/// first of that size.
struct Search<'g> {
    graph: &'g Graph,
    best: Vec<usize>,
    steps: u32,
}

impl Search<'_> {
    fn extend(&mut self, clique: &mut Vec<usize>, candidates: &[usize]) {
        if clique.len() > self.best.len() {
            self.best.clone_from(clique);
        }
        for (at, gpu) in candidates.iter().enumerate() {
            self.steps += 1;
            if clique.len() + candidates.len() - at <= self.best.len() || self.steps > STEP_BUDGET {
                return;
            }
            let neighbours = &self.graph.neighbours[*gpu];
            let rest: Vec<usize> =
                candidates[at + 1..].iter().copied().filter(|c| neighbours.contains(c)).collect();
            clique.push(*gpu);
            self.extend(clique, &rest);
            clique.pop();
        }
    }
}
