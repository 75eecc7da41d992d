//! Measured loads of GPUs, as planning reads them.
//!
//! Loads are rounded, and a small change is none: each change makes the allocator search the GPU's
//! node again.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::{DeviceId, DeviceLoad, PoolId};
use tessera_api::load::{GpuLoad, NodeLoad};
use tessera_api::names::{DeviceName, DriverName, NodeName, PoolName};

use crate::index::Index;

/// Step of loads, in percent.
const STEP: u8 = 5;

/// The measured loads.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    of_node: BTreeMap<NodeName, BTreeMap<DeviceName, DeviceLoad>>,
    /// Devices whose load has changed since the last plan.
    unplanned: BTreeSet<DeviceId>,
}

impl Index {
    /// Takes over the load of a node's GPUs, in place of the one before. Nothing is to be planned
    /// for it: a load only decides between devices that fit.
    pub fn apply_load(&mut self, node: &NodeName, load: &NodeLoad) {
        let before = self.loads.of_node.remove(node).unwrap_or_default();
        let new = |gpu: &GpuLoad| {
            let device = DeviceName::from(&gpu.uuid);
            let known = before.get(&device).map(|load| load.busy_percent);
            let load = DeviceLoad {
                busy_percent: rounded(known, gpu.busy_percent),
                settled_cores_percent: gpu.settled_cores_percent,
            };
            (device, load)
        };
        let now: BTreeMap<_, _> = load.gpus.iter().map(new).collect();
        let all = before.keys().chain(now.keys());
        let changed = all.filter(|device| before.get(*device) != now.get(*device));
        self.loads.unplanned.extend(changed.map(|device| device_id(node, device)));
        if !now.is_empty() {
            self.loads.of_node.insert(node.clone(), now);
        }
    }

    /// Forgets the load of a node's GPUs: it is too old.
    pub fn forget_load(&mut self, node: &NodeName) {
        self.apply_load(node, &NodeLoad::default());
    }

    /// Returns the loads that have changed since the last call; none = unknown.
    pub(crate) fn take_changed_loads(&mut self) -> Vec<(DeviceId, Option<DeviceLoad>)> {
        let unplanned = std::mem::take(&mut self.loads.unplanned);
        let load = |device: DeviceId| {
            let node = NodeName::new(device.pool.pool.as_str()).ok();
            let of_node = node.and_then(|node| self.loads.of_node.get(&node));
            let load = of_node.and_then(|loads| loads.get(&device.device)).copied();
            (device, load)
        };
        unplanned.into_iter().map(load).collect()
    }
}

/// Returns the load to the next [`STEP`], or the known one if the difference is less than a step.
fn rounded(known: Option<u8>, percent: u8) -> u8 {
    match known {
        Some(known) if known.abs_diff(percent) < STEP => known,
        _ => (percent.min(100) + STEP / 2) / STEP * STEP,
    }
}

fn device_id(node: &NodeName, device: &DeviceName) -> DeviceId {
    let pool = PoolId { driver: DriverName::ours(), pool: PoolName::of_node(node) };
    DeviceId { pool, device: device.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_api::names::GpuUuid;

    fn load(percent: u8, settled: u32) -> NodeLoad {
        let uuid = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        let gpu = GpuLoad { uuid, busy_percent: percent, settled_cores_percent: settled };
        NodeLoad { gpus: vec![gpu] }
    }

    fn changes(index: &mut Index, load: &NodeLoad) -> Vec<Option<(u8, u32)>> {
        index.apply_load(&NodeName::new("node-a").expect("a name"), load);
        let parts = |load: DeviceLoad| (load.busy_percent, load.settled_cores_percent);
        index.take_changed_loads().into_iter().map(|(_, load)| load.map(parts)).collect()
    }

    #[test]
    fn small_changes_of_a_load_are_none() {
        let mut index = Index::default();
        assert_eq!(changes(&mut index, &load(41, 0)), [Some((40, 0))]);
        for percent in [36, 44, 40] {
            assert_eq!(changes(&mut index, &load(percent, 0)), [], "{percent} is not far from 40");
        }
        assert_eq!(changes(&mut index, &load(46, 0)), [Some((45, 0))]);
        assert_eq!(changes(&mut index, &load(46, 25)), [Some((45, 25))]);
    }

    #[test]
    fn a_missing_load_is_unknown() {
        let mut index = Index::default();
        changes(&mut index, &load(100, 0));
        assert_eq!(changes(&mut index, &NodeLoad::default()), [None]);
        assert_eq!(changes(&mut index, &NodeLoad::default()), []);
    }
}
