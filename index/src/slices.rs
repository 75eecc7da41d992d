//! Changes of ResourceSlices and DeviceTaintRules.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceSlice};
use tessera_allocator::model::{Device, DeviceId, PoolId};
use tessera_api::names::{DriverName, PoolName};

use crate::convert::{self, ConvertError, DeviceFilter};
use crate::index::Index;
use crate::taints::TaintRule;

/// Number of slices that are tainted in one go: about 20 ms with the update of the planner.
const SLICES_PER_PART: usize = 500;

impl Index {
    /// Takes over a ResourceSlice. Slices of drivers that are not managed are ignored.
    ///
    /// # Errors
    /// It cannot be read; its pool is then incomplete and not allocated. If only its links cannot
    /// be read, it counts without them.
    pub fn apply_slice(&mut self, object: &ResourceSlice) -> Result<(), ConvertError> {
        let Some(name) = object.metadata.name.clone() else { return Ok(()) };
        if !self.managed.contains(&object.spec.driver) {
            return Ok(());
        }
        self.touch_slice(&name);
        self.changed.slices.insert(name.clone());
        match convert::slice(object, DeviceFilter::Managed) {
            Ok(slice) => {
                let slice = Arc::new(slice);
                if self.published.get(&name).is_some_and(|old| old.pool != slice.pool) {
                    self.withdraw(&name);
                }
                self.slices.insert(name.clone(), self.rules.tainted(&slice));
                self.slices_of.insert(slice.pool.clone(), name.clone());
                self.published.insert(name.clone(), Arc::clone(&slice));
                self.touch_slice(&name);
                let topology = self.topologies.apply(&slice, object);
                topology.map_err(|source| ConvertError::Topology { name, source: Arc::new(source) })
            }
            Err(error) => {
                self.withdraw(&name);
                Err(error)
            }
        }
    }

    /// Takes over a DeviceTaintRule. Of a rule for all pools of a large cluster, most slices are
    /// tainted [later](Self::continue_tainting).
    pub fn apply_taint_rule(&mut self, object: &DeviceTaintRule) {
        let changed = self.rules.apply(object, &self.managed);
        self.taint_slices(&changed);
    }

    /// Removes a deleted DeviceTaintRule. Its taints are removed like those of a rule
    /// are [added](Self::apply_taint_rule).
    pub fn remove_taint_rule(&mut self, object: &DeviceTaintRule) {
        let removed = self.rules.remove(object.metadata.name.as_deref().unwrap_or_default());
        self.taint_slices(&removed);
    }

    /// Taints the next slices to which rules for all pools are not applied yet: some milliseconds.
    /// Returns true if others are left.
    pub fn continue_tainting(&mut self) -> bool {
        for _ in 0..SLICES_PER_PART {
            let Some(name) = self.untainted.pop_first() else { break };
            self.taint_slice(&name);
        }
        !self.untainted.is_empty()
    }

    /// Taints the slices of which one of the rules selects a device, anew.
    fn taint_slices(&mut self, changed: &[TaintRule]) {
        for rule in changed {
            let Some(pool) = rule.pool() else {
                let selected =
                    self.published.iter().filter(|(_, slice)| rule.selects_any_of(slice));
                self.untainted.extend(selected.map(|(name, _)| name.clone()));
                self.continue_tainting();
                continue;
            };
            let Ok(pool) = PoolName::new(pool) else { continue };
            let is_selected = |name: &&String| {
                self.published.get(*name).is_some_and(|slice| rule.selects_any_of(slice))
            };
            let names: Vec<String> = self.slices_in(pool).filter(is_selected).cloned().collect();
            names.iter().for_each(|name| self.taint_slice(name));
        }
    }

    /// Returns the names of the slices of the pools of this name, one of each managed driver.
    pub(crate) fn slices_in(&self, pool: PoolName) -> impl Iterator<Item = &String> {
        let id = move |driver: &DriverName| PoolId { driver: driver.clone(), pool: pool.clone() };
        self.managed.iter().flat_map(move |driver| self.slices_of.get(&id(driver)))
    }

    fn taint_slice(&mut self, name: &str) {
        let Some(slice) = self.published.get(name) else { return };
        self.slices.insert(name.to_owned(), self.rules.tainted(slice));
        self.changed.slices.insert(name.to_owned());
        self.waiting_changes.pools.insert(slice.pool.clone());
    }

    /// Removes a deleted ResourceSlice.
    pub fn remove_slice(&mut self, object: &ResourceSlice) {
        if let Some(name) = &object.metadata.name {
            self.touch_slice(name);
            self.changed.slices.insert(name.clone());
            self.withdraw(name);
        }
    }

    /// Removes a slice from all maps of slices.
    fn withdraw(&mut self, name: &str) {
        self.slices.remove(name);
        let Some(old) = self.published.remove(name) else { return };
        self.topologies.remove(&old);
        self.slices_of.remove(&old.pool, name);
    }

    /// Marks the devices of the slice as changed.
    fn touch_slice(&mut self, name: &str) {
        let Some(slice) = self.published.get(name) else { return };
        let device =
            |d: &Arc<Device>| DeviceId { pool: slice.pool.clone(), device: d.name.clone() };
        let devices: Vec<DeviceId> = slice.devices.iter().map(device).collect();
        self.sums.touched.extend(devices.iter().cloned());
        self.waiting_changes.pools.insert(slice.pool.clone());
        self.note_republished(devices);
    }
}
