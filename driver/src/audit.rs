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
    state::journal::{ClaimRecord, Journal},
};

/// Interval of rounds. Each reads every prepared claim: 300 nodes with 80 claims each make 80 reads
/// per second.
const INTERVAL: Duration = Duration::from_secs(300);

/// Deadline of the read of one claim.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// GPUs of orphaned claims.
pub type OrphanedGpus = BTreeSet<GpuUuid>;

/// Findings of the audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFindings {
    /// GPUs of orphaned claims.
    pub gpus: OrphanedGpus,
    /// True once every claim was compared since the driver started. Until then, GPUs that are
    /// published as orphaned stay so.
    pub is_complete: bool,
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
    /// True once every claim was compared in one round.
    is_complete: bool,
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
        Self { source, journal, metrics, orphaned, found: BTreeSet::new(), is_complete: false }
    }

    /// Audits until `stop`: immediately, since a restart forgets the findings, then every five
    /// minutes.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut due = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Ok(()) = self.journal.changed() => {}
                () = sleep_until(due) => {
                    self.round().await;
                    due = Instant::now() + INTERVAL;
                }
            }
            self.publish();
        }
    }

    /// Compares every claim of the journal, also those that wait for an MPS control daemon.
    /// Findings about claims that cannot be read stay.
    async fn round(&mut self) {
        let journal = Arc::clone(&self.journal.borrow());
        let mut is_complete = true;
        for (uid, record) in &journal.claims {
            let until = Instant::now() + READ_TIMEOUT;
            let orphaned = match self.source.read(&record.namespace, &record.name, until).await {
                Ok(claim) => !grants(&claim, uid, record),
                Err(ReadError::NotFound { .. }) => true,
                Err(error) => {
                    tracing::warn!(
                        namespace = %record.namespace, claim = %record.name, %uid, error = %chain(&error),
                        "cannot compare prepared claim with the API server"
                    );
                    is_complete = false;
                    continue;
                }
            };
            if !orphaned {
                self.found.remove(uid);
            } else if self.found.insert(uid.clone()) {
                tracing::warn!(
                    namespace = %record.namespace, claim = %record.name, %uid,
                    "prepared claim was deleted, replaced or deallocated; its GPUs are tainted until the kubelet unprepares it"
                );
            }
        }
        self.is_complete |= is_complete;
    }

    /// Sends the GPUs of orphaned claims that are still prepared.
    fn publish(&mut self) {
        let journal = Arc::clone(&self.journal.borrow_and_update());
        self.found.retain(|uid| journal.claims.contains_key(uid));
        let records = self.found.iter().filter_map(|uid| journal.claims.get(uid));
        let gpus: OrphanedGpus = records
            .flat_map(|record| record.shares.iter().map(|share| share.gpu.clone()))
            .collect();
        self.metrics.set_orphaned_claims(self.found.len());
        self.orphaned.send_if_modified(|published| {
            let findings = AuditFindings { gpus, is_complete: self.is_complete };
            let is_changed = *published != findings;
            *published = findings;
            is_changed
        });
    }
}

/// Returns true if `claim` is the object that was prepared and still has all of its shares.
fn grants(claim: &ResourceClaim, uid: &ClaimUid, record: &ClaimRecord) -> bool {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    claim.metadata.uid.as_deref() == Some(uid.as_str())
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
