//! GPUs in MIG mode: one row each, with the allocated MIG devices.

use std::collections::BTreeMap;

use tessera_allocator::model::Device;
use tessera_api::names::{DeviceName, GpuUuid, attribute};

use super::{CapacityUsage, GpuView, text_of};

/// Returns the GPU of a MIG device, or `None` for other devices.
pub(super) fn parent(device: &Device) -> Option<GpuUuid> {
    let is_mig = text_of(device, attribute::TYPE).as_deref() == Some(attribute::TYPE_MIG);
    GpuUuid::of_device(&device.name).filter(|_| is_mig)
}

/// Views of the GPUs whose MIG devices are published.
#[derive(Default)]
pub(super) struct MigGpus(BTreeMap<DeviceName, GpuView>);

impl MigGpus {
    /// Adds a MIG device of a GPU.
    pub(super) fn add(&mut self, parent: &GpuUuid, device: &Device, view: GpuView) {
        let name = parent.device_name();
        let gpu = self.0.entry(name.clone()).or_insert_with(|| GpuView {
            device: name.to_string(),
            uuid: text_of(device, attribute::PARENT_UUID),
            memory: CapacityUsage::default(),
            cores: CapacityUsage::default(),
            mig: true,
            shares: Vec::new(),
            ..view.clone()
        });
        // The profile of the whole GPU has the most memory. The devices overlap: what is allocated
        // adds up, what is published does not.
        let total = gpu.memory.total.max(view.memory.total);
        let allocated = gpu.memory.allocated.checked_add(view.memory.allocated);
        gpu.memory = CapacityUsage::new(total, allocated.unwrap_or(total));
        gpu.shares.extend(view.shares);
        for state in view.state {
            if !gpu.state.contains(&state) {
                gpu.state.push(state);
            }
        }
    }

    /// Returns the views.
    pub(super) fn into_views(self) -> impl Iterator<Item = GpuView> {
        self.0.into_values()
    }
}
