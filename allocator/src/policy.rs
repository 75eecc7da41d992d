//! Placement policies: rank candidate nodes and devices (feasibility is decided elsewhere).
//!
//! Each policy is a [`Scorer`] in a file of its own.

mod binpack;
mod first_fit;
mod least_fragmentation;
mod node_gpus;
mod random;
mod spread;

use tessera_api::config::PlacementPolicy;
use tessera_api::names::capacity::MEMORY;

use crate::cluster::{Interner, ReachableDevices};
use crate::search::Chosen;
use crate::shape::{AlternativeShape, Shape};

pub(crate) use node_gpus::{ForecastView, NodeGpuState, share};
pub(crate) use random::seeded_hash;

/// A placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Policy {
    /// Upstream's order: nodes by name, pools by driver and name, devices as published.
    FirstFit,
    /// Most utilized first, so that whole devices and nodes stay free.
    Binpack,
    /// Least utilized first, so that claims interfere least with each other.
    Spread,
    /// Pseudo-random order, by seed and pod.
    Random,
    /// Minimizes the capacity stranded for expected requests: see
    /// [`fragmentation`](crate::fragmentation).
    #[default]
    LeastFragmentation,
}

/// Utilization in parts per million.
pub(crate) type Ppm = u64;

pub(crate) const WHOLE: Ppm = 1_000_000;

fn ppm(ppm: Ppm) -> i64 {
    i64::try_from(ppm).unwrap_or(i64::MAX)
}

/// Sort key: smaller ranks first; the second element decides between equal first ones.
pub(crate) type Rank = (i64, i64);

/// Ranking of devices and nodes by a policy.
trait Scorer {
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
    fn gpu_state(&self) -> &NodeGpuState {
        self.gpu_state.get_or_init(|| NodeGpuState::new(self))
    }
}

/// A device to rank, and the alternative that it would serve.
struct ScoredDevice<'a> {
    ranking: &'a Ranking<'a>,
    alternative: &'a AlternativeShape,
    candidate: usize,
}

/// A node to rank, and the devices that the claims would get.
struct ScoredNode<'a> {
    ranking: &'a Ranking<'a>,
    shape: &'a Shape,
    chosen: &'a [Vec<Chosen>],
}

impl Policy {
    fn scorer(self) -> &'static dyn Scorer {
        match self {
            Self::FirstFit => &first_fit::FirstFit,
            Self::Binpack => &binpack::Binpack,
            Self::Spread => &spread::Spread,
            Self::Random => &random::Random,
            Self::LeastFragmentation => &least_fragmentation::LeastFragmentation,
        }
    }

    /// Returns true if devices are tried in upstream's order.
    pub(crate) fn keeps_order(self) -> bool {
        self == Self::FirstFit
    }

    /// Returns the candidates in the order of the policy; `None` keeps upstream's order.
    pub(crate) fn order(
        self,
        ranking: &Ranking<'_>,
        alternative: &AlternativeShape,
    ) -> Option<Vec<usize>> {
        let count = ranking.reachable.candidates.len();
        let rank =
            |candidate| Some((self.rank_device(ranking, alternative, candidate)?, candidate));
        let mut ranked = (0..count).map(rank).collect::<Option<Vec<_>>>()?;
        ranked.sort_unstable();
        Some(ranked.into_iter().map(|(_, candidate)| candidate).collect())
    }

    /// Returns the rank of a device on its node; `None` keeps upstream's order.
    pub(crate) fn rank_device(
        self,
        ranking: &Ranking<'_>,
        alternative: &AlternativeShape,
        candidate: usize,
    ) -> Option<Rank> {
        self.scorer().device(&ScoredDevice { ranking, alternative, candidate })
    }

    /// Returns the rank of a node on which the claims of a shape fit.
    pub(crate) fn rank_node(
        self,
        ranking: &Ranking<'_>,
        shape: &Shape,
        chosen: &[Vec<Chosen>],
    ) -> Rank {
        self.scorer().node(&ScoredNode { ranking, shape, chosen })
    }

    /// Returns true if the policy uses the forecast and the free CPU of nodes.
    pub(crate) fn uses_forecast(self) -> bool {
        self == Self::LeastFragmentation
    }

    /// Returns true if each pod ranks nodes in its own pseudo-random order.
    pub(crate) fn is_randomized(self) -> bool {
        self == Self::Random
    }
}

impl From<PlacementPolicy> for Policy {
    fn from(policy: PlacementPolicy) -> Self {
        match policy {
            PlacementPolicy::Spread => Self::Spread,
            PlacementPolicy::Random => Self::Random,
            PlacementPolicy::Binpack => Self::Binpack,
            PlacementPolicy::LeastFragmentation => Self::LeastFragmentation,
        }
    }
}

impl ScoredDevice<'_> {
    /// Returns the utilization of the most utilized capacity, in ppm; 100 % if allocated
    /// exclusively.
    fn utilization(&self) -> Ppm {
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

    /// Returns the memory size, in bytes.
    fn memory(&self) -> i64 {
        let device = self.ranking.reachable.candidates[self.candidate].device();
        device.capacity.get(MEMORY).map_or(0, |memory| memory.value.value_i64().unwrap_or(i64::MAX))
    }

    /// Returns the number of allocations of the device.
    fn allocation_count(&self) -> u32 {
        self.ranking.reachable.exclusive[self.candidate]
            + self.ranking.reachable.shares[self.candidate]
    }
}

impl ScoredNode<'_> {
    fn devices(&self) -> impl Iterator<Item = ScoredDevice<'_>> {
        let (ranking, alternative) = (self.ranking, &self.shape.alternatives[0]);
        (0..ranking.reachable.candidates.len()).map(move |candidate| ScoredDevice {
            ranking,
            alternative,
            candidate,
        })
    }

    /// Returns the average utilization of its devices, in ppm.
    fn utilization(&self) -> Ppm {
        let count =
            Ppm::try_from(self.ranking.reachable.candidates.len().max(1)).unwrap_or(Ppm::MAX);
        self.devices().map(|device| device.utilization()).sum::<Ppm>() / count
    }

    /// Returns the number of allocations of its devices.
    fn allocation_count(&self) -> u32 {
        self.devices().map(|device| device.allocation_count()).sum()
    }
}
