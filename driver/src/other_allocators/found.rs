//! Detects GPUs advertised by other device plugins or DRA drivers. Pure functions, no I/O.

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
    names::{ExtendedResourceName, GpuUuid, PciBusId, attribute},
};

/// Extended resources of NVIDIA GPUs: of NVIDIA's device plugin and HAMi's, with the plugin's name
/// for shared GPUs, and of AWS's plugin.
const RESOURCES: [&str; 3] = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "k8s.amazonaws.com/vgpu"];

/// Prefixes of such names: MIG slices of NVIDIA's plugin, and the plugins of vgpu-manager, Elastic
/// GPU with its three domains, Tencent, Alibaba, Volcano and Huawei. `nvidia.com/` alone would
/// match the resources of NVIDIA's network operator, too.
const PREFIXES: [&str; 10] = [
    "nvidia.com/mig-",
    "nvidia.com/vgpu-",
    "elasticgpu.io/",
    "elasticgpu.com/",
    "gpushare.provisioner.elasticgpu.io/",
    "tke.cloud.tencent.com/qgpu-",
    "tencent.com/vcuda-",
    "aliyun.com/gpu",
    "volcano.sh/gpu-",
    "volcano.sh/vgpu-",
];

/// Names of attributes that hold the UUID of a GPU, or of the parent GPU of a MIG device.
const UUID_ATTRIBUTES: [&str; 2] = ["uuid", "parentUUID"];

/// Names of attributes that hold a PCI address, besides the standard attribute.
const PCI_ATTRIBUTES: [&str; 3] = ["pciBusID", "pcieBusID", "pciAddress"];

/// The identity by which a device of another driver is recognised as a GPU of this node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Identity {
    /// The UUID of the GPU.
    Uuid(GpuUuid),
    /// The PCI address of the GPU.
    Pci(PciBusId),
}

/// The other allocators of this node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherAllocators {
    /// Extended resources of the Node, which may be any of its GPUs.
    resources: BTreeSet<String>,
    /// Devices of other DRA drivers, with the name of the driver.
    devices: BTreeMap<Identity, String>,
}

impl OtherAllocators {
    pub(super) fn new(
        resources: impl IntoIterator<Item = String>,
        devices: impl IntoIterator<Item = (Identity, String)>,
    ) -> Self {
        Self { resources: resources.into_iter().collect(), devices: devices.into_iter().collect() }
    }

    /// Returns the reason not to publish the GPU, or `None` if no other allocator publishes it.
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

/// Returns the extended resources of a Node by which another allocator publishes GPUs: those of
/// common device plugins, and those in `named`.
pub(super) fn resources(node: &Node, named: &BTreeSet<ExtendedResourceName>) -> Vec<String> {
    let status = node.status.as_ref();
    // The kubelet keeps the capacity of a removed plugin for five minutes, while its pods may still
    // run.
    let all = [
        status.and_then(|status| status.capacity.as_ref()),
        status.and_then(|s| s.allocatable.as_ref()),
    ];
    let advertised = all.into_iter().flatten().flatten().filter(|(name, amount)| {
        (is_gpu_resource(name) || named.contains(name.as_str())) && is_positive(amount)
    });
    advertised.map(|(name, _)| name.clone()).collect()
}

fn is_gpu_resource(resource: &str) -> bool {
    RESOURCES.contains(&resource) || PREFIXES.iter().any(|prefix| resource.starts_with(prefix))
}

/// Returns true if the amount is positive or malformed.
fn is_positive(amount: &ApiQuantity) -> bool {
    Quantity::parse(&amount.0).map_or(true, |amount| amount > Quantity::ZERO)
}

/// Returns the identities of the devices in a slice of another driver, with that driver.
pub(super) fn devices(slice: &ResourceSlice) -> Vec<(Identity, String)> {
    let devices = slice.spec.devices.iter().flatten();
    devices.flat_map(identities).map(|identity| (identity, slice.spec.driver.clone())).collect()
}

/// Returns the identities of a device. Attributes match by name, with or without the driver's
/// domain; UUIDs in upper or lower case; PCI addresses in any form that parses.
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
