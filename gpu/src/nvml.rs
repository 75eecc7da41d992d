//! GPU library on top of NVIDIA's management library (NVML).

mod describe;
mod links;
mod mig;
mod raw;
mod session;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use nvml_wrapper::Device;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use tessera_api::gpu::{Gpu, Inventory, Unpublished, UnpublishedReason};
use tessera_api::names::{GpuUuid, PciBusId};

use crate::device_nodes;
use crate::library::{
    GpuLibrary, GpuMemory, GpuProcess, HealthWatch, LibraryError, ProcessUtilization,
};
use crate::recovery::RecoveryAction;
use crate::sysfs;
use session::Session;

/// Options of the NVML search and of GPU discovery.
#[derive(Debug, Clone)]
pub struct NvmlOptions {
    /// Path of the library; if `None`, it is searched for.
    pub library: Option<PathBuf>,
    /// Root of the NVIDIA driver's files, as this process sees it.
    pub driver_root: PathBuf,
    /// Directory in which device nodes are created that only the driver root has: `/dev` of a
    /// container, since a GPU may be added later. If `None`, none are created.
    pub device_directory: Option<PathBuf>,
    /// Mount point of sysfs.
    pub sysfs_root: PathBuf,
    /// Mount point of procfs.
    pub proc_root: PathBuf,
    /// True to describe the profiles of GPUs in MIG mode, which are then published.
    pub mig: bool,
    /// GPUs that are not published.
    pub exclude: BTreeSet<GpuUuid>,
}

impl Default for NvmlOptions {
    /// Returns the driver root `/`, sysfs at `/sys`, procfs at `/proc`, no MIG devices and no
    /// exclusions.
    fn default() -> Self {
        Self {
            library: None,
            driver_root: PathBuf::from("/"),
            device_directory: None,
            sysfs_root: PathBuf::from("/sys"),
            proc_root: PathBuf::from("/proc"),
            mig: false,
            exclude: BTreeSet::new(),
        }
    }
}

/// The GPUs of this node, read through NVML.
///
/// The library is loaded at first use. If that fails, or the kernel driver is replaced, it is
/// loaded again by the next [`inventory`](GpuLibrary::inventory): a driver that is installed later
/// is found without a restart. NVML knows the GPUs that were bound to the kernel driver when it was
/// initialised, so it is also loaded again when these change.
#[derive(Debug)]
pub struct NvmlLibrary {
    options: NvmlOptions,
    session: Mutex<Option<OpenSession>>,
    /// GPUs of earlier inventories, to name those that are gone.
    known: Mutex<BTreeMap<GpuUuid, LastSeen>>,
}

/// A session, and the GPUs that were bound to the kernel driver before it was opened.
#[derive(Debug)]
struct OpenSession {
    session: Arc<Session>,
    bound: Option<BTreeSet<String>>,
}

impl NvmlLibrary {
    /// Returns a library with these options, without loading NVML.
    pub fn new(options: NvmlOptions) -> Self {
        Self { options, session: Mutex::new(None), known: Mutex::default() }
    }

    /// Returns the file that NVML was loaded from. Returns `None` before it is loaded, and if the
    /// dynamic loader found it.
    pub fn library_path(&self) -> Option<PathBuf> {
        self.lock_session().as_ref()?.session.library_path()
    }

    fn lock_session(&self) -> MutexGuard<'_, Option<OpenSession>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn session(&self) -> Result<Arc<Session>, LibraryError> {
        let mut session = self.lock_session();
        if let Some(open) = session.as_ref() {
            return Ok(Arc::clone(&open.session));
        }
        // Before NVML looks: a GPU that is bound in between makes the session outdated.
        let bound = sysfs::bound_gpus(&self.options.sysfs_root);
        if let Some(own) = &self.options.device_directory {
            device_nodes::create_missing(&self.options.driver_root, own);
        }
        let opened = Arc::new(Session::open(&self.options)?);
        *session = Some(OpenSession { session: Arc::clone(&opened), bound });
        Ok(opened)
    }

    /// Closes the session after an error that invalidates it.
    fn close_session(&self) {
        *self.lock_session() = None;
    }

    /// Closes an outdated session. NVML looks for GPUs only when it is initialised for the first
    /// time, or after each user has shut it down, so a session that is in use stays.
    fn close_outdated(&self) {
        let mut session = self.lock_session();
        let is_closable = |open: &OpenSession| {
            self.is_outdated_session(open) && Arc::strong_count(&open.session) == 1
        };
        if session.as_ref().is_some_and(is_closable) {
            tracing::info!("GPUs were bound to the kernel driver or unbound: NVML is loaded again");
            *session = None;
        }
    }

    fn is_outdated_session(&self, open: &OpenSession) -> bool {
        let bound = sysfs::bound_gpus(&self.options.sysfs_root);
        bound.is_some() && bound != open.bound
    }

    fn with_gpu<T>(
        &self,
        gpu: &GpuUuid,
        call: &'static str,
        query: impl FnOnce(&Device<'_>) -> Result<T, NvmlError>,
    ) -> Result<T, LibraryError> {
        let session = self.session()?;
        session.nvml().device_by_uuid(gpu.as_str()).and_then(|device| query(&device)).map_err(
            |source| match source {
                NvmlError::GpuLost | NvmlError::NotFound => LibraryError::Lost { gpu: gpu.clone() },
                source => LibraryError::GpuCall { gpu: gpu.clone(), call, source },
            },
        )
    }

    /// Records the present GPUs and lists earlier ones that are gone as lost. NVML counts a lost
    /// GPU without identifying it, or does not count it.
    fn record_lost(&self, gpus: &[Gpu], unpublished: &mut Vec<Unpublished>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let present: BTreeSet<&GpuUuid> = gpus
            .iter()
            .map(|gpu| &gpu.uuid)
            .chain(unpublished.iter().filter_map(|gpu| gpu.uuid.as_ref()))
            .collect();
        let gone: Vec<_> = known
            .iter()
            .filter(|(uuid, _)| !present.contains(uuid))
            .map(|(u, s)| (u.clone(), s.clone()))
            .collect();
        for (uuid, seen) in gone {
            let lost = Unpublished {
                uuid: Some(uuid),
                index: Some(seen.index),
                pci_bus_id: Some(seen.pci_bus_id),
                reason: UnpublishedReason::Lost,
            };
            let unidentified =
                |other: &&mut Unpublished| other.uuid.is_none() && other.index == lost.index;
            match unpublished.iter_mut().find(unidentified) {
                Some(other) => *other = lost,
                None => unpublished.push(lost),
            }
        }
        for gpu in gpus {
            let seen = LastSeen { index: gpu.index, pci_bus_id: gpu.pci_bus_id.clone() };
            known.insert(gpu.uuid.clone(), seen);
        }
    }
}

/// Last known location of a GPU.
#[derive(Debug, Clone)]
struct LastSeen {
    index: u32,
    pci_bus_id: PciBusId,
}

impl GpuLibrary for NvmlLibrary {
    fn inventory(&self) -> Result<Inventory, LibraryError> {
        self.close_outdated();
        let session = self.session()?;
        let count = session.nvml().device_count().map_err(|source| {
            self.close_session();
            LibraryError::Call { call: "nvmlDeviceGetCount_v2", source }
        })?;
        let versions = session.versions()?;
        let (mut gpus, mut unpublished) = (Vec::new(), Vec::new());
        for index in 0..count {
            match describe::gpu(&session, index, &versions, &self.options) {
                Ok(gpu) => gpus.push(gpu),
                Err(gpu) => unpublished.push(gpu),
            }
        }
        self.record_lost(&gpus, &mut unpublished);
        let links = links::between(&session, &gpus);
        Ok(Inventory::new(gpus, links, unpublished).excluding(&self.options.exclude))
    }

    fn is_outdated(&self) -> bool {
        self.lock_session().as_ref().is_some_and(|open| self.is_outdated_session(open))
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError> {
        let memory =
            self.with_gpu(gpu, "nvmlDeviceGetMemoryInfo_v2", |device| device.memory_info())?;
        Ok(GpuMemory { total: memory.total, used: memory.used, free: memory.free })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError> {
        let call = "nvmlDeviceGetComputeRunningProcesses_v3";
        let computing = self.with_gpu(gpu, call, |device| device.running_compute_processes())?;
        let call = "nvmlDeviceGetGraphicsRunningProcesses_v3";
        let graphics =
            self.with_gpu(gpu, call, |device| match device.running_graphics_processes() {
                // The GPU or the driver does not support the call.
                Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(Vec::new()),
                answer => answer,
            })?;
        let bytes = |used| match used {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        let process = |process: nvml_wrapper::struct_wrappers::device::ProcessInfo| GpuProcess {
            pid: process.pid,
            bytes: bytes(process.used_gpu_memory),
        };
        // A process that does both is in both lists, each time with all of its memory.
        let all = computing.into_iter().chain(graphics).map(process);
        let by_pid: BTreeMap<u32, GpuProcess> = all.map(|process| (process.pid, process)).collect();
        Ok(by_pid.into_values().collect())
    }

    fn utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Option<ProcessUtilization>, LibraryError> {
        self.with_gpu(gpu, "nvmlDeviceGetProcessUtilization", |device| {
            match device.process_utilization_stats(since_us) {
                Ok(samples) => Ok(Some(utilization(since_us, samples, SystemTime::now()))),
                // There is no sample since then.
                Err(NvmlError::NotFound) => {
                    Ok(Some(ProcessUtilization { last_us: since_us, ..Default::default() }))
                }
                Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn busy_percent(&self, gpu: &GpuUuid) -> Result<Option<u8>, LibraryError> {
        self.with_gpu(gpu, "nvmlDeviceGetUtilizationRates", |device| {
            match device.utilization_rates() {
                Ok(rates) => {
                    Ok(Some(u8::try_from(rates.gpu).map_or(100, |percent| percent.min(100))))
                }
                Err(NvmlError::NotSupported) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn recovery_action(&self, gpu: &GpuUuid) -> Result<Option<RecoveryAction>, LibraryError> {
        self.with_gpu(gpu, "nvmlDeviceGetFieldValues", |device| match recovery_action(device) {
            Ok(action) => Ok(Some(action)),
            // Drivers that do not support the field return one of the first two errors, or lack the
            // function.
            Err(
                NvmlError::NotSupported | NvmlError::InvalidArg | NvmlError::FailedToLoadSymbol(_),
            ) => Ok(None),
            Err(error) => Err(error),
        })
    }

    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn HealthWatch>, LibraryError> {
        Ok(Box::new(watch::NvmlWatch::start(self.session()?, gpus)?))
    }
}

/// Returns the samples by PID. NVML reports a process that does compute and graphics twice, and
/// numbers above 100 for samples that it has not taken; it leaves array elements empty (PID 0).
fn utilization(
    since_us: u64,
    samples: Vec<ProcessUtilizationSample>,
    now: SystemTime,
) -> ProcessUtilization {
    let mut found = ProcessUtilization { last_us: since_us, ..Default::default() };
    for sample in samples.into_iter().filter(|sample| sample.pid != 0 && sample.sm_util <= 100) {
        found.last_us = found.last_us.max(sample.timestamp);
        if sample.sm_util > 0 {
            let percent = found.percent.entry(sample.pid).or_default();
            *percent = (*percent + sample.sm_util).min(100);
        }
    }
    if found.last_us > since_us {
        // NVML's times of samples are microseconds of the real-time clock.
        let sampled_at = SystemTime::UNIX_EPOCH + Duration::from_micros(found.last_us);
        found.age = now.duration_since(sampled_at).ok();
    }
    found
}

fn recovery_action(device: &Device<'_>) -> Result<RecoveryAction, NvmlError> {
    let answers = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)])?;
    let answer = answers.into_iter().next().ok_or(NvmlError::NotFound)??;
    match answer.value? {
        SampleValue::U32(number) => Ok(RecoveryAction::from_number(number)),
        SampleValue::U64(number) => {
            Ok(RecoveryAction::from_number(u32::try_from(number).unwrap_or(u32::MAX)))
        }
        SampleValue::I64(_) | SampleValue::F64(_) => Err(NvmlError::NotSupported),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(pid: u32, sm_util: u32, timestamp: u64) -> ProcessUtilizationSample {
        ProcessUtilizationSample { pid, timestamp, sm_util, mem_util: 0, enc_util: 0, dec_util: 0 }
    }

    #[test]
    fn samples_of_a_process_add_up_and_invalid_ones_are_ignored() {
        let samples = vec![
            sample(7, 40, 20),
            sample(7, 30, 21),
            sample(8, 0, 22),
            sample(9, 4_294_967_295, 99),
            sample(0, 50, 99),
        ];
        let at = |us| SystemTime::UNIX_EPOCH + Duration::from_micros(us);
        let found = utilization(10, samples.clone(), at(25));
        let age = Some(Duration::from_micros(3));
        assert_eq!(found, ProcessUtilization { last_us: 22, age, percent: [(7, 70)].into() });
        assert_eq!(utilization(10, samples, at(21)).age, None, "the clock was set back");
        assert_eq!(utilization(10, Vec::new(), at(25)).age, None, "no newer sample");
    }
}
