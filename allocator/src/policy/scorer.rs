//! Ranking of devices and nodes: the input of a policy and its interface.

use tessera_api::names::capacity::{CORES, MEMORY};

use super::node_gpus::{ForecastView, NodeGpuState};
use crate::cluster::{Interner, ReachableDevices};
use crate::shape::{AlternativeShape, Chosen, Shape};

/// Utilization in parts per million.
pub(crate) type Ppm = u64;

pub(crate) const WHOLE: Ppm = 1_000_000;

/// Nano-units of a unit.
const NANO: u64 = 1_000_000_000;

pub(super) fn ppm(ppm: Ppm) -> i64 {
    i64::try_from(ppm).unwrap_or(i64::MAX)
}

/// Sort key: smaller ranks first; the second element decides between equal first ones.
pub(crate) type Rank = (i64, i64);

/// Ranking of devices and nodes by a policy.
pub(super) trait Scorer {
    /// Returns the rank of a device; `None` keeps upstream's order.
    fn device(&self, device: &ScoredDevice<'_>) -> Option<Rank>;

    /// Returns the rank of a feasible node.
    fn node(&self, node: &ScoredNode<'_>) -> Rank;
}

/// Input of a ranking: the devices of a node and their usage.
pub(crate) struct Ranking<'a> {
    pub(crate) reachable: &'a ReachableDevices,
    pub(crate) interner: &'a Interner,
    /// [`ReachableDevices::left`], minus the consumption of the current search.
    pub(crate) left: &'a [i128],
    /// Devices that the search holds exclusively, by candidate: not 0. Empty means none.
    pub(crate) holders: &'a [u128],
    pub(crate) seed: u64,
    pub(crate) forecast_view: ForecastView<'a>,
    /// Computed when a policy first uses it.
    gpu_state: std::cell::OnceCell<NodeGpuState>,
}

impl<'a> Ranking<'a> {
    pub(crate) fn new(
        reachable: &'a ReachableDevices,
        interner: &'a Interner,
        left: &'a [i128],
        seed: u64,
        forecast_view: ForecastView<'a>,
    ) -> Self {
        Self {
            reachable,
            interner,
            left,
            holders: &[],
            seed,
            forecast_view,
            gpu_state: std::cell::OnceCell::new(),
        }
    }

    /// Returns the ranking with these devices held by the search.
    pub(crate) fn with_holders(self, holders: &'a [u128]) -> Self {
        Self { holders, ..self }
    }

    /// Returns the state of the node's GPUs.
    pub(super) fn gpu_state(&self) -> &NodeGpuState {
        self.gpu_state.get_or_init(|| NodeGpuState::new(self))
    }
}

/// A device to rank, and the alternative that it would serve.
pub(super) struct ScoredDevice<'a> {
    pub(super) ranking: &'a Ranking<'a>,
    pub(super) alternative: &'a AlternativeShape,
    pub(super) candidate: usize,
}

/// A node to rank, and the devices that the claims would get.
pub(super) struct ScoredNode<'a> {
    pub(super) ranking: &'a Ranking<'a>,
    pub(super) shape: &'a Shape,
    pub(super) chosen: &'a [Vec<Chosen>],
}

impl ScoredDevice<'_> {
    /// Returns the utilization of the most utilized capacity, in ppm; 100 % if allocated
    /// exclusively.
    pub(super) fn utilization(&self) -> Ppm {
        let reachable = self.ranking.reachable;
        if reachable.exclusive[self.candidate] > 0 {
            return WHOLE;
        }
        let capacity =
            &self.ranking.interner.profile(reachable.candidates[self.candidate].profile).capacity;
        let from = reachable.offset[self.candidate] as usize;
        let left = &self.ranking.left[from..from + capacity.len()];
        let ratio = |(capacity, left): (&i128, &i128)| {
            if *capacity <= 0 {
                0
            } else {
                (capacity - left).max(0).saturating_mul(i128::from(WHOLE)) / capacity
            }
        };
        let most = capacity.iter().zip(left).map(ratio).max().unwrap_or(0);
        // A share without capacity counts as the smallest utilization above 0.
        let least = Ppm::from(reachable.shares[self.candidate] > 0);
        Ppm::try_from(most).unwrap_or(WHOLE).clamp(least, WHOLE)
    }

    /// Returns the expected load, in ppm: what was measured, and the reserved compute of shares
    /// that are not in the measurement. Without a measurement it is the utilization.
    pub(super) fn expected_load(&self) -> Ppm {
        let reachable = self.ranking.reachable;
        let load = reachable.loads.get(self.candidate).copied().flatten();
        let Some(load) = load.filter(|_| reachable.exclusive[self.candidate] == 0) else {
            return self.utilization();
        };
        let young = self.reserved_cores().saturating_sub(load.settled_cores_percent.into());
        (u64::from(load.busy_percent) + young) * (WHOLE / 100)
    }

    /// Returns the reserved compute, in percent of the device.
    fn reserved_cores(&self) -> u64 {
        let reachable = self.ranking.reachable;
        let capacity = &reachable.candidates[self.candidate].device().capacity;
        let from = reachable.offset[self.candidate] as usize;
        let cores = capacity.iter().zip(&self.ranking.left[from..]);
        let reserved = cores
            .filter(|((name, _), _)| *name == CORES)
            .map(|((_, cores), left)| (cores.value.nano() - left).max(0) / i128::from(NANO));
        reserved.sum::<i128>().try_into().unwrap_or(u64::MAX / WHOLE)
    }

    /// Returns the memory size, in bytes.
    pub(super) fn memory(&self) -> i64 {
        let device = self.ranking.reachable.candidates[self.candidate].device();
        device.capacity.get(MEMORY).map_or(0, |memory| memory.value.value_i64().unwrap_or(i64::MAX))
    }

    /// Returns the number of allocations of the device.
    pub(super) fn allocation_count(&self) -> u32 {
        self.ranking.reachable.exclusive[self.candidate]
            + self.ranking.reachable.shares[self.candidate]
    }
}

impl ScoredNode<'_> {
    pub(super) fn devices(&self) -> impl Iterator<Item = ScoredDevice<'_>> {
        let (ranking, alternative) = (self.ranking, &self.shape.alternatives[0]);
        (0..ranking.reachable.candidates.len()).map(move |candidate| ScoredDevice {
            ranking,
            alternative,
            candidate,
        })
    }

    /// Returns the devices that the claims would get.
    pub(super) fn chosen_devices(&self) -> impl Iterator<Item = ScoredDevice<'_>> {
        let (ranking, alternative) = (self.ranking, &self.shape.alternatives[0]);
        let chosen = self.chosen.iter().flatten();
        chosen.map(move |chosen| ScoredDevice { ranking, alternative, candidate: chosen.candidate })
    }

    /// Returns the average utilization of its devices, in ppm.
    pub(super) fn utilization(&self) -> Ppm {
        let count =
            Ppm::try_from(self.ranking.reachable.candidates.len().max(1)).unwrap_or(Ppm::MAX);
        self.devices().map(|device| device.utilization()).sum::<Ppm>() / count
    }

    /// Returns the number of allocations of its devices.
    pub(super) fn allocation_count(&self) -> u32 {
        self.devices().map(|device| device.allocation_count()).sum()
    }
}
