//! What the shares of this node take of its GPUs, as their ledgers say, and whether NVML agrees.
//!
//! ```text
//! journal + ledgers --[Ledgers]--> ShareUse --[collector]--> metrics, read anew for each scrape
//!                                      |
//!           NVML's processes, /proc --[audit]--> metrics, an event on the Node: who takes what no ledger has
//! ```
//!
//! A ledger is its tenant's to write: what it says is reported as such, and nothing here depends on
//! its being true. That is what the audit is for.

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
    journal::{Journal, State},
};

/// A prepared share, and what is taken of it.
#[derive(Debug)]
pub struct ShareUse {
    /// Which.
    pub share: ClaimDeviceName,
    /// Its claim's namespace.
    pub namespace: Namespace,
    /// Its claim's name.
    pub claim: ClaimName,
    /// The request of the claim that it answers.
    pub request: RequestName,
    /// The GPU.
    pub gpu: GpuUuid,
    /// Bytes that may be taken.
    pub limit_bytes: u64,
    /// Percent of the GPU's compute; 0 = best effort.
    pub cores_percent: u8,
    /// What its ledger says.
    pub taken: Result<Taken, UnreadableLedger>,
}

/// What a ledger says.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken {
    /// The most bytes that were taken at one time.
    pub peak_bytes: u64,
    /// Requests for memory that were refused.
    pub refused: u64,
    /// Kernel launches of all processes, also of those that are gone.
    pub launches: u64,
    /// Functions that were handed out and that the library does not know.
    pub unknown_functions: u64,
    /// Launches that were held back.
    pub throttled_launches: u64,
    /// For how long, added up over processes.
    pub throttled: Duration,
    /// GPU time of all processes, as far as it was measured.
    pub gpu_time: Duration,
    /// The processes that live.
    pub processes: Vec<ProcessReport>,
    /// The file itself.
    pub file: FileIdentity,
}

impl Taken {
    /// Bytes that living processes hold. What a dead one held is free, though it stays in the
    /// ledger's total until somebody needs it.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.processes.iter().fold(0, |sum, process| sum.saturating_add(process.used_bytes))
    }
}

/// Why a ledger says nothing.
#[derive(Debug, thiserror::Error)]
pub enum UnreadableLedger {
    /// It is not there, or not a file any more.
    #[error("the ledger cannot be read")]
    Io(#[from] io::Error),
    /// Its bytes make no sense: its containers have written over it.
    #[error("the ledger makes no sense")]
    Ruined(#[source] LedgerError),
}

/// Reads the ledgers of what is prepared.
#[derive(Clone, Debug)]
pub struct Ledgers {
    paths: StatePaths,
    journal: watch::Receiver<Arc<Journal>>,
}

impl Ledgers {
    /// The ledgers below `paths` of the claims that `journal` has.
    #[must_use]
    pub fn new(paths: StatePaths, journal: watch::Receiver<Arc<Journal>>) -> Self {
        Self { paths, journal }
    }

    /// Every prepared share. Reads 60 KiB for each, from memory; without any lock, so a share that
    /// is being taken down may be unreadable.
    #[must_use]
    pub fn read(&self) -> Vec<ShareUse> {
        let journal = Arc::clone(&self.journal.borrow());
        let prepared = journal.claims.iter().filter(|(_, record)| record.state == State::Completed);
        let shares = prepared
            .flat_map(|(uid, record)| record.shares.iter().map(move |share| (uid, record, share)));
        let read = shares.map(|(uid, record, share)| {
            let id = share.id(uid);
            ShareUse {
                namespace: record.namespace.clone(),
                claim: record.name.clone(),
                request: share.request.clone(),
                gpu: share.gpu.clone(),
                limit_bytes: share.memory_bytes,
                cores_percent: share.cores_percent,
                taken: read(&self.paths.ledger(&id)),
                share: id,
            }
        });
        read.collect()
    }
}

/// A copy of a ledger, as it is now.
///
/// # Errors
/// What the system says. Whether the bytes are those of a ledger is not looked at.
pub fn read_ledger(path: &Path) -> io::Result<(File, Vec<u8>)> {
    // Its tenants own the file: whatever it is by now, opening it must neither wait nor lead
    // elsewhere.
    let careful = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(careful.bits()).open(path)?;
    let mut bytes = Vec::with_capacity(LEDGER_LEN + 1);
    (&file).take(LEDGER_LEN as u64 + 1).read_to_end(&mut bytes)?;
    Ok((file, bytes))
}

fn read(path: &Path) -> Result<Taken, UnreadableLedger> {
    let (file, bytes) = read_ledger(path)?;
    let report = LedgerReport::parse(&bytes).map_err(UnreadableLedger::Ruined)?;
    let processes = report.processes().filter(|process| is_alive(&file, process.slot)).collect();
    let file = FileIdentity::of(&file)?;
    Ok(Taken {
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

/// Whether somebody holds the slot's lock in that ledger, which the kernel lets go of when the
/// process dies.
pub fn is_alive(ledger: &File, slot: usize) -> bool {
    let mut lock = lock_on(slot, libc::F_WRLCK);
    // Where the kernel does not say, nobody is declared dead.
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
