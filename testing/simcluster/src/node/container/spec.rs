//! What the runtime hands to `container-init`: everything about one container, resolved.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::image::ImageFile;

/// One container, ready to be set up. Paths named `source` are of this machine, `target` of the
/// container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InitSpec {
    /// Where the root file system is put together (an empty directory of this machine).
    pub(crate) root: PathBuf,
    /// Host name inside.
    pub(crate) hostname: String,
    /// The image's files.
    pub(crate) files: Vec<ImageFile>,
    /// Bind mounts, in the order in which they are made.
    pub(crate) mounts: Vec<BindMount>,
    /// Device nodes besides the usual ones.
    pub(crate) devices: Vec<DeviceNode>,
    /// Program and arguments; a name without `/` is looked up in `PATH`.
    pub(crate) command: Vec<String>,
    /// Environment, complete.
    pub(crate) env: BTreeMap<String, String>,
    /// Working directory.
    pub(crate) working_dir: PathBuf,
    /// Whether `/` is read-only.
    pub(crate) read_only_root: bool,
    /// Who runs it.
    pub(crate) user: RunAs,
    /// `no_new_privs`.
    pub(crate) no_new_privileges: bool,
    /// A user namespace of its own (`hostUsers: false`).
    pub(crate) user_namespace: bool,
}

/// User and group of the first process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// Numeric user id.
    pub uid: u32,
    /// Numeric group id.
    pub gid: u32,
    /// Supplementary groups. Left out where a user namespace without root maps a single group.
    pub groups: Vec<u32>,
}

/// A file or directory that appears inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindMount {
    /// Path on this machine.
    pub source: PathBuf,
    /// Absolute path in the container.
    pub target: PathBuf,
    /// Mounted read-only.
    pub read_only: bool,
}

/// A device node that appears inside, as a bind mount of the machine's own.
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
pub(crate) enum Report {
    /// The program runs.
    Started {
        /// Its process id, as the runtime sees it.
        pid: i32,
    },
    /// Setting up failed and nothing runs.
    Failed {
        /// What went wrong, for a user.
        message: String,
    },
    /// The program ended.
    Exited {
        /// Exit code; 128 plus the signal's number where a signal ended it, as container runtimes
        /// count.
        code: i32,
        /// The signal that ended it.
        signal: Option<i32>,
    },
}

/// One line from the runtime to the supervisor. End of file means: kill it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "order")]
pub(crate) enum Order {
    /// Ask the program to end.
    Terminate,
    /// End it.
    Kill,
}
