//! FGD ("Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
//! Descent", ATC'23) as simulated by its authors, including the truncation of scores to integers,
//! without which the results differ.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::best_fit::free;
use super::cluster::{Demand, Models, Node};
use super::placer::Score;
use super::trace::PodRow;

/// Minimum percentage of the original pods that the typical ones cover.
const COVERED_PERCENT: u64 = 95;

/// Key by which pods are counted, which also sorts equally frequent ones. Memory is ignored, and
/// models are compared as text.
type Class<'p> = (u64, u32, usize, &'p str);

/// The FGD policy.
#[derive(Debug, Clone)]
pub struct Fgd {
    /// Typical pods with their frequency, the most frequent first.
    typical: Vec<(Demand, f64)>,
}

/// Fragmented share of a node's GPUs in thousandths, by cause. The sums are separate and added in
/// this order as in the published code: another order would round some scores differently.
#[derive(Debug, Clone, Copy, Default)]
struct Fragments {
    lacks_both: f64,
    lacks_gpu: f64,
    lacks_cpu: f64,
    needs_no_gpu: f64,
    needs_no_gpu_and_lacks_cpu: f64,
    other_model: f64,
}

impl Fgd {
    /// Returns the policy for the pods of the original trace.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers of pods, in f64 as published")]
    pub fn new(pods: &[PodRow], models: &Models) -> Self {
        let mut counts: BTreeMap<Class<'_>, (Demand, u64)> = BTreeMap::new();
        for pod in pods {
            let class = (pod.cpu_milli, pod.gpu_milli, pod.num_gpu, pod.gpu_spec.as_str());
            counts.entry(class).or_insert((Demand::of(pod, models), 0)).1 += 1;
        }
        let mut typical: Vec<(Class<'_>, (Demand, u64))> = counts.into_iter().collect();
        typical.sort_by_key(|&(class, (_, count))| Reverse((count, class)));
        let total = pods.len() as u64;
        let mut covered = 0;
        typical.retain(|(_, (_, count))| {
            let is_typical = 100 * covered < COVERED_PERCENT * total;
            covered += if is_typical { *count } else { 0 };
            is_typical
        });
        let part = |count: u64| (count as f64 / total as f64) / (covered as f64 / total as f64);
        Self {
            typical: typical
                .into_iter()
                .map(|(_, (demand, count))| (demand, part(count)))
                .collect(),
        }
    }

    fn fragments(&self, node: &Node) -> f64 {
        let mut fragments = Fragments::default();
        for (pod, part) in &self.typical {
            fragments.add(pod, *part, node);
        }
        fragments.sum()
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the published arithmetic: the integer part"
    )]
    fn score_of(&self, before: f64, after: &Node) -> i64 {
        let fall = before - self.fragments(after);
        (100.0 / (1.0 + (-fall / 1000.0).exp())) as i64
    }
}

impl Fragments {
    #[expect(clippy::cast_precision_loss, reason = "thousandths of the GPUs of one node")]
    fn add(&mut self, pod: &Demand, part: f64, node: &Node) {
        let has_cpu = node.cpu_milli >= pod.cpu_milli;
        let has_gpus = node.gpus.iter().filter(|&&left| left >= pod.gpu_milli).count() >= pod.gpus;
        let too_small =
            || node.gpus.iter().filter(|&&left| left < pod.gpu_milli).map(|&left| u64::from(left));
        let (cause, milli) = match () {
            () if pod.gpus == 0 && has_cpu => (&mut self.needs_no_gpu, node.total_gpu_milli()),
            () if pod.gpus == 0 => (&mut self.needs_no_gpu_and_lacks_cpu, node.total_gpu_milli()),
            () if !pod.models.intersects(node.model) => {
                (&mut self.other_model, node.total_gpu_milli())
            }
            () if has_gpus && has_cpu => (&mut self.lacks_gpu, too_small().sum()),
            () if has_gpus => (&mut self.lacks_cpu, node.total_gpu_milli()),
            () if has_cpu => (&mut self.lacks_gpu, node.total_gpu_milli()),
            () => (&mut self.lacks_both, node.total_gpu_milli()),
        };
        *cause += part * milli as f64;
    }

    fn sum(self) -> f64 {
        self.lacks_both
            + self.lacks_gpu
            + self.lacks_cpu
            + self.needs_no_gpu
            + self.needs_no_gpu_and_lacks_cpu
            + self.other_model
    }
}

impl Score for Fgd {
    type Value = i64;

    fn score(&mut self, demand: &Demand, node: &Node) -> (i64, Vec<usize>) {
        let before = self.fragments(node);
        if !demand.is_share() {
            let gpus = free(demand, node);
            return (self.score_of(before, &node.with(demand, &gpus)), gpus);
        }
        let mut best = (i64::MIN, Vec::new());
        for gpu in (0..node.gpus.len()).filter(|&gpu| node.gpus[gpu] >= demand.gpu_milli) {
            if node.gpus[..gpu].contains(&node.gpus[gpu]) {
                continue;
            }
            let score = self.score_of(before, &node.with(demand, &[gpu]));
            if score > best.0 {
                best = (score, vec![gpu]);
            }
        }
        best
    }
}
