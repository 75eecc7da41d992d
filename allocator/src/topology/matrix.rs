//! How the devices of one machine are joined.

use tessera_api::config::TopologyScope;
use tessera_api::gpu::PcieLevel;

use super::DeviceSet;

/// Points of a pair or of a set: 100 for each NVLink, 10 to 60 for the PCIe level, summed over
/// pairs.
pub type Score = u32;

/// What joins two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// NVLinks between them, directly or through switches.
    pub nvlinks: u32,
    /// How close they are over PCIe.
    pub pcie: PcieLevel,
}

impl Pair {
    /// Two devices of which nothing is known but that they are in one machine.
    pub const FARTHEST: Self = Self { nvlinks: 0, pcie: PcieLevel::System };
}

/// Where a device is. Numbers only tell places apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Its PCIe root complex; `None` where it is not known, which is then shared with no other
    /// device.
    pub pcie_root: Option<u32>,
    /// Its NUMA node; the same holds.
    pub numa_node: Option<u32>,
}

/// More devices than a link matrix can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a machine of {0} devices; a link matrix holds at most {max}", max = DeviceSet::MAX)]
pub struct TooManyDevices(pub usize);

/// The score of each pair of a machine's devices, and who shares what. Two machines that are built
/// alike, and list their devices in the same order, have equal matrices.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LinkMatrix {
    count: usize,
    /// Scores of pairs, row by row.
    scores: Vec<Score>,
    /// For each scope and device, whom it shares the scope with, itself excepted.
    shared: [Vec<DeviceSet>; TopologyScope::ALL.len()],
    /// Devices that may change places with each other and nothing is different, by their lowest
    /// member.
    twins: Vec<DeviceSet>,
}

impl LinkMatrix {
    /// NVLinks beyond this count for no more: no GPU has that many, and sums of scores stay far
    /// from overflow.
    const MAX_NVLINKS: u32 = 1000;

    /// The matrix of devices at `places`; `pair` is asked once for each pair, the lower position
    /// first.
    ///
    /// # Errors
    /// More than 64 devices.
    pub fn new(
        places: &[Place],
        mut pair: impl FnMut(usize, usize) -> Pair,
    ) -> Result<Self, TooManyDevices> {
        let count = places.len();
        if count > DeviceSet::MAX {
            return Err(TooManyDevices(count));
        }
        let mut matrix = Self {
            count,
            scores: vec![0; count * count],
            shared: std::array::from_fn(|_| vec![DeviceSet::EMPTY; count]),
            twins: Vec::new(),
        };
        for a in 0..count {
            for b in a + 1..count {
                let joined = pair(a, b);
                let score = 100 * joined.nvlinks.min(Self::MAX_NVLINKS) + pcie_score(joined.pcie);
                matrix.scores[a * count + b] = score;
                matrix.scores[b * count + a] = score;
                matrix.share(TopologyScope::NvLink, a, b, joined.nvlinks > 0);
                matrix.share(
                    TopologyScope::Pcie,
                    a,
                    b,
                    same(places[a].pcie_root, places[b].pcie_root),
                );
                matrix.share(
                    TopologyScope::Numa,
                    a,
                    b,
                    same(places[a].numa_node, places[b].numa_node),
                );
            }
        }
        matrix.twins = matrix.find_twins();
        Ok(matrix)
    }

    fn share(&mut self, scope: TopologyScope, a: usize, b: usize, shared: bool) {
        if shared {
            let sets = &mut self.shared[scope as usize];
            sets[a] = sets[a] | DeviceSet::one(b);
            sets[b] = sets[b] | DeviceSet::one(a);
        }
    }

    /// How many devices.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has no device.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All devices.
    pub fn devices(&self) -> DeviceSet {
        DeviceSet::first(self.count)
    }

    /// The score of two devices; 0 for one with itself.
    pub fn pair(&self, a: usize, b: usize) -> Score {
        self.row(a)[b]
    }

    /// The scores of a device with each.
    pub(super) fn row(&self, device: usize) -> &[Score] {
        &self.scores[device * self.count..][..self.count]
    }

    /// The score of a set.
    pub fn score(&self, set: DeviceSet) -> Score {
        set.iter().map(|a| self.degree(a, set.above(a))).sum()
    }

    /// What a device scores with all of a set.
    pub(super) fn degree(&self, device: usize, with: DeviceSet) -> Score {
        with.iter().map(|other| self.pair(device, other)).sum()
    }

    /// The least score of a pair of the set; `None` for fewer than two devices.
    pub fn weakest_pair(&self, set: DeviceSet) -> Option<Score> {
        set.iter().flat_map(|a| set.above(a).iter().map(move |b| self.pair(a, b))).min()
    }

    /// The devices that share `scope` with this one, itself excepted.
    pub fn sharing(&self, scope: TopologyScope, device: usize) -> DeviceSet {
        self.shared[scope as usize][device]
    }

    /// How many pairs of the set share `scope`.
    pub fn pairs_sharing(&self, scope: TopologyScope, set: DeviceSet) -> usize {
        set.iter().map(|a| (self.sharing(scope, a) & set.above(a)).len()).sum()
    }

    /// Groups of twins: devices that are joined to each other device alike. Each device is in one
    /// group.
    pub fn twins(&self) -> &[DeviceSet] {
        &self.twins
    }

    fn find_twins(&self) -> Vec<DeviceSet> {
        let mut groups: Vec<DeviceSet> = Vec::new();
        for device in 0..self.count {
            // Being twins is an equivalence: one member speaks for its group.
            let own = groups
                .iter_mut()
                .find(|group| group.iter().next().is_some_and(|g| self.are_twins(g, device)));
            match own {
                Some(group) => *group = *group | DeviceSet::one(device),
                None => groups.push(DeviceSet::one(device)),
            }
        }
        groups
    }

    fn are_twins(&self, a: usize, b: usize) -> bool {
        let both = DeviceSet::one(a) | DeviceSet::one(b);
        let others = || (self.devices() - both).iter();
        others().all(|other| self.pair(a, other) == self.pair(b, other))
            && self.shared.iter().all(|sets| sets[a] - both == sets[b] - both)
    }
}

/// Points of a PCIe level.
fn pcie_score(level: PcieLevel) -> Score {
    match level {
        PcieLevel::System => 10,
        PcieLevel::Node => 20,
        PcieLevel::HostBridge => 30,
        PcieLevel::Multiple => 40,
        PcieLevel::Single => 50,
        PcieLevel::Board => 60,
    }
}

fn same<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
    one.is_some() && one == other
}
