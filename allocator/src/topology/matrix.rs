//! Links between the devices of one machine.

use tessera_api::config::TopologyScope;
use tessera_api::gpu::PcieLevel;

use super::DeviceSet;

/// Score of a pair or set: 100 per NVLink plus 10 to 60 for the PCIe level, summed over pairs.
pub type Score = u32;

/// Links between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLinks {
    /// Number of NVLinks between them, direct or through switches.
    pub nvlinks: u32,
    /// PCIe level between them.
    pub pcie: PcieLevel,
}

impl DeviceLinks {
    /// Two devices in one machine without known links.
    pub const FARTHEST: Self = Self { nvlinks: 0, pcie: PcieLevel::System };
}

/// Location of a device in its machine. The numbers only distinguish locations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceLocation {
    /// PCIe root complex; `None` if unknown, which is shared with no other device.
    pub pcie_root: Option<u32>,
    /// NUMA node; `None` if unknown, which is shared with no other device.
    pub numa_node: Option<u32>,
}

/// Error: the machine has more devices than a link matrix supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a machine of {0} devices; a link matrix holds at most {max}", max = DeviceSet::MAX)]
pub struct TooManyDevices(pub usize);

/// Score of each pair of a machine's devices, and their shared scopes.
///
/// Identical machines that list their devices in the same order have equal matrices.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LinkMatrix {
    count: usize,
    /// Scores of pairs, row by row.
    scores: Vec<Score>,
    /// Devices that share a scope with each device (without itself), per scope.
    shared: [Vec<DeviceSet>; TopologyScope::ALL.len()],
    /// Groups of interchangeable devices, by their lowest member.
    twins: Vec<DeviceSet>,
}

impl LinkMatrix {
    /// Maximum number of NVLinks that count. No GPU has as many, and sums of scores cannot
    /// overflow.
    const MAX_NVLINKS: u32 = 1000;

    /// Creates a matrix for devices at `places`. `pair` is called once per pair, with the lower
    /// position first.
    ///
    /// # Errors
    /// Returns [`TooManyDevices`] for more than 64 devices.
    pub fn new(
        places: &[DeviceLocation],
        mut pair: impl FnMut(usize, usize) -> DeviceLinks,
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

    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if the matrix has no device.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the set of all devices.
    pub fn devices(&self) -> DeviceSet {
        DeviceSet::first(self.count)
    }

    /// Returns the score of two devices; 0 for a device and itself.
    ///
    /// # Panics
    /// Panics if a position is not below [`len`](Self::len).
    pub fn pair(&self, a: usize, b: usize) -> Score {
        self.row(a)[b]
    }

    /// Returns the scores of a device with all devices.
    pub(super) fn row(&self, device: usize) -> &[Score] {
        &self.scores[device * self.count..][..self.count]
    }

    /// Returns the score of a set.
    ///
    /// # Panics
    /// Panics if a position is not below [`len`](Self::len).
    pub fn score(&self, set: DeviceSet) -> Score {
        set.iter().map(|a| self.degree(a, set.above(a))).sum()
    }

    /// Returns the sum of a device's scores with a set.
    pub(super) fn degree(&self, device: usize, with: DeviceSet) -> Score {
        with.iter().map(|other| self.pair(device, other)).sum()
    }

    /// Returns the lowest score of a pair in the set; `None` for fewer than two devices.
    ///
    /// # Panics
    /// Panics if a position is not below [`len`](Self::len).
    pub fn weakest_pair(&self, set: DeviceSet) -> Option<Score> {
        set.iter().flat_map(|a| set.above(a).iter().map(move |b| self.pair(a, b))).min()
    }

    /// Returns the devices that share `scope` with this one, without itself.
    ///
    /// # Panics
    /// Panics if a position is not below [`len`](Self::len).
    pub fn peers_in_scope(&self, scope: TopologyScope, device: usize) -> DeviceSet {
        self.shared[scope as usize][device]
    }

    /// Returns the number of pairs in the set that share `scope`.
    ///
    /// # Panics
    /// Panics if a position is not below [`len`](Self::len).
    pub fn pairs_sharing(&self, scope: TopologyScope, set: DeviceSet) -> usize {
        set.iter().map(|a| (self.peers_in_scope(scope, a) & set.above(a)).len()).sum()
    }

    /// Returns the groups of twins: devices with equal links to every other device. Each device is
    /// in one group.
    pub fn twins(&self) -> &[DeviceSet] {
        &self.twins
    }

    fn find_twins(&self) -> Vec<DeviceSet> {
        let mut groups: Vec<DeviceSet> = Vec::new();
        for device in 0..self.count {
            // The relation is an equivalence, so comparing with one member is sufficient.
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

/// Returns the score of a PCIe level.
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
