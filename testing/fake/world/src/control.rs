//! `control.yaml`: what happens to the machine while it runs.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tessera_runtime::atomic_file;

/// Everything that deviates from a healthy, idle machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Control {
    /// Per GPU UUID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<String, GpuCondition>,
    /// Events, oldest first, ids rising.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
    /// NVML finds no driver: `nvmlInit` and `cuInit` fail.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub driver_not_loaded: bool,
}

/// The condition of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct GpuCondition {
    /// It fell off the bus: every call on it answers `GPU_IS_LOST`.
    pub lost: bool,
    /// It hangs: every call on it fails with `UNKNOWN`, and waiting for its events with
    /// `GPU_IS_LOST`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hung: bool,
    /// What the kernel driver says has to be done before it can be used again.
    #[serde(skip_serializing_if = "RecoveryAction::is_none")]
    pub recovery_action: RecoveryAction,
    /// Overrides the world's MIG mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
    /// Processes outside the fake world that hold memory on it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ForeignProcess>,
    /// Corrected (single bit) memory errors since the driver was loaded.
    pub ecc_corrected: u64,
    /// Uncorrected (double bit) memory errors since the driver was loaded.
    pub ecc_uncorrected: u64,
    /// Percent of time with a kernel running; absent = derived (0 without processes).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<u32>,
    /// Degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<u32>,
}

/// What has to be done before a GPU can be used again; the numbers are NVML's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[repr(u32)]
pub enum RecoveryAction {
    /// Nothing.
    #[default]
    None = 0,
    /// Its processes end, then it is reset.
    GpuReset = 1,
    /// The node is booted again.
    NodeReboot = 2,
    /// Processes that use peer-to-peer end.
    DrainP2p = 3,
    /// It is reset once its processes have ended.
    DrainAndReset = 4,
}

impl RecoveryAction {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::None, Self::GpuReset, Self::NodeReboot, Self::DrainP2p, Self::DrainAndReset];

    /// Whether nothing is to be done.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// The word used on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::GpuReset => "gpu-reset",
            Self::NodeReboot => "node-reboot",
            Self::DrainP2p => "drain-p2p",
            Self::DrainAndReset => "drain-and-reset",
        }
    }

    /// By that word.
    pub fn by_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.word() == word)
    }
}

/// The XID by which the kernel driver announces another recovery action.
const RECOVERY_ACTION_CHANGED: u64 = 154;

/// A process that holds GPU memory without using the fake CUDA library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ForeignProcess {
    /// Its process id.
    pub pid: u32,
    /// MiB of GPU memory.
    #[serde(rename = "usedMiB")]
    pub used_mib: u64,
    /// Its name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

/// Something that happened to a GPU at one moment. Who waits for events at that time is told, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Event {
    /// Rises with every event; an id seen once is never delivered again.
    pub id: u64,
    /// UUID of the GPU.
    pub gpu: String,
    /// What happened: `{xid: 79}`, `eccSingleBit` or `eccDoubleBit`.
    pub kind: EventKind,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EventKind {
    /// An XID, as the kernel driver logs them.
    Xid(u64),
    /// A single-bit ECC error.
    EccSingleBit,
    /// A double-bit ECC error.
    EccDoubleBit,
}

/// `control.yaml`, read again whenever it has changed.
///
/// A file that is not there is an empty one. A malformed one is complained about on stderr, once,
/// and what was read last stays in force: a typing error must not bring a lost GPU back.
#[derive(Debug)]
pub struct ControlFile {
    path: PathBuf,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    stamp: Option<Stamp>,
    control: Arc<Control>,
}

/// Changes whenever the file is written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl ControlFile {
    /// The control file at that path; it need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), seen: Mutex::default() }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says now. Costs one `stat` where nothing has changed.
    pub fn read(&self) -> Arc<Control> {
        let stamp = fs::metadata(&self.path).ok().map(|meta| Stamp {
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        });
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.stamp == stamp {
            return Arc::clone(&seen.control);
        }
        seen.stamp = stamp;
        match self.decode() {
            Ok(control) => seen.control = Arc::new(control),
            Err(error) => {
                eprintln!("tessera-fake-world: {} stays as it was: {error}", self.path.display())
            }
        }
        Arc::clone(&seen.control)
    }

    /// Changes the file: reads it, lets `change` edit it, and replaces it in one step. Writers wait
    /// for each other.
    ///
    /// # Errors
    /// The file is malformed, or cannot be written.
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
    /// The condition of that GPU, to be edited.
    pub fn gpu_mut(&mut self, uuid: &str) -> &mut GpuCondition {
        self.gpus.entry(uuid.to_owned()).or_default()
    }

    /// The condition of that GPU, if the file says anything about it.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuCondition> {
        self.gpus.get(uuid)
    }

    /// Whether that GPU fell off the bus.
    pub fn is_lost(&self, uuid: &str) -> bool {
        self.gpu(uuid).is_some_and(|gpu| gpu.lost)
    }

    /// The highest event id so far; 0 where there is none.
    pub fn last_event(&self) -> u64 {
        self.events.iter().map(|event| event.id).max().unwrap_or(0)
    }

    /// Adds an event.
    pub fn push_event(&mut self, gpu: &str, kind: EventKind) {
        let id = self.last_event() + 1;
        self.events.push(Event { id, gpu: gpu.to_owned(), kind });
    }

    /// An XID after which the kernel driver asks for that action; as the real one, it announces a
    /// change of it.
    pub fn report_xid(&mut self, gpu: &str, code: u64, action: RecoveryAction) {
        self.push_event(gpu, EventKind::Xid(code));
        let condition = self.gpu_mut(gpu);
        if condition.recovery_action != action {
            condition.recovery_action = action;
            self.push_event(gpu, EventKind::Xid(RECOVERY_ACTION_CHANGED));
        }
    }

    /// The GPU is reset: it answers again, nothing is to be done any more, and its error counters
    /// begin anew. No event tells.
    pub fn reset(&mut self, gpu: &str) {
        let condition = self.gpu_mut(gpu);
        condition.lost = false;
        condition.hung = false;
        condition.recovery_action = RecoveryAction::None;
        condition.ecc_corrected = 0;
        condition.ecc_uncorrected = 0;
    }

    /// Whether that GPU hangs.
    pub fn is_hung(&self, uuid: &str) -> bool {
        self.gpu(uuid).is_some_and(|gpu| gpu.hung)
    }

    /// Bytes that foreign processes hold on that GPU.
    pub fn foreign_bytes(&self, uuid: &str) -> u64 {
        let processes = self.gpu(uuid).map(|gpu| gpu.processes.as_slice()).unwrap_or_default();
        processes.iter().map(|process| process.used_mib * 1024 * 1024).sum()
    }
}

#[cfg(test)]
mod tests;
