//! MIG devices through NVML, on the fake library.

mod node;

use tessera_api::gpu::MigInstance;
use tessera_api::names::GpuUuid;
use tessera_fake_world::mig::{MigTable, NodeMig};
use tessera_fake_world::shipped;
use tessera_gpu::{GpuLibrary, MigLibrary, MigLibraryError, NvmlLibrary, NvmlOptions};

use node::Node;

/// Index of the GPU in MIG mode in the world `mixed`.
const IN_MIG_MODE: usize = 3;

struct MigNode {
    node: Node,
    library: NvmlLibrary,
    gpu: GpuUuid,
}

impl MigNode {
    fn new() -> Self {
        Self::of_model("a100-80gb")
    }

    /// Returns a node whose GPU in MIG mode has the profiles of this model.
    fn of_model(table: &str) -> Self {
        let world = shipped::MIXED.replace("migTable: a100-80gb", &format!("migTable: {table}"));
        let node = Node::new(&world);
        let proc_root = NodeMig::new(&node.control).proc_root();
        let library = NvmlLibrary::new(NvmlOptions { mig: true, proc_root, ..node.options() });
        let gpu = node.uuid(IN_MIG_MODE);
        Self { node, library, gpu }
    }

    /// Creates an instance as another program would, with a compute instance if it has slices.
    fn create_foreign(&self, profile: u32, start: u32, slices: u32) {
        let gpu = &self.node.world.gpus[IN_MIG_MODE];
        let created = NodeMig::new(&self.node.control).create(gpu, profile, start, slices);
        created.expect("it fits");
    }

    fn existing(&self) -> Vec<MigInstance> {
        let inventory = self.library.inventory().expect("an inventory");
        let gpu = inventory.gpu(&self.gpu).expect("it is published");
        gpu.mig.clone().expect("it is in MIG mode").instances
    }
}

#[test]
fn profiles_are_those_of_nvml_for_every_model() {
    for model in MigTable::models() {
        let node = MigNode::of_model(model);
        let inventory = node.library.inventory().expect("an inventory");
        let mig = inventory.gpu(&node.gpu).and_then(|gpu| gpu.mig.clone()).expect("MIG mode");
        let table = MigTable::of_model(model).expect("a table");
        assert_eq!(mig.profiles.len(), table.profiles.len(), "{model}");
        assert_eq!(mig.memory_slices(), table.memory_slices(), "{model}");
        for profile in &mig.profiles {
            let row = table.profile(profile.id).expect("a row");
            assert_eq!(profile.name, row.name, "{model}");
            assert_eq!(profile.memory_mib, row.memory_mib, "{model} {}", row.name);
            assert_eq!(profile.engines.multiprocessors, row.multiprocessors);
            assert_eq!(profile.engines.ofa_engines, row.ofa_engines);
            let placements: Vec<_> = profile.placements.iter().map(|p| (p.start, p.size)).collect();
            let expected: Vec<_> = row.placements.iter().map(|p| (p.start, p.size)).collect();
            assert_eq!(placements, expected, "{model} {}", row.name);
        }
    }
}

#[test]
fn device_is_created_used_and_destroyed_on_every_model() {
    for model in MigTable::models() {
        let node = MigNode::of_model(model);
        let (mig, gpu) = (&node.library, &node.gpu);
        for profile in &MigTable::of_model(model).expect("a table").profiles {
            let start = profile.placements.last().expect("a placement").start;
            let id = mig.create_gpu_instance(gpu, profile.id, start).expect("it is free");
            let compute = mig.create_compute_instance(gpu, id).expect("it is free");
            let nodes = mig.capability_nodes(gpu, id, compute.id).expect("files of the kernel");
            assert_eq!(nodes[1].minor, nodes[0].minor + 1);
            let found = mig.gpu_instances(gpu, profile.id).expect("instances");
            assert_eq!(found.len(), 1, "{model} {}", profile.name);
            assert_eq!((found[0].id, found[0].instance.profile), (id, profile.id));
            assert_eq!(found[0].compute, [compute], "{model} {}", profile.name);
            mig.destroy_gpu_instance(gpu, id).expect("it is idle");
            mig.destroy_gpu_instance(gpu, id).expect("it is gone already");
            assert!(mig.gpu_instances(gpu, profile.id).expect("instances").is_empty());
        }
    }
}

#[test]
fn placement_in_use_is_refused_by_name() {
    let node = MigNode::new();
    node.create_foreign(9, 4, 3);
    assert_eq!(node.existing().len(), 1);
    let refused = node.library.create_gpu_instance(&node.gpu, 19, 5).expect_err("it is taken");
    assert!(matches!(refused, MigLibraryError::Taken { profile: 19, start: 5, .. }), "{refused}");
    node.library.create_gpu_instance(&node.gpu, 19, 3).expect("it is free");
}

#[test]
fn instance_with_a_process_is_not_destroyed() {
    let node = MigNode::new();
    let id = node.library.create_gpu_instance(&node.gpu, 14, 2).expect("it is free");
    node.library.create_compute_instance(&node.gpu, id).expect("it is free");
    let set_busy = |busy| {
        let gpu = &node.node.world.gpus[IN_MIG_MODE];
        NodeMig::new(&node.node.control).set_busy(gpu, busy).expect("written");
    };
    set_busy(true);
    let refused = node.library.destroy_gpu_instance(&node.gpu, id).expect_err("in use");
    assert!(matches!(refused, MigLibraryError::InUse { .. }), "{refused}");
    assert_eq!(node.library.gpu_instances(&node.gpu, 14).expect("instances")[0].compute.len(), 1);
    set_busy(false);
    node.library.destroy_gpu_instance(&node.gpu, id).expect("it is idle");
}

#[test]
fn uuid_is_new_after_each_creation_and_ids_are_not() {
    let node = MigNode::new();
    let create = || {
        let id = node.library.create_gpu_instance(&node.gpu, 14, 0).expect("it is free");
        let compute = node.library.create_compute_instance(&node.gpu, id).expect("it is free");
        node.library.destroy_gpu_instance(&node.gpu, id).expect("it is idle");
        (id, compute)
    };
    let (first, second) = (create(), create());
    assert_eq!((first.0, first.1.id), (second.0, second.1.id));
    assert_ne!(first.1.uuid, second.1.uuid);
}

#[test]
fn reboot_loses_instances() {
    let node = MigNode::new();
    node.create_foreign(0, 0, 7);
    NodeMig::new(&node.node.control).reboot().expect("removed");
    assert!(node.existing().is_empty());
}

#[test]
fn gpu_without_mig_mode_has_no_instances() {
    let node = MigNode::new();
    let whole = node.node.uuid(0);
    assert!(node.library.gpu_instances(&whole, 19).expect("no error").is_empty());
    let refused = node.library.create_gpu_instance(&whole, 19, 0).expect_err("MIG mode is off");
    assert!(matches!(refused, MigLibraryError::ModeOff { .. }), "{refused}");
    node.library.destroy_gpu_instance(&whole, 1).expect("there is none");
}

#[test]
fn driver_without_mig_leaves_the_gpu_unpublished() {
    let node = MigNode::new();
    let inventory = node.node.library().inventory().expect("an inventory");
    assert!(inventory.gpu(&node.gpu).is_none());
    assert_eq!(inventory.unpublished_by_reason()["MigEnabled"], 1);
}
