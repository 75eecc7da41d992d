use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;

use super::*;
use crate::gpu::{
    ComputeCapability, CudaVersion, Gpu, Health, Inventory, Link, LinkKind, Mig, MigEngines,
    MigInstance, MigPlacement, MigProfile, PcieLevel,
};
use crate::machines::{all_pairs, dgx1v, dgx1v_links, gpu, h100_8, nvlink, unlinked, uuid};
use crate::names::{
    DeviceName, DriverName, FENCE_ANNOTATION, GpuUuid, MANAGED_TAINT_KEY, NodeName,
    TOPOLOGY_ANNOTATION, UNHEALTHY_TAINT_KEY,
};
use crate::quantity::Quantity;

fn options() -> SliceOptions {
    SliceOptions {
        generation: 3,
        ..SliceOptions::new(NodeName::new("node-a").expect("a node name"))
    }
}

fn one(inventory: Inventory, options: &SliceOptions) -> ResourceSlice {
    let mut slices = build(&inventory, options);
    assert_eq!(slices.len(), 1);
    slices.remove(0)
}

fn devices(slice: &ResourceSlice) -> &[Device] {
    slice.spec.devices.as_deref().unwrap_or_default()
}

fn indices(slice: &ResourceSlice) -> Vec<i64> {
    let index = |device: &Device| device.attributes.as_ref()?.get("index")?.int;
    devices(slice).iter().map(|device| index(device).expect("an index")).collect()
}

fn string<'d>(device: &'d Device, attribute: &str) -> Option<&'d str> {
    device.attributes.as_ref()?.get(attribute)?.string.as_deref()
}

#[test]
fn eight_h100_behind_nvswitches() {
    let owned = SliceOptions { owner: Some(NodeOwner { uid: "node-uid".to_owned() }), ..options() };
    insta::assert_yaml_snapshot!(build(&h100_8(), &owned));
}

#[test]
fn a_dgx_1_with_its_mesh() {
    insta::assert_yaml_snapshot!(build(&dgx1v(), &options()));
}

#[test]
fn no_gpu_is_one_empty_slice() {
    let slice = one(Inventory::default(), &options());
    assert_eq!(slice.spec.devices, None);
    assert_eq!(slice.metadata.annotations, None);
    assert_eq!((slice.spec.pool.generation, slice.spec.pool.resource_slice_count), (3, 1));
}

/// An H100 in MIG mode with two profiles.
fn mig_gpu(index: u32, instances: Vec<MigInstance>) -> Gpu {
    let profile =
        |id, name: &str, memory_mib, multiprocessors, placements: &[(u32, u32)]| MigProfile {
            id,
            name: name.to_owned(),
            slices: 1,
            memory_mib,
            engines: MigEngines { multiprocessors, copy_engines: 1, ..MigEngines::default() },
            placements: placements
                .iter()
                .map(|(start, size)| MigPlacement { start: *start, size: *size })
                .collect(),
        };
    let ones: Vec<(u32, u32)> = (0..7).map(|start| (start, 1)).collect();
    let profiles = vec![
        profile(9, "3g.40gb", 40448, 60, &[(0, 4), (4, 4)]),
        profile(19, "1g.10gb", 9984, 16, &ones),
    ];
    Gpu { mig: Some(Mig { profiles, instances }), ..gpu(index) }
}

#[test]
fn a_gpu_in_mig_mode_beside_one_that_is_shared() {
    let inventory =
        Inventory::new(vec![mig_gpu(0, Vec::new()), gpu(1)], all_pairs(2, 4), Vec::new());
    assert!(inventory.links.is_empty(), "MIG devices have no peer access");
    insta::assert_yaml_snapshot!(build(&inventory, &options()));
}

#[test]
fn slices_of_an_instance_that_no_claim_has_are_not_published() {
    let placement = MigPlacement { start: 4, size: 4 };
    let taken = MigInstance { profile: 9, placement };
    let inventory = Inventory::new(vec![mig_gpu(0, vec![taken])], Vec::new(), Vec::new());
    let slices = build(&inventory, &options());
    let names: Vec<&str> = devices(&slices[0]).iter().map(|device| &device.name[41..]).collect();
    assert_eq!(
        names,
        [
            "mig-1g10gb-19-0",
            "mig-1g10gb-19-1",
            "mig-1g10gb-19-2",
            "mig-1g10gb-19-3",
            "mig-3g40gb-9-0"
        ]
    );
    let counters = &slices[1].spec.shared_counters.as_ref().expect("counters")[0].counters;
    let left = |name: &str| counters[name].value.0.clone();
    assert_eq!((left("memory-slice-3"), left("memory-slice-4")), ("1".to_owned(), "0".to_owned()));
    assert_eq!(left("multiprocessors"), "0", "60 of 60");
}

#[test]
fn the_spelling_of_counters_is_no_difference() {
    let inventory = Inventory::new(vec![mig_gpu(0, Vec::new())], Vec::new(), Vec::new());
    let desired = build(&inventory, &options());
    let mut published = desired.clone();
    let device = &mut published[0].spec.devices.as_mut().expect("devices")[0];
    let consumed = &mut device.consumes_counters.as_mut().expect("counters")[0];
    consumed.counters.values_mut().for_each(|counter| counter.value.0.push_str("000m"));
    let set = &mut published[1].spec.shared_counters.as_mut().expect("counters")[0];
    set.counters.values_mut().for_each(|counter| counter.value.0.push_str("000m"));
    assert!(same_pool(&desired, &published));
    set_counter(&mut published[1], "memory-slice-0", "0");
    assert!(!same_pool(&desired, &published));
}

fn set_counter(slice: &mut ResourceSlice, name: &str, value: &str) {
    let set = &mut slice.spec.shared_counters.as_mut().expect("counters")[0];
    set.counters.get_mut(name).expect("a counter").value = ApiQuantity(value.to_owned());
}

#[test]
fn mig_devices_are_split_at_64_and_counters_at_8() {
    let gpus = (0..9).map(|index| mig_gpu(index, Vec::new())).collect();
    let inventory = Inventory::new(gpus, Vec::new(), Vec::new());
    for fence in [Fence::Rule, Fence::Taint] {
        let slices = build(&inventory, &SliceOptions { fence, ..options() });
        let sizes: Vec<(usize, usize)> = slices
            .iter()
            .map(|slice| {
                let sets = slice.spec.shared_counters.as_deref().unwrap_or_default();
                (devices(slice).len(), sets.len())
            })
            .collect();
        assert_eq!(sizes, [(64, 0), (17, 0), (0, 8), (0, 1)]);
    }
}

#[test]
fn tainted_devices_are_split_at_64_and_untainted_ones_at_128() {
    let sizes = |options: &SliceOptions| -> Vec<usize> {
        build(&unlinked(130), options).iter().map(|slice| devices(slice).len()).collect()
    };
    assert_eq!(sizes(&options()), [64, 64, 2]);
    assert_eq!(sizes(&SliceOptions { fence: Fence::Stock, ..options() }), [128, 2]);
    assert_eq!(sizes(&SliceOptions { fence: Fence::Rule, ..options() }), [128, 2]);
}

#[test]
fn split_slices_are_one_pool_in_order_of_their_names() {
    let slices = build(&unlinked(130), &options());
    let names: Vec<&str> =
        slices.iter().filter_map(|slice| slice.metadata.name.as_deref()).collect();
    assert_eq!(
        names,
        ["000-gpu.tessera.dev-node-a", "001-gpu.tessera.dev-node-a", "002-gpu.tessera.dev-node-a"]
    );
    assert!(slices.iter().all(|slice| {
        let pool = &slice.spec.pool;
        (pool.name.as_str(), pool.generation, pool.resource_slice_count) == ("node-a", 3, 3)
    }));
    let all: Vec<i64> = slices.iter().flat_map(indices).collect();
    assert_eq!(all, (0..130).collect::<Vec<_>>());
}

#[test]
fn slices_fenced_by_a_rule_say_so_and_have_no_taint() {
    let by_rule = one(h100_8(), &SliceOptions { fence: Fence::Rule, ..options() });
    assert!(is_fenced_by_rule(&by_rule));
    assert!(devices(&by_rule).iter().all(|device| device.taints.is_none()));
    let empty = one(Inventory::default(), &SliceOptions { fence: Fence::Rule, ..options() });
    assert!(is_fenced_by_rule(&empty));
    let stock = one(h100_8(), &SliceOptions { fence: Fence::Stock, ..options() });
    assert!(!is_fenced_by_rule(&stock) && !is_fenced_by_rule(&one(h100_8(), &options())));
    assert!(!same_content(&by_rule, &stock), "a change of the fence is published");
}

#[test]
fn without_the_fence_nothing_is_tainted() {
    let slice = one(h100_8(), &SliceOptions { fence: Fence::Stock, ..options() });
    assert!(devices(&slice).iter().all(|device| device.taints.is_none()));
}

#[test]
fn a_sick_gpu_is_tainted_beside_the_fence_and_also_without_it() {
    let health =
        Health::Unhealthy { code: "Xid 79!".to_owned(), message: "fell off the bus".to_owned() };
    let inventory = Inventory::new(vec![Gpu { health, ..gpu(0) }], Vec::new(), Vec::new());
    let keys = |fence| -> Vec<(String, Option<String>)> {
        let slice = one(inventory.clone(), &SliceOptions { fence, ..options() });
        devices(&slice)[0]
            .taints
            .iter()
            .flatten()
            .map(|taint| (taint.key.clone(), taint.value.clone()))
            .collect()
    };
    let unhealthy = (UNHEALTHY_TAINT_KEY.to_owned(), Some("Xid79".to_owned()));
    assert_eq!(keys(Fence::Taint), [(MANAGED_TAINT_KEY.to_owned(), None), unhealthy.clone()]);
    assert_eq!(keys(Fence::Stock), [unhealthy]);
}

#[test]
fn what_is_not_known_is_left_out() {
    let bare = Gpu {
        architecture: String::new(),
        driver_version: "unknown".to_owned(),
        pcie_root: None,
        numa_node: None,
        ..gpu(0)
    };
    let slice = one(Inventory::new(vec![bare], Vec::new(), Vec::new()), &options());
    let names: Vec<&str> =
        devices(&slice)[0].attributes.iter().flatten().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "cudaComputeCapability",
            "cudaDriverVersion",
            "index",
            "productName",
            "resource.kubernetes.io/pciBusID",
            "type",
            "uuid"
        ]
    );
}

#[test]
fn a_long_product_name_is_cut_between_characters() {
    let long = Gpu { product_name: format!("{}é tail", "x".repeat(63)), ..gpu(0) };
    let slice = one(Inventory::new(vec![long], Vec::new(), Vec::new()), &options());
    assert_eq!(string(&devices(&slice)[0], "productName"), Some("x".repeat(63).as_str()));
}

#[test]
fn memory_is_floored_to_whole_mib_and_the_default_is_all_of_it() {
    let odd = Gpu { memory_bytes: (81559 << 20) + (1 << 20) - 1, ..gpu(0) };
    let slice = one(Inventory::new(vec![odd], Vec::new(), Vec::new()), &options());
    let capacity = devices(&slice)[0].capacity.as_ref().expect("capacity");
    let policy = capacity["memory"].request_policy.as_ref().expect("a policy");
    assert_eq!(capacity["memory"].value.0, "81559Mi");
    assert_eq!(policy.default.as_ref().map(|q| q.0.as_str()), Some("81559Mi"));
}

#[test]
fn oversubscribed_memory_is_published_with_the_truth_beside_it() {
    let ratio = MemoryRatio::from_percent(150).expect("a ratio");
    let slice = one(unlinked(1), &SliceOptions { memory_ratio: ratio, ..options() });
    let device = &devices(&slice)[0];
    assert_eq!(device.capacity.as_ref().expect("capacity")["memory"].value.0, "122338Mi");
    assert_eq!(string(device, "physicalMemory"), Some("81559Mi"));
    assert_eq!((MemoryRatio::from_percent(99), MemoryRatio::from_percent(801)), (None, None));
}

#[test]
fn shares_are_a_capacity_of_which_a_request_takes_one() {
    for number in [1, 10, 128] {
        let max_shares = MaxShares::new(number).expect("a number");
        let options = SliceOptions { max_shares, ..options() };
        let slice = one(Inventory::new(vec![gpu(0)], Vec::new(), Vec::new()), &options);
        let capacity = &devices(&slice)[0].capacity.as_ref().expect("capacity")["shares"];
        assert_eq!(capacity.value.0, number.to_string());
        let policy = capacity.request_policy.as_ref().expect("a policy");
        let range = policy.valid_range.as_ref().expect("a range");
        let step = range.step.as_ref().map(|step| step.0.as_str());
        let default = policy.default.as_ref().map(|default| default.0.as_str());
        assert_eq!((default, range.min.0.as_str(), step), (Some("1"), "1", Some("1")));
    }
    for text in ["0", "129", "-1", "1.5", "", "ten"] {
        let error = text.parse::<MaxShares>().expect_err(text).to_string();
        assert_eq!(error, "not a whole number from 1 to 128");
    }
    assert_eq!("7".parse(), Ok(MaxShares::new(7).expect("a number")));
}

#[test]
fn a_gpu_whose_memory_cannot_spill_is_published_with_what_it_has() {
    let old = Gpu { cuda_compute_capability: ComputeCapability { major: 5, minor: 2 }, ..gpu(0) };
    let ratio = MemoryRatio::from_percent(200).expect("a ratio");
    let slice = one(
        Inventory::new(vec![old], Vec::new(), Vec::new()),
        &SliceOptions { memory_ratio: ratio, ..options() },
    );
    let device = &devices(&slice)[0];
    assert_eq!(device.capacity.as_ref().expect("capacity")["memory"].value.0, "81559Mi");
    assert_eq!(string(device, "physicalMemory"), None);
}

#[test]
fn gpus_since_volta_have_the_mps_attribute_if_driver_and_node_allow() {
    let says = |gpu: Gpu, mps| {
        let inventory = Inventory::new(vec![gpu], Vec::new(), Vec::new());
        let slice = one(inventory, &SliceOptions { mps, ..options() });
        devices(&slice)[0]
            .attributes
            .as_ref()
            .expect("attributes")
            .get("mps")
            .and_then(|mps| mps.bool)
    };
    let pascal =
        Gpu { cuda_compute_capability: ComputeCapability { major: 6, minor: 1 }, ..gpu(0) };
    let with_cuda =
        |major, minor| Gpu { cuda_driver_version: CudaVersion { major, minor }, ..gpu(0) };
    assert_eq!(
        (says(gpu(0), true), says(gpu(0), false), says(pascal, true)),
        (Some(true), None, None)
    );
    assert_eq!((says(with_cuda(12, 3), true), says(with_cuda(12, 2), true)), (Some(true), None));
}

#[test]
fn the_order_of_devices_is_a_policy() {
    let in_use = BTreeMap::from([(uuid(2), 1 << 30), (uuid(5), 2 << 30)]);
    let ordered = |order| {
        indices(&one(dgx1v(), &SliceOptions { order, in_use: in_use.clone(), ..options() }))
    };
    assert_eq!(ordered(DeviceOrder::Index), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(ordered(DeviceOrder::FreeLast), [5, 2, 0, 1, 3, 4, 6, 7]);
    assert_eq!(ordered(DeviceOrder::FreeFirst), [0, 1, 3, 4, 6, 7, 2, 5]);
    let bridged = Inventory::new(
        (0..4).map(gpu).collect(),
        vec![nvlink(1, 2, 2), nvlink(0, 3, 2)],
        Vec::new(),
    );
    assert_eq!(
        indices(&one(bridged, &SliceOptions { order: DeviceOrder::Clique, ..options() })),
        [0, 3, 1, 2]
    );
    for order in DeviceOrder::ALL {
        assert_eq!(order.word().parse(), Ok(order));
    }
}

#[test]
fn cliques_of_two_nodes_never_match() {
    let clique = |node: &str| {
        let options = SliceOptions::new(NodeName::new(node).expect("a node name"));
        string(&devices(&one(h100_8(), &options))[0], "nvlinkClique").map(str::to_owned)
    };
    assert_ne!(clique("node-a"), clique("node-b"));
    assert_eq!(clique(&"n".repeat(253)).map(|value| value.len()), Some(14));
}

#[test]
fn slices_of_nodes_with_long_names_keep_distinct_names() {
    let name = |node: String| {
        let options = SliceOptions::new(NodeName::new(node).expect("a node name"));
        one(Inventory::default(), &options).metadata.name.expect("a name")
    };
    let (one, other) =
        (name(format!("{}.a", "n".repeat(250))), name(format!("{}.b", "n".repeat(250))));
    assert_ne!(one, other);
    assert!(one.len() <= 253 && NodeName::new(&one).is_ok(), "{one}");
}

#[test]
fn the_topology_is_read_back_as_it_was_written() {
    let topology = Topology::of_slices(&build(&dgx1v(), &options())).expect("our own annotation");
    assert_eq!(topology, Topology::new(dgx1v_links()));
    assert_eq!(
        (topology.nvlinks(&uuid(3), &uuid(0)), topology.nvlinks(&uuid(0), &uuid(5))),
        (2, 0)
    );
    assert_eq!(topology.pcie(&uuid(1), &uuid(0)), PcieLevel::Single);
    assert_eq!(topology.pcie(&uuid(0), &uuid(7)), PcieLevel::System);
}

#[test]
fn the_topology_of_a_split_pool_is_complete() {
    let links = vec![nvlink(0, 65, 4), nvlink(64, 65, 4), nvlink(1, 0, 4)];
    let inventory = Inventory::new((0..66).map(gpu).collect(), links.clone(), Vec::new());
    let topology =
        Topology::of_slices(&build(&inventory, &options())).expect("our own annotations");
    assert_eq!(topology, Topology::new(links));
}

#[test]
fn a_topology_beyond_the_annotation_drops_what_matters_least() {
    let mut links = all_pairs(64, 4);
    links.extend((0..64).flat_map(|a| {
        (a + 1..64).map(move |b| Link::new(uuid(a), uuid(b), LinkKind::Pcie(PcieLevel::Node)))
    }));
    let text = Topology::new(links).to_annotation().expect("something is left");
    assert!(text.len() <= MAX_ANNOTATION_BYTES);
    assert_eq!(
        Topology::parse(&text).expect("our own annotation"),
        Topology::new(all_pairs(64, 4))
    );
}

#[test]
fn a_malformed_topology_is_refused_and_an_unknown_kind_of_link_is_skipped() {
    let parse = |text: &str| Topology::parse(text).map_err(|error| error.to_string());
    assert_eq!(
        parse("[]"),
        Err("annotation gpu.tessera.dev/topology is not of the form {\"links\": [[device, device, kind, count], …]}".into())
    );
    assert_eq!(
        parse(r#"{"links": [["gpu-0", "gpu-1", "NVLink", 4]]}"#),
        Err("annotation gpu.tessera.dev/topology: links[0] names `gpu-0`, which is no GPU of ours"
            .into())
    );
    assert_eq!(
        parse(&" ".repeat(262_145)),
        Err("annotation gpu.tessera.dev/topology has 262145 bytes; all annotations together may have 262144"
            .into())
    );
    let (a, b) = (uuid(0).device_name(), uuid(1).device_name());
    assert_eq!(
        parse(&format!(
            r#"{{"links": [["{b}", "{a}", "NVLink", 2], ["{a}", "{b}", "Photons", 9]], "since": 2}}"#
        )),
        Ok(Topology::new([nvlink(0, 1, 2)]))
    );
}

/// Returns the slice as an API server stores it: with times of taints, canonical quantities and
/// metadata.
fn as_published(mut slice: ResourceSlice) -> ResourceSlice {
    slice.metadata.uid = Some("slice-uid".to_owned());
    slice.metadata.resource_version = Some("7".to_owned());
    slice
        .metadata
        .annotations
        .get_or_insert_default()
        .insert("example.com/note".to_owned(), "hello".to_owned());
    for device in slice.spec.devices.iter_mut().flatten() {
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = Some(Time("2026-11-21T03:00:00Z".parse().expect("a time")));
        }
        for capacity in device.capacity.iter_mut().flat_map(BTreeMap::values_mut) {
            let value = Quantity::try_from(&capacity.value).expect("a quantity").value();
            capacity.value = ApiQuantity(value.to_string());
        }
    }
    slice
}

#[test]
fn what_the_server_adds_is_no_difference() {
    let desired = build(&dgx1v(), &options());
    let published: Vec<ResourceSlice> = desired.iter().cloned().map(as_published).collect();
    assert!(same_content(&desired[0], &published[0]));
    assert!(same_pool(&desired, &published));
}

#[test]
fn what_a_user_could_notice_is_a_difference() {
    let desired = one(dgx1v(), &options());
    let changed = |change: fn(&mut ResourceSlice)| {
        let mut published = as_published(desired.clone());
        change(&mut published);
        !same_content(&desired, &published)
    };
    assert!(
        changed(|slice| slice.spec.devices.get_or_insert_default().swap(0, 1)),
        "the order of devices"
    );
    assert!(
        changed(|slice| slice.spec.devices.get_or_insert_default()[3].taints = None),
        "a taint"
    );
    assert!(changed(|slice| slice.metadata.annotations = None), "the topology");
    assert!(changed(|slice| slice.spec.node_name = None), "the node");
    assert!(
        changed(|slice| {
            let capacity =
                slice.spec.devices.get_or_insert_default()[0].capacity.get_or_insert_default();
            capacity.get_mut("memory").expect("memory").value = ApiQuantity("32767Mi".to_owned());
        }),
        "an amount"
    );
    assert!(
        !changed(|slice| slice.spec.pool.generation = 99),
        "the generation follows, it does not lead"
    );
}

#[test]
fn a_pool_is_the_same_only_as_a_whole() {
    let desired = build(&unlinked(70), &options());
    let published: Vec<ResourceSlice> = desired.iter().cloned().map(as_published).collect();
    let mut reversed = published.clone();
    reversed.reverse();
    assert!(same_pool(&desired, &reversed), "the API lists in any order");
    assert!(!same_pool(&desired, &published[..1]), "one is missing");
    assert!(!same_pool(&desired[..1], &published), "one is left over");
    let mut torn = published.clone();
    torn[1].spec.pool.generation += 1;
    assert!(!same_pool(&desired, &torn), "two generations");
    let mut miscounted = published.clone();
    miscounted[1].spec.pool.resource_slice_count = 5;
    assert!(!same_pool(&desired, &miscounted), "the count is wrong");
    let mut renamed = published;
    renamed[1].metadata.name = Some("another".to_owned());
    assert!(!same_pool(&desired, &renamed), "another's name");
}

#[test]
fn a_taint_keeps_the_time_it_was_added() {
    let published = as_published(one(unlinked(2), &options()));
    let sick = Gpu {
        health: Health::Unhealthy { code: "Xid79".to_owned(), message: String::new() },
        ..gpu(1)
    };
    let mut desired =
        one(Inventory::new(vec![gpu(0), sick, gpu(2)], Vec::new(), Vec::new()), &options());
    keep_server_fields(&mut desired, &published);
    let since: Vec<Vec<bool>> = devices(&desired)
        .iter()
        .map(|device| {
            device.taints.iter().flatten().map(|taint| taint.time_added.is_some()).collect()
        })
        .collect();
    assert_eq!(since, [vec![true], vec![true, false], vec![false]]);
}

prop_compose! {
    fn any_gpu()(
        index in 0_u32..200,
        product_name in ".{0,90}",
        architecture in "[A-Za-z ]{0,80}",
        memory_bytes in any::<u64>(),
        driver_version in ".{0,40}",
        cuda in any::<u32>(),
        pcie_root in prop::option::of(".{0,90}"),
        code in ".{0,90}",
        sick in any::<bool>(),
    ) -> Gpu {
        let health = if sick { Health::Unhealthy { code, message: String::new() } } else { Health::Healthy };
        let cuda_driver_version = crate::gpu::CudaVersion::from_number(cuda);
        Gpu { product_name, architecture, memory_bytes: memory_bytes >> 12, driver_version, cuda_driver_version, pcie_root,
              health, ..gpu(index) }
    }
}

fn check_device(device: &Device) {
    assert!(
        DeviceName::new(&device.name).is_ok()
            && GpuUuid::from_device_name(&DeviceName::new(&device.name).unwrap()).is_ok()
    );
    let attributes = device.attributes.as_ref().expect("attributes");
    let capacity = device.capacity.as_ref().expect("capacity");
    assert!(attributes.len() + capacity.len() <= 32);
    for (name, value) in attributes {
        let id = name.rsplit('/').next().expect("a name");
        assert!(
            id.len() <= 32 && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
            "{name}"
        );
        assert!(value.string.iter().all(|text| text.len() <= 64), "{name}");
        assert!(
            value
                .version
                .iter()
                .all(|text| text.len() <= 64 && semver::Version::parse(text).is_ok()),
            "{name}"
        );
        let kinds = [value.string.is_some(), value.version.is_some(), value.int.is_some()];
        assert_eq!(kinds.iter().filter(|set| **set).count(), 1, "{name}");
    }
    for capacity in capacity.values() {
        check_policy(capacity);
    }
    for taint in device.taints.iter().flatten() {
        let value = taint.value.as_deref().unwrap_or("x");
        assert!(
            value.len() <= 63 && value.starts_with(|c: char| c.is_ascii_alphanumeric()),
            "{value}"
        );
    }
}

/// The rules of the API for a range: min + step <= value, and default on the grid within min and
/// value.
fn check_policy(capacity: &k8s_openapi::api::resource::v1::DeviceCapacity) {
    let amount = |quantity: &ApiQuantity| Quantity::try_from(quantity).expect("a quantity").value();
    let policy = capacity.request_policy.as_ref().expect("a policy");
    let range = policy.valid_range.as_ref().expect("a range");
    let (value, min, step) =
        (amount(&capacity.value), amount(&range.min), amount(range.step.as_ref().expect("a step")));
    let default = amount(policy.default.as_ref().expect("a default"));
    assert!(
        min + step <= value && default >= min && default <= value && (default - min) % step == 0
    );
}

proptest! {
    // Each case is up to 150 devices of random text.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whatever_the_hardware_says_the_slices_keep_the_limits_of_the_api(
        gpus in prop::collection::vec(any_gpu(), 0..150),
        fence in prop::sample::select(vec![Fence::Taint, Fence::Rule, Fence::Stock]),
    ) {
        let inventory = Inventory::new(gpus, Vec::new(), Vec::new());
        let slices = build(&inventory, &SliceOptions { fence, ..options() });
        let mut names = BTreeSet::new();
        for slice in &slices {
            let devices = devices(slice);
            let tainted = devices.iter().any(|device| device.taints.is_some());
            let limit = if tainted { 64 } else { 128 };
            prop_assert!(devices.len() <= limit);
            prop_assert_eq!(slice.spec.pool.resource_slice_count, slices.len() as i64);
            prop_assert!(DriverName::new(&slice.spec.driver).is_ok());
            for device in devices {
                check_device(device);
                prop_assert!(names.insert(device.name.clone()), "{} is there twice", device.name);
            }
        }
        prop_assert_eq!(names.len(), inventory.gpus.len());
        prop_assert!(same_pool(&slices, &slices));
        prop_assert!(slices.iter().all(|s| s.metadata.annotations.iter().flatten().all(|(key, _)| [TOPOLOGY_ANNOTATION, FENCE_ANNOTATION].contains(&key.as_str()))));
    }
}
