//! How the devices of pools are joined, and who chooses sets of them.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::model::{PoolId, PoolTopology};
use crate::topology::{DeviceSet, LinkMatrix, SetChooser, SizeMix};

use super::{FastMap, Reach};

/// The machines of all pools of which it is known how their devices are joined.
#[derive(Debug, Default)]
pub(crate) struct Machines {
    pools: FastMap<PoolId, Arc<Machine>>,
    /// One for all machines that are built alike.
    choosers: HashMap<Arc<LinkMatrix>, Arc<OnceLock<SetChooser>>>,
}

/// The machine of one pool.
#[derive(Debug)]
pub(crate) struct Machine {
    topology: Arc<PoolTopology>,
    chooser: Arc<OnceLock<SetChooser>>,
}

/// Where the candidates of a node are in the link matrices of their pools.
#[derive(Debug)]
pub(crate) struct Places {
    /// Per pool its machine; none where nothing is known of it.
    machines: Vec<Option<Arc<Machine>>>,
    /// Per candidate its position in the matrix of its pool.
    positions: Vec<Option<usize>>,
}

impl Machines {
    pub(super) fn set(&mut self, pool: &PoolId, topology: Option<&Arc<PoolTopology>>) {
        match topology {
            Some(topology) => {
                let chooser =
                    Arc::clone(self.choosers.entry(Arc::clone(topology.matrix())).or_default());
                let machine = Machine { topology: Arc::clone(topology), chooser };
                self.pools.insert(pool.clone(), Arc::new(machine));
            }
            None => {
                self.pools.remove(pool);
            }
        }
        self.choosers.retain(|_, chooser| Arc::strong_count(chooser) > 1);
    }
}

impl Machine {
    /// How its devices are joined.
    pub(crate) fn matrix(&self) -> &LinkMatrix {
        self.topology.matrix()
    }

    /// Who chooses sets of its devices. What that takes is worked out when it is first asked for.
    pub(crate) fn chooser(&self) -> &SetChooser {
        self.chooser.get_or_init(|| {
            SetChooser::new(Arc::clone(self.topology.matrix()), &SizeMix::default())
        })
    }
}

impl Places {
    pub(super) fn new(reach: &Reach, machines: &Machines) -> Self {
        let of_pools: Vec<Option<Arc<Machine>>> =
            reach.pools.iter().map(|pool| machines.pools.get(&pool.id).map(Arc::clone)).collect();
        let position = |candidate: &super::Candidate| {
            of_pools[candidate.pool as usize].as_ref()?.topology.position(&candidate.device().name)
        };
        let positions = reach.candidates.iter().map(position).collect();
        Self { machines: of_pools, positions }
    }

    /// The machine of a pool.
    pub(crate) fn machine(&self, pool: u32) -> Option<&Machine> {
        self.machines[pool as usize].as_deref()
    }

    /// Position of a candidate in the matrix of its pool.
    pub(crate) fn position(&self, candidate: usize) -> Option<usize> {
        self.positions[candidate]
    }

    /// Equal for candidates of one pool that are joined to all others alike; for those without a
    /// place only for the same.
    pub(crate) fn twins(&self, pool: u32, candidate: usize) -> [u32; 2] {
        let group =
            self.machine(pool).zip(self.positions[candidate]).and_then(|(machine, position)| {
                machine.matrix().twins().iter().position(|twins| twins.contains(position))
            });
        group.map_or([0, candidate as u32], |group| [pool + 1, group as u32])
    }

    /// The positions of those of the candidates that have one. All must be of one pool.
    pub(crate) fn set(&self, candidates: impl IntoIterator<Item = usize>) -> DeviceSet {
        candidates.into_iter().filter_map(|candidate| self.positions[candidate]).collect()
    }
}
