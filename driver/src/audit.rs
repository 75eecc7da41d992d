//! Compares, slowly and for ever, what is prepared here with the claims that the API has.
//!
//! ```text
//! journal, claims from the API --> GPUs of orphaned claims --> publisher: a taint on their devices
//! ```
//!
//! A claim can vanish, be replaced or lose its allocation while the kubelet has it prepared: its
//! finalizer was stripped, or somebody wrote its status. Then its share looks free to every
//! allocator, and its containers still use it. While that lasts, nothing new is put on its GPUs. It
//! ends with the kubelet's Unprepare, which comes for whatever the kubelet has ever asked to
//! prepare (docs/adr/0044-gpu-health.md).

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
    metrics::Metrics,
    prepare::source::{ClaimSource, ReadError},
    state::journal::{ClaimRecord, Journal},
};

/// Between rounds. One read per prepared claim: 300 nodes with 80 claims each make 80 reads a
/// second.
const EVERY: Duration = Duration::from_secs(300);

/// For the read of one claim.
const PATIENCE: Duration = Duration::from_secs(10);

/// GPUs of orphaned claims. Not known before the first round has ended.
pub type Orphaned = BTreeSet<GpuUuid>;

/// The audit of one node.
#[derive(Debug)]
pub struct Audit {
    source: ClaimSource,
    journal: watch::Receiver<Arc<Journal>>,
    metrics: Arc<Metrics>,
    orphaned: watch::Sender<Option<Arc<Orphaned>>>,
    /// Claims that were found orphaned.
    found: BTreeSet<ClaimUid>,
    /// Whether a round has ended.
    known: bool,
}

impl Audit {
    /// Compares `journal` with `source`, and tells `orphaned`.
    #[must_use]
    pub fn new(
        source: ClaimSource,
        journal: watch::Receiver<Arc<Journal>>,
        metrics: Arc<Metrics>,
        orphaned: watch::Sender<Option<Arc<Orphaned>>>,
    ) -> Self {
        Self { source, journal, metrics, orphaned, found: BTreeSet::new(), known: false }
    }

    /// Audits until `stop`: at once, since a restart forgets what was found, then every five
    /// minutes.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut due = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Ok(()) = self.journal.changed() => {}
                () = sleep_until(due) => {
                    self.round().await;
                    due = Instant::now() + EVERY;
                }
            }
            self.tell();
        }
    }

    /// Looks at every claim that has something here, also at those that wait for an MPS control
    /// daemon. What cannot be read is as it was found before.
    async fn round(&mut self) {
        let journal = Arc::clone(&self.journal.borrow());
        for (uid, record) in &journal.claims {
            let until = Instant::now() + PATIENCE;
            let orphaned = match self.source.read(&record.namespace, &record.name, until).await {
                Ok(claim) => !grants(&claim, uid, record),
                Err(ReadError::NotFound { .. }) => true,
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "what is prepared cannot be compared with the API now");
                    return;
                }
            };
            if !orphaned {
                self.found.remove(uid);
            } else if self.found.insert(uid.clone()) {
                tracing::warn!(
                    %uid, claim = %format_args!("{}/{}", record.namespace, record.name),
                    "a claim is prepared here that the API does not have so any more; its GPUs take nothing new until the kubelet unprepares it"
                );
            }
        }
        self.known = true;
    }

    /// Tells the GPUs of those that are still prepared.
    fn tell(&mut self) {
        let journal = Arc::clone(&self.journal.borrow_and_update());
        self.found.retain(|uid| journal.claims.contains_key(uid));
        let records = self.found.iter().filter_map(|uid| journal.claims.get(uid));
        let gpus: Orphaned = records
            .flat_map(|record| record.shares.iter().map(|share| share.gpu.clone()))
            .collect();
        self.metrics.orphaned(self.found.len());
        self.orphaned.send_if_modified(|told| {
            let news = self.known && told.as_deref() != Some(&gpus);
            if news {
                *told = Some(Arc::new(gpus));
            }
            news
        });
    }
}

/// Whether `claim` is the one that was prepared, and still has all of its shares.
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
