//! Which feasible choice is preferred: in which order devices are tried on a node, and which node
//! is taken.
//!
//! A policy is a [`Rule`] in a file of its own. It ranks; what is feasible is not its business.

mod binpack;
mod first_fit;
mod least_fragmentation;
mod outlook;
mod random;
mod spread;

use tessera_api::config::PlacementPolicy;
use tessera_api::names::capacity::MEMORY;

use crate::cluster::{Interner, Reach};
use crate::search::Chosen;
use crate::shape::{AlternativeShape, Shape};

pub(crate) use outlook::{Outlook, Picture, share};
pub(crate) use random::lot;

/// A placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Policy {
    /// Upstream's order: nodes by name, pools by driver and name, devices as published.
    FirstFit,
    /// The fullest first, so that whole devices and nodes stay free.
    Binpack,
    /// The emptiest first, so that neighbours disturb each other least.
    Spread,
    /// Any, by lot: the seed and the pod decide.
    Random,
    /// Where the least becomes useless to the requests that are expected: see
    /// [`fragmentation`](crate::fragmentation).
    #[default]
    LeastFragmentation,
}

/// Parts per million of something that is taken.
pub(crate) type Ppm = u64;

pub(crate) const WHOLE: Ppm = 1_000_000;

fn ppm(ppm: Ppm) -> i64 {
    i64::try_from(ppm).unwrap_or(i64::MAX)
}

/// What things are sorted by: smaller comes first, the second decides among equals.
pub(crate) type Rank = (i64, i64);

/// How a policy ranks.
trait Rule {
    /// The rank of a device; none where upstream's order is the order.
    fn device(&self, device: &DeviceView<'_>) -> Option<Rank>;

    /// The rank of a node on which the claims fit.
    fn node(&self, node: &NodeView<'_>) -> Rank;
}

/// What is ranked: the devices of a node as they are.
pub(crate) struct Ranking<'a> {
    pub(crate) reach: &'a Reach,
    pub(crate) interner: &'a Interner,
    /// As [`Reach::left`], less what the search has taken.
    pub(crate) left: &'a [i128],
    /// The devices that the search has taken as a whole, by candidate: not 0. Empty = none.
    pub(crate) holders: &'a [u128],
    pub(crate) seed: u64,
    pub(crate) outlook: Outlook<'a>,
    /// Worked out when a policy first looks at it.
    picture: std::cell::OnceCell<Picture>,
}

impl<'a> Ranking<'a> {
    pub(crate) fn new(
        reach: &'a Reach,
        interner: &'a Interner,
        left: &'a [i128],
        seed: u64,
        outlook: Outlook<'a>,
    ) -> Self {
        Self {
            reach,
            interner,
            left,
            holders: &[],
            seed,
            outlook,
            picture: std::cell::OnceCell::new(),
        }
    }

    /// The same, where the search holds these devices.
    pub(crate) fn with_holders(self, holders: &'a [u128]) -> Self {
        Self { holders, ..self }
    }

    /// The node as it is when `chosen` is taken of it.
    fn picture(&self) -> &Picture {
        self.picture.get_or_init(|| Picture::new(self))
    }
}

/// A device that is ranked, and what is asked of it.
struct DeviceView<'a> {
    ranking: &'a Ranking<'a>,
    asked: &'a AlternativeShape,
    candidate: usize,
}

/// A node that is ranked, and what the claims get there.
struct NodeView<'a> {
    ranking: &'a Ranking<'a>,
    shape: &'a Shape,
    chosen: &'a [Vec<Chosen>],
}

impl Policy {
    fn rule(self) -> &'static dyn Rule {
        match self {
            Self::FirstFit => &first_fit::FirstFit,
            Self::Binpack => &binpack::Binpack,
            Self::Spread => &spread::Spread,
            Self::Random => &random::Random,
            Self::LeastFragmentation => &least_fragmentation::LeastFragmentation,
        }
    }

    /// Whether devices are tried in upstream's order.
    pub(crate) fn keeps_order(self) -> bool {
        self == Self::FirstFit
    }

    /// The candidates in the order in which they are tried for an alternative; none where it is
    /// upstream's.
    pub(crate) fn order(
        self,
        ranking: &Ranking<'_>,
        asked: &AlternativeShape,
    ) -> Option<Vec<usize>> {
        let count = ranking.reach.candidates.len();
        let rank = |candidate| Some((self.rank_device(ranking, asked, candidate)?, candidate));
        let mut ranked = (0..count).map(rank).collect::<Option<Vec<_>>>()?;
        ranked.sort_unstable();
        Some(ranked.into_iter().map(|(_, candidate)| candidate).collect())
    }

    /// The rank of a device among its node's; none where upstream's order is the order.
    pub(crate) fn rank_device(
        self,
        ranking: &Ranking<'_>,
        asked: &AlternativeShape,
        candidate: usize,
    ) -> Option<Rank> {
        self.rule().device(&DeviceView { ranking, asked, candidate })
    }

    /// The rank of a node on which the claims of a shape fit.
    pub(crate) fn rank_node(
        self,
        ranking: &Ranking<'_>,
        shape: &Shape,
        chosen: &[Vec<Chosen>],
    ) -> Rank {
        self.rule().node(&NodeView { ranking, shape, chosen })
    }

    /// Whether it goes by the requests that are expected, and by the CPU that nodes have left for
    /// them.
    pub(crate) fn looks_ahead(self) -> bool {
        self == Self::LeastFragmentation
    }

    /// Whether each pod sees nodes in an order of its own.
    pub(crate) fn draws_lots(self) -> bool {
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

impl DeviceView<'_> {
    /// How much of it is taken: of the capacity of which most is. All of it where it is allocated
    /// as a whole.
    fn taken(&self) -> Ppm {
        let reach = self.ranking.reach;
        if reach.exclusive[self.candidate] > 0 {
            return WHOLE;
        }
        let capacity =
            &self.ranking.interner.offer(reach.candidates[self.candidate].offer).capacity;
        let from = reach.offset[self.candidate] as usize;
        let left = &self.ranking.left[from..from + capacity.len()];
        let ratio = |(capacity, left): (&i128, &i128)| {
            if *capacity <= 0 {
                0
            } else {
                (capacity - left).max(0).saturating_mul(i128::from(WHOLE)) / capacity
            }
        };
        let most = capacity.iter().zip(left).map(ratio).max().unwrap_or(0);
        // A share without any capacity is the least that can be told from nothing.
        let least = Ppm::from(reach.shares[self.candidate] > 0);
        Ppm::try_from(most).unwrap_or(WHOLE).clamp(least, WHOLE)
    }

    /// All of its memory, in bytes.
    fn memory(&self) -> i64 {
        let device = self.ranking.reach.candidates[self.candidate].device();
        device.capacity.get(MEMORY).map_or(0, |memory| memory.value.value_i64().unwrap_or(i64::MAX))
    }

    /// How many claims hold it.
    fn tasks(&self) -> u32 {
        self.ranking.reach.exclusive[self.candidate] + self.ranking.reach.shares[self.candidate]
    }
}

impl NodeView<'_> {
    fn devices(&self) -> impl Iterator<Item = DeviceView<'_>> {
        let (ranking, asked) = (self.ranking, &self.shape.alternatives[0]);
        (0..ranking.reach.candidates.len()).map(move |candidate| DeviceView {
            ranking,
            asked,
            candidate,
        })
    }

    /// How much of its devices is taken, on average.
    fn taken(&self) -> Ppm {
        let count = Ppm::try_from(self.ranking.reach.candidates.len().max(1)).unwrap_or(Ppm::MAX);
        self.devices().map(|device| device.taken()).sum::<Ppm>() / count
    }

    /// How many claims hold devices of it.
    fn tasks(&self) -> u32 {
        self.devices().map(|device| device.tasks()).sum()
    }
}
