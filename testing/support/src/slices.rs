//! Queries of published ResourceSlices.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceSlice;

/// Returns the nodes whose pool is complete in its newest generation and has a device.
pub fn nodes_with_whole_pool<'s>(
    slices: impl IntoIterator<Item = &'s ResourceSlice>,
) -> BTreeSet<&'s str> {
    let mut pools = BTreeMap::<(&str, &str), Vec<&ResourceSlice>>::new();
    for slice in slices {
        if let Some(node) = slice.spec.node_name.as_deref() {
            pools.entry((node, &slice.spec.pool.name)).or_default().push(slice);
        }
    }
    pools.retain(|_, slices| is_complete(slices));
    pools.into_keys().map(|(node, _)| node).collect()
}

fn is_complete(slices: &[&ResourceSlice]) -> bool {
    let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
    let current: Vec<_> =
        slices.iter().filter(|slice| Some(slice.spec.pool.generation) == newest).collect();
    let has_devices =
        current.iter().any(|slice| slice.spec.devices.iter().flatten().next().is_some());
    let expected = current.first().map(|slice| slice.spec.pool.resource_slice_count);
    has_devices && expected == i64::try_from(current.len()).ok()
}
