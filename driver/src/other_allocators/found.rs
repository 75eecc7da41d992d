//! What a Node and the slices of others say: pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        core::v1::Node,
        resource::v1::{Device, ResourceSlice},
    },
    apimachinery::pkg::api::resource::Quantity as ApiQuantity,
};
use tessera_api::{
    Gpu, Quantity,
    gpu::UnpublishedReason,
    names::{GpuUuid, PciBusId, attribute},
};

/// Extended resources by which others hand out NVIDIA GPUs: NVIDIA's device plugin and HAMi's, with
/// the plugin's name for shared ones; AWS's; Alibaba's; Tencent's; Volcano's.
const RESOURCES: [&str; 11] = [
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "k8s.amazonaws.com/vgpu",
    "aliyun.com/gpu",
    "aliyun.com/gpu-mem",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
    "volcano.sh/gpu-memory",
    "volcano.sh/gpu-number",
    "volcano.sh/vgpu-memory",
    "volcano.sh/vgpu-number",
];

/// Beginnings of such names: MIG slices of NVIDIA's plugin, vgpu-manager's, Elastic GPU's.
/// `nvidia.com/` alone would be too much: its network operator's resources have it as well.
const PREFIXES: [&str; 3] = ["nvidia.com/mig-", "nvidia.com/vgpu-", "elasticgpu.io/"];

/// Names of attributes that hold the UUID of a GPU, or of the one that a MIG device is a part of.
const UUID_ATTRIBUTES: [&str; 2] = ["uuid", "parentUUID"];

/// Names of attributes that hold a PCI address, besides the standard one.
const PCI_ATTRIBUTES: [&str; 3] = ["pciBusID", "pcieBusID", "pciAddress"];

/// By what a device of another driver is recognised as one of our GPUs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Identity {
    /// Its UUID.
    Uuid(GpuUuid),
    /// Its PCI address.
    Pci(PciBusId),
}

/// Who else hands out this node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherAllocators {
    /// Extended resources of the Node: they may be any of its GPUs.
    resources: BTreeSet<String>,
    /// Devices of other DRA drivers, with the driver.
    devices: BTreeMap<Identity, String>,
}

impl OtherAllocators {
    pub(super) fn new(
        resources: impl IntoIterator<Item = String>,
        devices: impl IntoIterator<Item = (Identity, String)>,
    ) -> Self {
        Self { resources: resources.into_iter().collect(), devices: devices.into_iter().collect() }
    }

    /// Why the GPU is not to be published, if another allocator hands it out.
    #[must_use]
    pub fn reason(&self, gpu: &Gpu) -> Option<UnpublishedReason> {
        let by_uuid = || self.devices.get(&Identity::Uuid(gpu.uuid.clone()));
        let by_address = || self.devices.get(&Identity::Pci(gpu.pci_bus_id.clone()));
        let allocator = match by_uuid().or_else(by_address) {
            Some(driver) => format!("the DRA driver {driver}, in its ResourceSlices"),
            None if self.resources.is_empty() => return None,
            None => {
                let names: Vec<_> = self.resources.iter().map(String::as_str).collect();
                format!("a device plugin, as {} of this Node", names.join(", "))
            }
        };
        Some(UnpublishedReason::OtherAllocator { allocator })
    }
}

/// The extended resources of a Node by which GPUs are handed out.
pub(super) fn resources(node: &Node) -> Vec<String> {
    let status = node.status.as_ref();
    // The kubelet keeps the capacity of a plugin that went away for five minutes, while its pods
    // may still run.
    let all = [
        status.and_then(|status| status.capacity.as_ref()),
        status.and_then(|s| s.allocatable.as_ref()),
    ];
    let given = all
        .into_iter()
        .flatten()
        .flatten()
        .filter(|(name, amount)| is_of_gpus(name) && some(amount));
    given.map(|(name, _)| name.clone()).collect()
}

fn is_of_gpus(resource: &str) -> bool {
    RESOURCES.contains(&resource) || PREFIXES.iter().any(|prefix| resource.starts_with(prefix))
}

/// What cannot be read is taken for something.
fn some(amount: &ApiQuantity) -> bool {
    Quantity::parse(&amount.0).map_or(true, |amount| amount > Quantity::ZERO)
}

/// What may be GPUs of ours among the devices of a slice of another driver, with that driver.
pub(super) fn devices(slice: &ResourceSlice) -> Vec<(Identity, String)> {
    let devices = slice.spec.devices.iter().flatten();
    devices.flat_map(identities).map(|identity| (identity, slice.spec.driver.clone())).collect()
}

/// By name, with the driver's domain or without. A UUID in whatever case, an address in whatever
/// form that parses.
fn identities(device: &Device) -> Vec<Identity> {
    let attributes = device.attributes.iter().flatten();
    let texts =
        attributes.filter_map(|(name, value)| Some((name.as_str(), value.string.as_deref()?)));
    let identity = |(name, text): (&str, &str)| {
        let own = name.rsplit('/').next().unwrap_or(name);
        if UUID_ATTRIBUTES.contains(&own) {
            let digits = text.get(4..).filter(|_| text[..4].eq_ignore_ascii_case("gpu-"))?;
            GpuUuid::new(format!("GPU-{digits}")).ok().map(Identity::Uuid)
        } else if name == attribute::PCI_BUS_ID || PCI_ATTRIBUTES.contains(&own) {
            PciBusId::new(text).ok().map(Identity::Pci)
        } else {
            None
        }
    };
    texts.filter_map(identity).collect()
}

#[cfg(test)]
mod tests;
