//! Load of the published GPUs, by NVML, every second: served at `/load`, by which the controller
//! places pods, and as a metric.
//!
//! Unlike the ledgers, NVML's readings are out of reach for containers: a tenant attracts or repels
//! other pods only by work.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::{
    load::{GpuLoad, NodeLoad},
    names::{ClaimDeviceName, GpuUuid},
};
use tessera_gpu::GpuLibrary;
use tessera_runtime::{error_chain::chain, supervisor::blocking};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::monotonic_ns,
    inventory::HardwareState,
    metrics::DriverMetrics,
    state::journal::{Journal, RecordState},
};

/// Interval of readings.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time constant of the averages. A pause between two batches is not the end of a load, and that of
/// a job that has ended is forgotten within minutes.
const WINDOW: Duration = Duration::from_secs(60);

/// Time after Prepare for which the work of a share is expected in addition to the average:
/// containers start and load their models before they run kernels.
const SETTLING: Duration = Duration::from_secs(180);

/// Age beyond which a reading is not served: NVML hangs.
const MAX_AGE: Duration = Duration::from_secs(30);

/// Measures the load of the GPUs of one node.
pub struct LoadMeter {
    gpus: Arc<dyn GpuLibrary>,
    hardware: watch::Receiver<Arc<HardwareState>>,
    journal: watch::Receiver<Arc<Journal>>,
    metrics: Arc<DriverMetrics>,
    averages: BTreeMap<GpuUuid, Average>,
    /// Monotonic time in ns at which each share was first seen prepared. After a restart of the
    /// driver all shares are new, as the averages are.
    prepared: BTreeMap<ClaimDeviceName, u64>,
    readings: watch::Sender<Reading>,
}

/// The last reading, and its monotonic time in ns.
#[derive(Clone, Debug, Default)]
struct Reading {
    at_ns: u64,
    load: NodeLoad,
}

/// Reads the last reading of a [`LoadMeter`].
#[derive(Clone, Debug)]
pub struct LoadReader(watch::Receiver<Reading>);

impl LoadReader {
    /// Returns the load at the monotonic time `now_ns`: that of no GPU if the last reading is old.
    #[must_use]
    pub fn read(&self, now_ns: u64) -> NodeLoad {
        let reading = self.0.borrow();
        let age = Duration::from_nanos(now_ns.saturating_sub(reading.at_ns));
        if age > MAX_AGE { NodeLoad::default() } else { reading.load.clone() }
    }
}

/// Average of percentages: of all readings at first, and exponential once they are older than
/// [`WINDOW`].
#[derive(Clone, Copy, Debug)]
struct Average {
    percent: f64,
    begun_ns: u64,
    at_ns: u64,
}

impl Average {
    fn new(percent: u8, now_ns: u64) -> Self {
        Self { percent: percent.into(), begun_ns: now_ns, at_ns: now_ns }
    }

    fn add(&mut self, percent: u8, now_ns: u64) {
        let elapsed = Duration::from_nanos(now_ns.saturating_sub(self.at_ns)).as_secs_f64();
        let age = Duration::from_nanos(now_ns.saturating_sub(self.begun_ns)).as_secs_f64();
        // The first reading stands for one interval before it.
        let window = (age + INTERVAL.as_secs_f64()).min(WINDOW.as_secs_f64());
        let weight = (elapsed / window).min(1.0);
        self.percent += (f64::from(percent) - self.percent) * weight;
        self.at_ns = now_ns;
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 100")]
    fn rounded(&self) -> u8 {
        self.percent.round().clamp(0.0, 100.0) as u8
    }
}

impl std::fmt::Debug for LoadMeter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadMeter").field("averages", &self.averages).finish_non_exhaustive()
    }
}

impl LoadMeter {
    /// Returns a meter of the published GPUs of `hardware`, with the shares of `journal`.
    #[must_use]
    pub fn new(
        gpus: Arc<dyn GpuLibrary>,
        hardware: watch::Receiver<Arc<HardwareState>>,
        journal: watch::Receiver<Arc<Journal>>,
        metrics: Arc<DriverMetrics>,
    ) -> Self {
        let (averages, prepared, readings) = Default::default();
        Self { gpus, hardware, journal, metrics, averages, prepared, readings }
    }

    /// Returns a reader of its readings.
    #[must_use]
    pub fn reader(&self) -> LoadReader {
        LoadReader(self.readings.subscribe())
    }

    /// Measures until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut meter = self;
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // NVML may hang: the thread is left behind then when the driver stops.
            let round = blocking(move || {
                meter.round(monotonic_ns());
                meter
            });
            tokio::select! {
                () = stop.cancelled() => return,
                after = round => meter = after,
            }
        }
    }

    /// Reads all published GPUs once. `now_ns` is the monotonic time.
    pub fn round(&mut self, now_ns: u64) {
        let published: BTreeSet<GpuUuid> = match &**self.hardware.borrow() {
            HardwareState::Known(inventory) => {
                inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
            }
            HardwareState::Unknown { .. } => BTreeSet::new(),
        };
        self.averages.retain(|gpu, _| published.contains(gpu));
        for gpu in published {
            match self.gpus.busy_percent(&gpu) {
                Ok(Some(percent)) => {
                    let known = self.averages.entry(gpu);
                    let add = |known: &mut Average| known.add(percent, now_ns);
                    known.and_modify(add).or_insert_with(|| Average::new(percent, now_ns));
                }
                Ok(None) => drop(self.averages.remove(&gpu)),
                Err(error) => {
                    tracing::debug!(%gpu, error = chain(&error), "cannot read utilization of GPU");
                    self.averages.remove(&gpu);
                }
            }
        }
        let percents = self.averages.iter().map(|(gpu, average)| (gpu, average.rounded()));
        self.metrics.set_utilization(percents);
        let load = self.load(now_ns);
        self.readings.send_replace(Reading { at_ns: now_ns, load });
    }

    /// Returns the load of the GPUs with an average.
    fn load(&mut self, now_ns: u64) -> NodeLoad {
        let settled = self.settled_cores(now_ns);
        let load = |(gpu, average): (&GpuUuid, &Average)| GpuLoad {
            uuid: gpu.clone(),
            busy_percent: average.rounded(),
            settled_cores_percent: settled.get(gpu).copied().unwrap_or(0),
        };
        NodeLoad { gpus: self.averages.iter().map(load).collect() }
    }

    /// Returns the reserved compute of the shares that were prepared [`SETTLING`] ago or before, in
    /// percent of each GPU.
    fn settled_cores(&mut self, now_ns: u64) -> BTreeMap<GpuUuid, u32> {
        let journal = Arc::clone(&self.journal.borrow());
        let before = std::mem::take(&mut self.prepared);
        let mut settled = BTreeMap::new();
        let is_prepared = |record: &RecordState| *record == RecordState::Completed;
        let claims = journal.claims.iter().filter(|(_, record)| is_prepared(&record.state));
        for (uid, share) in
            claims.flat_map(|(uid, record)| record.shares.iter().map(move |share| (uid, share)))
        {
            let id = share.id(uid);
            let since = before.get(&id).copied().unwrap_or(now_ns);
            self.prepared.insert(id, since);
            if Duration::from_nanos(now_ns.saturating_sub(since)) >= SETTLING {
                let cores = share.reserved.map_or(share.cores_percent, |own| own.cores_percent);
                *settled.entry(share.gpu.clone()).or_default() += u32::from(cores);
            }
        }
        settled
    }
}
