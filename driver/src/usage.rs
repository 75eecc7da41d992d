//! GPU usage of shares, read from their ledgers and compared with NVML.
//!
//! ```text
//! journal + ledgers --[Ledgers]--> ShareUsage --[collector]--> metrics, read at each scrape
//!                                      |
//!           NVML's processes, /proc --[measurement]--> gain and overhead in each grant
//!                                   --[audit]--> metrics and events of unaccounted memory
//!           NVML's utilization ------[load]----> `/load`, metric
//! ```
//!
//! Containers can write their ledgers: values are reported as they are, and nothing here relies on
//! them. The audit compares them with NVML.

pub mod audit;
pub mod collector;
pub mod comparison;
pub mod liveness;
pub mod load;
pub mod measurement;
pub mod owners;
pub mod process;

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use nix::fcntl::OFlag;
use tessera_api::names::{ClaimDeviceName, ClaimName, ClaimUid, GpuUuid, Namespace, RequestName};
use tessera_intercept_abi::{LEDGER_LEN, LedgerError, LedgerReport, ProcessReport};
use tessera_intercept_limiter::compute::Entitlement;
use tokio::sync::watch;

use liveness::{SlowLedgers, TooManyLocks};
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
    /// The UID of its claim.
    pub claim_uid: ClaimUid,
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
    /// Bytes that are charged for each CUDA context.
    pub context_bytes: u64,
    /// Percent of the GPU's compute; 0 = best effort.
    pub cores_percent: u8,
    /// Entitlement of its containers to GPU time.
    pub entitlement: Entitlement,
    /// The content of its ledger.
    pub usage: Result<LedgerUsage, UnreadableLedger>,
}

/// The content of a ledger.
#[derive(Debug, PartialEq, Eq)]
pub struct LedgerUsage {
    /// Peak of used memory in bytes.
    pub peak_bytes: u64,
    /// Number of refused memory allocations.
    pub refused: u64,
    /// Bytes of the last of them, and bytes that counted as used then.
    pub last_refusal: (u64, u64),
    /// Number of kernel launches of all processes, including exited ones.
    pub launches: u64,
    /// Number of driver functions returned to programs although the interceptor does not know
    /// them.
    pub unknown_functions: u64,
    /// Number of throttled kernel launches.
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

/// An error of reading a ledger.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the usage of the share")]
pub struct UnreadableLedger {
    /// The file, or `None` if it cannot be read.
    pub file: Option<FileIdentity>,
    /// The cause.
    #[source]
    pub cause: LedgerFault,
}

/// Causes of an unreadable ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerFault {
    /// The file cannot be opened or read.
    #[error("cannot read ledger")]
    Io(#[from] io::Error),
    /// The content is invalid: containers have overwritten it.
    #[error("ledger is corrupt")]
    Corrupt(#[from] LedgerError),
    /// Containers hold so many locks on it that its processes are unknown.
    #[error(transparent)]
    TooManyLocks(#[from] TooManyLocks),
}

/// Reads the ledgers of prepared shares.
#[derive(Clone, Debug)]
pub struct Ledgers {
    paths: StatePaths,
    journal: watch::Receiver<Arc<Journal>>,
    slow: Arc<SlowLedgers>,
}

impl Ledgers {
    /// Returns the ledgers below `paths` of the claims in `journal`.
    #[must_use]
    pub fn new(paths: StatePaths, journal: watch::Receiver<Arc<Journal>>) -> Self {
        Self { paths, journal, slow: Arc::default() }
    }

    /// Returns the state directory.
    #[must_use]
    pub fn paths(&self) -> &StatePaths {
        &self.paths
    }

    /// Returns the journal.
    #[must_use]
    pub fn journal(&self) -> watch::Receiver<Arc<Journal>> {
        self.journal.clone()
    }

    /// Returns the ledgers with too many locks.
    #[must_use]
    pub fn slow(&self) -> &Arc<SlowLedgers> {
        &self.slow
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
                claim_uid: uid.clone(),
                namespace: record.namespace.clone(),
                claim: record.name.clone(),
                request: share.request.clone(),
                gpu: share.gpu.clone(),
                limit_bytes: share.memory_bytes,
                context_bytes: record.context_bytes,
                cores_percent: share.cores_percent,
                entitlement: share.entitlement(),
                usage: self.read_share(&id),
                share: id,
            }
        });
        let read: Vec<_> = read.collect();
        let prepared: BTreeSet<_> = read.iter().map(|usage| &usage.share).collect();
        self.slow.retain(|share| prepared.contains(share));
        read
    }

    fn read_share(&self, share: &ClaimDeviceName) -> Result<LedgerUsage, UnreadableLedger> {
        let path = self.paths.ledger(share);
        self.slow.read(share, || read_usage(&path)).unwrap_or_else(|pauses| {
            Err(UnreadableLedger { file: FileIdentity::at(&path).ok(), cause: pauses.into() })
        })
    }
}

/// Reads one ledger.
///
/// # Errors
/// [`UnreadableLedger`].
pub fn read_usage(path: &Path) -> Result<LedgerUsage, UnreadableLedger> {
    let without_file = |error: io::Error| UnreadableLedger { file: None, cause: error.into() };
    let (file, bytes) = read_ledger(path).map_err(without_file)?;
    let identity = FileIdentity::of(&file).map_err(without_file)?;
    LedgerUsage::of(&file, identity, &bytes)
        .map_err(|cause| UnreadableLedger { file: Some(identity), cause })
}

impl LedgerUsage {
    fn of(ledger: &File, file: FileIdentity, bytes: &[u8]) -> Result<Self, LedgerFault> {
        let report = LedgerReport::parse(bytes)?;
        let claimed = report.processes().map(|process| process.slot);
        let live = liveness::live_slots(ledger, claimed)?;
        Ok(Self {
            file,
            peak_bytes: report.peak_bytes(),
            refused: report.refused(),
            last_refusal: report.last_refusal(),
            launches: report.launches(),
            throttled_launches: report.waits(),
            throttled: Duration::from_nanos(report.waited_ns()),
            gpu_time: Duration::from_nanos(report.gpu_ns()),
            unknown_functions: report.unknown_functions(),
            processes: report.processes().filter(|process| live.contains(&process.slot)).collect(),
        })
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
