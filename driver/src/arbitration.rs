//! Says to each share's containers, some times a second, how fast they may go and who else is on
//! their GPU.
//!
//! ```text
//! journal --[which shares, of which GPU]--+
//! ledgers --[busy and GPU time, waits]----+--> Arbiter, one for each GPU --> PublishedPage, in each share's grant
//! ```
//!
//! Only this writes there, and of several drivers on a node only the one that holds the lock: in a
//! rolling update two are at work for a moment. A driver that starts goes on from what is
//! published. A GPU that no claim has a share of is not looked at; where there is none, nothing
//! wakes up. What is said here goes stale after a second: without a driver, `Balance` is `Fixed`.
//!
//! A ledger is its tenant's to write. What a ruined or lying one costs others is bounded by the
//! machine (`tessera_intercept_limiter::compute`): a share is never believed to have had more than
//! some processes' worth of work.

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
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    state::{
        StatePaths,
        journal::{ComputeCap, ComputePriority, Journal, ShareRecord, State},
        sole_lock,
    },
    usage::{is_alive, read_ledger},
};

/// Between two rounds: what is given back is taken back within some of these.
const EVERY: Duration = Duration::from_millis(50);

/// Shares of one GPU that are looked at. More than these go by their grants alone.
const SHARES: usize = 128;

/// Where the words lie in a grant.
const WORD: u64 = grant_offset::PUBLISHED as u64;
const OTHERS_BUSY: u64 = WORD + std::mem::offset_of!(PublishedPage, others_busy_ns) as u64;

/// The arbiter of one node's GPUs.
#[derive(Debug)]
pub struct Arbitration {
    paths: StatePaths,
    journal: watch::Receiver<Arc<Journal>>,
    gpus: BTreeMap<GpuUuid, Gpu>,
    /// Held by the driver that publishes.
    lock: Option<File>,
}

#[derive(Debug)]
struct Gpu {
    arbiter: Box<Arbiter<SHARES>>,
    /// By place in the arbiter, which a share keeps.
    shares: Vec<Option<Share>>,
}

/// One share.
#[derive(Debug)]
struct Share {
    id: ClaimDeviceName,
    tenant: Tenant,
    grant: File,
    /// Launches that had waited, the last time.
    waits: u64,
}

impl Arbitration {
    /// For the shares below `paths` of the claims that `journal` has.
    #[must_use]
    pub fn new(paths: StatePaths, journal: watch::Receiver<Arc<Journal>>) -> Self {
        Self { paths, journal, gpus: BTreeMap::new(), lock: None }
    }

    /// Goes on until told to stop.
    pub async fn run(mut self, stop: CancellationToken) {
        self.journal.mark_changed();
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let idle = self.gpus.is_empty();
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.journal.changed(), if idle => if changed.is_err() { return },
                _ = ticks.tick(), if !idle => {}
            }
            // Files on a tmpfs, but a hundred of them twenty times a second.
            let round = tokio::task::spawn_blocking(move || {
                self.round(idle);
                self
            });
            let Ok(this) = round.await else { return };
            self = this;
        }
    }

    /// `changed`: the journal is known to have.
    fn round(&mut self, changed: bool) {
        if changed || self.journal.has_changed().unwrap_or(false) {
            self.follow_journal();
        }
        if !self.gpus.is_empty() && self.may_publish() {
            let now_ns = monotonic_ns();
            for gpu in self.gpus.values_mut() {
                gpu.step(&self.paths, now_ns);
            }
        }
    }

    /// Takes the shares that there are now.
    fn follow_journal(&mut self) {
        let journal = Arc::clone(&self.journal.borrow_and_update());
        let prepared = journal.claims.iter().filter(|(_, record)| record.state == State::Completed);
        let mut by_gpu: BTreeMap<&GpuUuid, BTreeMap<ClaimDeviceName, &ShareRecord>> =
            BTreeMap::new();
        for (uid, record) in prepared {
            for share in &record.shares {
                by_gpu.entry(&share.gpu).or_default().insert(share.id(uid), share);
            }
        }
        self.gpus.retain(|gpu, _| by_gpu.contains_key(gpu));
        for (gpu, shares) in by_gpu {
            self.gpus.entry(gpu.clone()).or_default().follow(&self.paths, &shares);
        }
        if self.gpus.is_empty() {
            self.lock = None;
        }
    }

    /// Whether this driver is the one that publishes.
    fn may_publish(&mut self) -> bool {
        if self.lock.is_none() {
            self.lock = sole_lock::take(&self.paths.arbitration_lock()).unwrap_or_else(|error| {
                tracing::warn!(
                    error = chain(&error),
                    "compute is not balanced: its lock cannot be had"
                );
                None
            });
            if self.lock.is_some() {
                // Another may have published since the shares were found.
                self.gpus.values_mut().for_each(Gpu::resume);
            }
        }
        self.lock.is_some()
    }
}

impl Default for Gpu {
    fn default() -> Self {
        Self { arbiter: Box::default(), shares: (0..SHARES).map(|_| None).collect() }
    }
}

impl Gpu {
    /// Keeps the shares that are still there in their places, and takes new ones in.
    fn follow(&mut self, paths: &StatePaths, shares: &BTreeMap<ClaimDeviceName, &ShareRecord>) {
        for place in &mut self.shares {
            place.take_if(|share| !shares.contains_key(&share.id) || share.was_removed());
        }
        let known: BTreeSet<_> =
            self.shares.iter().flatten().map(|share| share.id.clone()).collect();
        for (id, record) in shares.iter().filter(|(id, _)| !known.contains(id)) {
            let Some(at) = self.shares.iter().position(Option::is_none) else {
                tracing::warn!(share = %id, "compute is not balanced for it: the GPU has more than {SHARES} shares");
                continue;
            };
            match Share::open(paths, id, record) {
                Ok(share) => {
                    self.arbiter.resume(at, share.others_busy_ns());
                    self.shares[at] = Some(share);
                }
                Err(error) => {
                    tracing::warn!(share = %id, error = chain(&error), "compute is not balanced for it");
                }
            }
        }
    }

    /// Goes on from what is published.
    fn resume(&mut self) {
        for (at, share) in self.shares.iter().enumerate() {
            if let Some(share) = share {
                self.arbiter.resume(at, share.others_busy_ns());
            }
        }
    }

    /// Reads all ledgers, and publishes.
    fn step(&mut self, paths: &StatePaths, now_ns: u64) {
        let mut seen = [None; SHARES];
        for (seen, share) in seen.iter_mut().zip(&mut self.shares) {
            *seen = share.as_mut().and_then(|share| share.observe(paths, now_ns));
        }
        let published = self.arbiter.step(now_ns, &seen);
        for (share, published) in self.shares.iter().zip(published) {
            if let (Some(share), Some(published)) = (share, published)
                && let Err(error) = share.publish(&published)
            {
                tracing::debug!(share = %share.id, %error, "cannot publish");
            }
        }
    }
}

impl Share {
    fn open(paths: &StatePaths, id: &ClaimDeviceName, record: &ShareRecord) -> io::Result<Self> {
        let share = match record.cores_percent {
            0 => Rate::FULL,
            percent => Rate::from_percent(percent.into()),
        };
        let policy = match record.compute {
            // A share of nothing caps nothing.
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

    /// What its ledger says; nothing where that makes no sense.
    fn observe(&mut self, paths: &StatePaths, now_ns: u64) -> Option<Observation> {
        let (file, bytes) = read_ledger(&paths.ledger(&self.id)).ok()?;
        let ledger = LedgerReport::parse(&bytes).ok()?;
        let waits = ledger.waits();
        // Who was killed while it waited does so for ever, by what it left in its slot.
        let still_waits =
            || ledger.processes().any(|process| process.waits && is_alive(&file, process.slot));
        let waited = waits != self.waits || still_waits();
        self.waits = waits;
        let (busy_ns, gpu_ns) = (ledger.busy_ns(now_ns), ledger.gpu_ns());
        Some(Observation { tenant: self.tenant, busy_ns, gpu_ns, waited })
    }

    /// The word with the stamp last: who reads it reads the other after it.
    fn publish(&self, published: &Published) -> io::Result<()> {
        let [word, others_busy_ns] = published.words();
        self.grant.write_all_at(&others_busy_ns.to_le_bytes(), OTHERS_BUSY)?;
        self.grant.write_all_at(&word.to_le_bytes(), WORD)
    }

    /// Whether the grant was removed since: a share that is prepared again between two looks has a
    /// new file under the same name.
    fn was_removed(&self) -> bool {
        self.grant.metadata().is_ok_and(|grant| grant.nlink() == 0)
    }

    /// What was published of the others' work.
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
