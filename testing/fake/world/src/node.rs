//! A whole fake node on disk, for tests: driver root, sysfs, and the control file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::control::ControlFile;
use crate::locate::WORLD_IN_DRIVER_ROOT;
use crate::tree::{self, Libraries, TreeError};
use crate::world::{World, WorldError};

/// Why a node could not be laid out.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The world is no good.
    #[error("the node's world cannot be used")]
    World(#[from] WorldError),
    /// The world file could not be written.
    #[error("cannot write `{path}`")]
    WorldFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The files could not be written.
    #[error("cannot lay out the node")]
    Tree(#[from] TreeError),
}

/// A fake node.
///
/// Each has its own copy of the libraries, so several can be loaded into one process without
/// sharing anything: the loader tells libraries apart by inode.
#[derive(Debug)]
pub struct FakeNode {
    /// What the node has.
    pub world: World,
    /// Stands for `/`: the driver's files, and the world.
    pub driver_root: PathBuf,
    /// Stands for `/sys`.
    pub sysfs_root: PathBuf,
    /// Makes things happen to it.
    pub control: ControlFile,
}

impl FakeNode {
    /// Lays a node out in a directory.
    ///
    /// # Errors
    /// The world is not possible, or a file cannot be written.
    pub fn lay_out(
        world: &str,
        libraries: &Libraries,
        directory: &Path,
    ) -> Result<Self, NodeError> {
        let file = directory.join("world.yaml");
        fs::write(&file, world)
            .map_err(|source| NodeError::WorldFile { path: file.clone(), source })?;
        let world = World::load(&file)?;
        let driver_root = directory.join("root");
        let sysfs_root = directory.join("sys");
        tree::write_driver_root(&file, &world, libraries, &driver_root)?;
        tree::write_sysfs(&world, &sysfs_root)?;
        let control =
            ControlFile::new(driver_root.join(WORLD_IN_DRIVER_ROOT).with_file_name("control.yaml"));
        Ok(Self { world, driver_root, sysfs_root, control })
    }

    /// The NVML library's path.
    pub fn nvml(&self) -> PathBuf {
        self.driver_root.join(tree::LIBRARY_DIRECTORY).join("libnvidia-ml.so.1")
    }

    /// The CUDA library's path.
    pub fn cuda(&self) -> PathBuf {
        self.driver_root.join(tree::LIBRARY_DIRECTORY).join("libcuda.so.1")
    }
}
