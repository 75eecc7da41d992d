//! Builds the ResourceSlices of the node from its hardware.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceSlice;
use tessera_api::{
    Inventory,
    names::{GpuUuid, NodeName},
    slice::{CoresRatio, DeviceOrder, Fence, MaxShares, MemoryRatio, SliceOptions, build},
};

use crate::{
    audit::OrphanedGpus,
    inventory::HardwareState,
    mode::{DriverMode, FenceKind},
    state::journal::Journal,
};

/// Builder of the slices of one node.
#[derive(Clone, Debug)]
pub struct SliceSource {
    node: NodeName,
    order: DeviceOrder,
    mode: DriverMode,
    fence: FenceKind,
    memory_ratio: MemoryRatio,
    cores_ratio: CoresRatio,
    max_shares: MaxShares,
    mps: bool,
}

impl SliceSource {
    /// Returns a builder for `node`, with devices in this order, fenced for this mode by a taint.
    /// All memory is published, and no sharing by MPS.
    #[must_use]
    pub fn new(node: NodeName, order: DeviceOrder, mode: DriverMode) -> Self {
        let (memory_ratio, cores_ratio) = (MemoryRatio::WHOLE, CoresRatio::WHOLE);
        let max_shares = MaxShares::default();
        let fence = FenceKind::Taint;
        Self { node, order, mode, fence, memory_ratio, cores_ratio, max_shares, mps: false }
    }

    /// Sets the object with the managed taint.
    #[must_use]
    pub fn with_fence(self, fence: FenceKind) -> Self {
        Self { fence, ..self }
    }

    /// Sets the published part of the GPUs' memory.
    #[must_use]
    pub fn with_memory_ratio(self, memory_ratio: MemoryRatio) -> Self {
        Self { memory_ratio, ..self }
    }

    /// Sets the published cores of a GPU.
    #[must_use]
    pub fn with_cores_ratio(self, cores_ratio: CoresRatio) -> Self {
        Self { cores_ratio, ..self }
    }

    /// Sets the maximum number of shares of a GPU.
    #[must_use]
    pub fn with_max_shares(self, max_shares: MaxShares) -> Self {
        Self { max_shares, ..self }
    }

    /// Sets whether claims can share GPUs by MPS.
    #[must_use]
    pub fn with_mps(self, mps: bool) -> Self {
        Self { mps, ..self }
    }

    /// Returns the allocation mode.
    #[must_use]
    pub fn mode(&self) -> DriverMode {
        self.mode
    }

    /// Returns the fence of published devices.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.mode.fence(self.fence)
    }

    /// Returns the name of the node.
    #[must_use]
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Returns true if the slices depend on the prepared claims: their order, or their memory.
    #[must_use]
    pub fn depends_on_usage(&self) -> bool {
        self.memory_ratio.is_oversubscribed()
            || match self.order {
                DeviceOrder::FreeLast | DeviceOrder::FreeFirst => true,
                DeviceOrder::Index | DeviceOrder::Clique => false,
            }
    }

    /// Returns the slices of this hardware, without generations and owners.
    ///
    /// The result is one slice without devices if the library failed, and `None` before the library
    /// was called: slices of an earlier process stay until then. `orphaned` are GPUs of orphaned
    /// claims, `leaving_stock` GPUs that kube-scheduler may still be allocating.
    #[must_use]
    pub fn slices(
        &self,
        hardware: &HardwareState,
        journal: Option<&Journal>,
        orphaned: &OrphanedGpus,
        leaving_stock: BTreeSet<GpuUuid>,
    ) -> Option<Vec<ResourceSlice>> {
        let nothing = Inventory::default();
        let inventory = match hardware {
            HardwareState::Known(inventory) => inventory,
            HardwareState::Unknown { is_queried: true, .. } => &nothing,
            HardwareState::Unknown { is_queried: false, .. } => return None,
        };
        let in_use = journal.map(Journal::memory_by_gpu).unwrap_or_default();
        let fixed = journal.map(Journal::gpus_with_fixed_shares).unwrap_or_default();
        Some(build(
            inventory,
            &SliceOptions {
                fence: self.fence(),
                order: self.order,
                in_use,
                orphaned: orphaned.clone(),
                leaving_stock,
                memory_ratio: self.memory_ratio,
                cores_ratio: self.cores_ratio,
                max_shares: self.max_shares,
                fixed,
                mps: self.mps,
                ..SliceOptions::new(self.node.clone())
            },
        ))
    }

    /// Returns the slices of this inventory as YAML documents.
    ///
    /// # Errors
    /// Never, for results of [`build`].
    pub fn as_yaml(&self, inventory: Inventory) -> Result<String, serde_saphyr::ser::Error> {
        let slices = self
            .slices(&HardwareState::Known(inventory), None, &OrphanedGpus::new(), BTreeSet::new())
            .unwrap_or_default();
        let documents: Result<Vec<String>, _> =
            slices.iter().map(serde_saphyr::to_string).collect();
        Ok(documents?.into_iter().map(|document| format!("---\n{document}")).collect())
    }
}
