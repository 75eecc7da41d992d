//! Usage: bytes and kernel time per process and GPU, in one file that all processes map.
//!
//! ```text
//!  header | slot 0 | slot 1 | ...          one slot per living process that has used memory
//!           ^ byte lock 0 held by its owner
//! ```
//!
//! The usage of a GPU *is* the sum over the slots; there is no second number that could drift. A
//! slot is valid while the lock on its byte is held. The kernel releases the lock when the
//! process's address space goes away, for any reason (see `Claim` in `usage/region.rs`). The next
//! process that reads the usage clears the slots of dead processes.

mod region;
mod shared;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::locate::StateLocation;
use crate::world::World;
use region::{Claim, Region, SLOTS, Slot};
pub use shared::ExportedMemory;

/// Error of a charge that exceeds the free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of GPU memory: {requested} bytes requested")]
pub struct OutOfMemory {
    /// Requested bytes.
    pub requested: u64,
}

/// Memory of one process on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessUsage {
    /// PID in the caller's PID namespace.
    pub pid: u32,
    /// Name (`comm`).
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Time in ns that its kernels have run; `None` if it is no process of the fake CUDA.
    pub gpu_ns: Option<u64>,
}

/// Memory usage per process and GPU.
#[derive(Debug)]
pub struct Usage {
    region: Region,
    /// Slot of this process, if it has used memory. After a fork the child has its own.
    claim: Mutex<Option<Claim>>,
    /// Index of the slot + 1, for the fast path; 0: none.
    slot: AtomicU64,
}

/// Returns the file name. Worlds with different GPUs have different files, so that a world can be
/// replaced while processes of the old one exit.
fn file_name(fingerprint: u64) -> String {
    format!("usage-{fingerprint:016x}")
}

/// Returns true if the directory exists or can be created, and is writable.
pub(crate) fn can_share(directory: &Path) -> bool {
    make_directory(directory).is_ok() && region::is_writable(directory)
}

/// Creates a directory in which all users can create files, like `/tmp`: containers run as any
/// user.
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
    /// Returns an error if the file cannot be used or belongs to another world.
    pub fn open(location: &StateLocation, world: &World) -> anyhow::Result<Self> {
        let fingerprint = fingerprint(world);
        let region = match location {
            StateLocation::Shared(directory) => {
                let path = directory.join(file_name(fingerprint));
                make_directory(directory)
                    .and_then(|()| Region::open(&path, fingerprint))
                    .with_context(|| format!("cannot use the state file `{}`", path.display()))?
            }
            StateLocation::Process => {
                Region::in_memory(fingerprint).context("cannot create a state in memory")?
            }
        };
        ensure!(
            region.matches(fingerprint),
            "unsupported version of state file `{}`: remove it when no process uses it",
            region.path().display()
        );
        Ok(Self { region, claim: Mutex::new(None), slot: AtomicU64::new(0) })
    }

    /// Charges bytes of a GPU to this process, unless the usage of all processes would exceed
    /// `capacity`.
    ///
    /// Safe against concurrent threads and processes: the usage never exceeds `capacity`. In a race
    /// for the last bytes both charges may fail.
    ///
    /// # Errors
    /// Returns an error if the GPU is full.
    pub fn charge(&self, gpu: usize, bytes: u64, capacity: u64) -> Result<(), OutOfMemory> {
        let error = OutOfMemory { requested: bytes };
        if bytes > capacity {
            return Err(error);
        }
        let slot = self.own_slot().ok_or(error)?;
        slot.bytes[gpu].fetch_add(bytes, Ordering::SeqCst);
        if self.sum(gpu) <= capacity {
            return Ok(());
        }
        self.clear_dead_slots();
        if self.sum(gpu) <= capacity {
            return Ok(());
        }
        slot.bytes[gpu].fetch_sub(bytes, Ordering::SeqCst);
        Err(error)
    }

    /// Refunds bytes of a GPU. Bytes beyond this process's usage are ignored.
    pub fn refund(&self, gpu: usize, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            let less = |held: u64| Some(held.saturating_sub(bytes));
            // The closure always returns a value.
            let _ = slot.bytes[gpu].fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// Adds a kernel of this process that ends after `ends_in`. `length` is the part of its time in
    /// which no other kernel of the process runs.
    pub fn work(&self, gpu: usize, length: Duration, ends_in: Duration) {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(slot) = self.current_slot() {
            slot.kernels_ns[gpu].fetch_add(ns(length), Ordering::SeqCst);
            let until = monotonic_ns().saturating_add(ns(ends_in));
            slot.busy_until_ns[gpu].fetch_max(until, Ordering::SeqCst);
        }
    }

    /// Returns the bytes of a GPU that this process holds.
    pub fn own(&self, gpu: usize) -> u64 {
        self.current_slot().map_or(0, |slot| slot.bytes[gpu].load(Ordering::SeqCst))
    }

    /// Returns the bytes of a GPU that all living processes hold.
    pub fn total(&self, gpu: usize) -> u64 {
        self.clear_dead_slots();
        self.sum(gpu)
    }

    /// Returns the living processes that hold bytes of a GPU. A process of an invisible PID
    /// namespace is counted in [`Usage::total`], but not listed, because it has no PID here.
    pub fn processes(&self, gpu: usize) -> Vec<ProcessUsage> {
        self.clear_dead_slots();
        let in_use = self.region.used_slots().iter().enumerate().filter_map(|(index, slot)| {
            let bytes = slot.bytes[gpu].load(Ordering::SeqCst) + self.inherited(index, gpu);
            (bytes > 0).then(|| {
                let gpu_ns = Some(slot.executed_ns(gpu));
                Some(ProcessUsage { pid: slot.local_pid()?, name: slot.name(), bytes, gpu_ns })
            })?
        });
        in_use.collect()
    }

    fn sum(&self, gpu: usize) -> u64 {
        let slots = self.region.used_slots().iter().enumerate();
        let held = slots.map(|(index, slot)| {
            slot.bytes[gpu].load(Ordering::SeqCst).saturating_add(self.inherited(index, gpu))
        });
        held.fold(0, u64::saturating_add)
    }

    /// Returns the slot of this process, if any.
    fn current_slot(&self) -> Option<&Slot> {
        if self.region.was_forked() {
            return None;
        }
        let slot = self.slot.load(Ordering::Acquire).checked_sub(1)?;
        self.region.slots().get(slot as usize)
    }

    /// Returns the slot of this process and claims one if necessary. `None` if all are in use.
    fn own_slot(&self) -> Option<&Slot> {
        if let Some(slot) = self.current_slot() {
            return Some(slot);
        }
        let mut claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = self.current_slot() {
            return Some(slot);
        }
        if self.region.was_forked()
            && let Some(parent) = claim.take()
        {
            parent.abandon();
        }
        let own = (0..SLOTS).find_map(|slot| self.region.claim(slot).ok().flatten())?;
        self.slot.store(own.slot() as u64 + 1, Ordering::Release);
        self.region.set_owned();
        *claim = Some(own);
        drop(claim);
        self.current_slot()
    }

    fn clear_dead_slots(&self) {
        for (index, slot) in self.region.used_slots().iter().enumerate() {
            let empty = slot.bytes.iter().all(|bytes| bytes.load(Ordering::SeqCst) == 0);
            if !empty && !self.region.is_alive(index) {
                // The claim clears the slot and holds its lock meanwhile.
                drop(self.region.claim(index));
            }
        }
    }
}

/// Returns a fingerprint of the GPUs: FNV-1a over the UUIDs, in order.
fn fingerprint(world: &World) -> u64 {
    let bytes = world.gpus.iter().flat_map(|gpu| gpu.uuid.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Returns the monotonic time, which all processes share, in ns.
fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// Returns the PID namespace of this process.
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

    /// Returns the time in which its kernels have run. The GPU is not idle before the last queued
    /// one ends.
    fn executed_ns(&self, gpu: usize) -> u64 {
        let queued = self.busy_until_ns[gpu].load(Ordering::SeqCst).saturating_sub(monotonic_ns());
        self.kernels_ns[gpu].load(Ordering::SeqCst).saturating_sub(queued)
    }

    /// Returns the owner's PID in this process's PID namespace.
    fn local_pid(&self) -> Option<u32> {
        let (pid, namespace) =
            (self.pid.load(Ordering::SeqCst), self.namespace.load(Ordering::SeqCst));
        if namespace == own_namespace() { Some(pid) } else { translate(pid, namespace) }
    }
}

/// Translates a PID of another PID namespace; works for descendants of this one.
fn translate(pid: u32, namespace: u64) -> Option<u32> {
    let matches = |candidate: &u32| {
        let same = fs::metadata(format!("/proc/{candidate}/ns/pid"))
            .is_ok_and(|meta| meta.ino() == namespace);
        same && innermost_pid(*candidate) == Some(pid)
    };
    let entries = fs::read_dir("/proc").ok()?;
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .find(matches)
}

fn innermost_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests;
