//! The base CDI spec: what a container needs of the NVIDIA driver to use a GPU at all.
//!
//! Kind `k8s.gpu.tessera.dev/driver`, one device for each GPU, named by its full UUID. The driver's
//! libraries and tools are found under the driver root and mounted at the same path with the root
//! stripped; the device nodes are those that exist below its `dev`. Which GPUs a container sees is
//! decided by the device nodes alone, so every device says `NVIDIA_VISIBLE_DEVICES=void`: a legacy
//! runtime would otherwise add every GPU that the image names.

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
    ContainerEdits, Device, DeviceNode, Kind, Mount, Spec, SpecFile, SpecStore, StoreError, Written,
};

use crate::intercept::Library;

/// Keeps a legacy NVIDIA runtime from adding GPUs that nobody granted.
pub const NO_LEGACY_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// A GPU as the base spec needs it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BaseDevice {
    /// Its name in the spec.
    pub gpu: GpuUuid,
    /// Minor number of its device node, `/dev/nvidia<minor>`, where it is known.
    pub minor: Option<u32>,
}

/// The base spec's file and what goes into it.
#[derive(Debug)]
pub struct BaseSpec {
    store: SpecStore,
    file: SpecFile,
    root: DriverRoot,
    /// Whether containers get the real libcuda and NVML where the proxies expect them, too.
    behind_proxies: AtomicBool,
    /// What was written last, so that a removed file is brought back without looking at the
    /// hardware.
    current: Mutex<Option<Spec>>,
}

impl BaseSpec {
    /// The base spec in `store`, of the driver files under `root`.
    #[must_use]
    pub fn new(store: SpecStore, root: DriverRoot) -> Self {
        let file = SpecFile::only(kind());
        Self {
            store,
            file,
            root,
            behind_proxies: AtomicBool::new(false),
            current: Mutex::default(),
        }
    }

    /// From the next description on, the real libcuda and NVML are also where the proxies expect
    /// them.
    pub fn put_the_real_behind_proxies(&self) {
        self.behind_proxies.store(true, Ordering::Relaxed);
    }

    /// The containers' paths of the libraries that there are proxies of.
    #[must_use]
    pub fn replaceable(&self) -> Vec<PathBuf> {
        let paths = self.root.files().mounts.into_iter().map(|file| file.container_path);
        paths.filter(|path| Library::of(path).is_some()).collect()
    }

    /// Describes `gpus` and writes the file if that changes it. GPUs in `keep` stay described as
    /// they are in the file, even if they are gone from `gpus`: a claim has them, and a
    /// container that restarts must find its CDI device.
    ///
    /// # Errors
    /// [`StoreError`]; the file is as before, and [`BaseSpec::ensure`] tries again.
    pub fn describe(
        &self,
        gpus: &[BaseDevice],
        keep: &BTreeSet<GpuUuid>,
    ) -> Result<Written, StoreError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.root.files();
        let mut devices: BTreeMap<String, Device> =
            gpus.iter().map(|gpu| (gpu.gpu.to_string(), device(gpu, &files))).collect();
        let old = self.store.read(&self.file)?.map(|spec| spec.devices).unwrap_or_default();
        for gpu in keep {
            let found = || old.iter().find(|device| device.name.as_str() == gpu.as_str()).cloned();
            let unknown = || device(&BaseDevice { gpu: gpu.clone(), minor: None }, &files);
            devices.entry(gpu.to_string()).or_insert_with(|| found().unwrap_or_else(unknown));
        }
        if devices.is_empty() {
            // A spec without devices is not valid, and nobody refers to it.
            *current = None;
            self.store.remove(&self.file)?;
            return Ok(Written::Changed);
        }
        let mut common = common_edits(&files);
        if self.behind_proxies.load(Ordering::Relaxed) {
            common.mounts.extend(behind_proxies(&files));
        }
        let spec = Spec::new(kind(), devices.into_values().collect(), common);
        // Also if it cannot be written now: then no claim is prepared that refers to it.
        self.store.write(&self.file, current.insert(spec))
    }

    /// Where the driver's files are looked for, if there is no libcuda among them: its name is what
    /// the loader asks for.
    #[must_use]
    pub fn lacks_cuda(&self) -> Option<String> {
        let is_libcuda = |file: &DriverFile| file.container_path.ends_with("libcuda.so.1");
        (!self.root.files().mounts.iter().any(is_libcuda)).then(|| self.root.to_string())
    }

    /// Writes the file again if it is not what was written last.
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

/// The base spec's kind.
fn kind() -> Kind {
    CDI_DRIVER_KIND.parse().expect("invariant: the kind is a constant")
}

fn device(gpu: &BaseDevice, files: &DriverFiles) -> Device {
    let node = gpu.minor.map(|minor| format!("nvidia{minor}"));
    let node = node.and_then(|name| files.device_nodes.iter().find(|node| node.name == name));
    let container_edits = ContainerEdits {
        env: vec![NO_LEGACY_DEVICES.to_owned()],
        device_nodes: node
            .map(|node| DeviceNode::of_host(&node.container_path, &node.host_path))
            .into_iter()
            .collect(),
        ..ContainerEdits::default()
    };
    let name = gpu.gpu.as_str().parse().expect("invariant: a GPU UUID is a CDI device name");
    Device { name, annotations: BTreeMap::new(), container_edits }
}

/// The real libraries, where the proxies expect them.
fn behind_proxies(files: &DriverFiles) -> Vec<Mount> {
    let of = |library: Library| {
        let file =
            files.mounts.iter().find(|file| file.container_path.ends_with(library.soname()))?;
        Some(Mount::bind_read_only(&file.host_path, &library.real_path()))
    };
    Library::ALL.into_iter().filter_map(of).collect()
}

/// What a container gets once, however many GPUs it has.
fn common_edits(files: &DriverFiles) -> ContainerEdits {
    /// Nodes that belong to no single GPU.
    const CONTROL_NODES: [&str; 4] =
        ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];
    let control =
        files.device_nodes.iter().filter(|node| CONTROL_NODES.contains(&node.name.as_str()));
    ContainerEdits {
        device_nodes: control
            .map(|node| DeviceNode::of_host(&node.container_path, &node.host_path))
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
