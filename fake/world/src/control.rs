//! `control.yaml`: what happens to the machine while it runs.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

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
/// A file that is not there is an empty one. A malformed one is complained about on stderr, once, and what was read last
/// stays in force: a typing error must not bring a lost GPU back.
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
            Err(error) => eprintln!("tessera-fake-world: {} stays as it was: {error}", self.path.display()),
        }
        Arc::clone(&seen.control)
    }

    /// Changes the file: reads it, lets `change` edit it, and replaces it in one step. Writers wait for each other.
    ///
    /// # Errors
    /// The file is malformed, or cannot be written.
    pub fn update(&self, change: impl FnOnce(&mut Control)) -> io::Result<()> {
        let lock = fs::File::create(self.path.with_extension("lock"))?;
        lock.lock()?;
        let mut control = self.decode()?;
        change(&mut control);
        let text = serde_saphyr::to_string(&control).map_err(io::Error::other)?;
        let temporary = self.path.with_extension("new");
        let mut file = fs::File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&temporary, &self.path)
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

    /// Bytes that foreign processes hold on that GPU.
    pub fn foreign_bytes(&self, uuid: &str) -> u64 {
        let processes = self.gpu(uuid).map(|gpu| gpu.processes.as_slice()).unwrap_or_default();
        processes.iter().map(|process| process.used_mib * 1024 * 1024).sum()
    }
}

#[cfg(test)]
mod tests;
