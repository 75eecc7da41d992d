//! Comparison of published slices with the desired ones.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, Device, DeviceCapacity,
    DeviceTaint, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use crate::names::{FENCE_ANNOTATION, TOPOLOGY_ANNOTATION};
use crate::quantity::Quantity;

/// Returns true if a published slice equals the desired one in driver, node, devices and their
/// order, topology and fence.
///
/// Fields that other programs set are not compared: metadata beside our annotations, when a taint
/// was added, how a quantity is spelled. Nor are generation and slice count: those follow from
/// whether anything else differs.
pub fn same_content(desired: &ResourceSlice, published: &ResourceSlice) -> bool {
    annotations(desired) == annotations(published)
        && comparable(&desired.spec) == comparable(&published.spec)
}

/// Returns true if the published slices are the desired pool: each desired slice exists by its name
/// with the same content, no other exists, all have one generation, and each has the right
/// `resourceSliceCount`.
pub fn same_pool(desired: &[ResourceSlice], published: &[ResourceSlice]) -> bool {
    let by_name: BTreeMap<Option<&str>, &ResourceSlice> =
        published.iter().map(|slice| (slice.metadata.name.as_deref(), slice)).collect();
    let generation = published.first().map(|slice| slice.spec.pool.generation);
    published.len() == desired.len()
        && desired.iter().all(|slice| {
            by_name.get(&slice.metadata.name.as_deref()).is_some_and(|there| {
                same_content(slice, there)
                    && Some(there.spec.pool.generation) == generation
                    && there.spec.pool.resource_slice_count == slice.spec.pool.resource_slice_count
            })
        })
}

/// Copies into a desired slice what the API server filled in when the published one was written and
/// what an update would otherwise set anew: the time at which a taint was added, for the taints
/// that are still there.
pub fn keep_server_fields(desired: &mut ResourceSlice, published: &ResourceSlice) {
    let there: BTreeMap<&str, &Device> = published
        .spec
        .devices
        .iter()
        .flatten()
        .map(|device| (device.name.as_str(), device))
        .collect();
    for device in desired.spec.devices.iter_mut().flatten() {
        let Some(old) = there.get(device.name.as_str()) else { continue };
        for taint in device.taints.iter_mut().flatten().filter(|taint| taint.time_added.is_none()) {
            let same = old.taints.iter().flatten().find(|old| same_taint(old, taint));
            taint.time_added = same.and_then(|old| old.time_added.clone());
        }
    }
}

fn same_taint(one: &DeviceTaint, other: &DeviceTaint) -> bool {
    one.key == other.key && one.value == other.value && one.effect == other.effect
}

fn annotations(slice: &ResourceSlice) -> [Option<&String>; 2] {
    let value = |name| slice.metadata.annotations.as_ref()?.get(name);
    [TOPOLOGY_ANNOTATION, FENCE_ANNOTATION].map(value)
}

/// The spec with everything removed or made equal that does not count.
fn comparable(spec: &ResourceSliceSpec) -> ResourceSliceSpec {
    let mut spec = spec.clone();
    spec.pool.generation = 0;
    spec.pool.resource_slice_count = 0;
    spec.devices = spec.devices.filter(|devices| !devices.is_empty());
    for device in spec.devices.iter_mut().flatten() {
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = None;
        }
        for capacity in device.capacity.iter_mut().flat_map(BTreeMap::values_mut) {
            canonical_capacity(capacity);
        }
        let consumed = device.consumes_counters.iter_mut().flatten();
        consumed.for_each(|consumed| canonical_counters(&mut consumed.counters));
    }
    let sets = spec.shared_counters.iter_mut().flatten();
    sets.for_each(|set| canonical_counters(&mut set.counters));
    spec
}

fn canonical_capacity(capacity: &mut DeviceCapacity) {
    let DeviceCapacity { value, request_policy } = capacity;
    canonical(value);
    if let Some(CapacityRequestPolicy { default, valid_range, valid_values }) = request_policy {
        default.iter_mut().chain(valid_values.iter_mut().flatten()).for_each(canonical);
        if let Some(CapacityRequestPolicyRange { min, max, step }) = valid_range {
            canonical(min);
            max.iter_mut().chain(step).for_each(canonical);
        }
    }
}

fn canonical_counters(counters: &mut BTreeMap<String, Counter>) {
    counters.values_mut().for_each(|counter| canonical(&mut counter.value));
}

/// Spells a quantity in one way per amount; one that cannot be read stays as it is and equals only
/// itself.
fn canonical(quantity: &mut ApiQuantity) {
    if let Ok(amount) = Quantity::try_from(&*quantity) {
        *quantity = amount.in_format(crate::quantity::Format::DecimalSi).into();
    }
}
