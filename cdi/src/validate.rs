//! Validation of a spec before it is written.

use std::{
    collections::HashSet,
    path::{Component, Path, PathBuf},
};

use crate::{
    name::DeviceName,
    spec::{ContainerEdits, DeviceNode, Hook, Mount, Spec},
    version::{self, Version},
};

/// Error of an invalid spec. Names (kinds, devices) are validated when they are parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValidationError {
    /// The spec has no devices.
    #[error("the CDI spec has no devices")]
    NoDevices,
    /// Two devices have the same name.
    #[error("the CDI spec has device `{0}` more than once")]
    DuplicateDevice(DeviceName),
    /// A device has no edits, which runtimes refuse.
    #[error("device `{0}` has no container edits")]
    EmptyDevice(DeviceName),
    /// The content needs a higher version than the declared one.
    #[error("the CDI spec declares cdiVersion {declared} but needs {required}")]
    VersionTooLow {
        /// Declared version.
        declared: Version,
        /// Required version.
        required: Version,
    },
    /// An environment entry is not `NAME=value`.
    #[error("env entry `{0}` is not NAME=value")]
    Environment(String),
    /// A path is relative or has `..`.
    #[error("{field} `{path}` is not an absolute path without `..`", path = .path.display())]
    Path {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        path: PathBuf,
    },
    /// The type of a device node is not `b`, `c`, `u` or `p`.
    #[error("device node type `{0}` is not one of b, c, u, p")]
    DeviceType(String),
    /// Device permissions are neither letters of `rwm` nor `none`.
    #[error("device node permissions `{0}` are not letters of rwm")]
    Permissions(String),
    /// A hook's name is not an OCI hook.
    #[error("hookName `{0}` is not one of the OCI hooks")]
    HookName(String),
}

impl Spec {
    /// Checks the rules that a container runtime enforces.
    ///
    /// # Errors
    /// Returns the first violated rule.
    pub fn validate(&self) -> Result<(), ValidationError> {
        if self.devices.is_empty() {
            return Err(ValidationError::NoDevices);
        }
        let mut names = HashSet::new();
        for device in &self.devices {
            if !names.insert(&device.name) {
                return Err(ValidationError::DuplicateDevice(device.name.clone()));
            }
            if device.container_edits.is_empty() {
                return Err(ValidationError::EmptyDevice(device.name.clone()));
            }
        }
        let required = version::required(self);
        if self.cdi_version < required {
            return Err(ValidationError::VersionTooLow { declared: self.cdi_version, required });
        }
        self.all_edits().try_for_each(edits)
    }
}

fn edits(edits: &ContainerEdits) -> Result<(), ValidationError> {
    edits.env.iter().try_for_each(|entry| environment(entry))?;
    edits.device_nodes.iter().try_for_each(device_node)?;
    edits.mounts.iter().try_for_each(mount)?;
    edits.hooks.iter().try_for_each(hook)
}

fn environment(entry: &str) -> Result<(), ValidationError> {
    match entry.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(()),
        _ => Err(ValidationError::Environment(entry.to_owned())),
    }
}

fn absolute(field: &'static str, path: &Path) -> Result<(), ValidationError> {
    let has_parent = path.components().any(|component| component == Component::ParentDir);
    if path.is_absolute() && !has_parent {
        return Ok(());
    }
    Err(ValidationError::Path { field, path: path.to_owned() })
}

fn device_node(node: &DeviceNode) -> Result<(), ValidationError> {
    absolute("deviceNodes.path", &node.path)?;
    if let Some(host_path) = &node.host_path {
        absolute("deviceNodes.hostPath", host_path)?;
    }
    if let Some(kind) = &node.kind
        && !["b", "c", "u", "p"].contains(&kind.as_str())
    {
        return Err(ValidationError::DeviceType(kind.clone()));
    }
    if let Some(permissions) = &node.permissions
        && permissions != "none"
        && !permissions.chars().all(|letter| "rwm".contains(letter))
    {
        return Err(ValidationError::Permissions(permissions.clone()));
    }
    Ok(())
}

fn mount(mount: &Mount) -> Result<(), ValidationError> {
    absolute("mounts.hostPath", &mount.host_path)?;
    absolute("mounts.containerPath", &mount.container_path)
}

fn hook(hook: &Hook) -> Result<(), ValidationError> {
    const NAMES: [&str; 6] =
        ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];
    if !NAMES.contains(&hook.hook_name.as_str()) {
        return Err(ValidationError::HookName(hook.hook_name.clone()));
    }
    absolute("hooks.path", &hook.path)?;
    hook.env.iter().try_for_each(|entry| environment(entry))
}
