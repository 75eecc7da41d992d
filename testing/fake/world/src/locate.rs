//! Location of this process's world.
//!
//! The location is, in this order: the environment variable; the driver root of the library that
//! this code is linked into, if it has a world; the default, which is the driver root `/` and thus
//! that of every container with the driver's files.

use std::env;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Environment variable with the world file; overrides all other locations.
pub const WORLD_VARIABLE: &str = "TESSERA_FAKE_WORLD";
/// Environment variable with the directory of the shared state; overrides `state` beside the world
/// file.
pub const STATE_VARIABLE: &str = "TESSERA_FAKE_STATE";
/// World file in a driver root: a path that is mounted into containers with the driver's own files.
pub const WORLD_IN_DRIVER_ROOT: &str = "usr/share/nvidia/tessera-fake/world.yaml";

/// Error of a missing world.
#[derive(Debug, thiserror::Error)]
#[error("no world file at `{path}`: set {WORLD_VARIABLE}")]
pub struct LocateError {
    /// Searched path.
    pub path: PathBuf,
}

/// Files of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Path of `world.yaml`.
    pub world: PathBuf,
    /// Path of `control.yaml`, beside the world.
    pub control: PathBuf,
    /// Location of the usage.
    pub state: StatePlace,
    /// Directory of the GPUs' device nodes: `dev` of the world's driver root.
    pub device_nodes: Option<PathBuf>,
}

/// Location of the usage. The fake NVML and the fake CUDA of one process share it, unless it is
/// [`StatePlace::Process`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatePlace {
    /// A directory, shared with every process that can see it.
    Shared(PathBuf),
    /// Memory of this process.
    Process,
}

impl Location {
    /// Returns the location of this process's world.
    ///
    /// # Errors
    /// Returns an error if the world file does not exist.
    pub fn of_this_process() -> Result<Self, LocateError> {
        let named =
            env::var_os(WORLD_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
        let found = || this_library().and_then(|library| world_above(&library));
        let world =
            named.or_else(found).unwrap_or_else(|| Path::new("/").join(WORLD_IN_DRIVER_ROOT));
        Self::of_world(
            &world,
            env::var_os(STATE_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from),
        )
    }

    /// Returns the files of a world file.
    ///
    /// A given state directory is created. Otherwise the state is in the first of these that exists
    /// or can be created, and is writable: `state` beside the world; a directory in `/dev/shm`,
    /// for containers, whose driver files are read-only (the state is then shared only within
    /// the pod); the process's own memory.
    ///
    /// # Errors
    /// Returns an error if the world file does not exist.
    pub fn of_world(world: &Path, state: Option<PathBuf>) -> Result<Self, LocateError> {
        if !world.is_file() {
            return Err(LocateError { path: world.to_owned() });
        }
        let state = match state {
            Some(directory) => StatePlace::Shared(directory),
            None => {
                let candidates = [Some(world.with_file_name("state")), in_shared_memory(world)];
                let writable = candidates
                    .into_iter()
                    .flatten()
                    .find(|directory| crate::usage::can_share(directory));
                writable.map_or(StatePlace::Process, StatePlace::Shared)
            }
        };
        let control = world.with_file_name("control.yaml");
        Ok(Self { world: world.to_owned(), control, state, device_nodes: device_nodes_of(world) })
    }
}

/// Returns `dev` of the driver root that has this world file.
fn device_nodes_of(world: &Path) -> Option<PathBuf> {
    let depth = Path::new(WORLD_IN_DRIVER_ROOT).components().count();
    let root = world.ancestors().nth(depth)?;
    world.ends_with(WORLD_IN_DRIVER_ROOT).then(|| root.join("dev"))
}

/// Returns the directory in `/dev/shm` for a world file.
fn in_shared_memory(world: &Path) -> Option<PathBuf> {
    let file = world.metadata().ok()?;
    Some(PathBuf::from(format!("/dev/shm/tessera-fake-{:x}-{:x}", file.dev(), file.ino())))
}

/// Returns the world of the driver root that has this file.
fn world_above(file: &Path) -> Option<PathBuf> {
    file.ancestors()
        .skip(1)
        .map(|root| root.join(WORLD_IN_DRIVER_ROOT))
        .find(|world| world.is_file())
}

/// Returns the file that this code was loaded from: the fake library, if it is linked into one.
fn this_library() -> Option<PathBuf> {
    // SAFETY: `Dl_info` is plain data, for which zeroes are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here: fn() -> Option<PathBuf> = this_library;
    // SAFETY: any address is a valid argument; the result is written into `info`.
    if unsafe { libc::dladdr(here as *const libc::c_void, &mut info) } == 0
        || info.dli_fname.is_null()
    {
        return None;
    }
    // SAFETY: on success the name is a terminated string that lives as long as the library is
    // loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

#[cfg(test)]
mod tests;
