//! The slices of a node.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CounterSet, Device, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use sha2::{Digest, Sha256};

use super::{
    Fence, MAX_COUNTER_SETS, MAX_DEVICES, MAX_TAINTED_DEVICES, SliceOptions, Topology, device, mig,
};
use crate::gpu::{Gpu, Inventory, NvlinkClique, nvlink_cliques};
use crate::names::{
    DRIVER_NAME, FENCE_ANNOTATION, FENCE_BY_RULE, GpuUuid, NodeName, TOPOLOGY_ANNOTATION,
};

/// Longest object name (DNS subdomain).
const MAX_NAME_BYTES: usize = 253;
/// Hexadecimal digits of the hash that stands for a node's name: the clique attribute holds 64
/// bytes, a node's name has up to 253. 48 bits make a collision among 40,000 nodes a matter of one
/// in 350,000.
const NODE_HASH_DIGITS: usize = 12;

/// The slices that publish the inventory: one pool, as many slices as the API's limits ask for, all
/// of one generation. No GPU gives one empty slice, which says that the driver is there and has
/// nothing.
///
/// The result depends on nothing but the arguments: equal arguments give equal slices, names
/// included, so that a slice published twice collides instead of counting twice.
pub fn build(inventory: &Inventory, options: &SliceOptions) -> Vec<ResourceSlice> {
    let (mig, mut gpus): (Vec<&Gpu>, Vec<&Gpu>) =
        inventory.gpus.iter().partition(|gpu| gpu.mig.is_some());
    let cliques = nvlink_cliques(gpus.iter().map(|gpu| &gpu.uuid), &inventory.links);
    options.order.sort(&mut gpus, &options.in_use, &cliques);
    let clique_values = clique_values(&cliques, &options.node);
    let devices: Vec<Device> = gpus
        .iter()
        .map(|gpu| device::device(gpu, clique_values.get(&gpu.uuid).cloned(), options))
        .collect();
    let per_slice =
        if devices.iter().any(|d| d.taints.is_some()) { MAX_TAINTED_DEVICES } else { MAX_DEVICES };
    let mut parts: Vec<SlicePart> = Vec::new();
    for (devices, gpus) in devices.chunks(per_slice).zip(gpus.chunks(per_slice)) {
        let links = inventory.links.iter().filter(|link| gpus.iter().any(|gpu| gpu.uuid == link.a));
        let topology = Topology::new(links.cloned());
        parts.push(SlicePart { devices: devices.to_vec(), topology, ..SlicePart::default() });
    }
    // A slice has either counters or devices.
    for devices in mig::devices(&mig, options).chunks(MAX_TAINTED_DEVICES) {
        parts.push(SlicePart { devices: devices.to_vec(), ..SlicePart::default() });
    }
    for sets in mig::counter_sets(&mig).chunks(MAX_COUNTER_SETS) {
        parts.push(SlicePart { counter_sets: sets.to_vec(), ..SlicePart::default() });
    }
    if parts.is_empty() {
        parts.push(SlicePart::default());
    }
    let count = parts.len() as i64;
    let parts = parts.into_iter().enumerate();
    parts.map(|(index, part)| slice(index, count, part, options)).collect()
}

/// Content of one slice.
#[derive(Default)]
struct SlicePart {
    devices: Vec<Device>,
    counter_sets: Vec<CounterSet>,
    topology: Topology,
}

fn slice(index: usize, count: i64, part: SlicePart, options: &SliceOptions) -> ResourceSlice {
    let SlicePart { devices, counter_sets, topology } = part;
    let links = topology.to_annotation().map(|text| (TOPOLOGY_ANNOTATION.to_owned(), text));
    let fence = (options.fence == Fence::Rule)
        .then(|| (FENCE_ANNOTATION.to_owned(), FENCE_BY_RULE.to_owned()));
    let annotations: BTreeMap<String, String> = links.into_iter().chain(fence).collect();
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(slice_name(index, &options.node)),
            annotations: (!annotations.is_empty()).then_some(annotations),
            owner_references: options
                .owner
                .as_ref()
                .map(|owner| vec![owner_reference(&options.node, &owner.uid)]),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: DRIVER_NAME.to_owned(),
            node_name: Some(options.node.to_string()),
            pool: ResourcePool {
                name: options.pool().into(),
                generation: options.generation,
                resource_slice_count: count,
            },
            devices: (!devices.is_empty()).then_some(devices),
            shared_counters: (!counter_sets.is_empty()).then_some(counter_sets),
            ..ResourceSliceSpec::default()
        },
    }
}

/// The slice's name. The position comes first and has a fixed width, because upstream's allocator
/// goes through slices by name: so it meets devices in our order.
fn slice_name(index: usize, node: &NodeName) -> String {
    let name = format!("{index:03}-{DRIVER_NAME}-{node}");
    if name.len() <= MAX_NAME_BYTES {
        return name;
    }
    let kept = name[..MAX_NAME_BYTES - NODE_HASH_DIGITS - 1].trim_end_matches(['-', '.']);
    format!("{kept}-{}", node_hash(node))
}

fn owner_reference(node: &NodeName, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_string(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// The clique attribute of each GPU that has one. The node's name is in it, so that equal cliques
/// mean one machine.
fn clique_values(cliques: &[NvlinkClique], node: &NodeName) -> BTreeMap<GpuUuid, String> {
    let hash = node_hash(node);
    let values = cliques.iter().flat_map(|clique| {
        clique.members.iter().map(|member| (member.clone(), format!("{hash}/{}", clique.number)))
    });
    values.collect()
}

fn node_hash(node: &NodeName) -> String {
    let digest = Sha256::digest(node.as_str().as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    hex[..NODE_HASH_DIGITS].to_owned()
}
