//! Compute scheduler: publishes each share's compute rate and contention to its containers, every
//! 50 ms.
//!
//! ```text
//! journal --[which shares, of which GPU]--+
//! ledgers --[busy and GPU time, waits]----+--> Arbiter per GPU --> PublishedPage of each grant
//! grants --[gain of the measurement]------+
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

use tessera_api::{
    names::{ClaimDeviceName, GpuUuid},
    slice::MaxShares,
};
use tessera_intercept_abi::LedgerReport;
use tessera_intercept_limiter::compute::{
    Arbiter, Gain, Observation, Published, Rate, Tenant, needs_metering,
};
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::watch,
    task::{JoinError, JoinSet},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::monotonic_ns,
    state::{
        StatePaths,
        journal::{ComputePriority, Journal, RecordState, ShareRecord},
        shares::open_grant,
        sole_lock,
    },
    usage::{
        Ledgers,
        liveness::live_slots,
        measurement::{GAIN, OTHERS_BUSY, SCALE, WORD},
        read_ledger,
    },
};

/// Interval of rounds. Unused compute is redistributed within a few rounds.
const INTERVAL: Duration = Duration::from_millis(50);

/// Upper bound of scheduled shares per GPU. Further shares, of claims allocated while more were
/// possible, are limited by their grants alone.
const MAX_SHARES: usize = MaxShares::LIMIT as usize;

/// The compute scheduler of one node's GPUs.
///
/// Each GPU makes its rounds on a thread of its own, so that ledgers that are slow to read delay
/// the rounds of their own GPU only.
#[derive(Debug)]
pub struct Arbitration {
    ledgers: Ledgers,
    journal: watch::Receiver<Arc<Journal>>,
    gpus: BTreeMap<GpuUuid, GpuRounds>,
    rounds: JoinSet<(GpuUuid, Box<ScheduledGpu>)>,
    /// The lock of the instance that publishes. A round holds it too: a stop does not wait for
    /// rounds, and another instance must not publish beside the last one.
    lock: Option<Arc<File>>,
}

/// Prepared shares of one GPU.
type PreparedShares = BTreeMap<ClaimDeviceName, ShareRecord>;

/// The rounds of one GPU.
#[derive(Debug)]
struct GpuRounds {
    /// The shares of the journal.
    prepared: Arc<PreparedShares>,
    /// `None` while a round runs.
    gpu: Option<Box<ScheduledGpu>>,
}

/// A GPU with shares.
#[derive(Debug)]
struct ScheduledGpu {
    arbiter: Box<Arbiter<MAX_SHARES>>,
    /// By index in the arbiter. A share keeps its index.
    shares: Vec<Option<ScheduledShare>>,
    /// The shares of the last update.
    updated: Option<Arc<PreparedShares>>,
    /// Shares that are not scheduled. Each was logged once, and is tried again in each round.
    unscheduled: BTreeSet<ClaimDeviceName>,
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
    /// Returns a scheduler of the shares of `ledgers`.
    #[must_use]
    pub fn new(ledgers: Ledgers) -> Self {
        let journal = ledgers.journal();
        Self { ledgers, journal, gpus: BTreeMap::new(), rounds: JoinSet::new(), lock: None }
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
                changed = self.journal.changed(), if idle => match changed {
                    Ok(()) => self.read_journal(),
                    Err(_) => return,
                },
                Some(ended) = self.rounds.join_next() => self.end_round(ended),
                _ = ticks.tick(), if !idle => self.begin_rounds(),
            }
        }
    }

    /// Begins a round of each GPU whose last round has ended.
    fn begin_rounds(&mut self) {
        if self.journal.has_changed().unwrap_or(false) {
            self.read_journal();
        }
        if self.gpus.is_empty() || !self.try_lock() {
            return;
        }
        for (uuid, rounds) in &mut self.gpus {
            let Some(mut gpu) = rounds.gpu.take() else { continue };
            let (uuid, prepared) = (uuid.clone(), Arc::clone(&rounds.prepared));
            let (ledgers, lock) = (self.ledgers.clone(), self.lock.clone());
            // Up to a hundred files, twenty times a second.
            self.rounds.spawn_blocking(move || {
                gpu.round(&ledgers, &prepared);
                drop(lock);
                (uuid, gpu)
            });
        }
    }

    /// Takes the GPU of a round back. A panic of the round continues.
    fn end_round(&mut self, ended: Result<(GpuUuid, Box<ScheduledGpu>), JoinError>) {
        match ended.map_err(JoinError::try_into_panic) {
            Ok((uuid, gpu)) => {
                if let Some(rounds) = self.gpus.get_mut(&uuid) {
                    rounds.gpu = Some(gpu);
                }
                self.remove_unused();
            }
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            Err(Err(error)) => tracing::debug!(%error, "round of compute scheduling was cancelled"),
        }
    }

    /// Updates the prepared shares from the journal.
    fn read_journal(&mut self) {
        let journal = Arc::clone(&self.journal.borrow_and_update());
        let prepared =
            journal.claims.iter().filter(|(_, record)| record.state == RecordState::Completed);
        let mut by_gpu: BTreeMap<&GpuUuid, PreparedShares> = BTreeMap::new();
        for (uid, record) in prepared {
            for share in &record.shares {
                by_gpu.entry(&share.gpu).or_default().insert(share.id(uid), share.clone());
            }
        }
        for (gpu, rounds) in &mut self.gpus {
            rounds.replace(by_gpu.remove(gpu).unwrap_or_default());
        }
        for (gpu, shares) in by_gpu {
            self.gpus.entry(gpu.clone()).or_default().replace(shares);
        }
        self.remove_unused();
    }

    /// Removes GPUs without shares. One whose round runs is removed at its end: two rounds of a GPU
    /// must not publish at the same time.
    fn remove_unused(&mut self) {
        self.gpus.retain(|_, rounds| !rounds.prepared.is_empty() || rounds.gpu.is_none());
        if self.gpus.is_empty() {
            self.lock = None;
        }
    }

    /// Takes the lock if it is free. Returns true if this instance holds it. Grants are opened
    /// afterwards, so that scheduling continues from what another instance has published.
    fn try_lock(&mut self) -> bool {
        if self.lock.is_none() {
            let path = self.ledgers.paths().arbitration_lock();
            let taken = sole_lock::take(&path).unwrap_or_else(|error| {
                tracing::warn!(
                    error = chain(&error),
                    "cannot lock compute scheduling; compute is not balanced"
                );
                None
            });
            self.lock = taken.map(Arc::new);
        }
        self.lock.is_some()
    }
}

impl Default for GpuRounds {
    fn default() -> Self {
        Self { prepared: Arc::default(), gpu: Some(Box::default()) }
    }
}

impl GpuRounds {
    /// Replaces the prepared shares. Equal ones may have new files.
    fn replace(&mut self, shares: PreparedShares) {
        self.prepared = Arc::new(shares);
    }
}

impl Default for ScheduledGpu {
    fn default() -> Self {
        Self {
            arbiter: Box::default(),
            shares: (0..MAX_SHARES).map(|_| None).collect(),
            updated: None,
            unscheduled: BTreeSet::new(),
        }
    }
}

impl ScheduledGpu {
    /// Makes one round for the `prepared` shares.
    fn round(&mut self, ledgers: &Ledgers, prepared: &Arc<PreparedShares>) {
        let is_updated =
            self.updated.as_ref().is_some_and(|updated| Arc::ptr_eq(updated, prepared));
        if !is_updated || !self.unscheduled.is_empty() {
            self.update(ledgers.paths(), prepared);
            self.updated = Some(Arc::clone(prepared));
        }
        self.step(ledgers, monotonic_ns());
    }

    /// Removes shares that are gone and adds new ones. The others keep their index.
    fn update(&mut self, paths: &StatePaths, shares: &PreparedShares) {
        for slot in &mut self.shares {
            slot.take_if(|share| !shares.contains_key(&share.id) || share.was_removed());
        }
        self.unscheduled.retain(|share| shares.contains_key(share));
        let known: BTreeSet<_> =
            self.shares.iter().flatten().map(|share| share.id.clone()).collect();
        for (id, record) in shares.iter().filter(|(id, _)| !known.contains(id)) {
            let free = self.shares.iter().position(Option::is_none);
            let opened = free.map(|index| (index, ScheduledShare::open(paths, id, record)));
            match opened {
                Some((index, Ok(share))) => {
                    self.arbiter.resume(index, share.others_busy_ns());
                    self.shares[index] = Some(share);
                    self.unscheduled.remove(id);
                }
                None if self.unscheduled.insert(id.clone()) => {
                    tracing::warn!(share = %id, limit = MAX_SHARES, "too many shares of one GPU; compute of this share is not balanced");
                }
                Some((_, Err(error))) if self.unscheduled.insert(id.clone()) => {
                    tracing::warn!(share = %id, error = chain(&error), "cannot open grant; compute of this share is not balanced until it can be opened");
                }
                None | Some(_) => {}
            }
        }
    }

    /// Returns true if launches of a share must be charged and measured. The tenants of unscheduled
    /// shares are unknown: beside them, all launches are metered.
    fn needs_metering(&self, share: &ScheduledShare) -> bool {
        let others = self.shares.iter().flatten().filter(|other| other.id != share.id);
        !self.unscheduled.is_empty()
            || needs_metering(&share.tenant, others.map(|other| &other.tenant))
    }

    /// Reads all ledgers and publishes new values.
    fn step(&mut self, ledgers: &Ledgers, now_ns: u64) {
        let mut observed = [None; MAX_SHARES];
        for (observed, share) in observed.iter_mut().zip(&mut self.shares) {
            *observed = share.as_mut().and_then(|share| share.observe(ledgers, now_ns));
        }
        let published = self.arbiter.step(now_ns, &observed);
        for (share, published) in self.shares.iter().zip(published) {
            let is_metered = share.as_ref().is_none_or(|share| self.needs_metering(share));
            let Some(share) = share else { continue };
            let written = match published {
                Some(published) => share.publish(&Published { is_metered, ..published }),
                // Its ledger is unreadable: only the end of an unmetered time is published.
                None if is_metered => share.publish_metering(),
                None => Ok(()),
            };
            if let Err(error) = written {
                tracing::debug!(share = %share.id, %error, "cannot publish compute rate");
            }
        }
    }
}

impl ScheduledShare {
    fn open(paths: &StatePaths, id: &ClaimDeviceName, record: &ShareRecord) -> io::Result<Self> {
        let entitlement = record.entitlement();
        let limit =
            record.limit_percent.map_or(Rate::FULL, |limit| Rate::from_percent(limit.into()));
        let priority = match record.priority {
            ComputePriority::High => 0,
            ComputePriority::Normal => 1,
            ComputePriority::Low => 2,
        };
        let grant = open_grant(&paths.grant(id))?;
        Ok(Self {
            id: id.clone(),
            tenant: Tenant { entitlement, limit, priority },
            grant,
            waits: 0,
        })
    }

    /// Returns the usage in its ledger, or `None` if the ledger is unreadable, corrupt, or has too
    /// many locks.
    fn observe(&mut self, ledgers: &Ledgers, now_ns: u64) -> Option<Observation> {
        let id = self.id.clone();
        ledgers.slow().read(&id, || self.read_ledger(ledgers, now_ns)).ok()?
    }

    fn read_ledger(&mut self, ledgers: &Ledgers, now_ns: u64) -> Option<Observation> {
        let (file, bytes) = read_ledger(&ledgers.paths().ledger(&self.id)).ok()?;
        let ledger = LedgerReport::parse(&bytes).ok()?;
        let waits = ledger.waits();
        // The slot of a process that was killed while it waited says so until it is reclaimed.
        let waiting = ledger.processes().filter(|process| process.waits);
        let mut waiting = waiting.map(|process| process.slot).peekable();
        let waited = if waits != self.waits {
            true
        } else if waiting.peek().is_some() {
            !live_slots(&file, waiting).ok()?.is_empty()
        } else {
            false
        };
        self.waits = waits;
        let (busy_ns, gpu_ns) = (ledger.busy_ns(now_ns), ledger.gpu_ns());
        let gain = self.gain(now_ns);
        Some(Observation { tenant: self.tenant, busy_ns, gpu_ns, gain, waited })
    }

    /// Writes the values. The word with the time stamp is last, since readers read it first.
    fn publish(&self, published: &Published) -> io::Result<()> {
        let [word, others_busy_ns, scale] = published.words();
        self.grant.write_all_at(&scale.to_le_bytes(), SCALE)?;
        self.grant.write_all_at(&others_busy_ns.to_le_bytes(), OTHERS_BUSY)?;
        self.grant.write_all_at(&word.to_le_bytes(), WORD)
    }

    /// Publishes that launches are metered, if the opposite was published. Other values stay as
    /// they are, and expire.
    fn publish_metering(&self) -> io::Result<()> {
        let word = self.word(WORD);
        if Published::word_is_metered(word) {
            return Ok(());
        }
        self.grant.write_all_at(&Published::metered(word).to_le_bytes(), WORD)
    }

    /// Returns true if the grant was removed since it was opened: a share that is prepared again
    /// between two rounds has a new file under the same name.
    fn was_removed(&self) -> bool {
        self.grant.metadata().is_ok_and(|grant| grant.nlink() == 0)
    }

    /// Returns the published busy time of other shares.
    fn others_busy_ns(&self) -> u64 {
        self.word(OTHERS_BUSY)
    }

    /// Returns the correction of charged GPU time, which the measurement of shares has published.
    fn gain(&self, now_ns: u64) -> Gain {
        Gain::of_word(self.word(GAIN), now_ns)
    }

    /// Returns a word of the grant, or 0 if it cannot be read.
    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.grant.read_exact_at(&mut bytes, at).map_or(0, |()| u64::from_le_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tessera_api::names::ClaimUid;
    use tessera_intercept_abi::grant_offset;

    use super::*;

    const CLAIM: &str = "1f0c2d3e-9a41-4c3b-8e55-0d6f2b1a4c77";

    /// A share of the journal's format, of the GPU with this number.
    fn record(gpu: u32) -> ShareRecord {
        let share = serde_json::json!({
            "index": gpu, "request": "gpu", "pool": "node", "device": "gpu-0",
            "gpu": format!("GPU-00000000-0000-0000-0000-00000000000{gpu}"),
            "memoryBytes": 1 << 30, "coresPercent": 30, "compute": "Balance",
        });
        serde_json::from_value(share).expect("a share")
    }

    /// Adds the share of a GPU to what is prepared, and makes its files.
    fn prepare(arbitration: &mut Arbitration, gpu: u32) -> std::path::PathBuf {
        let (record, claim) = (record(gpu), ClaimUid::new(CLAIM).expect("a UID"));
        let (id, paths) = (record.id(&claim), arbitration.ledgers.paths().clone());
        for path in [paths.grant(&id), paths.ledger(&id)] {
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(&path, vec![0; 1 << 16]).expect("written");
        }
        let mut ledger = vec![0; tessera_intercept_abi::LEDGER_LEN];
        let initial = tessera_intercept_abi::ledger::initial();
        ledger[..initial.len()].copy_from_slice(&initial);
        fs::write(paths.ledger(&id), ledger).expect("written");
        let (uuid, grant) = (record.gpu.clone(), paths.grant(&id));
        arbitration.gpus.entry(uuid).or_default().replace([(id, record)].into());
        grant
    }

    fn is_published(grant: &std::path::Path) -> bool {
        let at = grant_offset::PUBLISHED;
        fs::read(grant).expect("a grant")[at..at + 8] != [0; 8]
    }

    fn arbitration(directory: &tempfile::TempDir) -> Arbitration {
        let (_, journal) = watch::channel(Arc::default());
        let paths = StatePaths::new(directory.path().to_owned());
        Arbitration::new(Ledgers::new(paths, journal))
    }

    #[tokio::test]
    async fn gpu_whose_round_runs_does_not_delay_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut arbitration = arbitration(&directory);
        let [slow, other] = [0, 1].map(|gpu| prepare(&mut arbitration, gpu));
        let slow_uuid = record(0).gpu;
        let running = arbitration.gpus.get_mut(&slow_uuid).expect("a GPU").gpu.take();
        arbitration.begin_rounds();
        let ended = arbitration.rounds.join_next().await.expect("a round");
        arbitration.end_round(ended);
        assert!(is_published(&other) && !is_published(&slow));
        assert!(arbitration.rounds.is_empty());

        arbitration.end_round(Ok((slow_uuid, running.expect("not running before"))));
        arbitration.begin_rounds();
        arbitration.rounds.join_next().await.expect("a round").expect("no panic");
        arbitration.rounds.join_next().await.expect("another round").expect("no panic");
        assert!(is_published(&slow));
    }

    #[tokio::test]
    async fn gpu_without_shares_is_removed_after_its_round() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut arbitration = arbitration(&directory);
        prepare(&mut arbitration, 0);
        arbitration.begin_rounds();
        // The journal is empty.
        arbitration.read_journal();
        assert_eq!(arbitration.gpus.len(), 1, "its round has not been ended");
        let ended = arbitration.rounds.join_next().await.expect("a round");
        arbitration.end_round(ended);
        assert!(arbitration.gpus.is_empty() && arbitration.lock.is_none());
    }

    #[test]
    fn open_grants_do_not_wait_for_leases_of_containers() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut arbitration = arbitration(&directory);
        let grant = prepare(&mut arbitration, 0);
        let share = record(0);
        let id = share.id(&ClaimUid::new(CLAIM).expect("a UID"));
        let paths = arbitration.ledgers.paths();
        let opened = ScheduledShare::open(paths, &id, &share).expect("opened");
        let flags = nix::fcntl::fcntl(&opened.grant, nix::fcntl::FcntlArg::F_GETFL);
        let flags = nix::fcntl::OFlag::from_bits_retain(flags.expect("flags"));
        assert!(flags.contains(nix::fcntl::OFlag::O_NONBLOCK), "{grant:?}: {flags:?}");
    }
}
