//! How the devices of a pool are joined.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::DeviceName;

use crate::topology::{DeviceSet, LinkMatrix};

/// The link matrix of a pool, and which device has which position in it. Pools of machines that are
/// built alike share one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTopology {
    positions: BTreeMap<DeviceName, usize>,
    matrix: Arc<LinkMatrix>,
}

impl PoolTopology {
    /// The topology of a pool whose devices have these positions in `matrix`, each below its
    /// length.
    pub fn new(positions: BTreeMap<DeviceName, usize>, matrix: Arc<LinkMatrix>) -> Self {
        debug_assert!(positions.values().all(|position| *position < matrix.len()));
        Self { positions, matrix }
    }

    /// How the devices are joined.
    pub fn matrix(&self) -> &Arc<LinkMatrix> {
        &self.matrix
    }

    /// The position of a device; `None` if it is none of the pool.
    pub fn position(&self, device: &DeviceName) -> Option<usize> {
        self.positions.get(device).copied()
    }

    /// The positions of those of the devices that are of the pool.
    pub fn set<'d>(&self, devices: impl IntoIterator<Item = &'d DeviceName>) -> DeviceSet {
        devices.into_iter().filter_map(|device| self.position(device)).collect()
    }
}
