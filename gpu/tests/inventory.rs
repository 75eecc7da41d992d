//! Inventory of every shipped fake world, read by the real NVML code.

mod node;

use std::fs;

use tessera_api::gpu::{Inventory, LinkKind, PcieLevel, UnpublishedReason, nvlink_cliques};
use tessera_fake_world::shipped;
use tessera_gpu::{GpuLibrary as _, LibraryError, NvmlLibrary, NvmlOptions};

use node::Node;

/// Returns the sizes of the NVLink cliques, largest first.
fn cliques(inventory: &Inventory) -> Vec<usize> {
    let uuids = inventory.gpus.iter().map(|gpu| &gpu.uuid);
    nvlink_cliques(uuids, &inventory.links).iter().map(|clique| clique.members.len()).collect()
}

fn nvlinks(inventory: &Inventory, node: &Node, one: usize, other: usize) -> u32 {
    let (one, other) = (node.uuid(one), node.uuid(other));
    let between = |link: &&tessera_api::Link| {
        [&link.a, &link.b].into_iter().all(|end| *end == one || *end == other)
    };
    inventory.links.iter().filter(between).map(tessera_api::Link::nvlinks).sum()
}

fn pcie(inventory: &Inventory, node: &Node, one: usize, other: usize) -> PcieLevel {
    let (one, other) = (node.uuid(one), node.uuid(other));
    let between = |link: &&tessera_api::Link| {
        [&link.a, &link.b].into_iter().all(|end| *end == one || *end == other)
    };
    let mut levels = inventory.links.iter().filter(between).filter_map(|link| match link.kind {
        LinkKind::Pcie(level) => Some(level),
        LinkKind::NvLink(_) => None,
    });
    levels.next().expect("every pair has a PCIe level")
}

#[test]
fn inventory_matches_every_shipped_world() {
    for (name, text) in shipped::ALL {
        let node = Node::new(text);
        let library = node.library();
        let inventory = library.inventory().unwrap();
        assert_eq!(
            inventory.gpus.len() + inventory.unpublished.len(),
            node.world.gpus.len(),
            "{name}"
        );
        for gpu in &inventory.gpus {
            let expected = &node.world.gpus[gpu.index as usize];
            assert_eq!(gpu.uuid.as_str(), expected.uuid);
            assert_eq!(gpu.minor, expected.minor);
            assert_eq!(gpu.product_name, expected.model.name);
            assert_eq!(gpu.architecture, format!("{:?}", expected.model.architecture));
            assert_eq!(gpu.memory_bytes, expected.model.memory_bytes());
            assert_eq!(gpu.cuda_compute_capability.major, expected.model.compute_capability.major);
            assert_eq!(gpu.cuda_compute_capability.minor, expected.model.compute_capability.minor);
            assert_eq!(gpu.driver_version, node.world.driver.version);
            assert_eq!(gpu.cuda_driver_version.number() as i32, node.world.driver.cuda_number());
            assert_eq!(gpu.pci_bus_id.as_str(), expected.pci.to_string());
            assert_eq!(gpu.pcie_root.as_deref(), Some(expected.pcie_root.as_str()));
            assert_eq!(gpu.numa_node, expected.numa_node.map(|node| node as i32));
            assert!(gpu.is_healthy() && gpu.mig.is_none());
        }
        assert_eq!(library.library_path(), Some(node.nvml()), "found under the driver root");
    }
}

#[test]
fn dgx_1v_has_nvlink_mesh_and_two_cliques_of_four() {
    let node = Node::new(shipped::DGX_1V);
    let inventory = node.library().inventory().unwrap();
    for one in 0..8 {
        for other in one + 1..8 {
            let expected = node.world.direct_links(one, other) as u32;
            assert_eq!(nvlinks(&inventory, &node, one, other), expected, "{one}-{other}");
            assert_eq!(
                pcie(&inventory, &node, one, other).word(),
                node.world.pcie_level(one, other).name()
            );
        }
    }
    assert_eq!(cliques(&inventory), [4, 4]);
}

#[test]
fn gpus_behind_switches_link_to_all_with_all_links() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let inventory = node.library().inventory().unwrap();
    for one in 0..8 {
        for other in one + 1..8 {
            assert_eq!(nvlinks(&inventory, &node, one, other), 18);
        }
    }
    assert_eq!(cliques(&inventory), [8]);
    assert_eq!(inventory.gpus.iter().filter(|gpu| gpu.numa_node == Some(1)).count(), 4);
}

#[test]
fn gpus_without_bridges_have_no_nvlinks() {
    let node = Node::new(shipped::A100_4_PCIE);
    let inventory = node.library().inventory().unwrap();
    assert!(inventory.links.iter().all(|link| link.nvlinks() == 0));
    assert_eq!(pcie(&inventory, &node, 0, 1), PcieLevel::Node);
    assert_eq!(pcie(&inventory, &node, 1, 2), PcieLevel::System);
    assert_eq!(cliques(&inventory), [0; 0]);
}

#[test]
fn gpu_in_mig_mode_is_unpublished_with_reason() {
    let node = Node::new(shipped::MIXED);
    let library = node.library();
    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.gpus.len(), 4);
    let [unpublished] = inventory.unpublished.as_slice() else {
        panic!("{:?}", inventory.unpublished)
    };
    assert_eq!(
        (unpublished.uuid.clone(), &unpublished.reason),
        (Some(node.uuid(3)), &UnpublishedReason::MigEnabled)
    );
    assert_eq!(cliques(&inventory), [2]);
    node.control
        .update(|control| control.gpu_mut(&node.world.gpus[3].uuid).mig = Some(false))
        .unwrap();
    assert_eq!(library.inventory().unwrap().gpus.len(), 5, "published after MIG is disabled");
}

#[test]
fn excluded_gpu_and_its_links_are_unpublished() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let inventory = node.library_excluding(5).inventory().unwrap();
    assert_eq!(inventory.unpublished.len(), 1);
    assert_eq!(inventory.unpublished[0].uuid, Some(node.uuid(5)));
    assert_eq!(inventory.unpublished[0].reason, UnpublishedReason::Excluded);
    assert!(inventory.gpu(&node.uuid(5)).is_none());
    assert_eq!(cliques(&inventory), [7]);
}

#[test]
fn lost_gpu_is_unpublished_by_uuid_until_restored() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let library = node.library();
    assert_eq!(library.inventory().unwrap().gpus.len(), 8);
    node.lose(6);
    for _ in 0..2 {
        let inventory = library.inventory().unwrap();
        let [lost] = inventory.unpublished.as_slice() else {
            panic!("{:?}", inventory.unpublished)
        };
        assert_eq!((lost.uuid.clone(), lost.index), (Some(node.uuid(6)), Some(6)));
        assert_eq!(lost.reason, UnpublishedReason::Lost);
        assert_eq!((inventory.gpus.len(), cliques(&inventory)), (7, vec![7]));
        assert!(matches!(library.memory(&node.uuid(6)), Err(LibraryError::Lost { .. })));
    }
    node.restore(6);
    let inventory = library.inventory().unwrap();
    assert_eq!((inventory.gpus.len(), inventory.unpublished.len()), (8, 0));
}

#[test]
fn gpu_lost_from_start_is_identified_by_index() {
    let node = Node::new(shipped::A100_4_PCIE);
    node.lose(1);
    let inventory = node.library().inventory().unwrap();
    let [lost] = inventory.unpublished.as_slice() else { panic!("{:?}", inventory.unpublished) };
    assert_eq!((&lost.uuid, lost.index, &lost.reason), (&None, Some(1), &UnpublishedReason::Lost));
}

#[test]
fn gpu_missing_in_sysfs_is_published_without_location() {
    let node = Node::new(shipped::T4_1);
    fs::remove_dir_all(&node.sysfs_root).unwrap();
    let inventory = node.library().inventory().unwrap();
    assert_eq!((&inventory.gpus[0].pcie_root, inventory.gpus[0].numa_node), (&None, None));
}

#[test]
fn node_without_gpus_has_empty_inventory() {
    let node = Node::new("driver: {version: 580.95.05, cuda: \"13.0\"}\ngpus: []\n");
    assert_eq!(node.library().inventory().unwrap(), Inventory::default());
}

#[test]
fn missing_library_error_lists_paths_and_retry_succeeds() {
    let node = Node::new(shipped::T4_1);
    let path = node.driver_root.join("opt/libnvidia-ml.so.1");
    let library = NvmlLibrary::new(NvmlOptions { library: Some(path.clone()), ..node.options() });
    let error = library.inventory().unwrap_err();
    assert!(matches!(error, LibraryError::NotFound { .. }));
    let message = error.to_string();
    assert!(
        message.contains(path.to_str().unwrap()) && message.contains("--nvml-library"),
        "{message}"
    );
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::copy(node.nvml(), &path).unwrap();
    assert_eq!(library.inventory().unwrap().gpus.len(), 1, "tried again");
}

#[test]
fn unloaded_kernel_driver_is_an_error_until_loaded() {
    let node = Node::new(shipped::T4_1);
    node.control.update(|control| control.driver_not_loaded = true).unwrap();
    let library = node.library();
    let error = library.inventory().unwrap_err();
    assert!(matches!(error, LibraryError::Initialise { .. }), "{error}");
    node.control.update(|control| control.driver_not_loaded = false).unwrap();
    assert_eq!(library.inventory().unwrap().gpus.len(), 1);
}

#[test]
fn file_that_is_not_a_library_is_not_found() {
    let node = Node::new(shipped::T4_1);
    let path = node.driver_root.join("not-a-library");
    fs::write(&path, "text").unwrap();
    let library = NvmlLibrary::new(NvmlOptions { library: Some(path), ..node.options() });
    assert!(matches!(library.inventory(), Err(LibraryError::NotFound { .. })));
}

/// Binds the GPU to the kernel driver: its device node and its link in sysfs.
fn plug(node: &Node, index: usize) {
    let gpu = &node.world.gpus[index];
    let (address, bound) = (gpu.pci.to_string(), node.sysfs_root.join("bus/pci/drivers/nvidia"));
    std::os::unix::fs::symlink("../../devices", bound.join(address))
        .expect("the fake node can be changed");
    fs::write(node.driver_root.join(format!("dev/nvidia{}", gpu.minor)), "")
        .expect("the fake node can be changed");
}

fn unplug(node: &Node, index: usize) {
    let gpu = &node.world.gpus[index];
    let address = gpu.pci.to_string();
    fs::remove_file(node.sysfs_root.join("bus/pci/drivers/nvidia").join(address))
        .expect("the fake node can be changed");
    fs::remove_file(node.driver_root.join(format!("dev/nvidia{}", gpu.minor)))
        .expect("the fake node can be changed");
}

/// A node with eight GPUs, all plugged, each with its device node.
fn node_with_device_nodes() -> Node {
    let node = Node::new(shipped::DGX_1V);
    let nodes = node.driver_root.join("dev");
    fs::create_dir_all(&nodes).expect("the fake node can be changed");
    fs::write(nodes.join("nvidiactl"), "").expect("the fake node can be changed");
    for gpu in &node.world.gpus {
        fs::write(nodes.join(format!("nvidia{}", gpu.minor)), "")
            .expect("the fake node can be changed");
    }
    node
}

#[test]
fn gpu_that_is_added_later_is_found_without_a_restart() {
    let node = node_with_device_nodes();
    unplug(&node, 7);
    let library = node.library();
    assert!(!library.is_outdated(), "nothing is loaded");
    let before = library.inventory().unwrap();
    assert_eq!((before.gpus.len(), library.is_outdated()), (7, false));
    let uuids: Vec<_> = before.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let watch = library.watch(&uuids).unwrap();
    plug(&node, 7);
    assert!(library.is_outdated());
    let held = library.inventory().unwrap();
    assert_eq!((held.gpus.len(), library.is_outdated()), (7, true), "the watch holds NVML");
    drop(watch);
    let after = library.inventory().unwrap();
    assert_eq!((after.gpus.len(), library.is_outdated()), (8, false));
    assert!(after.gpus.iter().any(|gpu| gpu.uuid == node.uuid(7)));
}

#[test]
fn gpu_that_is_removed_is_listed_as_lost() {
    let node = node_with_device_nodes();
    let library = node.library();
    assert_eq!(library.inventory().unwrap().gpus.len(), 8);
    unplug(&node, 3);
    assert!(library.is_outdated());
    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.gpus.len(), 7);
    let gone: Vec<_> = inventory.unpublished.iter().map(|gpu| (&gpu.uuid, &gpu.reason)).collect();
    assert_eq!(gone, [(&Some(node.uuid(3)), &UnpublishedReason::Lost)]);
}

#[test]
fn node_without_the_driver_in_sysfs_is_never_outdated() {
    let node = node_with_device_nodes();
    fs::remove_dir_all(node.sysfs_root.join("bus/pci/drivers")).unwrap();
    let library = node.library();
    assert_eq!(library.inventory().unwrap().gpus.len(), 8);
    assert!(!library.is_outdated());
}
