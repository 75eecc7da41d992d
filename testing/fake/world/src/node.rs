//! A complete fake node on disk for tests: driver root, sysfs and control file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::control::ControlFile;
use crate::locate::WORLD_IN_DRIVER_ROOT;
use crate::tree::{self, Libraries};
use crate::world::World;

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
    pub fn create(world: &str, libraries: &Libraries, directory: &Path) -> anyhow::Result<Self> {
        let file = directory.join("world.yaml");
        fs::write(&file, world).with_context(|| format!("cannot write `{}`", file.display()))?;
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
