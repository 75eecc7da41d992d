//! From API objects to rows.

use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use serde_json::Value;

/// Columns of [`gpus`].
pub(crate) const GPU_COLUMNS: [&str; 7] =
    ["NODE", "GPU", "PRODUCT", "MEMORY", "CORES", "NUMA", "NVLINK CLIQUE"];

/// One row for each published GPU.
pub(crate) fn gpus(slices: &[ResourceSlice]) -> Vec<Vec<String>> {
    let rows = slices.iter().flat_map(|slice| {
        let node = slice.spec.node_name.clone().unwrap_or_default();
        slice.spec.devices.iter().flatten().map(move |device| {
            vec![
                node.clone(),
                short(&device.name),
                attribute(device, "productName"),
                capacity(device, "memory"),
                capacity(device, "cores"),
                attribute(device, "resource.kubernetes.io/numaNode"),
                attribute(device, "nvlinkClique"),
            ]
        })
    });
    rows.collect()
}

/// Where a claim's first device is: node, GPU, memory, cores.
pub(crate) fn allocation(claim: &ResourceClaim) -> Option<[String; 4]> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    let result = allocation.devices.as_ref()?.results.as_ref()?.first()?;
    let taken = |name: &str| {
        let amount = result.consumed_capacity.as_ref().and_then(|taken| taken.get(name));
        amount.map(|amount| amount.0.clone()).unwrap_or_default()
    };
    Some([result.pool.clone(), short(&result.device), taken("memory"), taken("cores")])
}

/// `gpu-1f0c2d3e-…` is long enough to tell one from another.
fn short(device: &str) -> String {
    device.split('-').take(2).collect::<Vec<_>>().join("-")
}

fn attribute(device: &Device, name: &str) -> String {
    let value = device.attributes.as_ref().and_then(|attributes| attributes.get(name));
    let value = value.and_then(|value| serde_json::to_value(value).ok()).unwrap_or_default();
    match value.as_object().and_then(|fields| fields.values().next()) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => "-".into(),
    }
}

fn capacity(device: &Device, name: &str) -> String {
    let capacity = device.capacity.as_ref().and_then(|capacity| capacity.get(name));
    capacity.map_or_else(|| "-".into(), |capacity| capacity.value.0.clone())
}

/// Bytes as people say them.
pub(crate) fn gib(bytes: &Value) -> String {
    format!("{:.2} GiB", bytes.as_f64().unwrap_or_default() / f64::from(1 << 30))
}
