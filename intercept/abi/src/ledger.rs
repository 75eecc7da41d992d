//! Ledger: the use of one GPU by the processes of a claim.
//!
//! One page of totals, then [`SLOTS`] slots of [`SLOT_LEN`] bytes, one for each process that uses
//! the GPU. Slots never move. The process with the lock on byte [`LOCK_OFFSET`]` + index` of the
//! file (an open file description lock, on bytes that the file need not have) owns the slot. The
//! kernel releases the lock when the process ends, however it ends.

use core::fmt;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::compute::{ComputePage, ComputeSlot, busy};
use crate::{ABI_VERSION, GRANT_LEN, LEDGER_LEN};

/// `TESLEDGR` in the first eight bytes of the file.
pub const MAGIC: u64 = u64::from_le_bytes(*b"TESLEDGR");

/// Processes of one claim that can use its GPU at the same time: as many as keep its grant and
/// ledger within 64 KiB.
pub const SLOTS: usize = 448;

/// Bytes of the page of totals.
pub const HEADER_LEN: usize = 4096;

/// Number of exported handles in a ledger.
pub const EXPORTS: usize = 255;

/// Bytes of a slot: two cache lines, so that slots do not share one.
pub const SLOT_LEN: usize = 128;

/// The byte whose lock owns slot 0. Far behind the end of the file: locks need no bytes under them.
pub const LOCK_OFFSET: u64 = 1 << 32;

/// A free slot.
pub const SLOT_FREE: u32 = 0;
/// Slot of a process, if its lock is held; otherwise of an ended process.
pub const SLOT_LIVE: u32 = 1;

/// A ledger as it is mapped by the processes of a claim.
#[repr(C)]
#[derive(Debug)]
pub struct LedgerPage {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`ABI_VERSION`].
    pub abi_version: AtomicU32,
    /// [`LEDGER_LEN`].
    pub length: AtomicU32,
    /// [`SLOTS`].
    pub slots: AtomicU32,
    /// [`SLOT_LEN`].
    pub slot_length: AtomicU32,
    reserved0: [u64; 5],
    /// Bytes taken by all processes, and the change that made it so: a [`Total`].
    pub total: AtomicU64,
    /// The most bytes that were taken at one time.
    pub peak_bytes: AtomicU64,
    /// Requests for memory refused by the limit.
    pub refused: AtomicU64,
    /// Kernel launches of ended processes.
    pub past_launches: AtomicU64,
    /// GPU-ns of ended processes.
    pub past_gpu_ns: AtomicU64,
    reserved1: [u64; 3],
    /// Words about compute that the processes share.
    pub compute: ComputePage,
    /// Memory that processes of the claim have exported.
    pub exports: ExportsPage,
    /// Bytes of the last request for memory that the limit refused.
    pub refused_bytes: AtomicU64,
    /// Bytes that counted as used then.
    pub refused_used_bytes: AtomicU64,
    reserved2: [u64; (HEADER_LEN - 216 - size_of::<ExportsPage>()) / 8],
    /// Number of driver functions that programs got and that are not in the symbol table. In the
    /// last 64 bits of the header.
    pub unknown_functions: AtomicU64,
    /// One for each process.
    pub slot: [SlotPage; SLOTS],
}

/// The last handles under which processes of the claim have exported memory of the GPU.
#[repr(C)]
#[derive(Debug)]
pub struct ExportsPage {
    /// Number of handles so far: each replaces the oldest one.
    pub count: AtomicU64,
    /// A hash of each handle; 0: none.
    pub hashes: [AtomicU64; EXPORTS],
}

impl ExportsPage {
    const fn empty() -> Self {
        Self { count: AtomicU64::new(0), hashes: [const { AtomicU64::new(0) }; EXPORTS] }
    }
}

/// A process's part of the ledger.
///
/// A change of `used_bytes` is numbered: `next_used_bytes` and `begun` announce it, `total` applies
/// it together with slot and number, `settled` completes it. From these words the next process
/// completes or drops the change of an ended process.
#[repr(C)]
#[derive(Debug)]
pub struct SlotPage {
    /// [`SLOT_FREE`] or [`SLOT_LIVE`]; for readers, the lock is what counts.
    pub state: AtomicU32,
    /// The process, as it sees itself in its own PID namespace.
    pub pid: AtomicU32,
    /// Start of the process in clock ticks since boot (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: AtomicU64,
    /// Inode of the PID namespace.
    pub pid_namespace: AtomicU64,
    /// Bytes taken, as of change `settled`.
    pub used_bytes: AtomicU64,
    /// Bytes taken once change `begun` is done.
    pub next_used_bytes: AtomicU64,
    /// Number of the last change that was begun.
    pub begun: AtomicU64,
    /// Number of the last change known to be in the total.
    pub applied: AtomicU64,
    /// Number of the last change that is in `used_bytes`.
    pub settled: AtomicU64,
    /// Kernel launches.
    pub launches: AtomicU64,
    /// Its use of the GPU's time.
    pub compute: ComputeSlot,
    /// The host's PID of the process; 0: unknown. Written by the process, as all words here.
    pub host_pid: AtomicU32,
    /// The low half of the `start_ticks` that `host_pid` belongs to. A library that knows neither
    /// may have taken the slot since.
    pub host_pid_start: AtomicU32,
}

impl LedgerPage {
    /// An empty ledger in ordinary memory: what a file of [`initial`] bytes and then zeroes is when
    /// it is mapped.
    #[must_use]
    pub const fn empty() -> Self {
        Self {
            magic: AtomicU64::new(MAGIC),
            abi_version: AtomicU32::new(ABI_VERSION),
            length: AtomicU32::new(LEDGER_LEN as u32),
            slots: AtomicU32::new(SLOTS as u32),
            slot_length: AtomicU32::new(SLOT_LEN as u32),
            reserved0: [0; 5],
            total: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            past_launches: AtomicU64::new(0),
            past_gpu_ns: AtomicU64::new(0),
            reserved1: [0; 3],
            compute: ComputePage::empty(),
            exports: ExportsPage::empty(),
            refused_bytes: AtomicU64::new(0),
            refused_used_bytes: AtomicU64::new(0),
            reserved2: [0; (HEADER_LEN - 216 - size_of::<ExportsPage>()) / 8],
            unknown_functions: AtomicU64::new(0),
            slot: [const { SlotPage::empty() }; SLOTS],
        }
    }
}

impl SlotPage {
    const fn empty() -> Self {
        Self {
            state: AtomicU32::new(SLOT_FREE),
            pid: AtomicU32::new(0),
            start_ticks: AtomicU64::new(0),
            pid_namespace: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            next_used_bytes: AtomicU64::new(0),
            begun: AtomicU64::new(0),
            applied: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            launches: AtomicU64::new(0),
            compute: ComputeSlot::empty(),
            host_pid: AtomicU32::new(0),
            host_pid_start: AtomicU32::new(0),
        }
    }

    /// Stores the host's PID of the slot's process.
    pub fn set_host_pid(&self, pid: u32) {
        self.host_pid_start
            .store(low_half(self.start_ticks.load(Ordering::Relaxed)), Ordering::Relaxed);
        self.host_pid.store(pid, Ordering::Release);
    }
}

const fn low_half(word: u64) -> u32 {
    word as u32
}

const _: () = {
    assert!(LEDGER_LEN.is_multiple_of(4096));
    assert!(GRANT_LEN + LEDGER_LEN <= 64 << 10);
    assert!(SLOTS >= 256 && SLOTS <= 1 << Total::SLOT_BITS);
    assert!(Total::USED_BITS + Total::SLOT_BITS + Total::CHANGE_BITS == 64);
    assert!(size_of::<LedgerPage>() == LEDGER_LEN);
    assert!(offset_of!(LedgerPage, magic) == 0);
    assert!(offset_of!(LedgerPage, abi_version) == 8);
    assert!(offset_of!(LedgerPage, length) == 12);
    assert!(offset_of!(LedgerPage, slots) == 16);
    assert!(offset_of!(LedgerPage, slot_length) == 20);
    assert!(offset_of!(LedgerPage, total) == 64);
    assert!(offset_of!(LedgerPage, peak_bytes) == 72);
    assert!(offset_of!(LedgerPage, refused) == 80);
    assert!(offset_of!(LedgerPage, past_launches) == 88);
    assert!(offset_of!(LedgerPage, past_gpu_ns) == 96);
    assert!(offset_of!(LedgerPage, compute) == 128);
    assert!(offset_of!(ComputePage, due_ns) == 0);
    assert!(offset_of!(ComputePage, wake) == 8);
    assert!(offset_of!(ComputePage, waited_ns) == 16);
    assert!(offset_of!(ComputePage, waits) == 24);
    assert!(offset_of!(ComputePage, past_busy_ns) == 32);
    assert!(offset_of!(ComputePage, turn_ns) == 40);
    assert!(offset_of!(ComputePage, turn_at_ns) == 48);
    assert!(offset_of!(ComputePage, turn_others_ns) == 56);
    assert!(offset_of!(LedgerPage, unknown_functions) == HEADER_LEN - 8);
    assert!(offset_of!(LedgerPage, slot) == HEADER_LEN);
    assert!(size_of::<SlotPage>() == SLOT_LEN);
    assert!(offset_of!(SlotPage, state) == 0);
    assert!(offset_of!(SlotPage, pid) == 4);
    assert!(offset_of!(SlotPage, start_ticks) == 8);
    assert!(offset_of!(SlotPage, pid_namespace) == 16);
    assert!(offset_of!(SlotPage, used_bytes) == 24);
    assert!(offset_of!(SlotPage, next_used_bytes) == 32);
    assert!(offset_of!(SlotPage, begun) == 40);
    assert!(offset_of!(SlotPage, applied) == 48);
    assert!(offset_of!(SlotPage, settled) == 56);
    assert!(offset_of!(SlotPage, launches) == 64);
    assert!(offset_of!(SlotPage, compute) == 72);
    assert!(offset_of!(SlotPage, host_pid) == 120);
    assert!(offset_of!(SlotPage, host_pid_start) == 124);
    assert!(offset_of!(ComputeSlot, gpu_ns) == 0);
    assert!(offset_of!(ComputeSlot, outstanding_ns) == 8);
    assert!(offset_of!(ComputeSlot, busy_since_ns) == 16);
    assert!(offset_of!(ComputeSlot, busy_ns) == 24);
    assert!(offset_of!(ComputeSlot, waiting_since_ns) == 32);
    assert!(offset_of!(ComputeSlot, done_by_ns) == 40);
};

/// Word with the bytes taken, and the slot and number of the last change.
///
/// They are in one word so that a change and its slot are written in one step: after a kill, the
/// word shows if the change was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// Bytes taken by all processes.
    pub used_bytes: u64,
    /// Slot of the process that made the last change.
    pub slot: usize,
    /// The low bits of that change's number.
    pub change: u64,
}

impl Total {
    const USED_BITS: u32 = 43;
    const SLOT_BITS: u32 = 9;
    const CHANGE_BITS: u32 = 12;

    /// The most bytes that can be counted.
    pub const MAX_USED: u64 = (1 << Self::USED_BITS) - 1;
    /// The bits of a change's number that are kept.
    pub const CHANGE_MASK: u64 = (1 << Self::CHANGE_BITS) - 1;

    /// Takes the word apart.
    #[must_use]
    pub const fn unpack(word: u64) -> Self {
        let slot = word >> Self::CHANGE_BITS & ((1 << Self::SLOT_BITS) - 1);
        Self {
            used_bytes: word >> (Self::SLOT_BITS + Self::CHANGE_BITS),
            slot: slot as usize,
            change: word & Self::CHANGE_MASK,
        }
    }

    /// Makes the word; bytes above [`Total::MAX_USED`] count as that.
    #[must_use]
    pub const fn pack(self) -> u64 {
        let used = if self.used_bytes > Self::MAX_USED { Self::MAX_USED } else { self.used_bytes };
        let slot = self.slot as u64 & ((1 << Self::SLOT_BITS) - 1);
        used << (Self::SLOT_BITS + Self::CHANGE_BITS)
            | slot << Self::CHANGE_BITS
            | self.change & Self::CHANGE_MASK
    }
}

/// The first bytes of an empty ledger. The rest of the file is zero: write these, and set the
/// length to [`LEDGER_LEN`].
#[must_use]
pub fn initial() -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&ABI_VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&(LEDGER_LEN as u32).to_le_bytes());
    bytes[16..20].copy_from_slice(&(SLOTS as u32).to_le_bytes());
    bytes[20..].copy_from_slice(&(SLOT_LEN as u32).to_le_bytes());
    bytes
}

/// Error in the bytes of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LedgerError {
    /// Not [`LEDGER_LEN`] bytes, or says that it is not: truncated by the tenant, or another
    /// layout.
    Length {
        /// Bytes found.
        found: usize,
    },
    /// It does not begin with the magic number: overwritten by the tenant.
    Magic,
    /// Another version of Tessera wrote it.
    AbiVersion {
        /// The version found.
        found: u32,
    },
    /// Another number or length of slots.
    Slots {
        /// Slots found.
        slots: u32,
        /// Their length found.
        slot_length: u32,
    },
}

impl fmt::Display for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { found } => write!(f, "ledger has {found} bytes, not {LEDGER_LEN}"),
            Self::Magic => f.write_str("not a ledger: it does not begin with TESLEDGR"),
            Self::AbiVersion { found } => {
                write!(
                    f,
                    "ledger has ABI version {found}, this program speaks {ABI_VERSION}: use driver and library of one release"
                )
            }
            Self::Slots { slots, slot_length } => {
                write!(
                    f,
                    "ledger has {slots} slots of {slot_length} bytes, not {SLOTS} of {SLOT_LEN}"
                )
            }
        }
    }
}

impl core::error::Error for LedgerError {}

/// Values of a copy of a ledger's bytes. The tenant can write every byte of it: compare them with
/// NVML, and assume nothing about them.
#[derive(Debug, Clone, Copy)]
pub struct LedgerReport<'a> {
    bytes: &'a [u8],
}

/// Values of a ledger about one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessReport {
    /// Index of the slot.
    pub slot: usize,
    /// The process in its own PID namespace.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
    /// Inode of its PID namespace.
    pub pid_namespace: u64,
    /// The process as it says that the host knows it.
    pub host_pid: Option<u32>,
    /// Bytes taken.
    pub used_bytes: u64,
    /// Kernel launches.
    pub launches: u64,
    /// GPU time in nanoseconds.
    pub gpu_ns: u64,
    /// GPU time that is charged for work that is not known to be done, in ns.
    pub outstanding_ns: u64,
    /// Times with work.
    pub busy: Busy,
    /// It waits for tokens.
    pub waits: bool,
}

/// Times in which a process had work, monotonic ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    before_ns: u64,
    since_ns: u64,
    done_by_ns: u64,
}

impl Busy {
    /// Wall ns until now.
    #[must_use]
    pub fn until(&self, now: u64) -> u64 {
        busy(self.before_ns, self.since_ns, now.min(self.done_by_ns))
    }

    /// Monotonic ns by which its work should be done.
    #[must_use]
    pub fn done_by_ns(&self) -> u64 {
        self.done_by_ns
    }
}

impl<'a> LedgerReport<'a> {
    /// Reads a copy of the file: `pread` of [`LEDGER_LEN`] bytes, never a mapping (the tenant can
    /// truncate the file).
    ///
    /// # Errors
    /// Names the first thing that is wrong.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, LedgerError> {
        if bytes.len() != LEDGER_LEN {
            return Err(LedgerError::Length { found: bytes.len() });
        }
        let report = Self { bytes };
        if report.word(offset_of!(LedgerPage, magic)) != MAGIC {
            return Err(LedgerError::Magic);
        }
        let found = report.half(offset_of!(LedgerPage, abi_version));
        if found != ABI_VERSION {
            return Err(LedgerError::AbiVersion { found });
        }
        let length = report.half(offset_of!(LedgerPage, length)) as usize;
        if length != LEDGER_LEN {
            return Err(LedgerError::Length { found: length });
        }
        let (slots, slot_length) = (
            report.half(offset_of!(LedgerPage, slots)),
            report.half(offset_of!(LedgerPage, slot_length)),
        );
        if (slots as usize, slot_length as usize) != (SLOTS, SLOT_LEN) {
            return Err(LedgerError::Slots { slots, slot_length });
        }
        Ok(report)
    }

    /// Returns the bytes taken by all processes. Those of ended ones count until they are
    /// reclaimed.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        Total::unpack(self.word(offset_of!(LedgerPage, total))).used_bytes
    }

    /// The most bytes that were taken at one time.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.word(offset_of!(LedgerPage, peak_bytes))
    }

    /// Requests for memory refused by the limit.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.word(offset_of!(LedgerPage, refused))
    }

    /// Returns the number of driver functions that programs got and that are not in the symbol
    /// table.
    #[must_use]
    pub fn unknown_functions(&self) -> u64 {
        self.word(offset_of!(LedgerPage, unknown_functions))
    }

    /// Kernel launches of all processes, also of those that are gone.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.processes().fold(self.word(offset_of!(LedgerPage, past_launches)), |sum, process| {
            sum.saturating_add(process.launches)
        })
    }

    /// GPU time in nanoseconds of all processes, also of those that are gone.
    #[must_use]
    pub fn gpu_ns(&self) -> u64 {
        self.processes().fold(self.word(offset_of!(LedgerPage, past_gpu_ns)), |sum, process| {
            sum.saturating_add(process.gpu_ns)
        })
    }

    /// Wall ns until now in which processes had work, added up; also of those that are gone.
    #[must_use]
    pub fn busy_ns(&self, now: u64) -> u64 {
        let past = self.word(offset_of!(LedgerPage, compute.past_busy_ns));
        self.processes().fold(past, |sum, process| sum.saturating_add(process.busy.until(now)))
    }

    /// Time that launches were held back, ns, added up over processes. Waits that have not ended
    /// are not in it.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.word(offset_of!(LedgerPage, compute.waited_ns))
    }

    /// Bytes of the last request for memory that the limit refused, and bytes that counted as used
    /// then.
    #[must_use]
    pub fn last_refusal(&self) -> (u64, u64) {
        (
            self.word(offset_of!(LedgerPage, refused_bytes)),
            self.word(offset_of!(LedgerPage, refused_used_bytes)),
        )
    }

    /// Launches that were held back.
    #[must_use]
    pub fn waits(&self) -> u64 {
        self.word(offset_of!(LedgerPage, compute.waits))
    }

    /// The processes with a slot, dead ones included until their slot is used again.
    pub fn processes(&self) -> impl Iterator<Item = ProcessReport> + use<'a> {
        let report = *self;
        (0..SLOTS).filter_map(move |slot| {
            let at = HEADER_LEN + slot * SLOT_LEN;
            (report.half(at + offset_of!(SlotPage, state)) == SLOT_LIVE).then(|| ProcessReport {
                slot,
                pid: report.half(at + offset_of!(SlotPage, pid)),
                start_ticks: report.word(at + offset_of!(SlotPage, start_ticks)),
                pid_namespace: report.word(at + offset_of!(SlotPage, pid_namespace)),
                host_pid: report.host_pid(at),
                used_bytes: report.word(at + offset_of!(SlotPage, used_bytes)),
                launches: report.word(at + offset_of!(SlotPage, launches)),
                gpu_ns: report.word(at + offset_of!(SlotPage, compute.gpu_ns)),
                outstanding_ns: report.word(at + offset_of!(SlotPage, compute.outstanding_ns)),
                busy: Busy {
                    before_ns: report.word(at + offset_of!(SlotPage, compute.busy_ns)),
                    since_ns: report.word(at + offset_of!(SlotPage, compute.busy_since_ns)),
                    done_by_ns: report.word(at + offset_of!(SlotPage, compute.done_by_ns)),
                },
                waits: report.word(at + offset_of!(SlotPage, compute.waiting_since_ns)) != 0,
            })
        })
    }

    fn host_pid(&self, slot_at: usize) -> Option<u32> {
        let pid = self.half(slot_at + offset_of!(SlotPage, host_pid));
        let of_this = self.half(slot_at + offset_of!(SlotPage, host_pid_start))
            == low_half(self.word(slot_at + offset_of!(SlotPage, start_ticks)));
        (pid != 0 && of_this).then_some(pid)
    }

    fn word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.bytes[at..at + 8]);
        u64::from_le_bytes(word)
    }

    fn half(&self, at: usize) -> u32 {
        let mut half = [0; 4];
        half.copy_from_slice(&self.bytes[at..at + 4]);
        u32::from_le_bytes(half)
    }
}

#[cfg(test)]
mod tests;
