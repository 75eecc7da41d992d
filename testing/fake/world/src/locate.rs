//! Where the world of this process is.
//!
//! In this order: the environment says; the library that this code is linked into lies in a driver
//! root that has a world; the default place, which is that of the driver root `/` and so of every
//! container that the driver's files are mounted into.

use std::env;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Names the world file; wins over every other place.
pub const WORLD_VARIABLE: &str = "TESSERA_FAKE_WORLD";
/// Names the directory of the shared state; wins over `state` beside the world file.
pub const STATE_VARIABLE: &str = "TESSERA_FAKE_STATE";
/// Where the world file is in a driver root: a place that comes into containers with the driver's
/// own files.
pub const WORLD_IN_DRIVER_ROOT: &str = "usr/share/nvidia/tessera-fake/world.yaml";

/// Why no world was found.
#[derive(Debug, thiserror::Error)]
#[error("no world at `{path}`: set {WORLD_VARIABLE} to a world file")]
pub struct LocateError {
    /// Where it was looked for.
    pub path: PathBuf,
}

/// Where the files of a world are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// `world.yaml`.
    pub world: PathBuf,
    /// `control.yaml` beside it.
    pub control: PathBuf,
    /// Where usage is kept.
    pub state: StatePlace,
    /// Where the device nodes of the GPUs are: `dev` of the driver root that the world is in.
    pub device_nodes: Option<PathBuf>,
}

/// Where usage is kept. Wherever it is, the fake NVML and the fake CUDA of one process agree about
/// it, unless it is [`StatePlace::Process`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatePlace {
    /// In this directory, together with every process that can see it.
    Shared(PathBuf),
    /// In this process only.
    Process,
}

impl Location {
    /// The world of this process.
    ///
    /// # Errors
    /// There is no such file.
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

    /// The files that belong to a world file. A state directory that is named is made. Else it is
    /// the first of these that exists or can be made, and is writable: `state` beside the
    /// world; one in `/dev/shm`, for containers, whose driver files are read-only (what they
    /// hold is then seen in the same pod only); the process's own memory.
    ///
    /// # Errors
    /// The world file does not exist.
    pub fn of_world(world: &Path, state: Option<PathBuf>) -> Result<Self, LocateError> {
        if !world.is_file() {
            return Err(LocateError { path: world.to_owned() });
        }
        let state = match state {
            Some(directory) => StatePlace::Shared(directory),
            None => {
                let places = [Some(world.with_file_name("state")), in_shared_memory(world)];
                let writable = places
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

/// `dev` of the driver root whose world file that is.
fn device_nodes_of(world: &Path) -> Option<PathBuf> {
    let depth = Path::new(WORLD_IN_DRIVER_ROOT).components().count();
    let root = world.ancestors().nth(depth)?;
    world.ends_with(WORLD_IN_DRIVER_ROOT).then(|| root.join("dev"))
}

/// A directory in `/dev/shm` that belongs to that world file.
fn in_shared_memory(world: &Path) -> Option<PathBuf> {
    let file = world.metadata().ok()?;
    Some(PathBuf::from(format!("/dev/shm/tessera-fake-{:x}-{:x}", file.dev(), file.ino())))
}

/// The world of the driver root that a file is in.
fn world_above(file: &Path) -> Option<PathBuf> {
    file.ancestors()
        .skip(1)
        .map(|root| root.join(WORLD_IN_DRIVER_ROOT))
        .find(|world| world.is_file())
}

/// The file that this code was loaded from: the fake library, where it is linked into one.
fn this_library() -> Option<PathBuf> {
    // SAFETY: `Dl_info` is plain data, for which zeroes are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here: fn() -> Option<PathBuf> = this_library;
    // SAFETY: any address may be asked about; the result is written into `info`.
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
