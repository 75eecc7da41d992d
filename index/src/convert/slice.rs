//! ResourceSlices.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use tessera_allocator::model::{
    Attribute, BindingConditions, Capacity, CounterSet, CounterUse, Device, NODE_ALLOCATABLE,
    NameMap, NodeChoice, PoolId, RequestPolicy, Slice, Taint, TaintEffect, ValidRange,
};
use tessera_api::names::{
    self, DRIVER_NAME, DeviceName, DriverName, LEAVING_STOCK_TAINT_KEY, MANAGED_TAINT_KEY,
    NO_SCHEDULE, NodeName, PoolName,
};
use tessera_api::quantity::Quantity;
use tessera_api::slice::is_fenced_by_rule;

use super::selector::node_selector;
use super::{ConvertError, Subject, name_map};

/// The devices that may be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFilter {
    /// Devices with the taint [`MANAGED_TAINT_KEY`], and those of slices that a DeviceTaintRule
    /// fences; the taint does not repel our claims.
    Managed,
    /// All devices: for simulations in which we are the only allocator.
    None,
}

/// Reads a ResourceSlice.
///
/// # Errors
/// A name or quantity in it is not one.
pub fn slice(object: &api::ResourceSlice, fence: DeviceFilter) -> Result<Slice, ConvertError> {
    let subject = Subject::new("ResourceSlice", object.metadata.name.as_ref());
    let spec = &object.spec;
    let published = spec.devices.as_deref().unwrap_or_default();
    let counter_sets = counter_sets(spec.shared_counters.as_deref().unwrap_or_default(), subject)?;
    let driver = DriverName::new(&spec.driver).map_err(subject.field("spec.driver"))?;
    let fenced_by_rule = is_fenced_by_rule(object);
    let mut devices: Vec<Arc<Device>> = Vec::with_capacity(published.len());
    for (d, device) in published.iter().enumerate() {
        let last =
            d.checked_sub(1).map(|d| Previous { published: &published[d], read: &devices[d] });
        let device = self::device(device, last, fence, fenced_by_rule, subject)?;
        let (oversubscribed, mps) =
            (is_oversubscribed(&device, &driver), shares_by_mps(&device, &driver));
        // The fence of another driver is not in its slices.
        let is_foreign = driver.as_str() != DRIVER_NAME;
        devices.push(Arc::new(Device {
            is_foreign,
            is_unmanaged: device.is_unmanaged && !is_foreign,
            oversubscribed,
            supports_mps: mps,
            ..device
        }));
    }
    Ok(Slice {
        name: object.metadata.name.clone().ok_or_else(|| subject.missing("metadata.name"))?,
        pool: PoolId {
            driver: driver.clone(),
            pool: PoolName::new(&spec.pool.name).map_err(subject.field("spec.pool.name"))?,
        },
        generation: spec.pool.generation,
        slice_count: spec.pool.resource_slice_count,
        list_position: None,
        nodes: slice_nodes(spec, subject)?,
        // A slice with counters never provides devices, even if it has some.
        devices: if counter_sets.is_empty() { devices } else { Vec::new() },
        counter_sets,
        ignored: published.iter().any(uses_compatibility_groups),
    })
}

fn counter_sets(
    sets: &[api::CounterSet],
    subject: Subject<'_>,
) -> Result<Vec<CounterSet>, ConvertError> {
    let read = |set: &api::CounterSet| {
        let counters = counters(&set.counters, "spec.sharedCounters[].counters", subject)?;
        Ok(CounterSet { name: set.name.clone(), counters })
    };
    sets.iter().map(read).collect()
}

fn counter_uses(
    device: &api::Device,
    subject: Subject<'_>,
) -> Result<Vec<CounterUse>, ConvertError> {
    let read = |used: &api::DeviceCounterConsumption| {
        let counters =
            counters(&used.counters, "spec.devices[].consumesCounters[].counters", subject)?;
        Ok(CounterUse { set: used.counter_set.clone(), counters })
    };
    device.consumes_counters.iter().flatten().map(read).collect()
}

fn counters(
    counters: &BTreeMap<String, api::Counter>,
    path: &'static str,
    subject: Subject<'_>,
) -> Result<NameMap<Quantity>, ConvertError> {
    name_map(Some(counters), |name, counter| {
        Quantity::try_from(&counter.value).map_err(subject.field(format!("{path}[{name}].value")))
    })
}

fn slice_nodes(
    spec: &api::ResourceSliceSpec,
    subject: Subject<'_>,
) -> Result<NodeChoice, ConvertError> {
    if spec.per_device_node_selection == Some(true) {
        return Ok(NodeChoice::PerDevice);
    }
    choice(spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref(), subject)
}

fn choice(
    name: Option<&str>,
    all: Option<bool>,
    selector: Option<&k8s_openapi::api::core::v1::NodeSelector>,
    subject: Subject<'_>,
) -> Result<NodeChoice, ConvertError> {
    if let Some(name) = name.filter(|n| !n.is_empty()) {
        return Ok(NodeChoice::Node(NodeName::new(name).map_err(subject.field("nodeName"))?));
    }
    if all == Some(true) {
        return Ok(NodeChoice::All);
    }
    Ok(selector.map_or(NodeChoice::Unknown, |s| NodeChoice::Selector(node_selector(s))))
}

/// The device before another in a slice, with which it usually shares most values.
#[derive(Clone, Copy)]
struct Previous<'a> {
    published: &'a api::Device,
    read: &'a Device,
}

fn device(
    device: &api::Device,
    previous: Option<Previous<'_>>,
    fence: DeviceFilter,
    fenced_by_rule: bool,
    subject: Subject<'_>,
) -> Result<Device, ConvertError> {
    let name = DeviceName::new(&device.name).map_err(subject.field("spec.devices[].name"))?;
    let (fences, taints): (Vec<Taint>, Vec<Taint>) = device
        .taints
        .iter()
        .flatten()
        .map(taint)
        .partition(|taint| fence == DeviceFilter::Managed && is_fence(taint));
    let capacity = match previous {
        // Compared as published, because quantities are equal in any format.
        Some(last) if last.published.capacity == device.capacity => Arc::clone(&last.read.capacity),
        _ => Arc::new(capacities(device, subject)?),
    };
    let mut converted = Device {
        attributes: name_map(device.attributes.as_ref(), |name, value| {
            let value = attribute(value);
            let known = previous.and_then(|last| last.read.attributes.get(name));
            Ok(known.filter(|known| **known == value).cloned().unwrap_or(value))
        })?,
        capacity,
        shared: device.allow_multiple_allocations == Some(true),
        taints,
        nodes: choice(
            device.node_name.as_deref(),
            device.all_nodes,
            device.node_selector.as_ref(),
            subject,
        )?,
        binds_to_node: device.binds_to_node == Some(true),
        consumes: counter_uses(device, subject)?,
        binding: device.binding_conditions.as_ref().map(|conditions| {
            let failure_conditions = device.binding_failure_conditions.clone().unwrap_or_default();
            Arc::new(BindingConditions { conditions: conditions.clone(), failure_conditions })
        }),
        ..Device::new(name)
    };
    // An allocation that kube-scheduler has begun may still be written: no toleration makes the
    // device available before.
    let leaving_stock = converted.taints.iter().any(|taint| taint.key == LEAVING_STOCK_TAINT_KEY);
    let is_fenced = fenced_by_rule || !fences.is_empty();
    converted.is_unmanaged = fence == DeviceFilter::Managed && (!is_fenced || leaving_stock);
    let allocatable = device.node_allocatable_resources.as_ref();
    converted.unsupported = allocatable.is_some_and(|r| !r.is_empty()).then_some(NODE_ALLOCATABLE);
    Ok(converted)
}

/// Returns true if the device publishes more memory than it has. A value of another type counts as
/// true.
fn is_oversubscribed(device: &Device, driver: &DriverName) -> bool {
    let qualified = format!("{DRIVER_NAME}/{}", names::attribute::PHYSICAL_MEMORY);
    let physical = match device.attribute(driver, &qualified) {
        None => return false,
        Some(Attribute::String(text)) => Quantity::parse(text).unwrap_or_default(),
        Some(_) => Quantity::default(),
    };
    device.capacity.get(names::capacity::MEMORY).is_some_and(|memory| memory.value > physical)
}

/// Returns true if claims can share the device by MPS.
fn shares_by_mps(device: &Device, driver: &DriverName) -> bool {
    let qualified = format!("{DRIVER_NAME}/{}", names::attribute::MPS);
    device.attribute(driver, &qualified) == Some(&Attribute::Bool(true))
}

fn is_fence(taint: &Taint) -> bool {
    taint.key == MANAGED_TAINT_KEY && taint.effect.as_str() == NO_SCHEDULE
}

fn is_empty<T>(list: &Option<Vec<T>>) -> bool {
    list.as_ref().is_none_or(Vec::is_empty)
}

/// With the gate off, upstream ignores such a slice.
fn uses_compatibility_groups(device: &api::Device) -> bool {
    device.consumes_counters.iter().flatten().any(|c| !is_empty(&c.compatibility_groups))
}

pub(crate) fn taint(taint: &api::DeviceTaint) -> Taint {
    Taint {
        key: taint.key.clone(),
        value: taint.value.clone().unwrap_or_default(),
        effect: match taint.effect.as_str() {
            "NoSchedule" => TaintEffect::NoSchedule,
            "NoExecute" => TaintEffect::NoExecute,
            other => TaintEffect::Other(other.to_owned()),
        },
    }
}

fn attribute(value: &api::DeviceAttribute) -> Attribute {
    match (&value.string, value.int, value.bool, &value.version) {
        (Some(text), None, None, None) => Attribute::String(text.as_str().into()),
        (None, Some(number), None, None) => Attribute::Int(number),
        (None, None, Some(truth), None) => Attribute::Bool(truth),
        (None, None, None, Some(version)) => Attribute::Version(version.as_str().into()),
        (None, None, None, None) => list_attribute(value),
        _ => Attribute::Unknown,
    }
}

fn list_attribute(value: &api::DeviceAttribute) -> Attribute {
    let text = |t: &String| -> std::sync::Arc<str> { t.as_str().into() };
    if let Some(list) = &value.strings {
        Attribute::List(list.iter().map(|t| Attribute::String(text(t))).collect())
    } else if let Some(list) = &value.versions {
        Attribute::List(list.iter().map(|t| Attribute::Version(text(t))).collect())
    } else if let Some(list) = &value.ints {
        Attribute::List(list.iter().copied().map(Attribute::Int).collect())
    } else if let Some(list) = &value.bools {
        Attribute::List(list.iter().copied().map(Attribute::Bool).collect())
    } else {
        Attribute::Unknown
    }
}

fn capacities(
    device: &api::Device,
    subject: Subject<'_>,
) -> Result<NameMap<Capacity>, ConvertError> {
    name_map(device.capacity.as_ref(), |name, capacity| {
        let policy =
            capacity.request_policy.as_ref().map(|p| policy(p, name, subject)).transpose()?;
        let value = quantity(&capacity.value, name, "value", subject)?.unwrap_or_default();
        Ok(Capacity { value, policy })
    })
}

fn policy(
    policy: &api::CapacityRequestPolicy,
    name: &str,
    subject: Subject<'_>,
) -> Result<RequestPolicy, ConvertError> {
    let read = |q: &ApiQuantity, field: &'static str| quantity(q, name, field, subject);
    let optional = |q: &Option<ApiQuantity>, field| q.as_ref().map_or(Ok(None), |q| read(q, field));
    let values = policy
        .valid_values
        .iter()
        .flatten()
        .map(|v| Ok(read(v, "validValues")?.unwrap_or_default()));
    let range = policy.valid_range.as_ref().map(|range| {
        Ok(ValidRange {
            min: read(&range.min, "validRange.min")?,
            max: optional(&range.max, "validRange.max")?,
            step: optional(&range.step, "validRange.step")?,
        })
    });
    Ok(RequestPolicy {
        default: optional(&policy.default, "default")?,
        valid_values: values.collect::<Result<_, _>>()?,
        valid_range: range.transpose()?,
    })
}

/// Reads a quantity. An empty text, as an absent required field has it, is none.
fn quantity(
    quantity: &ApiQuantity,
    capacity: &str,
    field: &str,
    subject: Subject<'_>,
) -> Result<Option<Quantity>, ConvertError> {
    if quantity.0.is_empty() {
        return Ok(None);
    }
    let path = || format!("spec.devices[].capacity[{capacity}].{field}");
    Quantity::try_from(quantity).map(Some).map_err(subject.field(path()))
}
