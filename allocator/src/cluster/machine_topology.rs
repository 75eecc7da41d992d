//! Topologies of pools, and the choosers of device sets for them.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::model::{PoolId, PoolTopology};
use crate::topology::{DeviceSet, LinkMatrix, SetChooser, SizeMix};

use super::{FastMap, ReachableDevices};

/// Topologies of all pools with known links.
#[derive(Debug, Default)]
pub(crate) struct MachineTopologies {
    pools: FastMap<PoolId, Arc<MachineTopology>>,
    /// Matrices with their choosers, shared by identical machines.
    matrices: HashMap<Arc<LinkMatrix>, Arc<MatrixEntry>>,
    /// Number of the last new matrix.
    last_number: u32,
}

/// A matrix of one or more machines.
#[derive(Debug)]
struct MatrixEntry {
    /// Identity of the matrix; never reused.
    number: u32,
    chooser: OnceLock<SetChooser>,
}

/// Topology of one pool.
#[derive(Debug)]
pub(crate) struct MachineTopology {
    topology: Arc<PoolTopology>,
    entry: Arc<MatrixEntry>,
}

/// Positions of a node's candidates in the link matrices of their pools.
#[derive(Debug)]
pub(crate) struct MatrixPositions {
    /// Topology per pool; `None` if unknown.
    machines: Vec<Option<Arc<MachineTopology>>>,
    /// Position per candidate in the matrix of its pool.
    positions: Vec<Option<usize>>,
}

impl MachineTopologies {
    pub(super) fn set(&mut self, pool: &PoolId, topology: Option<&Arc<PoolTopology>>) {
        match topology {
            Some(topology) => {
                let entry = self.entry(topology.matrix());
                let machine = MachineTopology { topology: Arc::clone(topology), entry };
                self.pools.insert(pool.clone(), Arc::new(machine));
            }
            None => {
                self.pools.remove(pool);
            }
        }
        self.matrices.retain(|_, entry| Arc::strong_count(entry) > 1);
    }

    fn entry(&mut self, matrix: &Arc<LinkMatrix>) -> Arc<MatrixEntry> {
        if let Some(known) = self.matrices.get(matrix) {
            return Arc::clone(known);
        }
        self.last_number += 1;
        let entry = Arc::new(MatrixEntry { number: self.last_number, chooser: OnceLock::new() });
        self.matrices.insert(Arc::clone(matrix), Arc::clone(&entry));
        entry
    }
}

impl MachineTopology {
    /// Returns the link matrix of the devices.
    pub(crate) fn matrix(&self) -> &LinkMatrix {
        self.topology.matrix()
    }

    /// Returns the chooser of device sets. It is built on first use.
    pub(crate) fn chooser(&self) -> &SetChooser {
        self.entry.chooser.get_or_init(|| {
            SetChooser::new(Arc::clone(self.topology.matrix()), &SizeMix::default())
        })
    }
}

impl MatrixPositions {
    pub(super) fn new(reachable: &ReachableDevices, machines: &MachineTopologies) -> Self {
        let of_pools: Vec<Option<Arc<MachineTopology>>> = reachable
            .pools
            .iter()
            .map(|pool| machines.pools.get(&pool.id).map(Arc::clone))
            .collect();
        let position = |candidate: &super::Candidate| {
            of_pools[candidate.pool as usize].as_ref()?.topology.position(&candidate.device().name)
        };
        let positions = reachable.candidates.iter().map(position).collect();
        Self { machines: of_pools, positions }
    }

    /// Returns the topology of a pool.
    pub(crate) fn machine(&self, pool: u32) -> Option<&MachineTopology> {
        self.machines[pool as usize].as_deref()
    }

    /// Returns the position of a candidate in the matrix of its pool.
    pub(crate) fn get(&self, candidate: usize) -> Option<usize> {
        self.positions[candidate]
    }

    /// Returns numbers that are equal for candidates at equal positions in equal matrices.
    pub(super) fn identity(&self, pool: u32, candidate: usize) -> [u32; 2] {
        let matrix = self.machine(pool).map_or(0, |machine| machine.entry.number);
        let position = self.positions[candidate].map_or(0, |position| position as u32 + 1);
        [matrix, position]
    }

    /// Returns a group key: equal for candidates of one pool with equal links to all other devices.
    /// A candidate without a position has a key of its own.
    pub(crate) fn twin_group(&self, pool: u32, candidate: usize) -> [u32; 2] {
        let group =
            self.machine(pool).zip(self.positions[candidate]).and_then(|(machine, position)| {
                machine.matrix().twins().iter().position(|twins| twins.contains(position))
            });
        group.map_or([0, candidate as u32], |group| [pool + 1, group as u32])
    }

    /// Returns the set of the candidates' positions. All candidates must belong to one pool.
    pub(crate) fn set(&self, candidates: impl IntoIterator<Item = usize>) -> DeviceSet {
        candidates.into_iter().filter_map(|candidate| self.positions[candidate]).collect()
    }
}
