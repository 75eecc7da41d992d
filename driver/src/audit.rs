//! Compares prepared claims with the API server and reports orphans.
//!
//! ```text
//! journal, claims of the API server --> GPUs of orphaned claims --> publisher, which taints them
//! ```
//!
//! A claim can be deleted, replaced or deallocated while the kubelet has it prepared: its finalizer
//! was removed, or a client wrote its status. Its share then looks free to every allocator, and its
//! containers still use it. Until the kubelet unprepares it, its GPUs are tainted. The kubelet
//! unprepares every claim that it has prepared (docs/adr/0044-gpu-health.md).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_api::names::{ClaimUid, DRIVER_NAME, GpuUuid};
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    metrics::DriverMetrics,
    prepare::source::{ClaimSource, ReadError},
    state::journal::{ClaimRecord, Journal, MigDeviceRecord},
};

/// Interval of audits. Each reads every prepared claim: 300 nodes with 80 claims each make 80 reads
/// per second.
const INTERVAL: Duration = Duration::from_secs(300);

/// Time until claims that could not be read are read again.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Deadline of the read of one claim.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Number of reads at the same time. A round of 80 claims without any answer lasts 100 s.
const CONCURRENT_READS: usize = 8;

/// GPUs of orphaned claims.
pub type OrphanedGpus = BTreeSet<GpuUuid>;

/// Findings of the audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFindings {
    /// GPUs of orphaned claims.
    pub gpus: OrphanedGpus,
    /// GPUs with claims that were not compared since the start. Their published taints stay.
    pub undecided: UndecidedGpus,
}

/// GPUs whose claims were not compared since the driver started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UndecidedGpus {
    /// All GPUs: the audit has not started.
    #[default]
    All,
    /// GPUs with a claim that was not read yet, or could not be read.
    Only(BTreeSet<GpuUuid>),
}

impl UndecidedGpus {
    /// Returns true if a claim of `gpu` was not compared.
    #[must_use]
    pub fn contains(&self, gpu: &GpuUuid) -> bool {
        match self {
            Self::All => true,
            Self::Only(gpus) => gpus.contains(gpu),
        }
    }
}

/// The audit of one node's claims.
#[derive(Debug)]
pub struct ClaimAudit {
    source: ClaimSource,
    journal: watch::Receiver<Arc<Journal>>,
    metrics: Arc<DriverMetrics>,
    orphaned: watch::Sender<AuditFindings>,
    /// Orphaned claims.
    found: BTreeSet<ClaimUid>,
    /// Claims that were compared since the driver started.
    compared: BTreeSet<ClaimUid>,
    /// Claims whose last read failed.
    unread: BTreeSet<ClaimUid>,
}

/// The result of one read.
struct Comparison {
    uid: ClaimUid,
    record: ClaimRecord,
    claim: Result<ResourceClaim, ReadError>,
}

impl ClaimAudit {
    /// Returns an audit that compares `journal` with `source` and sends the findings to `orphaned`.
    #[must_use]
    pub fn new(
        source: ClaimSource,
        journal: watch::Receiver<Arc<Journal>>,
        metrics: Arc<DriverMetrics>,
        orphaned: watch::Sender<AuditFindings>,
    ) -> Self {
        let (found, compared, unread) = Default::default();
        Self { source, journal, metrics, orphaned, found, compared, unread }
    }

    /// Audits until `stop`: immediately, since a restart forgets the findings, then every five
    /// minutes. Claims that could not be read are read again after 30 s.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut all_due = Instant::now();
        let mut due = all_due;
        let mut reads: Option<BoxStream<'static, Comparison>> = None;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Ok(()) = self.journal.changed() => {}
                comparison = next(&mut reads), if reads.is_some() => {
                    match comparison {
                        Some(comparison) => self.record(comparison),
                        None => {
                            reads = None;
                            let retry = Instant::now() + RETRY_INTERVAL;
                            due = if self.unread.is_empty() { all_due } else { retry.min(all_due) };
                        }
                    }
                }
                () = sleep_until(due), if reads.is_none() => {
                    let now = Instant::now();
                    let is_full = now >= all_due;
                    if is_full {
                        all_due = now + INTERVAL;
                        let journal = Arc::clone(&self.journal.borrow());
                        self.source.retain_pods(|uid| journal.claims.contains_key(uid));
                    }
                    reads = Some(self.reads(is_full));
                }
            }
            self.publish();
        }
    }

    /// Returns the reads of all claims in the journal, including those that wait for an MPS control
    /// daemon, or of those whose last read failed.
    fn reads(&self, is_full: bool) -> BoxStream<'static, Comparison> {
        let journal = Arc::clone(&self.journal.borrow());
        let source = self.source.clone();
        let claims: Vec<_> = journal
            .claims
            .iter()
            .filter(|(uid, _)| is_full || self.unread.contains(*uid))
            .map(|(uid, record)| (uid.clone(), record.clone()))
            .collect();
        let read = move |(uid, record): (ClaimUid, ClaimRecord)| {
            let source = source.clone();
            async move {
                let until = Instant::now() + READ_TIMEOUT;
                let claim = source.read(&record.namespace, &record.name, until).await;
                Comparison { uid, record, claim }
            }
        };
        stream::iter(claims).map(read).buffer_unordered(CONCURRENT_READS).boxed()
    }

    /// Records the result of one read. If the read failed, the earlier finding is kept.
    fn record(&mut self, Comparison { uid, record, claim }: Comparison) {
        let is_orphaned = match claim {
            Ok(claim) => !grants(&claim, &uid, &record),
            Err(ReadError::NotFound { .. }) => true,
            Err(error) => {
                tracing::warn!(
                    namespace = %record.namespace, claim = %record.name, %uid, error = %chain(&error),
                    "cannot compare prepared claim with the API server; retrying in 30 s"
                );
                self.unread.insert(uid);
                return;
            }
        };
        self.unread.remove(&uid);
        self.compared.insert(uid.clone());
        if !is_orphaned {
            self.found.remove(&uid);
        } else if self.found.insert(uid.clone()) {
            tracing::warn!(
                namespace = %record.namespace, claim = %record.name, %uid,
                "prepared claim was deleted, replaced or deallocated; its GPUs are tainted until the kubelet unprepares it"
            );
        }
    }

    /// Sends the GPUs of orphaned claims that are still prepared.
    fn publish(&mut self) {
        let journal = Arc::clone(&self.journal.borrow_and_update());
        for claims in [&mut self.found, &mut self.compared, &mut self.unread] {
            claims.retain(|uid| journal.claims.contains_key(uid));
        }
        let gpus = gpus_of(&journal, |uid| self.found.contains(uid));
        let undecided = UndecidedGpus::Only(gpus_of(&journal, |uid| !self.compared.contains(uid)));
        self.metrics.set_orphaned_claims(self.found.len());
        self.orphaned.send_if_modified(|published| {
            let findings = AuditFindings { gpus, undecided };
            let is_changed = *published != findings;
            *published = findings;
            is_changed
        });
    }
}

/// Returns the next result of `reads`, or `None` after the last.
async fn next(reads: &mut Option<BoxStream<'static, Comparison>>) -> Option<Comparison> {
    reads.as_mut()?.next().await
}

/// Returns the GPUs of the claims of `journal` that are `wanted`.
fn gpus_of(journal: &Journal, wanted: impl Fn(&ClaimUid) -> bool) -> BTreeSet<GpuUuid> {
    let claims = journal.claims.iter().filter(|(uid, _)| wanted(uid));
    claims.flat_map(|(_, record)| record.gpus()).cloned().collect()
}

/// Returns true if `claim` is the object that was prepared and still has all of its shares.
fn grants(claim: &ResourceClaim, uid: &ClaimUid, record: &ClaimRecord) -> bool {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    let has_mig_device = |device: &MigDeviceRecord| {
        results.iter().any(|result| {
            result.driver == DRIVER_NAME
                && result.pool == device.pool.as_str()
                && result.device == device.device.device_name().as_str()
        })
    };
    claim.metadata.uid.as_deref() == Some(uid.as_str())
        && record.mig_devices.iter().all(has_mig_device)
        && record.shares.iter().all(|share| {
            results.iter().any(|result| {
                result.driver == DRIVER_NAME
                    && result.pool == share.pool.as_str()
                    && result.device == share.device.as_str()
                    && result.share_id.as_deref()
                        == share.share_id.as_ref().map(|share| share.as_str())
            })
        })
}
