//! The content of a CDI spec file.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    name::{DeviceName, Kind},
    version::Version,
};

/// One CDI spec file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// The declared version; [`Spec::new`] sets the lowest that the content needs.
    pub cdi_version: Version,
    /// What the devices are.
    pub kind: Kind,
    /// Free-form remarks; need 0.6.0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices.
    pub devices: Vec<Device>,
    /// Edits for a container that gets any of the devices, applied before the devices' own.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device that a container can be given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Its name within the kind.
    pub name: DeviceName,
    /// Free-form remarks; need 0.6.0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What giving it to a container changes there.
    pub container_edits: ContainerEdits,
}

/// Changes to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Programs that the runtime runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts. A later one at the same container path replaces an earlier one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Supplementary groups of the container's first process; need 0.7.0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

/// A device node in the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Where it is in the container.
    pub path: PathBuf,
    /// Where it is on the host, if elsewhere; needs 0.5.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<PathBuf>,
    /// `b`, `c`, `u` or `p`; the runtime looks at the host's node when it is not said.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Major number, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Mode bits, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// A subset of `rwm` for the devices cgroup; all of it when it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner; the container's user when it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount into the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// What is mounted.
    pub host_path: PathBuf,
    /// Where.
    pub container_path: PathBuf,
    /// File system type; needs 0.4.0. Not used for bind mounts.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// A program that the runtime runs at a point of the container's life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// Which point.
    pub hook_name: String,
    /// The program, on the host.
    pub path: PathBuf,
    /// Its arguments, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds until it is killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

impl Spec {
    /// A spec of these devices, declaring the lowest version that they need.
    #[must_use]
    pub fn new(kind: Kind, devices: Vec<Device>, container_edits: ContainerEdits) -> Self {
        let mut spec = Self {
            cdi_version: Version::V0_5,
            kind,
            annotations: BTreeMap::new(),
            devices,
            container_edits,
        };
        spec.cdi_version = spec.minimum_version();
        spec
    }

    /// The spec's own edits and those of each device.
    pub(crate) fn all_edits(&self) -> impl Iterator<Item = &ContainerEdits> {
        std::iter::once(&self.container_edits)
            .chain(self.devices.iter().map(|device| &device.container_edits))
    }
}

impl ContainerEdits {
    /// Whether this changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl DeviceNode {
    /// The host's node at `host_path`, at `path` in the container. Numbers and type are the
    /// runtime's to look up.
    #[must_use]
    pub fn of_host(path: &Path, host_path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            host_path: (path != host_path).then(|| host_path.to_owned()),
            kind: None,
            major: None,
            minor: None,
            file_mode: None,
            permissions: None,
            uid: None,
            gid: None,
        }
    }
}

impl Mount {
    /// A bind mount that the container can write to, if the file's mode lets it.
    ///
    /// The option `bind` is said because a runtime may not add it itself, and without it a
    /// container in a user namespace of its own fails. The mount is private to the container,
    /// and nothing on it runs with raised privileges.
    #[must_use]
    pub fn bind(host_path: &Path, container_path: &Path) -> Self {
        let options = ["bind", "rprivate", "nosuid", "nodev"].map(str::to_owned).to_vec();
        Self {
            host_path: host_path.to_owned(),
            container_path: container_path.to_owned(),
            kind: None,
            options,
        }
    }

    /// The same, read-only.
    #[must_use]
    pub fn bind_read_only(host_path: &Path, container_path: &Path) -> Self {
        let mut mount = Self::bind(host_path, container_path);
        mount.options.insert(0, "ro".to_owned());
        mount
    }
}
