//! A fake node whose NVML is loaded by the real wrapper.

use std::ops::Deref;
use std::path::PathBuf;

use nvml_wrapper::Nvml;
use tempfile::TempDir;
use tessera_fake_world::tree::Libraries;
use tessera_fake_world::{FakeNode, artifact};

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
            Libraries { nvml: artifact::nvml().expect("the library is built"), cuda: None };
        let node =
            FakeNode::lay_out(world, &libraries, directory.path()).expect("the node is laid out");
        Self { node, _directory: directory }
    }

    /// NVML, initialised.
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
