//! A fake node whose NVML is loaded by the real wrapper.

use std::ops::Deref;
use std::path::PathBuf;

use nvml_wrapper::Nvml;
use tempfile::TempDir;
use tessera_fake_world::tree::Libraries;
use tessera_fake_world::{FakeNode, artifact};

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
            Libraries { nvml: artifact::nvml().expect("the library is built"), cuda: None };
        let node =
            FakeNode::create(world, &libraries, directory.path()).expect("the node is created");
        Self { node, _directory: directory }
    }

    /// Returns the initialised NVML.
    pub(crate) fn nvml(&self) -> Nvml {
        self.try_nvml().expect("NVML initialises")
    }

    pub(crate) fn nvml_path(&self) -> PathBuf {
        self.node.nvml()
    }

    pub(crate) fn try_nvml(&self) -> Result<Nvml, nvml_wrapper::error::NvmlError> {
        Nvml::builder().lib_path(self.node.nvml().as_os_str()).init()
    }
}

impl Deref for Node {
    type Target = FakeNode;

    fn deref(&self) -> &FakeNode {
        &self.node
    }
}
