//! Topologies: the links between the devices of each pool, from its slices.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceSlice;
use tessera_allocator::model::{Attribute, Device, PoolId, PoolTopology, Slice};
use tessera_allocator::topology::{DeviceLinks, DeviceLocation, LinkMatrix};
use tessera_api::gpu::Link;
use tessera_api::names::{DeviceName, GpuUuid, attribute};
use tessera_api::slice::{Topology, TopologyError};

/// The topologies of all pools.
#[derive(Debug, Default)]
pub(crate) struct Topologies {
    /// The slices by pool and name.
    parts: BTreeMap<PoolId, BTreeMap<String, Part>>,
    pools: Arc<BTreeMap<PoolId, Arc<PoolTopology>>>,
    /// Each matrix once, for all pools that have it.
    matrices: HashSet<Arc<LinkMatrix>>,
    /// Pools that have changed since the last [`take_changed`](Self::take_changed).
    changed: BTreeSet<PoolId>,
}

/// The devices and links of one slice.
#[derive(Debug)]
struct Part {
    slice: Arc<Slice>,
    links: Vec<Link>,
}

impl Topologies {
    /// Returns all topologies as they are now.
    pub(crate) fn snapshot(&self) -> Arc<BTreeMap<PoolId, Arc<PoolTopology>>> {
        Arc::clone(&self.pools)
    }

    /// Returns the topologies of these pools that are known.
    pub(crate) fn of(
        &self,
        pools: impl Iterator<Item = PoolId>,
    ) -> Arc<BTreeMap<PoolId, Arc<PoolTopology>>> {
        let known = pools.filter_map(|pool| {
            let topology = self.pools.get(&pool).map(Arc::clone)?;
            Some((pool, topology))
        });
        Arc::new(known.collect())
    }

    /// Returns the pools that have changed since the last call, each as it is now.
    pub(crate) fn take_changed(&mut self) -> Vec<(PoolId, Option<Arc<PoolTopology>>)> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.map(|pool| (pool.clone(), self.pools.get(&pool).map(Arc::clone))).collect()
    }

    /// Takes over a slice that was created or changed.
    ///
    /// # Errors
    /// Its annotation cannot be read; its devices then count as linked by the farthest PCIe level
    /// only.
    pub(crate) fn apply(
        &mut self,
        slice: &Arc<Slice>,
        object: &ResourceSlice,
    ) -> Result<(), TopologyError> {
        let topology = Topology::of_slices([object]);
        let links = topology.as_ref().map(|topology| topology.links().to_vec()).unwrap_or_default();
        let part = Part { slice: Arc::clone(slice), links };
        self.parts.entry(slice.pool.clone()).or_default().insert(slice.name.clone(), part);
        self.build(&slice.pool);
        topology.map(|_| ())
    }

    /// Removes a slice that was deleted.
    pub(crate) fn remove(&mut self, slice: &Slice) {
        if let Some(parts) = self.parts.get_mut(&slice.pool) {
            parts.remove(&slice.name);
            self.build(&slice.pool);
        }
    }

    fn build(&mut self, pool: &PoolId) {
        let parts = self.parts.get(pool).filter(|parts| !parts.is_empty());
        let built = parts.and_then(topology);
        if parts.is_none() {
            self.parts.remove(pool);
        }
        let known = self.pools.get(pool);
        let Some((positions, matrix)) = built else {
            if known.is_some() {
                self.changed.insert(pool.clone());
                Arc::make_mut(&mut self.pools).remove(pool);
                self.forget_unused();
            }
            return;
        };
        let matrix = self.matrices.get(&matrix).map_or_else(|| Arc::new(matrix), Arc::clone);
        let topology = PoolTopology::new(positions, Arc::clone(&matrix));
        if known.is_some_and(|known| **known == topology) {
            return;
        }
        self.matrices.insert(matrix);
        self.changed.insert(pool.clone());
        Arc::make_mut(&mut self.pools).insert(pool.clone(), Arc::new(topology));
        self.forget_unused();
    }

    fn forget_unused(&mut self) {
        self.matrices.retain(|matrix| Arc::strong_count(matrix) > 1);
    }
}

/// Returns the positions of the devices and the matrix of their links; none for a pool without such
/// data, or with more devices than a matrix can hold.
fn topology(parts: &BTreeMap<String, Part>) -> Option<(BTreeMap<DeviceName, usize>, LinkMatrix)> {
    let newest = parts.values().map(|part| part.slice.generation).max()?;
    let current = || parts.values().filter(|part| part.slice.generation == newest);
    let links = Topology::new(current().flat_map(|part| part.links.iter().cloned()));
    let mut devices: Vec<&Device> =
        current().flat_map(|part| part.slice.devices.iter().map(AsRef::as_ref)).collect();
    let placed = |device: &&Device| {
        [attribute::PCIE_ROOT, attribute::NUMA_NODE]
            .iter()
            .any(|place| device.attributes.contains_key(*place))
    };
    if links.links().is_empty() && !devices.iter().any(placed) {
        return None;
    }
    // By NVML's index, whatever order they are published in, so that identical machines have equal
    // matrices.
    devices.sort_by_key(|device| (device.attributes.get(attribute::INDEX), &device.name));
    let uuids: Vec<Option<GpuUuid>> =
        devices.iter().map(|device| GpuUuid::from_device_name(&device.name).ok()).collect();
    let pair = |a: usize, b: usize| match (&uuids[a], &uuids[b]) {
        (Some(a), Some(b)) => DeviceLinks { nvlinks: links.nvlinks(a, b), pcie: links.pcie(a, b) },
        _ => DeviceLinks::FARTHEST,
    };
    let matrix = LinkMatrix::new(&places(&devices), pair).ok()?;
    let positions = devices.iter().enumerate().map(|(at, device)| (device.name.clone(), at));
    Some((positions.collect(), matrix))
}

/// Returns the PCIe root and the NUMA node of each device.
fn places(devices: &[&Device]) -> Vec<DeviceLocation> {
    let roots = numbered(devices, attribute::PCIE_ROOT);
    let nodes = numbered(devices, attribute::NUMA_NODE);
    roots
        .into_iter()
        .zip(nodes)
        .map(|(pcie_root, numa_node)| DeviceLocation { pcie_root, numa_node })
        .collect()
}

/// Numbers the values of an attribute in the order of the devices; none where a device lacks it.
fn numbered(devices: &[&Device], name: &str) -> Vec<Option<u32>> {
    let mut numbers: BTreeMap<&Attribute, u32> = BTreeMap::new();
    let values = devices.iter().map(|device| device.attributes.get(name));
    let mut number = |value| {
        let next = numbers.len() as u32;
        *numbers.entry(value).or_insert(next)
    };
    values.map(|value| value.map(&mut number)).collect()
}
