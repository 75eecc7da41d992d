//! Prometheus metrics. Durations are in seconds. Names that other crates use are in
//! [`tessera_api::metrics`].

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Instant,
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::{Metric, Registry},
};
use tessera_api::{
    Gpu,
    metrics::{self, MetricDescription},
    names::{GpuUuid, PoolName},
};

use crate::usage::collector::ShareCollector;

/// A call of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs, reason = "the names are those of the calls")]
pub enum Operation {
    Prepare,
    Unprepare,
}

/// A write of a ResourceSlice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs, reason = "the names are those of the verbs")]
pub enum SliceWrite {
    Create,
    Patch,
    Delete,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    operation: Operation,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    operation: Operation,
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Outcome {
    Done,
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerbLabel {
    verb: SliceWrite,
}

/// Label of a GPU, named as in NVIDIA's exporters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabel {
    uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    uuid: String,
    node: String,
    index: u32,
    product: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

/// All metrics of the driver.
#[derive(Debug)]
pub struct DriverMetrics {
    registry: Registry,
    operations: Family<OutcomeLabels, Counter>,
    seconds: Family<OperationLabel, Histogram, fn() -> Histogram>,
    retries: Counter,
    prepared_claims: Gauge,
    orphaned_claims: Gauge,
    published_gpus: Gauge,
    unhealthy_gpus: Gauge,
    unpublished_gpus: Family<ReasonLabel, Gauge>,
    gpu_info: Family<GpuLabels, Gauge>,
    gpu_memory: Family<GpuLabel, Gauge>,
    gpu_utilization: Family<GpuLabel, Gauge>,
    nvml_up: Gauge<i64, AtomicI64>,
    slice_writes: Family<VerbLabel, Counter>,
    slice_failures: Counter,
    registered: Gauge,
    unaccounted_processes: Family<GpuLabel, Gauge>,
    unaccounted_bytes: Family<GpuLabel, Gauge>,
    audited: Family<GpuLabel, Gauge>,
    mps_ready: Family<GpuLabel, Gauge>,
    mps_starts: Family<GpuLabel, Counter>,
}

/// Buckets from 0.25 ms to 90 s: most calls take one or two milliseconds, and some wait up to 40 s.
const BUCKETS: [f64; 16] = [
    0.000_25, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 45.0,
    90.0,
];

impl Default for DriverMetrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            operations: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            retries: Counter::default(),
            prepared_claims: Gauge::default(),
            orphaned_claims: Gauge::default(),
            published_gpus: Gauge::default(),
            unhealthy_gpus: Gauge::default(),
            unpublished_gpus: Family::default(),
            gpu_info: Family::default(),
            gpu_memory: Family::default(),
            gpu_utilization: Family::default(),
            nvml_up: Gauge::default(),
            slice_writes: Family::default(),
            slice_failures: Counter::default(),
            registered: Gauge::default(),
            unaccounted_processes: Family::default(),
            unaccounted_bytes: Family::default(),
            audited: Family::default(),
            mps_ready: Family::default(),
            mps_starts: Family::default(),
        };
        metrics.register();
        metrics
    }
}

impl DriverMetrics {
    fn register(&mut self) {
        let info = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        self.add(metrics::DRIVER_BUILD, info);
        self.add(metrics::DRIVER_CLAIM_OPERATIONS, self.operations.clone());
        self.add(metrics::DRIVER_CLAIM_OPERATION_SECONDS, self.seconds.clone());
        self.add(metrics::DRIVER_PREPARE_RETRIES, self.retries.clone());
        self.add(metrics::DRIVER_PREPARED_CLAIMS, self.prepared_claims.clone());
        self.add(metrics::DRIVER_ORPHANED_CLAIMS, self.orphaned_claims.clone());
        self.add(metrics::DRIVER_PUBLISHED_GPUS, self.published_gpus.clone());
        self.add(metrics::DRIVER_UNHEALTHY_GPUS, self.unhealthy_gpus.clone());
        self.add(metrics::DRIVER_UNPUBLISHED_GPUS, self.unpublished_gpus.clone());
        self.add(metrics::DRIVER_NVML_UP, self.nvml_up.clone());
        self.add(metrics::DRIVER_SLICE_WRITES, self.slice_writes.clone());
        self.add(metrics::DRIVER_SLICE_FAILURES, self.slice_failures.clone());
        self.add(metrics::DRIVER_REGISTERED, self.registered.clone());
        self.add(metrics::GPU_INFO, self.gpu_info.clone());
        self.add(metrics::GPU_MEMORY, self.gpu_memory.clone());
        self.add(metrics::GPU_UTILIZATION, self.gpu_utilization.clone());
        self.add(metrics::GPU_UNACCOUNTED_PROCESSES, self.unaccounted_processes.clone());
        self.add(metrics::GPU_UNACCOUNTED_MEMORY, self.unaccounted_bytes.clone());
        self.add(metrics::GPU_AUDITED, self.audited.clone());
        self.add(metrics::MPS_DAEMON_READY, self.mps_ready.clone());
        self.add(metrics::MPS_DAEMON_STARTS, self.mps_starts.clone());
    }

    fn add(&mut self, description: MetricDescription, metric: impl Metric) {
        self.registry.register(description.name(), description.help(), metric);
    }

    /// Adds the metrics of shares.
    #[must_use]
    pub fn with_shares(mut self, shares: ShareCollector) -> Self {
        self.registry.register_collector(Box::new(shares));
        self
    }

    /// Returns all metrics in the OpenMetrics text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("invariant: writing to a String does not fail");
        text
    }

    /// Starts the timer of a call.
    #[must_use]
    pub fn start_timer(self: &Arc<Self>, operation: Operation) -> OperationTimer {
        OperationTimer { metrics: Arc::clone(self), operation, begun: Instant::now() }
    }

    /// Counts another attempt to prepare a claim.
    pub fn inc_prepare_retries(&self) {
        self.retries.inc();
    }

    /// Sets the number of claims in the journal.
    pub fn set_prepared_claims(&self, claims: usize) {
        self.prepared_claims.set(count(claims));
    }

    /// Sets the number of orphaned claims.
    pub fn set_orphaned_claims(&self, claims: usize) {
        self.orphaned_claims.set(count(claims));
    }

    /// Sets whether the GPU library answers.
    pub fn set_nvml_up(&self, is_known: bool) {
        self.nvml_up.set(i64::from(is_known));
    }

    /// Sets the published GPUs of `pool`, which is named as the node.
    pub fn set_gpus(&self, pool: &PoolName, gpus: &[Gpu]) {
        self.gpu_info.clear();
        self.gpu_memory.clear();
        for gpu in gpus {
            let labels = GpuLabels {
                uuid: gpu.uuid.to_string(),
                node: pool.to_string(),
                index: gpu.index,
                product: gpu.product_name.clone(),
            };
            self.gpu_info.get_or_create(&labels).set(1);
            self.gpu_memory
                .get_or_create(&GpuLabel { uuid: gpu.uuid.to_string() })
                .set(i64::try_from(gpu.memory_bytes).unwrap_or(i64::MAX));
        }
    }

    /// Sets the utilization of all GPUs whose utilization is known, in percent.
    pub fn set_utilization<'g>(&self, of: impl Iterator<Item = (&'g GpuUuid, u8)>) {
        self.gpu_utilization.clear();
        for (gpu, percent) in of {
            let label = GpuLabel { uuid: gpu.to_string() };
            self.gpu_utilization.get_or_create(&label).set(percent.into());
        }
    }

    /// Sets the numbers of published GPUs, of unhealthy ones among them, and of GPUs that are not
    /// published, by reason.
    pub fn set_gpu_counts(
        &self,
        published: usize,
        unhealthy: usize,
        unpublished: &BTreeMap<&str, usize>,
    ) {
        self.published_gpus.set(count(published));
        self.unhealthy_gpus.set(count(unhealthy));
        self.unpublished_gpus.clear();
        for (reason, number) in unpublished {
            self.unpublished_gpus
                .get_or_create(&ReasonLabel { reason: (*reason).to_owned() })
                .set(count(*number));
        }
    }

    /// Counts a write of a slice.
    pub fn inc_slice_writes(&self, verb: SliceWrite) {
        self.slice_writes.get_or_create(&VerbLabel { verb }).inc();
    }

    /// Counts a failed attempt to publish slices.
    pub fn inc_slice_failures(&self) {
        self.slice_failures.inc();
    }

    /// Sets the processes and bytes of each GPU that no ledger accounts for, and which GPUs could
    /// be compared.
    pub fn set_unaccounted(
        &self,
        by_gpu: &BTreeMap<GpuUuid, (usize, u64)>,
        audited: &BTreeMap<GpuUuid, bool>,
    ) {
        self.audited.clear();
        for (gpu, is_audited) in audited {
            let label = GpuLabel { uuid: gpu.to_string() };
            self.audited.get_or_create(&label).set((*is_audited).into());
        }
        self.unaccounted_processes.clear();
        self.unaccounted_bytes.clear();
        for (gpu, (processes, bytes)) in by_gpu {
            let label = GpuLabel { uuid: gpu.to_string() };
            self.unaccounted_processes.get_or_create(&label).set(count(*processes));
            self.unaccounted_bytes
                .get_or_create(&label)
                .set(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
    }

    /// Sets the state of each MPS control daemon: true if it is ready, and its number of starts.
    pub fn set_mps_daemons(&self, daemons: &BTreeMap<GpuUuid, (bool, u64)>) {
        self.mps_ready.clear();
        self.mps_starts.clear();
        for (gpu, (is_ready, starts)) in daemons {
            let label = GpuLabel { uuid: gpu.to_string() };
            self.mps_ready.get_or_create(&label).set((*is_ready).into());
            self.mps_starts.get_or_create(&label).inner().store(*starts, Ordering::Relaxed);
        }
    }

    /// Sets whether the driver is registered with the kubelet.
    pub fn set_registered(&self, is_registered: bool) {
        self.registered.set(i64::from(is_registered));
    }
}

/// The timer of a call.
#[derive(Debug)]
pub struct OperationTimer {
    metrics: Arc<DriverMetrics>,
    operation: Operation,
    begun: Instant,
}

impl OperationTimer {
    /// Records the duration and outcome of the call.
    pub fn done(self, is_success: bool) {
        let Self { metrics, operation, begun } = self;
        metrics
            .seconds
            .get_or_create(&OperationLabel { operation })
            .observe(begun.elapsed().as_secs_f64());
        let outcome = if is_success { Outcome::Done } else { Outcome::Failed };
        metrics.operations.get_or_create(&OutcomeLabels { operation, outcome }).inc();
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
