//! Compute scheduler: publishes each share's compute rate and contention to its containers, every
//! 50 ms.
//!
//! ```text
//! journal --[which shares, of which GPU]--+
//! ledgers --[busy and GPU time, waits]----+--> Arbiter per GPU --> PublishedPage of each grant
//! ```
//!
//! Of several drivers on a node only the one that holds the lock publishes: during a rolling update
//! two run for a moment. A driver that starts continues from the published values. GPUs without
//! shares are not scheduled, and on a node without shares the task sleeps. Published values expire
//! after a second: without a driver, `Balance` behaves as `Fixed`.
//!
//! Containers can write their ledgers. The damage that a corrupt or forged ledger does to other
//! shares is bounded (`tessera_intercept_limiter::compute`): the work accepted for a share is
//! limited to that of a few processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
    sync::Arc,
    time::Duration,
};

use rustix::time::ClockId;
use tessera_api::names::{ClaimDeviceName, GpuUuid};
use tessera_intercept_abi::{ComputePolicy, LedgerReport, PublishedPage, grant_offset};
use tessera_intercept_limiter::compute::{Arbiter, Observation, Published, Rate, Tenant};
use tessera_runtime::{error_chain::chain, supervisor::blocking};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    state::{
        StatePaths,
        journal::{ComputeCap, ComputePriority, Journal, RecordState, ShareRecord},
        sole_lock,
    },
    usage::{is_alive, read_ledger},
};

/// Interval of rounds. Unused compute is redistributed within a few rounds.
const INTERVAL: Duration = Duration::from_millis(50);

/// Upper bound of scheduled shares per GPU. Further shares are limited by their grants alone.
const MAX_SHARES: usize = 128;

/// Offsets of the published words in a grant.
const WORD: u64 = grant_offset::PUBLISHED as u64;
const OTHERS_BUSY: u64 = WORD + std::mem::offset_of!(PublishedPage, others_busy_ns) as u64;

/// The compute scheduler of one node's GPUs.
#[derive(Debug)]
pub struct Arbitration {
    paths: StatePaths,
    journal: watch::Receiver<Arc<Journal>>,
    gpus: BTreeMap<GpuUuid, ScheduledGpu>,
    /// The lock of the instance that publishes.
    lock: Option<File>,
}

/// A GPU with shares.
#[derive(Debug)]
struct ScheduledGpu {
    arbiter: Box<Arbiter<MAX_SHARES>>,
    /// By index in the arbiter. A share keeps its index.
    shares: Vec<Option<ScheduledShare>>,
}

/// A scheduled share, with its open grant.
#[derive(Debug)]
struct ScheduledShare {
    id: ClaimDeviceName,
    tenant: Tenant,
    grant: File,
    /// Delayed launches at the last round.
    waits: u64,
}

impl Arbitration {
    /// Returns a scheduler of the shares below `paths` of the claims in `journal`.
    #[must_use]
    pub fn new(paths: StatePaths, journal: watch::Receiver<Arc<Journal>>) -> Self {
        Self { paths, journal, gpus: BTreeMap::new(), lock: None }
    }

    /// Schedules until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        self.journal.mark_changed();
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let idle = self.gpus.is_empty();
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.journal.changed(), if idle => if changed.is_err() { return },
                _ = ticks.tick(), if !idle => {}
            }
            // Up to a hundred files, twenty times a second.
            self = blocking(move || {
                self.round(idle);
                self
            })
            .await;
        }
    }

    /// Makes one round. The journal is read again if `changed`, or if it was changed meanwhile.
    fn round(&mut self, changed: bool) {
        if changed || self.journal.has_changed().unwrap_or(false) {
            self.read_journal();
        }
        if !self.gpus.is_empty() && self.try_lock() {
            let now_ns = monotonic_ns();
            for gpu in self.gpus.values_mut() {
                gpu.step(&self.paths, now_ns);
            }
        }
    }

    /// Updates the scheduled shares from the journal.
    fn read_journal(&mut self) {
        let journal = Arc::clone(&self.journal.borrow_and_update());
        let prepared =
            journal.claims.iter().filter(|(_, record)| record.state == RecordState::Completed);
        let mut by_gpu: BTreeMap<&GpuUuid, BTreeMap<ClaimDeviceName, &ShareRecord>> =
            BTreeMap::new();
        for (uid, record) in prepared {
            for share in &record.shares {
                by_gpu.entry(&share.gpu).or_default().insert(share.id(uid), share);
            }
        }
        self.gpus.retain(|gpu, _| by_gpu.contains_key(gpu));
        for (gpu, shares) in by_gpu {
            self.gpus.entry(gpu.clone()).or_default().update(&self.paths, &shares);
        }
        if self.gpus.is_empty() {
            self.lock = None;
        }
    }

    /// Takes the lock if it is free. Returns true if this instance holds it.
    fn try_lock(&mut self) -> bool {
        if self.lock.is_none() {
            self.lock = sole_lock::take(&self.paths.arbitration_lock()).unwrap_or_else(|error| {
                tracing::warn!(
                    error = chain(&error),
                    "cannot lock compute scheduling; compute is not balanced"
                );
                None
            });
            if self.lock.is_some() {
                // Another instance may have published since the shares were opened.
                self.gpus.values_mut().for_each(ScheduledGpu::resume);
            }
        }
        self.lock.is_some()
    }
}

impl Default for ScheduledGpu {
    fn default() -> Self {
        Self { arbiter: Box::default(), shares: (0..MAX_SHARES).map(|_| None).collect() }
    }
}

impl ScheduledGpu {
    /// Removes shares that are gone and adds new ones. The others keep their index.
    fn update(&mut self, paths: &StatePaths, shares: &BTreeMap<ClaimDeviceName, &ShareRecord>) {
        for slot in &mut self.shares {
            slot.take_if(|share| !shares.contains_key(&share.id) || share.was_removed());
        }
        let known: BTreeSet<_> =
            self.shares.iter().flatten().map(|share| share.id.clone()).collect();
        for (id, record) in shares.iter().filter(|(id, _)| !known.contains(id)) {
            let Some(index) = self.shares.iter().position(Option::is_none) else {
                tracing::warn!(share = %id, limit = MAX_SHARES, "too many shares of one GPU; compute of this share is not balanced");
                continue;
            };
            match ScheduledShare::open(paths, id, record) {
                Ok(share) => {
                    self.arbiter.resume(index, share.others_busy_ns());
                    self.shares[index] = Some(share);
                }
                Err(error) => {
                    tracing::warn!(share = %id, error = chain(&error), "cannot open grant; compute of this share is not balanced");
                }
            }
        }
    }

    /// Continues from the published values.
    fn resume(&mut self) {
        for (index, share) in self.shares.iter().enumerate() {
            if let Some(share) = share {
                self.arbiter.resume(index, share.others_busy_ns());
            }
        }
    }

    /// Reads all ledgers and publishes new values.
    fn step(&mut self, paths: &StatePaths, now_ns: u64) {
        let mut observed = [None; MAX_SHARES];
        for (observed, share) in observed.iter_mut().zip(&mut self.shares) {
            *observed = share.as_mut().and_then(|share| share.observe(paths, now_ns));
        }
        let published = self.arbiter.step(now_ns, &observed);
        for (share, published) in self.shares.iter().zip(published) {
            if let (Some(share), Some(published)) = (share, published)
                && let Err(error) = share.publish(&published)
            {
                tracing::debug!(share = %share.id, %error, "cannot publish compute rate");
            }
        }
    }
}

impl ScheduledShare {
    fn open(paths: &StatePaths, id: &ClaimDeviceName, record: &ShareRecord) -> io::Result<Self> {
        let share = match record.cores_percent {
            0 => Rate::FULL,
            percent => Rate::from_percent(percent.into()),
        };
        let policy = match record.compute {
            // 0 percent means best effort, which has no cap.
            _ if record.cores_percent == 0 => ComputePolicy::None,
            ComputeCap::None => ComputePolicy::None,
            ComputeCap::Fixed => ComputePolicy::Fixed,
            ComputeCap::Balance => ComputePolicy::Balance,
        };
        let priority = match record.priority {
            ComputePriority::High => 0,
            ComputePriority::Normal => 1,
            ComputePriority::Low => 2,
        };
        let grant = File::options().read(true).write(true).open(paths.grant(id))?;
        Ok(Self { id: id.clone(), tenant: Tenant { policy, share, priority }, grant, waits: 0 })
    }

    /// Returns the usage in its ledger, or `None` if the ledger is unreadable or corrupt.
    fn observe(&mut self, paths: &StatePaths, now_ns: u64) -> Option<Observation> {
        let (file, bytes) = read_ledger(&paths.ledger(&self.id)).ok()?;
        let ledger = LedgerReport::parse(&bytes).ok()?;
        let waits = ledger.waits();
        // The slot of a process that was killed while it waited says so until it is reclaimed.
        let still_waits =
            || ledger.processes().any(|process| process.waits && is_alive(&file, process.slot));
        let waited = waits != self.waits || still_waits();
        self.waits = waits;
        let (busy_ns, gpu_ns) = (ledger.busy_ns(now_ns), ledger.gpu_ns());
        Some(Observation { tenant: self.tenant, busy_ns, gpu_ns, waited })
    }

    /// Writes the values. The word with the time stamp is last, since readers read it first.
    fn publish(&self, published: &Published) -> io::Result<()> {
        let [word, others_busy_ns] = published.words();
        self.grant.write_all_at(&others_busy_ns.to_le_bytes(), OTHERS_BUSY)?;
        self.grant.write_all_at(&word.to_le_bytes(), WORD)
    }

    /// Returns true if the grant was removed since it was opened: a share that is prepared again
    /// between two rounds has a new file under the same name.
    fn was_removed(&self) -> bool {
        self.grant.metadata().is_ok_and(|grant| grant.nlink() == 0)
    }

    /// Returns the published busy time of other shares.
    fn others_busy_ns(&self) -> u64 {
        let mut bytes = [0; 8];
        self.grant.read_exact_at(&mut bytes, OTHERS_BUSY).map_or(0, |()| u64::from_le_bytes(bytes))
    }
}

fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}
