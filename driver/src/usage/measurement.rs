//! Measures shares by NVML, every second.
//!
//! ```text
//! NVML: bytes and percent of each process --+
//! /proc: which process                    --+--> gain, overhead --> PublishedPage of each grant
//! ledgers: bytes and GPU time of each slot -+                   --> metrics, events
//! ```
//!
//! The interceptor counts what programs ask for. What the CUDA driver takes by itself (contexts,
//! code of kernels, local memory) and what events cannot show (kernels that run at the same time,
//! copies) is seen by NVML only. The difference is published to the containers, which count it too
//! (docs/adr/0110-host-measurement.md). Both are bounded, since containers can write their ledgers.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    io,
    mem::offset_of,
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tessera_api::{
    events,
    names::{ClaimDeviceName, GpuUuid},
};
use tessera_gpu::{GpuLibrary, GpuProcess, ProcessUtilization};
use tessera_intercept_abi::{ProcessReport, PublishedPage, grant_offset};
use tessera_intercept_limiter::compute::{Gain, GainEstimator, Interval, Published, Rate};
use tessera_runtime::{error_chain::chain, supervisor::blocking};
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::{
    LedgerUsage, Ledgers, ShareUsage,
    comparison::{Compared, ProcessCharge, ProcessId},
    owners::Owners,
    process::ProcFs,
};
use crate::{
    clock::monotonic_ns,
    events::ClaimEvent,
    state::{shares::open_grant, sole_lock},
};

/// Interval of readings. NVML takes a sample of each process about six times a second.
const INTERVAL: Duration = Duration::from_secs(1);

/// Readings of a process's overhead whose median counts. A program allocates and frees between the
/// reads of NVML and of its ledger.
const READINGS: usize = 3;

/// Readings with a large gain until it is reported.
const LARGE_READINGS: u32 = 10;

// Offsets of the published words in a grant.
pub(crate) const GAIN: u64 = published(offset_of!(PublishedPage, gain));
const OVERHEAD: u64 = published(offset_of!(PublishedPage, overhead_bytes));
const UNMETERED: u64 = published(offset_of!(PublishedPage, unmetered_gpu_ns));
// Of those of the compute scheduler.
pub(crate) const WORD: u64 = published(offset_of!(PublishedPage, word));
pub(crate) const SCALE: u64 = published(offset_of!(PublishedPage, scale));
pub(crate) const OTHERS_BUSY: u64 = published(offset_of!(PublishedPage, others_busy_ns));

/// Returns the offset in a grant of a field of the published page.
const fn published(field: usize) -> u64 {
    (grant_offset::PUBLISHED + field) as u64
}

/// The measurement of one node's shares.
pub struct HostMeasurement {
    ledgers: Ledgers,
    gpus: Arc<dyn GpuLibrary>,
    owners: Owners,
    events: mpsc::Sender<ClaimEvent>,
    /// The samples that were read, by GPU.
    sampled: BTreeMap<GpuUuid, Sampled>,
    shares: BTreeMap<ClaimDeviceName, MeasuredShare>,
    /// True if GPU time is corrected.
    corrects: bool,
    /// The lock of the instance that publishes.
    lock: Option<File>,
}

/// The last reading of a GPU's samples.
#[derive(Clone, Copy, Debug)]
struct Sampled {
    /// NVML's time of the last sample in us.
    last_us: u64,
    /// Monotonic time of the reading in ns, whether it had a newer sample or not: NVML has no
    /// samples of an idle GPU, and what follows a pause of hours is of the last second.
    at_ns: u64,
}

/// The state of one share.
#[derive(Debug, Default)]
struct MeasuredShare {
    estimator: GainEstimator,
    /// GPU time charged at the last reading; `None` before the first.
    charged: Option<Duration>,
    /// The processes that NVML reported then.
    processes: BTreeMap<ProcessId, ProcessCharge>,
    /// Readings in a row with a large gain.
    large: u32,
    /// Refused allocations at the last reading; `None` before the first.
    refused: Option<u64>,
    /// Last readings of the overhead of each process in bytes, by PID and start time.
    overheads: BTreeMap<ProcessId, VecDeque<i64>>,
}

/// One reading of a GPU.
#[derive(Debug, Default)]
struct GpuReading {
    processes: Vec<GpuProcess>,
    /// The utilization. `None` if there is no newer sample.
    utilization: Option<ProcessUtilization>,
    /// Sum of the utilization of all processes in percent.
    percent: u32,
    /// Time of the last sample. `None` if it is unknown.
    sampled_at: Option<Instant>,
    /// Time since the last reading in ns; 0 for the first.
    wall_ns: u64,
    /// True if NVML does not report the utilization of processes.
    is_unsupported: bool,
}

impl std::fmt::Debug for HostMeasurement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostMeasurement").field("shares", &self.shares).finish_non_exhaustive()
    }
}

impl HostMeasurement {
    /// Returns a measurement that compares `ledgers` with the processes that `gpus` reports and
    /// `processes` shows.
    #[must_use]
    pub fn new(
        ledgers: Ledgers,
        gpus: Arc<dyn GpuLibrary>,
        processes: ProcFs,
        events: mpsc::Sender<ClaimEvent>,
    ) -> Self {
        let (sampled, shares, lock) = Default::default();
        let owners = Owners::new(processes);
        Self { ledgers, gpus, owners, events, sampled, shares, corrects: true, lock }
    }

    /// Returns it with this setting: false leaves charged GPU time as it is.
    #[must_use]
    pub fn with_correction(self, corrects: bool) -> Self {
        Self { corrects, ..self }
    }

    /// Measures until `stop`. A node without shares is not measured.
    pub async fn run(self, stop: CancellationToken) {
        let mut measurement = self;
        let mut journal = measurement.ledgers.journal();
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_idle = journal.borrow_and_update().claims.is_empty();
            tokio::select! {
                () = stop.cancelled() => return,
                changed = journal.changed(), if is_idle => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
                _ = ticks.tick(), if !is_idle => {}
            }
            // NVML may hang: the thread is left behind then when the driver stops.
            let round = blocking(move || {
                measurement.round(monotonic_ns());
                measurement
            });
            tokio::select! {
                () = stop.cancelled() => return,
                after = round => measurement = after,
            }
        }
    }

    /// Measures all shares once, and publishes what was found. `now_ns` is the monotonic time.
    pub fn round(&mut self, now_ns: u64) {
        if !self.try_lock() {
            return;
        }
        let before = self.ledgers.read();
        let gpus: BTreeSet<_> = before.iter().map(|share| share.gpu.clone()).collect();
        self.sampled.retain(|gpu, _| gpus.contains(gpu));
        let readings: BTreeMap<_, _> = gpus
            .into_iter()
            .filter_map(|gpu| Some((gpu.clone(), self.read_gpu(&gpu, now_ns)?)))
            .collect();
        let after = self.ledgers.read();
        let reported = |pid| {
            readings.values().any(|reading| reading.processes.iter().any(|held| held.pid == pid))
        };
        self.owners.retain(reported);
        self.shares.retain(|id, _| after.iter().any(|share| share.share == *id));
        for (gpu, reading) in &readings {
            let shares: Vec<_> = after.iter().filter(|share| share.gpu == *gpu).collect();
            self.measure(&shares, &before, reading, now_ns);
        }
    }

    /// Reads what NVML says about a GPU, or returns `None` if it does not answer: what was
    /// published stays then.
    fn read_gpu(&mut self, gpu: &GpuUuid, now_ns: u64) -> Option<GpuReading> {
        let processes = self.gpus.processes(gpu).inspect_err(|error| {
            tracing::debug!(%gpu, error = chain(error), "cannot read processes of GPU");
        });
        let processes = processes.ok()?;
        let before = self.sampled.get(gpu).copied();
        let since_us = before.map_or(0, |before| before.last_us);
        let utilization = self.gpus.utilization(gpu, since_us).unwrap_or_else(|error| {
            tracing::debug!(%gpu, error = chain(&error), "cannot read utilization of processes");
            None
        });
        let is_unsupported = utilization.is_none();
        let age = utilization.as_ref().and_then(|utilization| utilization.age);
        let sampled_at = age.and_then(|age| Instant::now().checked_sub(age));
        let newer = utilization.filter(|utilization| utilization.last_us > since_us);
        let last_us = newer.as_ref().map_or(since_us, |newer| newer.last_us);
        self.sampled.insert(gpu.clone(), Sampled { last_us, at_ns: now_ns });
        let wall_ns = before.map_or(0, |before| now_ns.saturating_sub(before.at_ns));
        // The first samples are of any time.
        let utilization = newer.filter(|_| since_us > 0);
        let percent = utilization.iter().flat_map(|of| of.percent.values()).sum();
        Some(GpuReading { processes, utilization, percent, sampled_at, wall_ns, is_unsupported })
    }

    /// Measures the shares of one GPU.
    fn measure(
        &mut self,
        shares: &[&ShareUsage],
        before: &[ShareUsage],
        reading: &GpuReading,
        now_ns: u64,
    ) {
        let mut found: Vec<FoundShare> = shares.iter().map(|_| FoundShare::default()).collect();
        for held in &reading.processes {
            let slots = self.owners.slots(shares, held.pid);
            let (Some((first, _)), Some(process)) = (slots.first(), self.owners.process(held.pid))
            else {
                continue;
            };
            let identity = (held.pid, process.start_ticks);
            // Memory is charged before the CUDA driver takes it, and stays charged until it is
            // given back. So the larger of both readings is not less than what it holds.
            let bytes_before = |share: &ShareUsage, slot: usize| {
                let before = before.iter().find(|before| before.share == share.share)?;
                let usage = before.usage.as_ref().ok()?;
                Some(usage.processes.iter().find(|before| before.slot == slot)?.used_bytes)
            };
            let charged = slots.iter().map(|(at, slot)| {
                slot.used_bytes.max(bytes_before(shares[*at], slot.slot).unwrap_or(0))
            });
            let charged = charged.fold(0, u64::saturating_add);
            let overhead = held.bytes.map(|bytes| difference(bytes, charged));
            let percent = reading
                .utilization
                .as_ref()
                .map_or(0, |utilization| utilization.percent.get(&held.pid).copied().unwrap_or(0));
            found[*first].overheads.extend(overhead.map(|overhead| (identity, overhead)));
            found[*first].percent = found[*first].percent.saturating_add(percent);
            // NVML does not say for which of several shares it worked.
            if slots.iter().all(|(at, _)| at == first) {
                let sum = |of: fn(&ProcessReport) -> u64| {
                    slots.iter().fold(0_u64, |sum, (_, slot)| sum.saturating_add(of(slot)))
                };
                let (gpu_ns, outstanding_ns) =
                    (sum(|slot| slot.gpu_ns), sum(|slot| slot.outstanding_ns));
                let busy_ns = slots.iter().map(|(_, slot)| slot.busy.until(now_ns)).max();
                let busy_ns = busy_ns.unwrap_or(0);
                let charge = ProcessCharge { gpu_ns, outstanding_ns, busy_ns, percent };
                found[*first].processes.insert(identity, charge);
            }
        }
        for (share, found) in shares.iter().zip(found) {
            self.publish(share, found, reading, now_ns);
        }
    }

    /// Publishes what was found about one share.
    fn publish(
        &mut self,
        share: &ShareUsage,
        found: FoundShare,
        reading: &GpuReading,
        now_ns: u64,
    ) {
        let Ok(usage) = &share.usage else { return };
        let state = self.shares.entry(share.share.clone()).or_default();
        let path = self.ledgers.paths().grant(&share.share);
        // The share may have been unprepared in between.
        let grant = open_grant(&path).and_then(PublishedGrant::read);
        let is_metered = grant.as_ref().is_ok_and(|grant| grant.is_metered);
        let used_ns = found.used_ns(reading);
        if reading.is_unsupported || !self.corrects || !is_metered {
            state.estimator = GainEstimator::default();
            state.charged = None;
        } else {
            let published = grant.as_ref().ok().and_then(|grant| grant.published(now_ns));
            let rate = share.entitlement.rate(published).unwrap_or(Rate::FULL);
            state.compare(usage, &found, reading, rate, now_ns);
        }
        let gain = state.estimator.gain();
        let corrected = state.large_gain(gain, share);
        let refused = state.refusal(usage, share);
        let notes =
            [(events::GPU_TIME_CORRECTED, corrected), (events::GPU_MEMORY_REFUSED, refused)];
        for (reason, note) in notes.into_iter().filter_map(|(reason, note)| Some((reason, note?))) {
            tracing::info!(namespace = %share.namespace, claim = %share.claim, note, "{}", reason.name());
            let (namespace, claim) = (share.namespace.clone(), share.claim.clone());
            let uid = share.share.claim().clone();
            // A full queue has the events of other claims; the metrics have all of them.
            let _ = self.events.try_send(ClaimEvent { namespace, claim, uid, reason, note });
        }
        let (percent, unmetered_ns) = (found.percent(), if is_metered { 0 } else { used_ns });
        let overhead_bytes = state.overhead(found, share.context_bytes);
        let measurement = Measurement { gain, overhead_bytes, unmetered: Duration::ZERO };
        let published =
            grant.and_then(|grant| grant.publish(measurement, percent, unmetered_ns, now_ns));
        if let Err(error) = published {
            tracing::debug!(share = %share.share, %error, "cannot publish measurement");
        }
    }

    /// Takes the lock if it is free. Returns true if this instance holds it.
    pub fn try_lock(&mut self) -> bool {
        let path = self.ledgers.paths().measurement_lock();
        sole_lock::hold(&mut self.lock, &path).unwrap_or_else(|error| {
            tracing::warn!(
                error = chain(&error),
                "cannot lock the measurement of shares; memory of CUDA contexts is not counted"
            );
            false
        })
    }
}

/// One reading of a share.
#[derive(Debug, Default)]
struct FoundShare {
    /// The processes with slots in no other share.
    processes: BTreeMap<ProcessId, ProcessCharge>,
    /// Bytes beyond the slots of each process.
    overheads: Vec<(ProcessId, i64)>,
    /// Sum of the utilization by its processes in percent.
    percent: u32,
}

impl FoundShare {
    /// Returns the GPU time that NVML reports for its processes since the last reading, in ns.
    fn used_ns(&self, reading: &GpuReading) -> u64 {
        reading.wall_ns / 100 * u64::from(self.percent)
    }

    /// Returns the utilization that NVML reports for its processes together, in percent.
    fn percent(&self) -> u8 {
        u8::try_from(self.percent.min(100)).unwrap_or(100)
    }
}

impl MeasuredShare {
    /// Compares the GPU time that was charged since the last reading with what NVML reports.
    ///
    /// NVML need not have a sample of a process that has just begun, and does not report one that
    /// has exited. So processes count that it reported at the last reading too; what the others
    /// were charged is taken to be used. A container gains nothing by hiding a process.
    fn compare(
        &mut self,
        usage: &LedgerUsage,
        found: &FoundShare,
        reading: &GpuReading,
        rate: Rate,
        now_ns: u64,
    ) {
        let before = std::mem::replace(&mut self.processes, found.processes.clone());
        let charged_before = self.charged.replace(usage.gpu_time);
        let Some(charged_before) = charged_before.filter(|_| reading.utilization.is_some()) else {
            return;
        };
        let charged_ns = nanoseconds(usage.gpu_time.saturating_sub(charged_before));
        let compared = Compared::new(&before, &found.processes);
        let outstanding = usage.processes.iter().map(|process| process.outstanding_ns);
        // The ledgers were read after NVML, which may take long: the sample is older by that.
        let age_ns = reading.sampled_at.map(|at| nanoseconds(at.elapsed()));
        self.estimator.add(Interval {
            wall_ns: reading.wall_ns,
            age_ns,
            charged_ns,
            busy_ns: compared.busy_ns,
            outstanding_ns: outstanding.fold(0, u64::saturating_add),
            used_ns: compared.used_ns(charged_ns, reading.wall_ns),
            processes: compared.working,
            is_contended: reading.percent > found.percent,
            is_late: usage
                .processes
                .iter()
                .any(|process| Interval::is_late(process.busy.done_by_ns(), now_ns)),
            rate,
        });
    }

    /// Returns the note of an event when the gain has been large for some time, once.
    fn large_gain(&mut self, gain: Gain, share: &ShareUsage) -> Option<String> {
        self.large = if gain.is_large() { self.large.saturating_add(1) } else { 0 };
        (self.large == LARGE_READINGS).then(|| {
            format!(
                "GPU time of ResourceClaim {} on {} is corrected by a factor of {:.2}: NVML reports that \
                 much of what CUDA events show. Kernels in several streams at the same time are counted once by \
                 NVML; copies, and kernels that kernels launch, are not seen by events. The limit holds with the correction",
                share.claim,
                share.gpu,
                gain.as_quotient()
            )
        })
    }

    /// Returns the note of an event if allocations were refused since the last reading.
    fn refusal(&mut self, usage: &LedgerUsage, share: &ShareUsage) -> Option<String> {
        let before = self.refused.replace(usage.refused)?;
        let refused = usage.refused.checked_sub(before).filter(|refused| *refused > 0)?;
        let ((bytes, used), mebibytes) = (usage.last_refusal, |bytes: u64| bytes.div_ceil(1 << 20));
        Some(format!(
            "{refused} allocations of memory of {} were refused, the last of {} MiB: {} of {} MiB of \
             ResourceClaim {} were in use, with contexts and kernel code",
            share.gpu,
            mebibytes(bytes),
            mebibytes(used),
            mebibytes(share.limit_bytes),
            share.claim
        ))
    }

    /// Adds the overheads of a reading, and returns their sum: of each process the median of its
    /// last readings, and nothing in the first seconds. Of what was charged for contexts, at most
    /// `context_bytes` are given back for each process.
    fn overhead(&mut self, found: FoundShare, context_bytes: u64) -> i64 {
        let found: BTreeMap<_, _> = found.overheads.into_iter().collect();
        self.overheads.retain(|process, _| found.contains_key(process));
        let least = difference(0, context_bytes);
        let mut sum: i64 = 0;
        for (process, overhead) in found {
            let readings = self.overheads.entry(process).or_default();
            readings.push_back(overhead.max(least));
            if readings.len() > READINGS {
                readings.pop_front();
            }
            if readings.len() == READINGS {
                let mut sorted: Vec<i64> = readings.iter().copied().collect();
                sorted.sort_unstable();
                sum = sum.saturating_add(sorted[READINGS / 2]);
            }
        }
        sum
    }
}

/// The published measurement of a share.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measurement {
    /// The correction of charged GPU time.
    pub gain: Gain,
    /// Bytes that the CUDA driver holds beyond what the slots say.
    pub overhead_bytes: i64,
    /// GPU time that NVML reported while launches were not metered. The ledger does not contain
    /// it.
    pub unmetered: Duration,
}

impl Measurement {
    /// Returns what a grant says, or `None` if it cannot be read.
    #[must_use]
    pub fn read(grant: &Path) -> Option<Self> {
        let grant = open_grant(grant).ok()?;
        let [gain, overhead, unmetered_ns] =
            [GAIN, OVERHEAD, UNMETERED].map(|at| read_word(&grant, at));
        Some(Self {
            gain: Gain::of_word(gain.ok()?, monotonic_ns()),
            overhead_bytes: overhead.ok()?.cast_signed(),
            unmetered: Duration::from_nanos(unmetered_ns.ok()?),
        })
    }
}

/// A grant whose published words are read and written.
struct PublishedGrant {
    file: File,
    is_metered: bool,
}

impl PublishedGrant {
    fn read(file: File) -> io::Result<Self> {
        let is_metered = Published::word_is_metered(read_word(&file, WORD)?);
        Ok(Self { file, is_metered })
    }

    /// Returns the values of the compute scheduler. `None` if they have expired.
    fn published(&self, now_ns: u64) -> Option<Published> {
        let word = |at| read_word(&self.file, at).ok();
        Published::of_words([word(WORD)?, word(OTHERS_BUSY)?, word(SCALE)?], now_ns)
    }

    /// Writes a measurement, and adds GPU time to that of unmetered launches, which stays in the
    /// grant when the driver restarts.
    fn publish(
        &self,
        measurement: Measurement,
        percent: u8,
        unmetered_ns: u64,
        now_ns: u64,
    ) -> io::Result<()> {
        let gain = measurement.gain.word(percent, now_ns);
        self.file.write_all_at(&gain.to_le_bytes(), GAIN)?;
        self.file.write_all_at(&measurement.overhead_bytes.to_le_bytes(), OVERHEAD)?;
        if unmetered_ns > 0 {
            let sum = read_word(&self.file, UNMETERED)?.saturating_add(unmetered_ns);
            self.file.write_all_at(&sum.to_le_bytes(), UNMETERED)?;
        }
        Ok(())
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn read_word(grant: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    grant.read_exact_at(&mut bytes, at)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Returns the first number less the second.
fn difference(bytes: u64, other: u64) -> i64 {
    let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    signed(bytes).saturating_sub(signed(other))
}
