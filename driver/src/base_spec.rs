//! The base CDI spec: files and device nodes of the NVIDIA driver that a container needs for a GPU.
//!
//! Its kind is `k8s.gpu.tessera.dev/driver`. It has one device for each GPU, named by the full
//! UUID. The driver's libraries and tools under the driver root are mounted at the same path
//! without the root. Device nodes are those below its `dev`. Only the device nodes decide which
//! GPUs a container sees, so every device sets `NVIDIA_VISIBLE_DEVICES=void`: a legacy runtime
//! would otherwise add every GPU that the image requests.

mod driver_root;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

pub use driver_root::{DriverFile, DriverFiles, DriverRoot};
use tessera_api::names::{CDI_DRIVER_KIND, GpuUuid};
use tessera_cdi::{
    CdiDevice, CdiKind, ContainerEdits, DeviceNode, Mount, Spec, SpecFile, SpecStore,
    SpecWriteOutcome, StoreError,
};

use crate::intercept::ProxiedLibrary;

/// Keeps a legacy NVIDIA runtime from adding GPUs that were not allocated.
pub const NO_LEGACY_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// A GPU in the base spec.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BaseDevice {
    /// The UUID, which is its name in the spec.
    pub gpu: GpuUuid,
    /// The minor number of its device node, `/dev/nvidia<minor>`, if known.
    pub minor: Option<u32>,
}

/// The file of the base spec, and its content.
#[derive(Debug)]
pub struct BaseSpec {
    store: SpecStore,
    file: SpecFile,
    root: DriverRoot,
    /// True if containers also get the real libcuda and NVML at the paths that the proxies load.
    has_real_libraries: AtomicBool,
    /// The content that was written last: restores a removed file without an inventory.
    current: Mutex<Option<Spec>>,
}

impl BaseSpec {
    /// Returns the base spec in `store`, with the driver files under `root`.
    #[must_use]
    pub fn new(store: SpecStore, root: DriverRoot) -> Self {
        let file = SpecFile::for_kind(kind());
        Self {
            store,
            file,
            root,
            has_real_libraries: AtomicBool::new(false),
            current: Mutex::default(),
        }
    }

    /// Adds the real libcuda and NVML at the paths that the proxies load, at the next update.
    pub fn add_real_libraries(&self) {
        self.has_real_libraries.store(true, Ordering::Relaxed);
    }

    /// Returns the container paths of the libraries that proxies can replace.
    #[must_use]
    pub fn replaceable(&self) -> Vec<PathBuf> {
        let paths = self.root.files().mounts.into_iter().map(|file| file.container_path);
        paths.filter(|path| ProxiedLibrary::of(path).is_some()).collect()
    }

    /// Updates the spec for `gpus`, and writes the file if it changes. GPUs in `keep` stay as they
    /// are in the file, even if they are missing from `gpus`: claims use them, and a container
    /// that restarts must find its CDI device.
    ///
    /// # Errors
    /// [`StoreError`]. The file is unchanged then, and [`BaseSpec::ensure`] tries again.
    pub fn update(
        &self,
        gpus: &[BaseDevice],
        keep: &BTreeSet<GpuUuid>,
    ) -> Result<SpecWriteOutcome, StoreError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.root.files();
        let mut devices: BTreeMap<String, CdiDevice> =
            gpus.iter().map(|gpu| (gpu.gpu.to_string(), device(gpu, &files))).collect();
        let old = self.store.read(&self.file)?.map(|spec| spec.devices).unwrap_or_default();
        for gpu in keep {
            let found = || old.iter().find(|device| device.name.as_str() == gpu.as_str()).cloned();
            let unknown = || device(&BaseDevice { gpu: gpu.clone(), minor: None }, &files);
            devices.entry(gpu.to_string()).or_insert_with(|| found().unwrap_or_else(unknown));
        }
        if devices.is_empty() {
            // A spec without devices is invalid, and no claim refers to it.
            self.store.remove(&self.file)?;
            *current = None;
            return Ok(SpecWriteOutcome::Changed);
        }
        let mut common = common_edits(&files);
        if self.has_real_libraries.load(Ordering::Relaxed) {
            common.mounts.extend(real_libraries(&files));
        }
        let spec = Spec::new(kind(), devices.into_values().collect(), common);
        // Stored even if the write fails: `ensure` then fails, and no claim is prepared.
        self.store.write(&self.file, current.insert(spec))
    }

    /// Returns the driver root if it has no `libcuda.so.1`, the name that the loader searches for.
    #[must_use]
    pub fn root_without_cuda(&self) -> Option<String> {
        let is_libcuda = |file: &DriverFile| file.container_path.ends_with("libcuda.so.1");
        (!self.root.files().mounts.iter().any(is_libcuda)).then(|| self.root.to_string())
    }

    /// Writes the file again if it was changed or removed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn ensure(&self) -> Result<(), StoreError> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match &*current {
            Some(spec) => self.store.write(&self.file, spec).map(drop),
            None => Ok(()),
        }
    }
}

/// Returns the kind of the base spec.
fn kind() -> CdiKind {
    CDI_DRIVER_KIND.parse().expect("invariant: the kind is a constant")
}

fn device(gpu: &BaseDevice, files: &DriverFiles) -> CdiDevice {
    let node = gpu.minor.map(|minor| format!("nvidia{minor}"));
    let node = node.and_then(|name| files.device_nodes.iter().find(|node| node.name == name));
    let container_edits = ContainerEdits {
        env: vec![NO_LEGACY_DEVICES.to_owned()],
        device_nodes: node
            .map(|node| DeviceNode::from_host(&node.container_path, &node.host_path))
            .into_iter()
            .collect(),
        ..ContainerEdits::default()
    };
    let name = gpu.gpu.as_str().parse().expect("invariant: a GPU UUID is a CDI device name");
    CdiDevice { name, annotations: BTreeMap::new(), container_edits }
}

/// Returns mounts of the real libraries at the paths that the proxies load.
fn real_libraries(files: &DriverFiles) -> Vec<Mount> {
    let of = |library: ProxiedLibrary| {
        let file =
            files.mounts.iter().find(|file| file.container_path.ends_with(library.soname()))?;
        Some(Mount::bind_read_only(&file.host_path, &library.real_path()))
    };
    ProxiedLibrary::ALL.into_iter().filter_map(of).collect()
}

/// Returns the edits that a container gets once, independent of its GPUs.
fn common_edits(files: &DriverFiles) -> ContainerEdits {
    /// Device nodes that do not belong to a single GPU.
    const CONTROL_NODES: [&str; 4] =
        ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];
    let control =
        files.device_nodes.iter().filter(|node| CONTROL_NODES.contains(&node.name.as_str()));
    ContainerEdits {
        device_nodes: control
            .map(|node| DeviceNode::from_host(&node.container_path, &node.host_path))
            .collect(),
        mounts: files
            .mounts
            .iter()
            .map(|file| Mount::bind_read_only(&file.host_path, &file.container_path))
            .collect(),
        ..ContainerEdits::default()
    }
}

#[cfg(test)]
mod tests;
