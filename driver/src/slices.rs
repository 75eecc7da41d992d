//! The ResourceSlices that say what the hardware is.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceSlice;
use tessera_api::{
    Inventory,
    names::{GpuUuid, NodeName},
    slice::{DeviceOrder, MemoryRatio, SliceOptions, build},
};

use crate::{audit::Orphaned, inventory::HardwareState, mode::Mode, state::journal::Journal};

/// Makes the slices of one node.
#[derive(Clone, Debug)]
pub struct SliceSource {
    node: NodeName,
    order: DeviceOrder,
    mode: Mode,
    memory_ratio: MemoryRatio,
    mps: bool,
}

impl SliceSource {
    /// The slices of `node`, with devices in this order, fenced as the mode says, and memory as it
    /// is.
    #[must_use]
    pub fn new(node: NodeName, order: DeviceOrder, mode: Mode) -> Self {
        Self { node, order, mode, memory_ratio: MemoryRatio::WHOLE, mps: false }
    }

    /// With so much memory of what there is.
    #[must_use]
    pub fn with_memory_ratio(self, memory_ratio: MemoryRatio) -> Self {
        Self { memory_ratio, ..self }
    }

    /// With GPUs that claims can share by MPS, or without.
    #[must_use]
    pub fn with_mps(self, mps: bool) -> Self {
        Self { mps, ..self }
    }

    /// Who allocates the devices.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Whether what is published depends on what is in use: the order of devices, or their memory.
    #[must_use]
    pub fn follows_use(&self) -> bool {
        self.memory_ratio.is_oversubscribed()
            || match self.order {
                DeviceOrder::FreeLast | DeviceOrder::FreeFirst => true,
                DeviceOrder::Index | DeviceOrder::Clique => false,
            }
    }

    /// The slices of this hardware; one without devices where nobody can tell what there is. `None`
    /// before the hardware was asked: what was published before a restart stays until then.
    /// `orphaned` are GPUs of claims that the API does not know, `leaving_stock` those that
    /// kube-scheduler may still be allocating. Generations and
    /// owners are the publisher's to set.
    #[must_use]
    pub fn slices(
        &self,
        hardware: &HardwareState,
        journal: Option<&Journal>,
        orphaned: &Orphaned,
        leaving_stock: BTreeSet<GpuUuid>,
    ) -> Option<Vec<ResourceSlice>> {
        let nothing = Inventory::default();
        let inventory = match hardware {
            HardwareState::Known(inventory) => inventory,
            HardwareState::Unknown { asked: true, .. } => &nothing,
            HardwareState::Unknown { asked: false, .. } => return None,
        };
        let in_use = journal.map(Journal::memory_by_gpu).unwrap_or_default();
        let fixed = journal.map(Journal::gpus_with_fixed_shares).unwrap_or_default();
        Some(build(
            inventory,
            &SliceOptions {
                fence: self.mode.fence(),
                order: self.order,
                in_use,
                orphaned: orphaned.clone(),
                leaving_stock,
                memory_ratio: self.memory_ratio,
                fixed,
                mps: self.mps,
                ..SliceOptions::new(self.node.clone())
            },
        ))
    }

    /// The slices of this inventory as YAML documents.
    ///
    /// # Errors
    /// Never, for what [`build`] makes.
    pub fn as_yaml(&self, inventory: Inventory) -> Result<String, serde_saphyr::ser::Error> {
        let slices = self
            .slices(&HardwareState::Known(inventory), None, &Orphaned::new(), BTreeSet::new())
            .unwrap_or_default();
        let documents: Result<Vec<String>, _> =
            slices.iter().map(serde_saphyr::to_string).collect();
        Ok(documents?.into_iter().map(|document| format!("---\n{document}")).collect())
    }
}
