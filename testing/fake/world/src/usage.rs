//! What processes hold: bytes per process and GPU, in one file that they all map.
//!
//! ```text
//!  header | slot 0 | slot 1 | ...          one slot per living process that has taken memory
//!           ^ byte lock 0 held by its owner
//! ```
//!
//! The sum over the slots *is* the use of a GPU: there is no second number that could drift. A slot
//! lives as long as the lock on its byte is held, and the kernel lets go of it when the process's
//! address space goes away, however that happens (see `Claim` in `usage/region.rs`). Whoever next
//! needs to know what is used clears the slots of the dead.

mod region;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::locate::StatePlace;
use crate::world::World;
use region::{Claim, Region, SLOTS, Slot};

/// Why the shared state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The file cannot be made, opened, mapped or locked.
    #[error("cannot use the state file `{path}`")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file was made by another version of this crate, or by nobody.
    #[error("the state file `{path}` is of another version: remove it when nothing uses it")]
    OtherVersion {
        /// The file.
        path: PathBuf,
    },
}

/// The GPU has not that much memory left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes are not free")]
pub struct OutOfMemory {
    /// What was asked for, in bytes.
    pub asked: u64,
}

/// What one process holds on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessUse {
    /// Its id, as the calling process would name it.
    pub pid: u32,
    /// Its name (`comm`).
    pub name: String,
    /// Bytes.
    pub bytes: u64,
}

/// Bytes per process and GPU.
#[derive(Debug)]
pub struct Usage {
    region: Region,
    /// This process's slot, once it has taken something. After a fork the child's is its own.
    claim: Mutex<Option<Claim>>,
    /// `claim`'s slot + 1, for the fast path; 0 = none.
    slot: AtomicU64,
}

/// Worlds with other GPUs have other files, so that one can take the place of another while old
/// processes end.
fn file_name(fingerprint: u64) -> String {
    format!("usage-{fingerprint:016x}")
}

/// Whether state can be shared in that directory: it exists or can be made, and files can be
/// written in it.
pub(crate) fn can_share(directory: &Path) -> bool {
    make_directory(directory).is_ok() && region::is_writable(directory)
}

/// Everybody may make files in it, like `/tmp`: containers run as any user.
fn make_directory(directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o1777))
}

impl Usage {
    /// Opens the usage of a world's GPUs.
    ///
    /// # Errors
    /// The file cannot be used, or belongs to another world.
    pub fn open(place: &StatePlace, world: &World) -> Result<Self, UsageError> {
        let fingerprint = fingerprint(world);
        let region = match place {
            StatePlace::Shared(directory) => {
                let path = directory.join(file_name(fingerprint));
                make_directory(directory)
                    .map_err(|source| UsageError::File { path: directory.clone(), source })?;
                Region::open(&path, fingerprint)
                    .map_err(|source| UsageError::File { path, source })?
            }
            StatePlace::Process => Region::in_memory(fingerprint)
                .map_err(|source| UsageError::File { path: PathBuf::from("(memory)"), source })?,
        };
        if !region.matches(fingerprint) {
            return Err(UsageError::OtherVersion { path: region.path().to_owned() });
        }
        Ok(Self { region, claim: Mutex::new(None), slot: AtomicU64::new(0) })
    }

    /// Charges this process with bytes of a GPU, unless all processes together would then hold more
    /// than `capacity` bytes. Safe against other threads and processes doing the same: never
    /// more than `capacity` is granted, and a refusal in a race for the last bytes may hit
    /// both.
    ///
    /// # Errors
    /// The GPU is full.
    pub fn take(&self, gpu: usize, bytes: u64, capacity: u64) -> Result<(), OutOfMemory> {
        let refused = OutOfMemory { asked: bytes };
        if bytes > capacity {
            return Err(refused);
        }
        let slot = self.own_slot().ok_or(refused)?;
        slot.bytes[gpu].fetch_add(bytes, Ordering::SeqCst);
        if self.sum(gpu) <= capacity {
            return Ok(());
        }
        self.clear_the_dead();
        if self.sum(gpu) <= capacity {
            return Ok(());
        }
        slot.bytes[gpu].fetch_sub(bytes, Ordering::SeqCst);
        Err(refused)
    }

    /// Gives bytes of a GPU back. More than this process holds is ignored.
    pub fn give_back(&self, gpu: usize, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            let less = |held: u64| Some(held.saturating_sub(bytes));
            // The closure never refuses.
            let _ = slot.bytes[gpu].fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// Bytes of a GPU that this process holds.
    pub fn own(&self, gpu: usize) -> u64 {
        self.current_slot().map_or(0, |slot| slot.bytes[gpu].load(Ordering::SeqCst))
    }

    /// Bytes of a GPU that all living processes hold.
    pub fn total(&self, gpu: usize) -> u64 {
        self.clear_the_dead();
        self.sum(gpu)
    }

    /// Living processes that hold bytes of a GPU. One whose PID namespace cannot be seen from here
    /// is counted in [`Usage::total`] but not listed: it has no id here.
    pub fn processes(&self, gpu: usize) -> Vec<ProcessUse> {
        self.clear_the_dead();
        let in_use = self.region.used_slots().iter().filter_map(|slot| {
            let bytes = slot.bytes[gpu].load(Ordering::SeqCst);
            (bytes > 0).then(|| {
                Some(ProcessUse { pid: slot.pid_seen_from_here()?, name: slot.name(), bytes })
            })?
        });
        in_use.collect()
    }

    fn sum(&self, gpu: usize) -> u64 {
        let held =
            self.region.used_slots().iter().map(|slot| slot.bytes[gpu].load(Ordering::SeqCst));
        held.fold(0, u64::saturating_add)
    }

    /// The slot of this process, if it has one.
    fn current_slot(&self) -> Option<&Slot> {
        if self.region.was_forked() {
            return None;
        }
        let slot = self.slot.load(Ordering::Acquire).checked_sub(1)?;
        self.region.slots().get(slot as usize)
    }

    /// The slot of this process; claims one if it has none. `None` where all are taken.
    fn own_slot(&self) -> Option<&Slot> {
        if let Some(slot) = self.current_slot() {
            return Some(slot);
        }
        let mut claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = self.current_slot() {
            return Some(slot);
        }
        if self.region.was_forked()
            && let Some(parents) = claim.take()
        {
            parents.forget();
        }
        let mine = (0..SLOTS).find_map(|slot| self.region.claim(slot).ok().flatten())?;
        self.slot.store(mine.slot() as u64 + 1, Ordering::Release);
        self.region.set_owned();
        *claim = Some(mine);
        drop(claim);
        self.current_slot()
    }

    fn clear_the_dead(&self) {
        for (index, slot) in self.region.used_slots().iter().enumerate() {
            let empty = slot.bytes.iter().all(|bytes| bytes.load(Ordering::SeqCst) == 0);
            if !empty && !self.region.is_alive(index) {
                // Claimed, emptied and let go: nobody else can move in meanwhile.
                drop(self.region.claim(index));
            }
        }
    }
}

/// Which GPUs the columns are: FNV-1a over the UUIDs, in order.
fn fingerprint(world: &World) -> u64 {
    let bytes = world.gpus.iter().flat_map(|gpu| gpu.uuid.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The PID namespace of this process.
fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino())
}

impl Slot {
    fn describe_this_process(&self) {
        let name = fs::read_to_string("/proc/self/comm").unwrap_or_default();
        self.set_name(name.trim());
        self.namespace.store(own_namespace(), Ordering::SeqCst);
        self.pid.store(std::process::id(), Ordering::SeqCst);
    }

    /// The owner's id in this process's PID namespace.
    fn pid_seen_from_here(&self) -> Option<u32> {
        let (pid, namespace) =
            (self.pid.load(Ordering::SeqCst), self.namespace.load(Ordering::SeqCst));
        if namespace == own_namespace() { Some(pid) } else { translate(pid, namespace) }
    }
}

/// Finds the process that another PID namespace calls `pid`; works for namespaces below this one.
fn translate(pid: u32, namespace: u64) -> Option<u32> {
    let is_it = |here: &u32| {
        let same =
            fs::metadata(format!("/proc/{here}/ns/pid")).is_ok_and(|meta| meta.ino() == namespace);
        same && innermost_pid(*here) == Some(pid)
    };
    let entries = fs::read_dir("/proc").ok()?;
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .find(is_it)
}

fn innermost_pid(here: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{here}/status")).ok()?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests;
