//! From CDI device ids to what changes in a container, as a container runtime reads it.
//!
//! The order is the runtime's: for each id in turn, first its spec's own edits (once per spec),
//! then the device's. A later mount at the same path replaces an earlier one; in the end mounts are
//! made shallow paths first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tessera_cdi::{ContainerEdits, Mount, Spec};

use super::spec::{BindMount, DeviceNode};

/// What the ids of one container add up to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edits {
    /// Later values of a name replace earlier ones.
    pub(crate) env: BTreeMap<String, String>,
    /// In the order in which they are to be made.
    pub(crate) mounts: Vec<BindMount>,
    pub(crate) devices: Vec<DeviceNode>,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
}

/// Ids that cannot be turned into edits. A container runtime fails the container's creation with
/// these.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// The directory of specs is there and cannot be read.
    #[error("failed to read the CDI directory `{path}`")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No spec has these devices.
    #[error("CDI device injection failed: unresolvable CDI devices {}", ids.join(", "))]
    Unresolvable {
        /// Their full names.
        ids: Vec<String>,
    },
    /// Two specs have the same device.
    #[error("CDI device injection failed: conflicting specs of {id}: `{first}` and `{second}`")]
    Conflict {
        /// Its full name.
        id: String,
        /// One of the files.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// The stand-in does not do this.
    #[error("CDI device {id} asks for {what}, which the container stand-in does not do")]
    Unsupported {
        /// Its full name.
        id: String,
        /// What it asks for.
        what: String,
    },
}

/// Resolves `ids` against the spec files in `directories`; files that are no valid spec offer no
/// devices.
///
/// # Errors
/// See [`CdiError`]; nothing is half resolved.
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
    // A file may vanish between the listing and here: it is then as if it had never been.
    let text = fs::read_to_string(path).ok()?;
    let spec = if json {
        serde_json::from_str(&text).map_err(|error| error.to_string())
    } else {
        serde_saphyr::from_str(&text).map_err(|error| error.to_string())
    };
    spec.inspect_err(
        |error| tracing::warn!(path = %path.display(), error, "not a CDI spec; ignored"),
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

/// runc takes a mount without `bind` for a file system of that type.
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
