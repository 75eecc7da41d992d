//! Model of a CDI spec file.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    name::{CdiKind, DeviceName},
    version::Version,
};

/// A CDI spec file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// Declared version; [`Spec::new`] sets the lowest that the content needs.
    pub cdi_version: Version,
    /// Kind of the devices.
    pub kind: CdiKind,
    /// Free-form annotations; need 0.6.0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Devices of the spec.
    pub devices: Vec<CdiDevice>,
    /// Edits of each container that gets any of the devices, applied before the devices' own
    /// edits.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device that can be added to a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CdiDevice {
    /// Name within the kind.
    pub name: DeviceName,
    /// Free-form annotations; need 0.6.0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Edits of a container that gets the device.
    pub container_edits: ContainerEdits,
}

/// Changes to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment variables as `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// OCI hooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts. A later mount at the same container path replaces an earlier one.
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
    /// Path in the container.
    pub path: PathBuf,
    /// Path on the host, if different; needs 0.5.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<PathBuf>,
    /// Type: `b`, `c`, `u` or `p`. If absent, the runtime reads it from the host's node.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Major number. If absent, the runtime reads it from the host's node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number. If absent, the runtime reads it from the host's node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Mode bits. If absent, the runtime reads them from the host's node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Permissions of the devices cgroup, a subset of `rwm`. If absent, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// User ID of the owner. If absent, the container's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group ID of the owner. If absent, the container's group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount into the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Path on the host.
    pub host_path: PathBuf,
    /// Path in the container.
    pub container_path: PathBuf,
    /// File system type; needs 0.4.0. Not used for bind mounts.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// A program that the runtime runs at a point of the container's lifecycle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// Name of the OCI hook.
    pub hook_name: String,
    /// Path of the program on the host.
    pub path: PathBuf,
    /// Arguments, starting with the program's name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment variables as `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Timeout in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

impl Spec {
    /// Returns a spec of these devices that declares the lowest version that they need.
    #[must_use]
    pub fn new(kind: CdiKind, devices: Vec<CdiDevice>, container_edits: ContainerEdits) -> Self {
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

    /// Returns the spec's own edits and those of each device.
    pub(crate) fn all_edits(&self) -> impl Iterator<Item = &ContainerEdits> {
        std::iter::once(&self.container_edits)
            .chain(self.devices.iter().map(|device| &device.container_edits))
    }
}

impl ContainerEdits {
    /// Returns true if there are no edits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl DeviceNode {
    /// Returns a character device with these major and minor numbers, which the runtime creates in
    /// the container. The host need not have a node of it.
    #[must_use]
    pub fn character(path: &Path, (major, minor): (i64, i64), file_mode: u32) -> Self {
        Self {
            kind: Some("c".to_owned()),
            major: Some(major),
            minor: Some(minor),
            file_mode: Some(file_mode),
            ..Self::from_host(path, path)
        }
    }

    /// Returns a node of the host at `path` in the container. The runtime reads type and numbers
    /// from the host.
    #[must_use]
    pub fn from_host(path: &Path, host_path: &Path) -> Self {
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
    /// Returns a bind mount that is writable as far as the file's mode permits.
    ///
    /// The option `bind` is explicit because a runtime may not add it itself, and a container in
    /// its own user namespace fails without it. The mount is private to the container, and
    /// `nosuid` and `nodev` are set.
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

    /// Returns a read-only bind mount.
    #[must_use]
    pub fn bind_read_only(host_path: &Path, container_path: &Path) -> Self {
        let mut mount = Self::bind(host_path, container_path);
        mount.options.insert(0, "ro".to_owned());
        mount
    }
}
