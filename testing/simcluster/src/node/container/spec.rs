//! Complete description of one container, passed from the runtime to `container-init`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::image::ImageFile;

/// One container, ready to be set up. `source` paths are on this machine, `target` paths in the
/// container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InitSpec {
    /// Empty directory of this machine for the root file system.
    pub(crate) root: PathBuf,
    /// Host name inside.
    pub(crate) hostname: String,
    /// Files of the image.
    pub(crate) files: Vec<ImageFile>,
    /// Bind mounts, in mount order.
    pub(crate) mounts: Vec<BindMount>,
    /// Device nodes besides the default ones.
    pub(crate) devices: Vec<DeviceNode>,
    /// Program and arguments. A name without `/` is searched in `PATH`.
    pub(crate) command: Vec<String>,
    /// Complete environment.
    pub(crate) env: BTreeMap<String, String>,
    /// Working directory.
    pub(crate) working_dir: PathBuf,
    /// True if `/` is read-only.
    pub(crate) read_only_root: bool,
    /// User and groups.
    pub(crate) user: RunAs,
    /// Sets `no_new_privs`.
    pub(crate) no_new_privileges: bool,
    /// Creates a user namespace for the container (`hostUsers: false`).
    pub(crate) user_namespace: bool,
}

/// User and groups of the first process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// Numeric user id.
    pub uid: u32,
    /// Numeric group id.
    pub gid: u32,
    /// Supplementary groups. Ignored if a user namespace without root maps a single group.
    pub groups: Vec<u32>,
}

/// A file or directory that is mounted into the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindMount {
    /// Path on this machine.
    pub source: PathBuf,
    /// Absolute path in the container.
    pub target: PathBuf,
    /// True if it is mounted read-only.
    pub read_only: bool,
}

/// A device node in the container: a bind mount of the machine's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Path on this machine.
    pub source: PathBuf,
    /// Absolute path in the container.
    pub target: PathBuf,
}

/// One line from the supervisor to the runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub(crate) enum SupervisorReport {
    /// The program runs.
    Started {
        /// Process id in the runtime's pid namespace.
        pid: i32,
    },
    /// The setup failed and nothing runs.
    Failed {
        /// Error message for a user.
        message: String,
    },
    /// The program ended.
    Exited {
        /// Exit code; 128 plus the signal's number if a signal ended it, as in container runtimes.
        code: i32,
        /// Signal that ended it.
        signal: Option<i32>,
    },
}

/// One line from the runtime to the supervisor. End of file means: kill the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "order")]
pub(crate) enum SupervisorOrder {
    /// Send SIGTERM to the program.
    Terminate,
    /// Send SIGKILL to the program.
    Kill,
}
