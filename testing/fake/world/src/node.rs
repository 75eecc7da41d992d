//! A complete fake node on disk for tests: driver root, sysfs and control file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::control::ControlFile;
use crate::locate::WORLD_IN_DRIVER_ROOT;
use crate::tree::{self, Libraries, TreeError};
use crate::world::{World, WorldError};

/// Error of creating a node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The world is invalid.
    #[error("cannot load the node's world")]
    World(#[from] WorldError),
    /// The world file cannot be written.
    #[error("cannot write `{path}`")]
    WorldFile {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The node's files cannot be written.
    #[error("cannot create the node's files")]
    Tree(#[from] TreeError),
}

/// A fake node.
///
/// Each has its own copy of the libraries, so that several nodes can be used in one process: the
/// loader distinguishes libraries by inode.
#[derive(Debug)]
pub struct FakeNode {
    /// World of the node.
    pub world: World,
    /// Directory in place of `/`: the driver's files and the world.
    pub driver_root: PathBuf,
    /// Directory in place of `/sys`.
    pub sysfs_root: PathBuf,
    /// Control file of the node.
    pub control: ControlFile,
}

impl FakeNode {
    /// Creates the files of a node in a directory.
    ///
    /// # Errors
    /// Returns an error if the world is invalid or a file cannot be written.
    pub fn create(world: &str, libraries: &Libraries, directory: &Path) -> Result<Self, NodeError> {
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

    /// Returns the path of the NVML library.
    pub fn nvml(&self) -> PathBuf {
        self.driver_root.join(tree::LIBRARY_DIRECTORY).join("libnvidia-ml.so.1")
    }

    /// Returns the path of the CUDA library.
    pub fn cuda(&self) -> PathBuf {
        self.driver_root.join(tree::LIBRARY_DIRECTORY).join("libcuda.so.1")
    }
}
