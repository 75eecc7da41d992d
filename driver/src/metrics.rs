//! Prometheus metrics. Times are in seconds; names that other parts know are in
//! [`tessera_api::labels::metric`].

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicI64},
    time::Instant,
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::Registry,
};
use tessera_api::{labels::metric, names::GpuUuid};

use crate::usage::collector::ShareCollector;

/// What the kubelet asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs, reason = "the names are those of the calls")]
pub enum Operation {
    Prepare,
    Unprepare,
}

/// What was done to a ResourceSlice.
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

/// `uuid` as in NVIDIA's exporters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabel {
    uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

/// All metrics of the driver.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    operations: Family<OutcomeLabels, Counter>,
    seconds: Family<OperationLabel, Histogram, fn() -> Histogram>,
    retries: Counter,
    prepared_claims: Gauge,
    orphaned_claims: Gauge,
    published_gpus: Gauge,
    unhealthy_gpus: Gauge,
    unpublished_gpus: Family<ReasonLabel, Gauge>,
    hardware_known: Gauge<i64, AtomicI64>,
    slice_writes: Family<VerbLabel, Counter>,
    slice_failures: Counter,
    registered: Gauge,
    unaccounted_processes: Family<GpuLabel, Gauge>,
    unaccounted_bytes: Family<GpuLabel, Gauge>,
    audited: Family<GpuLabel, Gauge>,
    mps_ready: Family<GpuLabel, Gauge>,
    mps_starts: Family<GpuLabel, Gauge>,
}

/// From a quarter of a millisecond to over a minute: most calls take a millisecond or two, and some
/// wait up to 40 s.
const BUCKETS: [f64; 16] = [
    0.000_25, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 45.0,
    90.0,
];

impl Default for Metrics {
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
            hardware_known: Gauge::default(),
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

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        let info = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("tessera_driver_build", "Which driver this is", info);
        registry.register(
            metric::CLAIM_OPERATIONS,
            "Claims that the kubelet asked for, by operation and outcome",
            self.operations.clone(),
        );
        registry.register(
            metric::CLAIM_OPERATION_SECONDS,
            "Seconds from the kubelet's call for one claim to the answer, by operation",
            self.seconds.clone(),
        );
        registry.register(
            "tessera_driver_prepare_retries",
            "Attempts to prepare a claim after the first",
            self.retries.clone(),
        );
        registry.register(
            metric::CLAIMS_PREPARED,
            "Claims in the journal",
            self.prepared_claims.clone(),
        );
        registry.register(
            metric::CLAIMS_ORPHANED,
            "Claims that are prepared and that the API does not have so any more",
            self.orphaned_claims.clone(),
        );
        registry.register(
            metric::GPUS_PUBLISHED,
            "GPUs that are published",
            self.published_gpus.clone(),
        );
        registry.register(
            "tessera_gpus_unhealthy",
            "Published GPUs that something is known against, which new claims do not get",
            self.unhealthy_gpus.clone(),
        );
        registry.register(
            metric::GPUS_UNPUBLISHED,
            "GPUs that are not published, by reason",
            self.unpublished_gpus.clone(),
        );
        registry.register(
            "tessera_driver_hardware_known",
            "1 while the GPU library answers, 0 while it does not",
            self.hardware_known.clone(),
        );
        registry.register(
            "tessera_driver_slice_writes",
            "Changes made to ResourceSlices",
            self.slice_writes.clone(),
        );
        registry.register(
            "tessera_driver_slice_failures",
            "Attempts to bring the ResourceSlices in line that failed",
            self.slice_failures.clone(),
        );
        registry.register(
            "tessera_driver_registered",
            "1 while the kubelet knows the driver",
            self.registered.clone(),
        );
        registry.register(
            metric::UNACCOUNTED_PROCESSES,
            "Processes of pods that hold memory of the GPU which no ledger accounts for",
            self.unaccounted_processes.clone(),
        );
        registry.register(
            metric::UNACCOUNTED_MEMORY,
            "Bytes of the GPU's memory that processes of pods hold beyond what ledgers account for",
            self.unaccounted_bytes.clone(),
        );
        registry.register(
            metric::AUDITED,
            "1 where the last comparison of the GPU's processes with ledgers could be made, 0 where it could not",
            self.audited.clone(),
        );
        registry.register(
            metric::MPS_DAEMON_READY,
            "1 while the MPS control daemon of the GPU answers, 0 while it does not; of GPUs that claims share by MPS",
            self.mps_ready.clone(),
        );
        registry.register(
            metric::MPS_DAEMON_STARTS,
            "How often the GPU's MPS control daemon was started since claims share the GPU by it",
            self.mps_starts.clone(),
        );
    }

    /// The same, with what shares take of GPUs.
    #[must_use]
    pub fn of_shares(mut self, shares: ShareCollector) -> Self {
        self.registry.register_collector(Box::new(shares));
        self
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("invariant: writing to a String does not fail");
        text
    }

    /// Begins to time a call.
    #[must_use]
    pub fn time(self: &Arc<Self>, operation: Operation) -> Timer {
        Timer { metrics: Arc::clone(self), operation, begun: Instant::now() }
    }

    /// Another attempt to prepare is made.
    pub fn retried(&self) {
        self.retries.inc();
    }

    /// So many claims are in the journal.
    pub fn prepared(&self, claims: usize) {
        self.prepared_claims.set(count(claims));
    }

    /// So many of them the API does not have any more.
    pub fn orphaned(&self, claims: usize) {
        self.orphaned_claims.set(count(claims));
    }

    /// So many GPUs are published, so many of them are unhealthy, and so many are not, by reason.
    pub fn hardware(
        &self,
        known: bool,
        published: usize,
        unhealthy: usize,
        unpublished: &BTreeMap<&str, usize>,
    ) {
        self.hardware_known.set(i64::from(known));
        self.published_gpus.set(count(published));
        self.unhealthy_gpus.set(count(unhealthy));
        self.unpublished_gpus.clear();
        for (reason, number) in unpublished {
            self.unpublished_gpus
                .get_or_create(&ReasonLabel { reason: (*reason).to_owned() })
                .set(count(*number));
        }
    }

    /// A slice was changed.
    pub fn slice_written(&self, verb: SliceWrite) {
        self.slice_writes.get_or_create(&VerbLabel { verb }).inc();
    }

    /// The slices could not be brought in line.
    pub fn slice_failed(&self) {
        self.slice_failures.inc();
    }

    /// So many processes of pods hold so many bytes of each GPU that no ledger accounts for, and
    /// none of any other; and whether that could be told of each.
    pub fn unaccounted(
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

    /// Which GPUs claims share by MPS: whether the control daemon of each is up, and how often it
    /// was started.
    pub fn mps_daemons(&self, daemons: &BTreeMap<GpuUuid, (bool, u64)>) {
        self.mps_ready.clear();
        self.mps_starts.clear();
        for (gpu, (is_ready, starts)) in daemons {
            let label = GpuLabel { uuid: gpu.to_string() };
            self.mps_ready.get_or_create(&label).set((*is_ready).into());
            self.mps_starts.get_or_create(&label).set(i64::try_from(*starts).unwrap_or(i64::MAX));
        }
    }

    /// Whether the kubelet knows us.
    pub fn registered(&self, registered: bool) {
        self.registered.set(i64::from(registered));
    }
}

/// A call that is being timed.
#[derive(Debug)]
pub struct Timer {
    metrics: Arc<Metrics>,
    operation: Operation,
    begun: Instant,
}

impl Timer {
    /// The call ended.
    pub fn done(self, success: bool) {
        let Self { metrics, operation, begun } = self;
        metrics
            .seconds
            .get_or_create(&OperationLabel { operation })
            .observe(begun.elapsed().as_secs_f64());
        let outcome = if success { Outcome::Done } else { Outcome::Failed };
        metrics.operations.get_or_create(&OutcomeLabels { operation, outcome }).inc();
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
