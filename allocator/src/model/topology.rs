//! Links between the devices of a pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::DeviceName;

use crate::topology::{DeviceSet, LinkMatrix};

/// Link matrix of a pool, and the position of each device in it.
///
/// Pools of identical machines share one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTopology {
    positions: BTreeMap<DeviceName, usize>,
    matrix: Arc<LinkMatrix>,
}

impl PoolTopology {
    /// Creates a topology from device positions. Each position must be below `matrix.len()`.
    pub fn new(positions: BTreeMap<DeviceName, usize>, matrix: Arc<LinkMatrix>) -> Self {
        debug_assert!(positions.values().all(|position| *position < matrix.len()));
        Self { positions, matrix }
    }

    /// Returns the link matrix.
    pub fn matrix(&self) -> &Arc<LinkMatrix> {
        &self.matrix
    }

    /// Returns the position of a device; `None` if the pool does not contain it.
    pub fn position(&self, device: &DeviceName) -> Option<usize> {
        self.positions.get(device).copied()
    }

    /// Returns the positions of those devices that belong to the pool.
    pub fn set<'d>(&self, devices: impl IntoIterator<Item = &'d DeviceName>) -> DeviceSet {
        devices.into_iter().filter_map(|device| self.position(device)).collect()
    }
}
