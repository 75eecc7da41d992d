//! `control.yaml`: changes of the machine at run time.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tessera_runtime::atomic_file;

/// All deviations from a healthy, idle machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Control {
    /// Condition by GPU UUID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<String, GpuCondition>,
    /// Events, oldest first, with increasing ids.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
    /// Driver not loaded: `nvmlInit` and `cuInit` fail.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub driver_not_loaded: bool,
}

/// Condition of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct GpuCondition {
    /// The GPU fell off the bus: every call on it returns `GPU_IS_LOST`.
    pub lost: bool,
    /// The GPU hangs: every call on it fails with `UNKNOWN`, and waiting for its events with
    /// `GPU_IS_LOST`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hung: bool,
    /// Recovery action that the kernel driver reports.
    #[serde(skip_serializing_if = "RecoveryAction::is_none")]
    pub recovery_action: RecoveryAction,
    /// Overrides the world's MIG mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
    /// Processes outside the fake world that hold memory on the GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ForeignProcess>,
    /// Corrected (single-bit) memory errors since the driver was loaded.
    pub ecc_corrected: u64,
    /// Uncorrected (double-bit) memory errors since the driver was loaded.
    pub ecc_uncorrected: u64,
    /// Percent of time with a running kernel; absent: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<u32>,
    /// Degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<u32>,
}

/// Recovery action before a GPU can be used again; the numbers are NVML's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[repr(u32)]
pub enum RecoveryAction {
    /// No action.
    #[default]
    None = 0,
    /// All processes exit, then the GPU is reset.
    GpuReset = 1,
    /// The node is rebooted.
    NodeReboot = 2,
    /// Processes that use peer-to-peer exit.
    DrainP2p = 3,
    /// The GPU is reset after its processes have exited.
    DrainAndReset = 4,
}

impl RecoveryAction {
    /// All recovery actions.
    pub const ALL: [Self; 5] =
        [Self::None, Self::GpuReset, Self::NodeReboot, Self::DrainP2p, Self::DrainAndReset];

    /// Returns true if no action is needed.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::GpuReset => "gpu-reset",
            Self::NodeReboot => "node-reboot",
            Self::DrainP2p => "drain-p2p",
            Self::DrainAndReset => "drain-and-reset",
        }
    }

    /// Returns the action of a name on the command line.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }
}

/// XID of a changed recovery action.
const RECOVERY_ACTION_CHANGED: u64 = 154;

/// A process that holds GPU memory without the fake CUDA library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ForeignProcess {
    /// PID.
    pub pid: u32,
    /// MiB of GPU memory.
    #[serde(rename = "usedMiB")]
    pub used_mib: u64,
    /// Name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

/// An event of a GPU. It is delivered once to each waiter that was registered before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Event {
    /// Id, which increases with every event. An id is delivered only once.
    pub id: u64,
    /// UUID of the GPU.
    pub gpu: String,
    /// Kind: `{xid: 79}`, `eccSingleBit` or `eccDoubleBit`.
    pub kind: EventKind,
}

/// Kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EventKind {
    /// An XID of the kernel driver.
    Xid(u64),
    /// A single-bit ECC error.
    EccSingleBit,
    /// A double-bit ECC error.
    EccDoubleBit,
}

/// `control.yaml`, which is read again after each change.
///
/// A missing file is an empty one. A malformed file is reported once on stderr, and the last valid
/// content stays in effect: a typing error must not restore a lost GPU.
#[derive(Debug)]
pub struct ControlFile {
    path: PathBuf,
    cache: Mutex<CachedControl>,
}

#[derive(Debug, Default)]
struct CachedControl {
    stamp: Option<Stamp>,
    control: Arc<Control>,
}

/// File attributes that change when the file is written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl ControlFile {
    /// Returns the control file at a path, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), cache: Mutex::default() }
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file's content. Costs one `stat` if the file is unchanged.
    pub fn read(&self) -> Arc<Control> {
        let stamp = fs::metadata(&self.path).ok().map(|meta| Stamp {
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        });
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.stamp == stamp {
            return Arc::clone(&cache.control);
        }
        cache.stamp = stamp;
        match self.decode() {
            Ok(control) => cache.control = Arc::new(control),
            Err(error) => {
                eprintln!(
                    "tessera-fake-world: cannot read {}, keeping its last content: {error}",
                    self.path.display()
                )
            }
        }
        Arc::clone(&cache.control)
    }

    /// Reads the file, edits it with `change`, and replaces it atomically. Writers wait for each
    /// other.
    ///
    /// # Errors
    /// Returns an error if the file is malformed or cannot be written.
    pub fn update(&self, change: impl FnOnce(&mut Control)) -> io::Result<()> {
        let lock = fs::File::create(self.path.with_extension("lock"))?;
        lock.lock()?;
        let mut control = self.decode()?;
        change(&mut control);
        let text = serde_saphyr::to_string(&control).map_err(io::Error::other)?;
        atomic_file::write(&self.path, text.as_bytes(), 0o644)
    }

    fn decode(&self) -> io::Result<Control> {
        match fs::read_to_string(&self.path) {
            Ok(text) if text.trim().is_empty() => Ok(Control::default()),
            Ok(text) => serde_saphyr::from_str(&text).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Control::default()),
            Err(error) => Err(error),
        }
    }
}

impl Control {
    /// Returns the condition of a GPU for editing.
    pub fn gpu_mut(&mut self, uuid: &str) -> &mut GpuCondition {
        self.gpus.entry(uuid.to_owned()).or_default()
    }

    /// Returns the condition of a GPU, if the file has one.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuCondition> {
        self.gpus.get(uuid)
    }

    /// Returns true if the GPU fell off the bus.
    pub fn is_lost(&self, uuid: &str) -> bool {
        self.gpu(uuid).is_some_and(|gpu| gpu.lost)
    }

    /// Returns the highest event id, or 0.
    pub fn last_event(&self) -> u64 {
        self.events.iter().map(|event| event.id).max().unwrap_or(0)
    }

    /// Adds an event.
    pub fn push_event(&mut self, gpu: &str, kind: EventKind) {
        let id = self.last_event() + 1;
        self.events.push(Event { id, gpu: gpu.to_owned(), kind });
    }

    /// Adds an XID and sets the recovery action. Like the real driver, it also adds XID 154 if the
    /// action changes.
    pub fn report_xid(&mut self, gpu: &str, code: u64, action: RecoveryAction) {
        self.push_event(gpu, EventKind::Xid(code));
        let condition = self.gpu_mut(gpu);
        if condition.recovery_action != action {
            condition.recovery_action = action;
            self.push_event(gpu, EventKind::Xid(RECOVERY_ACTION_CHANGED));
        }
    }

    /// Resets the GPU: it answers again, needs no recovery action, and its error counters are zero.
    /// No event is added.
    pub fn reset(&mut self, gpu: &str) {
        let condition = self.gpu_mut(gpu);
        condition.lost = false;
        condition.hung = false;
        condition.recovery_action = RecoveryAction::None;
        condition.ecc_corrected = 0;
        condition.ecc_uncorrected = 0;
    }

    /// Returns true if the GPU hangs.
    pub fn is_hung(&self, uuid: &str) -> bool {
        self.gpu(uuid).is_some_and(|gpu| gpu.hung)
    }

    /// Returns the bytes of foreign processes on the GPU.
    pub fn foreign_bytes(&self, uuid: &str) -> u64 {
        let processes = self.gpu(uuid).map(|gpu| gpu.processes.as_slice()).unwrap_or_default();
        processes.iter().map(|process| process.used_mib * 1024 * 1024).sum()
    }
}

#[cfg(test)]
mod tests;
