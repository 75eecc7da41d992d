//! Resolution of CDI device ids into container edits, as in a container runtime.
//!
//! For each id in turn, the spec's own edits are applied first (once per spec), then the device's.
//! A later mount at the same path replaces an earlier one. Mounts are finally ordered by depth,
//! shallow paths first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tessera_cdi::{ContainerEdits, Mount, Spec};

use super::spec::{BindMount, DeviceNode};

/// Combined edits of one container's ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edits {
    /// Later values of a name replace earlier ones.
    pub(crate) env: BTreeMap<String, String>,
    /// In mount order.
    pub(crate) mounts: Vec<BindMount>,
    pub(crate) devices: Vec<DeviceNode>,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
}

/// Error returned when ids cannot be resolved. The container is not created then.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// The spec directory exists but cannot be read.
    #[error("cannot read CDI directory `{path}`")]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// No spec has these devices.
    #[error("CDI device injection failed: unresolvable CDI devices {}", ids.join(", "))]
    Unresolvable {
        /// Full names of the devices.
        ids: Vec<String>,
    },
    /// Two specs have the same device.
    #[error("CDI device injection failed: conflicting specs of {id}: `{first}` and `{second}`")]
    Conflict {
        /// Full name of the device.
        id: String,
        /// First of the files.
        first: PathBuf,
        /// Second of the files.
        second: PathBuf,
    },
    /// The fake container runtime does not support the edit.
    #[error("CDI device {id}: the fake container runtime does not support {what}")]
    Unsupported {
        /// Full name of the device.
        id: String,
        /// The unsupported edit.
        what: String,
    },
}

/// Resolves `ids` with the spec files in `directories`. Invalid spec files are ignored.
///
/// # Errors
/// Returns a [`CdiError`] if any id cannot be resolved.
pub(crate) fn resolve(directories: &[PathBuf], ids: &[String]) -> Result<Edits, CdiError> {
    if ids.is_empty() {
        return Ok(Edits::default());
    }
    let mut specs = Vec::new();
    for directory in directories {
        specs.extend(read_directory(directory)?);
    }
    merge(&specs, ids)
}

type SpecFile = (PathBuf, Spec);

fn read_directory(directory: &Path) -> Result<Vec<SpecFile>, CdiError> {
    let failed = |source| CdiError::Directory { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut specs = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if let Some(spec) = read_spec(&path) {
            specs.push((path, spec));
        }
    }
    Ok(specs)
}

fn read_spec(path: &Path) -> Option<Spec> {
    let json = match path.extension()?.to_str()? {
        "json" => true,
        "yaml" => false,
        _ => return None,
    };
    // A file that vanishes between the list and here is ignored.
    let text = fs::read_to_string(path).ok()?;
    let spec = if json {
        serde_json::from_str(&text).map_err(|error| error.to_string())
    } else {
        serde_saphyr::from_str(&text).map_err(|error| error.to_string())
    };
    spec.inspect_err(
        |error| tracing::warn!(path = %path.display(), error, "ignoring invalid CDI spec"),
    )
    .ok()
}

fn merge(specs: &[SpecFile], ids: &[String]) -> Result<Edits, CdiError> {
    let mut devices: BTreeMap<String, (&PathBuf, &Spec, &ContainerEdits)> = BTreeMap::new();
    for (path, spec) in specs {
        for device in &spec.devices {
            let id = format!("{}={}", spec.kind, device.name);
            if let Some((first, ..)) = devices.get(&id)
                && ids.contains(&id)
            {
                return Err(CdiError::Conflict {
                    id,
                    first: (*first).clone(),
                    second: path.clone(),
                });
            }
            devices.insert(id, (path, spec, &device.container_edits));
        }
    }
    let unresolvable: Vec<_> =
        ids.iter().filter(|id| !devices.contains_key(*id)).cloned().collect();
    if !unresolvable.is_empty() {
        return Err(CdiError::Unresolvable { ids: unresolvable });
    }
    let mut edits = Edits::default();
    let mut seen = BTreeSet::new();
    for id in ids {
        let (path, spec, own) = devices[id];
        if seen.insert(path) {
            append(&mut edits, id, &spec.container_edits)?;
        }
        append(&mut edits, id, own)?;
    }
    edits.mounts.sort_by_key(|mount| mount.target.components().count());
    Ok(edits)
}

fn append(edits: &mut Edits, id: &str, more: &ContainerEdits) -> Result<(), CdiError> {
    if let Some(hook) = more.hooks.first() {
        return Err(CdiError::Unsupported {
            id: id.to_owned(),
            what: format!("the hook `{}`", hook.hook_name),
        });
    }
    for entry in &more.env {
        let (name, value) = entry.split_once('=').unwrap_or((entry, ""));
        edits.env.insert(name.to_owned(), value.to_owned());
    }
    for node in &more.device_nodes {
        let source = node.host_path.as_ref().unwrap_or(&node.path).clone();
        edits.devices.retain(|device| device.target != node.path);
        edits.devices.push(DeviceNode { source, target: node.path.clone() });
    }
    for mount in &more.mounts {
        let mount = bind_mount(id, mount)?;
        edits.mounts.retain(|other| other.target != mount.target);
        edits.mounts.push(mount);
    }
    for group in &more.additional_gids {
        if *group != 0 && !edits.groups.contains(group) {
            edits.groups.push(*group);
        }
    }
    Ok(())
}

/// Converts a mount. runc interprets a mount without `bind` as a file system type.
fn bind_mount(id: &str, mount: &Mount) -> Result<BindMount, CdiError> {
    let has = |wanted: &str| mount.options.iter().any(|option| option == wanted);
    if !has("bind") && !has("rbind") {
        let what =
            format!("a mount at `{}` without the option `bind`", mount.container_path.display());
        return Err(CdiError::Unsupported { id: id.to_owned(), what });
    }
    Ok(BindMount {
        source: mount.host_path.clone(),
        target: mount.container_path.clone(),
        read_only: has("ro"),
    })
}

#[cfg(test)]
#[path = "cdi/tests.rs"]
mod tests;
