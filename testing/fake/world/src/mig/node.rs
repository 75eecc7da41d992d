//! MIG of a node: the mode and instances of its GPUs, and the files of the kernel driver.
//!
//! The kernel driver names a capability device for each instance in
//! `/proc/driver/nvidia/capabilities`; a process needs the device nodes of a GPU instance and of
//! its compute instance to use it. The fake writes these files below
//! [`NodeMig::proc_root`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use tessera_runtime::atomic_file;

use super::{GpuInstance, MigError, MigState, MigTable};
use crate::control::ControlFile;
use crate::world::Gpu;

/// Character device major of `nvidia-caps`, which the kernel assigns at run time.
const CAPABILITY_MAJOR: u32 = 510;

/// Capability minors of one GPU instance: its own, and of its compute instances.
const MINORS_OF_INSTANCE: u32 = 9;

/// Capability minors of one GPU: those of 15 GPU instances.
const MINORS_OF_GPU: u32 = 15 * MINORS_OF_INSTANCE;

/// First capability minor of an instance. Lower ones are those of `config` and `monitor`.
const FIRST_MINOR: u32 = 3;

/// MIG of the GPUs of a node.
///
/// The instances and the kernel driver's files are in the directory `mig` beside the control file.
/// It may be a link to a directory that only the driver can write, and that a reboot deletes.
#[derive(Debug, Clone, Copy)]
pub struct NodeMig<'c> {
    control: &'c ControlFile,
}

/// Instances by UUID of the GPU.
type States = BTreeMap<String, MigState>;

impl<'c> NodeMig<'c> {
    /// Returns the MIG of the node with this control file.
    pub fn new(control: &'c ControlFile) -> Self {
        Self { control }
    }

    fn directory(self) -> PathBuf {
        self.control.path().with_file_name("mig")
    }

    /// Returns the directory in place of `/proc`.
    pub fn proc_root(self) -> PathBuf {
        self.directory().join("proc")
    }

    /// Returns true if MIG mode is on, by the control file or else by the world.
    pub fn is_enabled(self, gpu: &Gpu) -> bool {
        let control = self.control.read();
        control.gpu(&gpu.uuid).and_then(|condition| condition.mig).unwrap_or(gpu.mig)
    }

    /// Returns the profiles of a GPU in MIG mode.
    ///
    /// # Errors
    /// [`MigError::NotSupported`]: MIG mode is off, or the model has no profiles.
    pub fn table(self, gpu: &Gpu) -> Result<Arc<MigTable>, MigError> {
        let table = gpu.model.mig_table.as_deref().filter(|_| self.is_enabled(gpu));
        table.and_then(MigTable::of_model).ok_or(MigError::NotSupported)
    }

    /// Returns the instances of a GPU. None if there is no file of them, or MIG mode is off.
    pub fn state(self, gpu: &Gpu) -> MigState {
        let states = self.read().unwrap_or_default();
        states.get(&gpu.uuid).filter(|_| self.is_enabled(gpu)).cloned().unwrap_or_default()
    }

    /// Changes the instances of a GPU in MIG mode, and the files of the kernel driver.
    ///
    /// # Errors
    /// The error of `change`; [`MigError::NotSupported`] as [`table`](Self::table);
    /// [`MigError::NoPermission`] if a file cannot be written.
    pub fn change<T>(
        self,
        gpu: &Gpu,
        change: impl FnOnce(&mut MigState, &MigTable) -> Result<T, MigError>,
    ) -> Result<T, MigError> {
        let table = self.table(gpu)?;
        let changed = self.update(|states| {
            let state = states.entry(gpu.uuid.clone()).or_default();
            let result = change(state, &table)?;
            write_capabilities(&self.proc_root(), gpu.minor, &state.gpu_instances)
                .map_err(|_| MigError::NoPermission)?;
            Ok(result)
        });
        changed.map_err(|_| MigError::NoPermission)?
    }

    /// Creates an instance as an administrator does, with a compute instance if it has slices.
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn create(self, gpu: &Gpu, profile: u32, start: u32, slices: u32) -> Result<(), MigError> {
        self.change(gpu, |state, table| {
            let serial = state.create_gpu_instance(table, profile, Some(start))?;
            if slices > 0 {
                state.create_compute_instance(table, &gpu.uuid, serial, slices)?;
            }
            Ok(())
        })
    }

    /// Sets whether a process uses the first MIG device.
    ///
    /// # Errors
    /// As [`change`](Self::change); [`MigError::NotFound`] if there is none.
    pub fn set_busy(self, gpu: &Gpu, busy: bool) -> Result<(), MigError> {
        self.change(gpu, |state, _| {
            let mut devices = state.gpu_instances.iter_mut().flat_map(|gpu| &mut gpu.compute);
            devices.next().ok_or(MigError::NotFound)?.busy = busy;
            Ok(())
        })
    }

    /// Reboots the node: all instances are lost, MIG mode stays.
    ///
    /// # Errors
    /// The directory cannot be removed.
    pub fn reboot(self) -> io::Result<()> {
        let directory = fs::canonicalize(self.directory()).unwrap_or_else(|_| self.directory());
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn file(self) -> PathBuf {
        self.directory().join("instances.yaml")
    }

    fn read(self) -> io::Result<States> {
        match fs::read_to_string(self.file()) {
            Ok(text) => serde_saphyr::from_str(&text).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(States::default()),
            Err(error) => Err(error),
        }
    }

    /// Edits the file and replaces it atomically, unless `change` fails. Writers wait for each
    /// other.
    fn update<T>(
        self,
        change: impl FnOnce(&mut States) -> Result<T, MigError>,
    ) -> io::Result<Result<T, MigError>> {
        fs::create_dir_all(fs::canonicalize(self.directory()).or_else(|_| link_target(self))?)?;
        let lock = fs::File::create(self.file().with_extension("lock"))?;
        lock.lock()?;
        let mut states = self.read()?;
        let result = change(&mut states);
        if result.is_ok() {
            let text = serde_saphyr::to_string(&states).map_err(io::Error::other)?;
            atomic_file::write(&self.file(), text.as_bytes(), 0o644)?;
        }
        Ok(result)
    }
}

/// Returns the directory, or the target of the link to it, which need not exist.
fn link_target(mig: NodeMig<'_>) -> io::Result<PathBuf> {
    let directory = mig.directory();
    match fs::read_link(&directory) {
        Ok(target) => Ok(directory.with_file_name("").join(target)),
        Err(_) => Ok(directory),
    }
}

fn write_capabilities(root: &Path, gpu: u32, instances: &[GpuInstance]) -> io::Result<()> {
    fs::create_dir_all(root)?;
    let devices = format!(
        "Character devices:\n  1 mem\n195 nvidia\n{CAPABILITY_MAJOR} nvidia-caps\n\n\
         Block devices:\n259 blkext\n"
    );
    fs::write(root.join("devices"), devices)?;
    let directory = root.join(format!("driver/nvidia/capabilities/gpu{gpu}/mig"));
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    for instance in instances {
        let first = FIRST_MINOR + gpu * MINORS_OF_GPU + instance.id * MINORS_OF_INSTANCE;
        let of_instance = directory.join(format!("gi{}", instance.id));
        write_access(&of_instance, first)?;
        for compute in &instance.compute {
            write_access(&of_instance.join(format!("ci{}", compute.id)), first + 1 + compute.id)?;
        }
    }
    Ok(())
}

fn write_access(directory: &Path, minor: u32) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let content = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
    fs::write(directory.join("access"), content)
}
