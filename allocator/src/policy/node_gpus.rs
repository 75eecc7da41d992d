//! Input of the [`fragmentation`](crate::fragmentation) model for one node.

use std::cell::RefCell;

use super::scorer::Ranking;
use crate::fragmentation::{GpuFraction, GpuState, NodeCapacity, Potential, PotentialRise};
use crate::shape::{AlternativeShape, ProfileDemand};

/// Forecast, and the CPU of a node and of a pod to place there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForecastView<'a> {
    pub(crate) potential: &'a Potential,
    /// Free CPU of the node, in millicores.
    pub(crate) cpu_free: u64,
    /// CPU request of the pod, in millicores.
    pub(crate) cpu_requested: u64,
}

/// GPUs of a node. Devices that are not managed, those of other drivers, and partitions are not
/// included.
#[derive(Debug)]
pub(crate) struct NodeGpuState {
    gpus: Vec<GpuState>,
    /// Index of each candidate in `gpus`.
    gpu_indices: Vec<Option<usize>>,
    /// Fragmentation potential of the current state.
    level: f64,
    /// Cached rises for taking a share of one GPU.
    known: RefCell<Vec<(GpuState, GpuFraction, PotentialRise)>>,
}

impl NodeGpuState {
    pub(super) fn new(ranking: &Ranking<'_>) -> Self {
        let count = ranking.reachable.candidates.len();
        let (mut gpus, mut gpu_indices) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for candidate in 0..count {
            let compiled = ranking.reachable.candidates[candidate].compiled();
            let is_gpu = compiled.device.is_gpu();
            gpu_indices.push(is_gpu.then_some(gpus.len()));
            if is_gpu {
                gpus.push(GpuState { gpu_type: compiled.kind, free: left(ranking, candidate) });
            }
        }
        let forecast_view = &ranking.forecast_view;
        let level = forecast_view
            .potential
            .of(&NodeCapacity { cpu_milli: forecast_view.cpu_free, gpus: &gpus });
        Self { gpus, gpu_indices, level, known: RefCell::default() }
    }

    /// Returns the share of a GPU that the request consumes: the maximum over its capacities.
    pub(super) fn share(
        &self,
        ranking: &Ranking<'_>,
        alternative: &AlternativeShape,
        candidate: usize,
    ) -> GpuFraction {
        let candidate = &ranking.reachable.candidates[candidate];
        let whole = &ranking.interner.profile(candidate.profile).capacity;
        match alternative.profile_match(candidate.profile).map(|answer| &answer.demand) {
            Some(ProfileDemand::Takes(demand, _)) if candidate.device().shared => {
                share(demand, whole)
            }
            _ => GpuFraction::WHOLE,
        }
    }

    /// Returns the free share of a candidate.
    pub(super) fn left(&self, candidate: usize) -> GpuFraction {
        self.gpu_indices[candidate].map_or(GpuFraction::NONE, |index| self.gpus[index].free)
    }

    /// Returns the rise of the potential if these shares of candidates are taken.
    pub(super) fn rise(
        &self,
        forecast_view: &ForecastView<'_>,
        taken: &[(usize, GpuFraction)],
    ) -> PotentialRise {
        let only = match taken {
            [(candidate, share)] => {
                self.gpu_indices[*candidate].map(|index| (self.gpus[index], *share))
            }
            _ => None,
        };
        let known = self.known.borrow();
        let found = only.and_then(|only| known.iter().find(|known| (known.0, known.1) == only));
        if let Some((_, _, rise)) = found {
            return *rise;
        }
        drop(known);
        let mut gpus = self.gpus.clone();
        for (candidate, share) in taken {
            if let Some(index) = self.gpu_indices[*candidate] {
                gpus[index].free = gpus[index].free.saturating_sub(*share);
            }
        }
        let cpu_milli = forecast_view.cpu_free.saturating_sub(forecast_view.cpu_requested);
        let rise =
            forecast_view.potential.rise(self.level, &NodeCapacity { cpu_milli, gpus: &gpus });
        self.known.borrow_mut().extend(only.map(|(gpu, share)| (gpu, share, rise)));
        rise
    }
}

/// Returns the free share of a device: the minimum over its capacities.
fn left(ranking: &Ranking<'_>, candidate: usize) -> GpuFraction {
    let is_held = ranking.holders.get(candidate).is_some_and(|holders| *holders != 0);
    if is_held || ranking.reachable.exclusive[candidate] > 0 {
        return GpuFraction::NONE;
    }
    let whole = &ranking.interner.profile(ranking.reachable.candidates[candidate].profile).capacity;
    let from = ranking.reachable.offset[candidate] as usize;
    let left = &ranking.left[from..from + whole.len()];
    let part =
        |(left, whole): (&i128, &i128)| thousandths((*left).max(0).saturating_mul(1000), *whole);
    let parts = whole
        .iter()
        .zip(left)
        .filter(|(whole, _)| **whole > 0)
        .map(|(whole, left)| part((left, whole)));
    parts.min().map_or(GpuFraction::WHOLE, GpuFraction::new)
}

fn thousandths(milli: i128, whole: i128) -> u32 {
    u32::try_from(milli / whole).unwrap_or(u32::MAX)
}

/// Returns the share of a device that a demand consumes, rounded up.
pub(crate) fn share(demand: &[i128], whole: &[i128]) -> GpuFraction {
    let part = |(amount, whole): (&i128, &i128)| {
        thousandths((*amount).max(0).saturating_mul(1000).saturating_add(whole - 1), *whole)
    };
    let parts = demand.iter().zip(whole).filter(|(_, whole)| **whole > 0).map(part);
    parts.max().map_or(GpuFraction::NONE, GpuFraction::new)
}
