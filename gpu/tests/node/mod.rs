//! A fake node, seen by the real NVML code.

use std::collections::BTreeSet;
use std::ops::Deref;

use tempfile::TempDir;
use tessera_api::names::GpuUuid;
use tessera_fake_world::tree::Libraries;
use tessera_fake_world::{FakeNode, artifact};
use tessera_gpu::{NvmlLibrary, NvmlOptions};

/// The node; its files go away with it.
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
            FakeNode::lay_out(world, &libraries, directory.path()).expect("the node is laid out");
        Self { node, _directory: directory }
    }

    /// What the driver would be started with on this node.
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
        GpuUuid::new(&self.world.gpus[index].uuid).expect("the world's UUIDs are well formed")
    }

    pub(crate) fn uuids(&self) -> Vec<GpuUuid> {
        (0..self.world.gpus.len()).map(|index| self.uuid(index)).collect()
    }

    /// Makes a GPU fall off the bus.
    pub(crate) fn lose(&self, index: usize) {
        let uuid = self.world.gpus[index].uuid.clone();
        self.control
            .update(|control| control.gpu_mut(&uuid).lost = true)
            .expect("the control file is written");
    }

    /// Brings it back.
    pub(crate) fn heal(&self, index: usize) {
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
