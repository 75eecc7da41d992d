//! File in which HAMi's monitor reads a container's usage, and through which it lifts limits and
//! holds launches: version 1.2 of the layout.
//!
//! Source: `src/multiprocess/multiprocess_memory_limit.h` of HAMi-core, and
//! `pkg/monitor/nvidia/v1/spec.go` of HAMi 2.9. All words are in the machine's byte order.

use core::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::GPUS;

/// Places for processes.
pub const PROCESSES: usize = 1024;

/// Length of the file in bytes.
pub const REGION_LEN: usize = size_of::<Region>();

/// Value of [`Region::utilization_switch`] while compute limits apply.
pub const LIMITS_APPLY: i32 = 1;

/// Value of [`Region::recent_kernel`] that HAMi-core writes at a launch. The monitor subtracts 1
/// every five seconds.
pub const LAUNCHED: i32 = 2;

/// Value of [`Region::magic`].
const MAGIC: i32 = 19_920_718;

/// Value of [`Region::mark`]: "TESSERA1".
const MARK: u64 = u64::from_le_bytes(*b"TESSERA1");

/// Length of the field for a UUID.
const UUID_ROOM: usize = 96;

/// The file.
#[repr(C)]
#[derive(Debug)]
pub struct Region {
    magic: AtomicI32,
    major_version: AtomicU32,
    minor_version: AtomicU32,
    has_initialized_compute: AtomicI32,
    owner_pid: AtomicU64,
    semaphore: [AtomicU64; 4],
    /// GPUs whose entries the monitor reads: one more than the last one in use.
    gpu_count: AtomicU64,
    /// UUIDs as text, terminated; the first byte is 0 without one.
    uuids: [[AtomicU8; UUID_ROOM]; GPUS],
    /// Limits of memory in bytes; 0: none.
    pub memory_limit: [AtomicU64; GPUS],
    /// Limits of compute in percent; 0: none.
    pub cores_percent: [AtomicU64; GPUS],
    /// Processes of the container.
    pub processes: [Process; PROCESSES],
    /// Number of places of `processes` that the monitor reads.
    process_count: AtomicI32,
    /// 0 if the monitor lifts the limits of compute: the container is alone on its GPUs.
    pub utilization_switch: AtomicI32,
    /// Above 0 after a launch, below 0 while the monitor holds launches.
    pub recent_kernel: AtomicI32,
    /// Priority of the container; 0 is the highest.
    pub priority: AtomicI32,
    /// Time of the last launch in seconds since 1970.
    pub last_kernel_seconds: AtomicU64,
    /// [`MARK`] if this library initialized the file. HAMi-core has a semaphore here, which the
    /// monitor does not read.
    mark: AtomicU64,
    reserved: [AtomicU64; 3],
}

/// A process.
#[repr(C)]
#[derive(Debug)]
pub struct Process {
    /// Its id in its own PID namespace.
    pub pid: AtomicI32,
    host_pid: AtomicI32,
    memory: [Memory; GPUS],
    measured_memory: [AtomicU64; GPUS],
    utilization: [Utilization; GPUS],
    /// 1 if the monitor is to read the place.
    status: AtomicI32,
    sequence: AtomicU64,
    reserved: [AtomicU64; 2],
}

/// GPU memory of a process in bytes.
#[repr(C)]
#[derive(Debug)]
struct Memory {
    contexts: AtomicU64,
    modules: AtomicU64,
    allocations: AtomicU64,
    offset: AtomicU64,
    total: AtomicU64,
    reserved: [AtomicU64; 3],
}

/// Utilization of a GPU by a process in percent.
#[repr(C)]
#[derive(Debug)]
struct Utilization {
    decoder: AtomicU64,
    encoder: AtomicU64,
    compute: AtomicU64,
    reserved: [AtomicU64; 3],
}

const _: () = {
    assert!(size_of::<Process>() == 1960);
    assert!(REGION_LEN == 2_008_952);
    assert!(core::mem::offset_of!(Region, uuids) == 64);
    assert!(core::mem::offset_of!(Region, processes) == 1856);
    assert!(core::mem::offset_of!(Region, last_kernel_seconds) == 2_008_912);
};

impl Region {
    /// Returns true if this library initialized the file.
    #[must_use]
    pub fn is_initialized(&self) -> bool {
        self.mark.load(Ordering::Acquire) == MARK && self.magic.load(Ordering::Acquire) == MAGIC
    }

    /// Initializes a new file, or one that HAMi-core has left behind. `process_count`: places of
    /// processes in use. No other process may do so at the same time.
    pub fn initialize(&self, process_count: i32) {
        self.magic.store(0, Ordering::Release);
        self.processes.iter().for_each(Process::clear);
        self.uuids.iter().flatten().for_each(|byte| byte.store(0, Ordering::Relaxed));
        self.gpu_count.store(0, Ordering::Relaxed);
        self.process_count.store(process_count, Ordering::Relaxed);
        self.utilization_switch.store(LIMITS_APPLY, Ordering::Relaxed);
        self.recent_kernel.store(LAUNCHED, Ordering::Relaxed);
        self.major_version.store(1, Ordering::Relaxed);
        self.minor_version.store(2, Ordering::Relaxed);
        self.mark.store(MARK, Ordering::Relaxed);
        self.magic.store(MAGIC, Ordering::Release);
    }

    /// Returns the index of a GPU by its UUID as text; adds it at `index`, or, if another one is
    /// there or it is not known, at the first free index. `None` if all are in use. No other
    /// process may add one at the same time.
    pub fn place_of(&self, uuid: &[u8], index: Option<usize>) -> Option<usize> {
        if let Some(known) = (0..GPUS).find(|gpu| self.is_uuid(*gpu, uuid)) {
            return Some(known);
        }
        let is_free = |gpu: &usize| {
            self.uuids.get(*gpu).is_some_and(|text| text[0].load(Ordering::Relaxed) == 0)
        };
        let gpu = index.filter(is_free).or_else(|| (0..GPUS).find(is_free))?;
        let place = self.uuids.get(gpu)?;
        // The first byte last: it says that there is a UUID.
        for (to, byte) in place.iter().zip(uuid.iter().take(UUID_ROOM - 1)).rev() {
            to.store(*byte, Ordering::Release);
        }
        self.gpu_count.fetch_max(gpu as u64 + 1, Ordering::Release);
        Some(gpu)
    }

    fn is_uuid(&self, gpu: usize, uuid: &[u8]) -> bool {
        let Some(place) = self.uuids.get(gpu) else { return false };
        let text = uuid.iter().copied().chain([0]);
        place.iter().zip(text).all(|(known, byte)| known.load(Ordering::Acquire) == byte)
    }
}

impl Process {
    /// Shows the memory that the process holds on a GPU, in bytes.
    pub fn show_memory(&self, gpu: usize, bytes: u64) {
        if let Some(memory) = self.memory.get(gpu) {
            memory.allocations.store(bytes, Ordering::Relaxed);
            memory.total.store(bytes, Ordering::Relaxed);
        }
        self.status.store(1, Ordering::Release);
    }

    /// Shows the percent of a GPU's time that the process uses.
    pub fn show_utilization(&self, gpu: usize, percent: u64) {
        if let Some(utilization) = self.utilization.get(gpu) {
            utilization.compute.store(percent, Ordering::Relaxed);
        }
    }

    fn clear(&self) {
        (0..GPUS).for_each(|gpu| {
            self.show_memory(gpu, 0);
            self.show_utilization(gpu, 0);
        });
        let memory = self.memory.iter().flat_map(|memory| [&memory.contexts, &memory.modules]);
        memory.for_each(|word| word.store(0, Ordering::Relaxed));
        self.pid.store(0, Ordering::Relaxed);
        self.status.store(0, Ordering::Relaxed);
    }
}
