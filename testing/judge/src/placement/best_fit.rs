//! BestFit as simulated by FGD's authors: the node, and on it the GPU, with the least remaining
//! resources.

use super::cluster::{Demand, Node};
use super::placer::Score;
use super::trace::WHOLE;

/// Largest node of their cluster, which normalises the remaining resources.
const MAX_CPU_MILLI: f64 = 128_000.0;
const MAX_GPU_MILLI: f64 = 8_000.0;

/// The BestFit policy.
#[derive(Debug, Clone, Copy, Default)]
pub struct BestFit;

impl Score for BestFit {
    type Value = i64;

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the published arithmetic: int(100 x), in f64"
    )]
    fn score(&mut self, demand: &Demand, node: &Node) -> (i64, Vec<usize>) {
        let cpu = (node.cpu_milli - demand.cpu_milli) as f64 / MAX_CPU_MILLI;
        let gpu = (node.total_gpu_milli() - demand.total_gpu_milli()) as f64 / MAX_GPU_MILLI;
        ((100.0 * (1.0 - (0.5 * cpu + 0.5 * gpu))) as i64, gpus(demand, node))
    }
}

/// Returns the GPU with the least sufficient remainder for a share, or the first free ones for
/// whole GPUs.
fn gpus(demand: &Demand, node: &Node) -> Vec<usize> {
    if demand.is_share() {
        let enough = (0..node.gpus.len()).filter(|&gpu| node.gpus[gpu] >= demand.gpu_milli);
        return enough.min_by_key(|&gpu| node.gpus[gpu]).into_iter().collect();
    }
    free(demand, node)
}

/// Returns the first free GPUs of a node, as many as the demand needs.
pub(super) fn free(demand: &Demand, node: &Node) -> Vec<usize> {
    (0..node.gpus.len()).filter(|&gpu| node.gpus[gpu] == WHOLE).take(demand.gpus).collect()
}
