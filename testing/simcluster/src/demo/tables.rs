//! Summaries of API objects.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use serde_json::Value;
use tessera_simcluster::api::quantity;

/// Returns one line for each node with GPUs, ordered by name.
pub(crate) fn nodes(slices: &[ResourceSlice]) -> Vec<String> {
    let names: BTreeSet<_> =
        slices.iter().filter_map(|slice| slice.spec.node_name.as_deref()).collect();
    let devices = |name: &str| -> Vec<&Device> {
        let slices = slices.iter().filter(|slice| slice.spec.node_name.as_deref() == Some(name));
        slices.flat_map(|slice| slice.spec.devices.iter().flatten()).collect()
    };
    names.into_iter().filter_map(|name| node(name, &devices(name))).collect()
}

/// Returns a line like `node-a  8 x NVIDIA H100 80GB HBM3, 79.65 GiB each (2 NUMA nodes, NVLink)`.
fn node(name: &str, devices: &[&Device]) -> Option<String> {
    let first = *devices.first()?;
    let distinct = |attribute_name: &str| -> usize {
        let values = devices.iter().filter_map(|device| attribute(device, attribute_name));
        values.collect::<BTreeSet<_>>().len()
    };
    let numa_nodes = match distinct("resource.kubernetes.io/numaNode") {
        1 => "1 NUMA node".to_owned(),
        count => format!("{count} NUMA nodes"),
    };
    let link = if distinct("nvlinkClique") > 0 { "NVLink" } else { "PCIe" };
    Some(format!(
        "{name}  {} x {}, {} each ({numa_nodes}, {link})",
        devices.len(),
        attribute(first, "productName")?,
        capacity(first, "memory")?
    ))
}

/// Returns node, GPU, memory and compute of a claim's first allocated device.
pub(crate) fn allocation(claim: &ResourceClaim) -> Option<[String; 4]> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    let result = allocation.devices.as_ref()?.results.as_ref()?.first()?;
    let consumed = |name: &str| result.consumed_capacity.as_ref()?.get(name);
    let memory = consumed("memory").map(|amount| gib_of_quantity(&amount.0)).unwrap_or_default();
    let cores = consumed("cores").map(|amount| format!("{} %", amount.0)).unwrap_or_default();
    Some([result.pool.clone(), short(&result.device), memory, cores])
}

/// Returns the first part of a device name: `gpu-1f0c2d3e` of `gpu-1f0c2d3e-…`.
fn short(device: &str) -> String {
    device.split('-').take(2).collect::<Vec<_>>().join("-")
}

fn attribute(device: &Device, name: &str) -> Option<String> {
    let value = device.attributes.as_ref()?.get(name)?;
    let value = serde_json::to_value(value).ok()?;
    Some(match value.as_object()?.values().next()? {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })
}

fn capacity(device: &Device, name: &str) -> Option<String> {
    Some(gib_of_quantity(&device.capacity.as_ref()?.get(name)?.value.0))
}

/// Formats a Kubernetes quantity of bytes in GiB.
fn gib_of_quantity(quantity: &str) -> String {
    match quantity::parse(quantity) {
        Some(quantity::Nano(nano)) => format_gib(nano as f64 / 1e9),
        None => quantity.to_owned(),
    }
}

/// Formats a number of bytes in GiB.
pub(crate) fn gib(bytes: &Value) -> String {
    format_gib(bytes.as_f64().unwrap_or_default())
}

fn format_gib(bytes: f64) -> String {
    format!("{:.2} GiB", bytes / f64::from(1 << 30))
}
