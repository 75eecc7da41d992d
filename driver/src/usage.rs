//! GPU usage of shares, read from their ledgers and compared with NVML.
//!
//! ```text
//! journal + ledgers --[Ledgers]--> ShareUsage --[collector]--> metrics, read at each scrape
//!                                      |
//!           NVML's processes, /proc --[audit]--> metrics and events of unaccounted memory
//! ```
//!
//! Containers can write their ledgers: values are reported as they are, and nothing here relies on
//! them. The audit compares them with NVML.

pub mod audit;
pub mod collector;
pub mod process;

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
};
use tessera_api::names::{ClaimDeviceName, ClaimName, GpuUuid, Namespace, RequestName};
use tessera_intercept_abi::{
    LEDGER_LEN, LedgerError, LedgerReport, ProcessReport, ledger::LOCK_OFFSET,
};
use tokio::sync::watch;

use process::FileIdentity;

use crate::state::{
    StatePaths,
    journal::{Journal, RecordState},
};

/// A prepared share and its usage.
#[derive(Debug)]
pub struct ShareUsage {
    /// The share.
    pub share: ClaimDeviceName,
    /// The namespace of its claim.
    pub namespace: Namespace,
    /// The name of its claim.
    pub claim: ClaimName,
    /// The request of the claim for which it was allocated.
    pub request: RequestName,
    /// The GPU.
    pub gpu: GpuUuid,
    /// Memory limit in bytes.
    pub limit_bytes: u64,
    /// Percent of the GPU's compute; 0 = best effort.
    pub cores_percent: u8,
    /// The content of its ledger.
    pub usage: Result<LedgerUsage, UnreadableLedger>,
}

/// The content of a ledger.
#[derive(Debug, PartialEq, Eq)]
pub struct LedgerUsage {
    /// Peak of used memory in bytes.
    pub peak_bytes: u64,
    /// Refused memory allocations.
    pub refused: u64,
    /// Kernel launches of all processes, also of those that have exited.
    pub launches: u64,
    /// Driver functions that were returned to programs although the interceptor does not know
    /// them.
    pub unknown_functions: u64,
    /// Throttled kernel launches.
    pub throttled_launches: u64,
    /// Time of throttling, summed over processes.
    pub throttled: Duration,
    /// Measured GPU time of all processes.
    pub gpu_time: Duration,
    /// The living processes.
    pub processes: Vec<ProcessReport>,
    /// The identity of the file.
    pub file: FileIdentity,
}

impl LedgerUsage {
    /// Returns the bytes that living processes hold. Memory of an exited process is free, but stays
    /// in the ledger's total until its slot is reclaimed.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.processes.iter().fold(0, |sum, process| sum.saturating_add(process.used_bytes))
    }
}

/// Errors of reading a ledger.
#[derive(Debug, thiserror::Error)]
pub enum UnreadableLedger {
    /// The file is missing, or is not a file any more.
    #[error("cannot read ledger")]
    Io(#[from] io::Error),
    /// The content is invalid: containers have overwritten it.
    #[error("ledger is corrupt")]
    Corrupt(#[source] LedgerError),
}

/// Reads the ledgers of prepared shares.
#[derive(Clone, Debug)]
pub struct Ledgers {
    paths: StatePaths,
    journal: watch::Receiver<Arc<Journal>>,
}

impl Ledgers {
    /// Returns the ledgers below `paths` of the claims in `journal`.
    #[must_use]
    pub fn new(paths: StatePaths, journal: watch::Receiver<Arc<Journal>>) -> Self {
        Self { paths, journal }
    }

    /// Returns every prepared share. Reads 60 KiB for each from a tmpfs. Takes no lock, so a share
    /// that is being unprepared may be unreadable.
    #[must_use]
    pub fn read(&self) -> Vec<ShareUsage> {
        let journal = Arc::clone(&self.journal.borrow());
        let prepared =
            journal.claims.iter().filter(|(_, record)| record.state == RecordState::Completed);
        let shares = prepared
            .flat_map(|(uid, record)| record.shares.iter().map(move |share| (uid, record, share)));
        let read = shares.map(|(uid, record, share)| {
            let id = share.id(uid);
            ShareUsage {
                namespace: record.namespace.clone(),
                claim: record.name.clone(),
                request: share.request.clone(),
                gpu: share.gpu.clone(),
                limit_bytes: share.memory_bytes,
                cores_percent: share.cores_percent,
                usage: read(&self.paths.ledger(&id)),
                share: id,
            }
        });
        read.collect()
    }
}

/// Returns a ledger's file and a copy of its present content, which is not validated.
///
/// # Errors
/// The file cannot be read.
pub fn read_ledger(path: &Path) -> io::Result<(File, Vec<u8>)> {
    // Containers may have replaced the file: opening it must neither block nor follow a link.
    let careful = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(careful.bits()).open(path)?;
    let mut bytes = Vec::with_capacity(LEDGER_LEN + 1);
    (&file).take(LEDGER_LEN as u64 + 1).read_to_end(&mut bytes)?;
    Ok((file, bytes))
}

fn read(path: &Path) -> Result<LedgerUsage, UnreadableLedger> {
    let (file, bytes) = read_ledger(path)?;
    let report = LedgerReport::parse(&bytes).map_err(UnreadableLedger::Corrupt)?;
    let processes = report.processes().filter(|process| is_alive(&file, process.slot)).collect();
    let file = FileIdentity::of(&file)?;
    Ok(LedgerUsage {
        file,
        peak_bytes: report.peak_bytes(),
        refused: report.refused(),
        launches: report.launches(),
        throttled_launches: report.waits(),
        throttled: Duration::from_nanos(report.waited_ns()),
        gpu_time: Duration::from_nanos(report.gpu_ns()),
        unknown_functions: report.unknown_functions(),
        processes,
    })
}

/// Returns true if a process holds the lock of the slot in that ledger. The kernel releases the
/// lock when the process exits.
pub fn is_alive(ledger: &File, slot: usize) -> bool {
    let mut lock = lock_on(slot, libc::F_WRLCK);
    // If the kernel does not report the lock, the process counts as living.
    fcntl(ledger, FcntlArg::F_OFD_GETLK(&mut lock)).is_err()
        || i32::from(lock.l_type) != libc::F_UNLCK
}

fn lock_on(slot: usize, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: (LOCK_OFFSET + slot as u64) as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}
