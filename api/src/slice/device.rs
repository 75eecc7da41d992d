//! One GPU as a device of a slice.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity,
    DeviceTaint,
};

use super::{CoresRatio, Fence, SliceOptions};
use crate::gpu::{Gpu, Health, normalise_version};
use crate::names::{
    LEAVING_STOCK_TAINT_KEY, MANAGED_TAINT_KEY, NO_SCHEDULE, ORPHANED_TAINT_KEY,
    UNHEALTHY_TAINT_KEY, attribute, capacity,
};
use crate::quantity::Quantity;

/// Longest string and version that an attribute can have, bytes (API limit
/// `DeviceAttributeMaxValueLength`).
pub const MAX_STRING_BYTES: usize = 64;

/// The text, or as much of its beginning as an attribute can hold, cut between characters.
pub fn truncated(text: &str) -> &str {
    text[..text.floor_char_boundary(MAX_STRING_BYTES)].trim_end()
}

/// The device of a GPU; `clique` is the value of its NVLink clique's attribute.
pub(super) fn device(gpu: &Gpu, clique: Option<String>, options: &SliceOptions) -> Device {
    let published_mib = options.memory_ratio.of_gpu(gpu, options.fixed.contains(&gpu.uuid));
    let published = Quantity::from_mib(published_mib);
    let (one_mib, one) = (Quantity::from_mib(1), Quantity::from_integer(1));
    let shares = Quantity::from_integer(options.max_shares.get().into());
    Device {
        name: gpu.device_name().into(),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes(gpu, clique, published_mib, options.mps && shares_by_mps(gpu))),
        capacity: Some(BTreeMap::from([
            (capacity::MEMORY.to_owned(), ranged(published, published, one_mib, one_mib)),
            (capacity::SHARES.to_owned(), ranged(shares, one, one, one)),
            (capacity::CORES.to_owned(), cores(options.cores_ratio)),
        ])),
        taints: taints(gpu, options),
        ..Device::default()
    }
}

/// The cores: a request may have those of one GPU at most, whatever is published.
fn cores(ratio: CoresRatio) -> DeviceCapacity {
    let mut cores = ranged(
        Quantity::from_percent(ratio.percent()),
        Quantity::ZERO,
        Quantity::ZERO,
        Quantity::from_percent(1),
    );
    if ratio != CoresRatio::WHOLE
        && let Some(range) =
            cores.request_policy.as_mut().and_then(|policy| policy.valid_range.as_mut())
    {
        range.max = Some(Quantity::from_percent(100).into());
    }
    cores
}

fn ranged(value: Quantity, default: Quantity, min: Quantity, step: Quantity) -> DeviceCapacity {
    DeviceCapacity {
        value: value.into(),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(default.into()),
            valid_range: Some(CapacityRequestPolicyRange {
                min: min.into(),
                step: Some(step.into()),
                max: None,
            }),
            valid_values: None,
        }),
    }
}

/// Volta and later: only there a client of MPS has an address space, a limit on memory and a share
/// of the GPU of its own. CUDA 12.3 and later: from then on the CUDA driver says whether a process
/// is one (`CU_DEVICE_ATTRIBUTE_MPS_ENABLED`).
fn shares_by_mps(gpu: &Gpu) -> bool {
    let cuda = (gpu.cuda_driver_version.major, gpu.cuda_driver_version.minor);
    gpu.cuda_compute_capability.major >= 7 && cuda >= (12, 3)
}

fn attributes(
    gpu: &Gpu,
    clique: Option<String>,
    published_mib: u64,
    mps: bool,
) -> BTreeMap<String, DeviceAttribute> {
    let is_oversubscribed = published_mib > gpu.memory_mib();
    let physical = is_oversubscribed.then(|| Quantity::from_mib(gpu.memory_mib()).to_string());
    let own = [
        (attribute::TYPE, string(Some(attribute::TYPE_GPU))),
        (attribute::UUID, string(Some(gpu.uuid.as_str()))),
        (attribute::NVLINK_CLIQUE, string(clique.as_deref())),
        (attribute::PHYSICAL_MEMORY, string(physical.as_deref())),
        (
            attribute::MPS,
            mps.then(|| DeviceAttribute { bool: Some(true), ..DeviceAttribute::default() }),
        ),
    ];
    with_hardware(gpu, own)
}

/// Returns these attributes, and those of the hardware, which a GPU and its MIG devices have.
pub(super) fn with_hardware(
    gpu: &Gpu,
    own: impl IntoIterator<Item = (&'static str, Option<DeviceAttribute>)>,
) -> BTreeMap<String, DeviceAttribute> {
    let architecture = Some(gpu.architecture.as_str()).filter(|name| !name.is_empty());
    let driver_version = normalise_version(&gpu.driver_version).map(|version| version.to_string());
    let hardware = [
        (attribute::PRODUCT_NAME, string(Some(gpu.product_name.as_str()))),
        (attribute::ARCHITECTURE, string(architecture)),
        (
            attribute::CUDA_COMPUTE_CAPABILITY,
            version(Some(gpu.cuda_compute_capability.to_string())),
        ),
        (attribute::DRIVER_VERSION, version(driver_version)),
        (attribute::CUDA_DRIVER_VERSION, version(Some(gpu.cuda_driver_version.to_string()))),
        (attribute::INDEX, int(Some(i64::from(gpu.index)))),
        (attribute::PCI_BUS_ID, string(Some(gpu.pci_bus_id.as_str()))),
        (attribute::PCIE_ROOT, string(gpu.pcie_root.as_deref())),
        (attribute::NUMA_NODE, int(gpu.numa_node.map(i64::from))),
    ];
    let all = own.into_iter().chain(hardware);
    all.filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

pub(super) fn string(value: Option<&str>) -> Option<DeviceAttribute> {
    value.map(|text| DeviceAttribute {
        string: Some(truncated(text).to_owned()),
        ..DeviceAttribute::default()
    })
}

fn version(value: Option<String>) -> Option<DeviceAttribute> {
    value.map(|text| DeviceAttribute { version: Some(text), ..DeviceAttribute::default() })
}

fn int(value: Option<i64>) -> Option<DeviceAttribute> {
    value.map(|number| DeviceAttribute { int: Some(number), ..DeviceAttribute::default() })
}

pub(super) fn taints(gpu: &Gpu, options: &SliceOptions) -> Option<Vec<DeviceTaint>> {
    let managed = (options.fence == Fence::Taint).then(|| no_schedule(MANAGED_TAINT_KEY, None));
    let unhealthy = match &gpu.health {
        Health::Healthy => None,
        Health::Unhealthy { code, .. } => Some(no_schedule(UNHEALTHY_TAINT_KEY, label_value(code))),
    };
    let orphaned =
        options.orphaned.contains(&gpu.uuid).then(|| no_schedule(ORPHANED_TAINT_KEY, None));
    let leaving = options
        .leaving_stock
        .contains(&gpu.uuid)
        .then(|| no_schedule(LEAVING_STOCK_TAINT_KEY, None));
    let taints: Vec<DeviceTaint> =
        managed.into_iter().chain(unhealthy).chain(orphaned).chain(leaving).collect();
    (!taints.is_empty()).then_some(taints)
}

fn no_schedule(key: &str, value: Option<String>) -> DeviceTaint {
    DeviceTaint { key: key.to_owned(), value, effect: NO_SCHEDULE.to_owned(), time_added: None }
}

/// A text made to be a label value, which is what a taint's value must be: at most 63 of
/// `[A-Za-z0-9._-]`, alphanumeric at both ends.
fn label_value(text: &str) -> Option<String> {
    let kept: String =
        text.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).take(63).collect();
    let kept = kept.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    (!kept.is_empty()).then(|| kept.to_owned())
}
