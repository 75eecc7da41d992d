//! Where the world of this process is.

use std::env;
use std::path::{Path, PathBuf};

/// Names the world file; wins over [`DEFAULT_WORLD`].
pub const WORLD_VARIABLE: &str = "TESSERA_FAKE_WORLD";
/// Names the directory of the shared state; wins over `state` beside the world file.
pub const STATE_VARIABLE: &str = "TESSERA_FAKE_STATE";
/// Where the world file is when nothing else is said: a place that comes into containers with the driver's own files.
pub const DEFAULT_WORLD: &str = "/usr/share/nvidia/tessera-fake/world.yaml";

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
}

/// Where usage is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatePlace {
    /// In this directory, together with every process that can see it.
    Shared(PathBuf),
    /// In this process only.
    Process,
}

impl Location {
    /// The world of this process, by environment and default.
    ///
    /// # Errors
    /// There is no such file.
    pub fn of_this_process() -> Result<Self, LocateError> {
        let world = env::var_os(WORLD_VARIABLE).map_or_else(|| PathBuf::from(DEFAULT_WORLD), PathBuf::from);
        Self::of_world(&world, env::var_os(STATE_VARIABLE).map(PathBuf::from))
    }

    /// The files that belong to a world file. A state directory that is named is made; the one beside the world is used if it
    /// exists or can be made, and is writable.
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
                let directory = world.with_file_name("state");
                if crate::usage::can_share(&directory) {
                    StatePlace::Shared(directory)
                } else {
                    StatePlace::Process
                }
            }
        };
        Ok(Self { world: world.to_owned(), control: world.with_file_name("control.yaml"), state })
    }
}
