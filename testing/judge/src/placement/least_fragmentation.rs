//! The allocator's default policy without the allocator: each pod is placed where the potential of
//! [`tessera_allocator::fragmentation`] rises least.

use std::collections::HashMap;

use tessera_allocator::fragmentation::{
    GpuFraction, GpuRequest, GpuState, GpuType, GpuTypes, NodeCapacity, PotentialRise,
    RequestMixLearner,
};

use super::best_fit::free;
use super::cluster::{Demand, ModelSet, Node};
use super::placer::Score;

/// The LeastFragmentation policy, which starts with the prior and learns from arrivals.
#[derive(Debug, Clone, Default)]
pub struct LeastFragmentation {
    learner: RequestMixLearner,
    /// Cache of the potential of each state of a node under the current mix.
    cache: HashMap<Node, f64>,
}

impl LeastFragmentation {
    fn level(&mut self, node: &Node) -> f64 {
        if let Some(&level) = self.cache.get(node) {
            return level;
        }
        let level = view(node, |view| self.learner.potential().of(view));
        self.cache.insert(node.clone(), level);
        level
    }

    fn rise(&self, before: f64, after: &Node) -> PotentialRise {
        view(after, |view| self.learner.potential().rise(before, view))
    }
}

impl Score for LeastFragmentation {
    type Value = std::cmp::Reverse<PotentialRise>;

    fn arrival(&mut self, demand: &Demand) -> bool {
        let is_new = self.learner.observe(request(demand));
        if is_new {
            self.cache.clear();
        }
        is_new
    }

    fn rejected(&mut self, demand: &Demand) {
        self.learner.observe_refusal(request(demand));
    }

    fn score(&mut self, demand: &Demand, node: &Node) -> (Self::Value, Vec<usize>) {
        let before = self.level(node);
        let mut choices = choices(demand, node).into_iter().map(|gpus| {
            let rise = self.rise(before, &node.with(demand, &gpus));
            (std::cmp::Reverse(rise), gpus)
        });
        let first = choices.next().unwrap_or_else(|| unreachable!("the demand fits on the node"));
        choices.fold(first, |best, next| if next.0 > best.0 { next } else { best })
    }
}

/// Returns the sets of GPUs worth comparing: for a share one GPU of each remaining size, otherwise
/// the first free ones.
fn choices(demand: &Demand, node: &Node) -> Vec<Vec<usize>> {
    if !demand.is_share() {
        return vec![free(demand, node)];
    }
    let differs = |&gpu: &usize| !node.gpus[..gpu].contains(&node.gpus[gpu]);
    let enough = (0..node.gpus.len()).filter(|&gpu| node.gpus[gpu] >= demand.gpu_milli);
    enough.filter(differs).map(|gpu| vec![gpu]).collect()
}

fn view<T>(node: &Node, read: impl FnOnce(&NodeCapacity<'_>) -> T) -> T {
    let kind = types(node.model).next().unwrap_or(GpuType(u16::MAX));
    let gpus: Vec<GpuState> = node
        .gpus
        .iter()
        .map(|&left| GpuState { gpu_type: kind, free: GpuFraction::new(left) })
        .collect();
    read(&NodeCapacity { cpu_milli: node.cpu_milli, gpus: &gpus })
}

fn request(demand: &Demand) -> GpuRequest {
    let is_free = demand.models == ModelSet::ANY;
    GpuRequest {
        cpu_milli: demand.cpu_milli,
        gpus: u32::try_from(demand.gpus).unwrap_or(u32::MAX),
        share: GpuFraction::new(demand.gpu_milli),
        types: if is_free { GpuTypes::ANY } else { GpuTypes::of(types(demand.models)) },
    }
}

fn types(models: ModelSet) -> impl Iterator<Item = GpuType> {
    models.positions().filter_map(|at| u16::try_from(at).ok()).map(GpuType)
}
