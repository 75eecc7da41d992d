//! A fake node for tests of the NVML code.

use std::collections::BTreeSet;
use std::ops::Deref;

use tempfile::TempDir;
use tessera_api::names::GpuUuid;
use tessera_fake_world::tree::Libraries;
use tessera_fake_world::{FakeNode, artifact};
use tessera_gpu::{NvmlLibrary, NvmlOptions};

/// A fake node whose files are removed on drop.
pub(crate) struct Node {
    node: FakeNode,
    _directory: TempDir,
}

#[allow(dead_code, reason = "each test file uses its part")]
impl Node {
    pub(crate) fn new(world: &str) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let libraries =
            Libraries { nvml: artifact::nvml().expect("the fake NVML is built"), cuda: None };
        let node =
            FakeNode::create(world, &libraries, directory.path()).expect("the node is created");
        Self { node, _directory: directory }
    }

    /// Returns the options of the driver on this node.
    pub(crate) fn options(&self) -> NvmlOptions {
        NvmlOptions {
            driver_root: self.driver_root.clone(),
            sysfs_root: self.sysfs_root.clone(),
            ..NvmlOptions::default()
        }
    }

    pub(crate) fn library(&self) -> NvmlLibrary {
        NvmlLibrary::new(self.options())
    }

    pub(crate) fn library_excluding(&self, index: usize) -> NvmlLibrary {
        NvmlLibrary::new(NvmlOptions {
            exclude: BTreeSet::from([self.uuid(index)]),
            ..self.options()
        })
    }

    pub(crate) fn uuid(&self, index: usize) -> GpuUuid {
        GpuUuid::new(&self.world.gpus[index].uuid).expect("the world's UUIDs are valid")
    }

    pub(crate) fn uuids(&self) -> Vec<GpuUuid> {
        (0..self.world.gpus.len()).map(|index| self.uuid(index)).collect()
    }

    /// Simulates a GPU that falls off the bus.
    pub(crate) fn lose(&self, index: usize) {
        let uuid = self.world.gpus[index].uuid.clone();
        self.control
            .update(|control| control.gpu_mut(&uuid).lost = true)
            .expect("the control file is written");
    }

    /// Restores a lost GPU.
    pub(crate) fn restore(&self, index: usize) {
        let uuid = self.world.gpus[index].uuid.clone();
        self.control
            .update(|control| control.gpu_mut(&uuid).lost = false)
            .expect("the control file is written");
    }
}

impl Deref for Node {
    type Target = FakeNode;

    fn deref(&self) -> &FakeNode {
        &self.node
    }
}
