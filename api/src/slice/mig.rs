//! MIG devices of a slice: one for each profile and placement of a GPU in MIG mode.
//!
//! The devices of a GPU consume counters of one set: its memory slices, one each, and its engines.
//! So an allocator allocates only devices that can exist at the same time. The counters of
//! instances that no claim has are missing from the set, and placements that they overlap are not
//! published.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption,
};

use super::SliceOptions;
use super::device::{string, taints, with_hardware};
use crate::gpu::{Gpu, Mig, MigPlacement, MigProfile};
use crate::names::{attribute, capacity};
use crate::quantity::Quantity;

/// Returns the MIG devices of GPUs in MIG mode: small profiles first, and of each profile the
/// placement first that overlaps the fewest others. An allocator that takes the first fit then
/// keeps large profiles possible.
pub(super) fn devices(gpus: &[&Gpu], options: &SliceOptions) -> Vec<Device> {
    let mut devices: Vec<(SortKey, Device)> = Vec::new();
    for (position, gpu) in gpus.iter().enumerate() {
        let Some(mig) = &gpu.mig else { continue };
        for (profile, placement) in offered(mig) {
            let key = SortKey {
                memory_mib: profile.memory_mib,
                multiprocessors: profile.engines.multiprocessors,
                media: profile.engines.jpeg_engines + profile.engines.ofa_engines,
                gpu: position,
                overlapped: overlapped(mig, placement),
                start: placement.start,
            };
            devices.push((key, device(gpu, profile, placement, options)));
        }
    }
    devices.sort_by(|a, b| a.0.cmp(&b.0));
    devices.into_iter().map(|(_, device)| device).collect()
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct SortKey {
    memory_mib: u64,
    multiprocessors: u32,
    media: u32,
    gpu: usize,
    overlapped: usize,
    start: u32,
}

/// Returns the counters of GPUs in MIG mode.
pub(super) fn counter_sets(gpus: &[&Gpu]) -> Vec<CounterSet> {
    let set = |gpu: &&Gpu| {
        let mig = gpu.mig.as_ref()?;
        let mut counters: BTreeMap<String, u32> =
            mig.engines().into_iter().map(|(name, number)| (counter_name(name), number)).collect();
        counters.extend((0..mig.memory_slices()).map(|slice| (memory_slice(slice), 1)));
        for instance in &mig.instances {
            let Some(profile) = mig.profile(instance.profile) else { continue };
            for (name, number) in consumption(profile, &instance.placement) {
                let left = counters.entry(name).or_default();
                *left = left.saturating_sub(number);
            }
        }
        Some(CounterSet { name: set_name(gpu), counters: published(counters) })
    };
    gpus.iter().filter_map(set).collect()
}

/// Returns the profiles and placements that overlap no instance.
fn offered(mig: &Mig) -> impl Iterator<Item = (&MigProfile, &MigPlacement)> {
    let all = mig
        .profiles
        .iter()
        .flat_map(|profile| profile.placements.iter().map(move |placement| (profile, placement)));
    all.filter(|(_, placement)| mig.instance_at(placement).is_none())
}

/// Returns the number of placements that a placement overlaps.
fn overlapped(mig: &Mig, placement: &MigPlacement) -> usize {
    let placements = mig.profiles.iter().flat_map(|profile| &profile.placements);
    placements.filter(|other| other.overlaps(placement)).count()
}

fn device(
    gpu: &Gpu,
    profile: &MigProfile,
    placement: &MigPlacement,
    options: &SliceOptions,
) -> Device {
    let mut capacity: BTreeMap<String, DeviceCapacity> = BTreeMap::from([(
        capacity::MEMORY.to_owned(),
        amount(Quantity::from_mib(profile.memory_mib)),
    )]);
    let engines = profile.engines.by_name().into_iter().filter(|(_, number)| *number > 0);
    capacity
        .extend(engines.map(|(name, number)| {
            (name.to_owned(), amount(Quantity::from_integer(number.into())))
        }));
    let consumed = consumption(profile, placement).filter(|(_, number)| *number > 0).collect();
    Device {
        name: gpu.mig_device_name(profile, placement).device_name().into(),
        attributes: Some(attributes(gpu, profile)),
        capacity: Some(capacity),
        consumes_counters: Some(vec![DeviceCounterConsumption {
            counter_set: set_name(gpu),
            counters: published(consumed),
            ..DeviceCounterConsumption::default()
        }]),
        taints: taints(gpu, options),
        ..Device::default()
    }
}

fn amount(value: Quantity) -> DeviceCapacity {
    DeviceCapacity { value: value.into(), request_policy: None }
}

fn attributes(gpu: &Gpu, profile: &MigProfile) -> BTreeMap<String, DeviceAttribute> {
    let own = [
        (attribute::TYPE, string(Some(attribute::TYPE_MIG))),
        (attribute::PARENT_UUID, string(Some(gpu.uuid.as_str()))),
        (attribute::PROFILE, string(Some(profile.name.as_str()))),
    ];
    with_hardware(gpu, own)
}

/// Returns what an instance consumes of each counter of its GPU.
fn consumption(
    profile: &MigProfile,
    placement: &MigPlacement,
) -> impl Iterator<Item = (String, u32)> {
    let engines = profile.engines.by_name().map(|(name, number)| (counter_name(name), number));
    let slices = (placement.start..placement.end()).map(|slice| (memory_slice(slice), 1));
    engines.into_iter().chain(slices)
}

/// Returns the name of a counter: a DNS label, unlike the name of the capacity.
fn counter_name(capacity: &str) -> String {
    let mut name = String::new();
    for c in capacity.chars() {
        if c.is_ascii_uppercase() {
            name.push('-');
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}

fn memory_slice(number: u32) -> String {
    format!("memory-slice-{number}")
}

/// Returns the name of a GPU's counters: that of the GPU's device.
fn set_name(gpu: &Gpu) -> String {
    gpu.device_name().into()
}

fn published(counters: BTreeMap<String, u32>) -> BTreeMap<String, Counter> {
    let value = |number: u32| Counter { value: Quantity::from_integer(number.into()).into() };
    counters.into_iter().map(|(name, number)| (name, value(number))).collect()
}
