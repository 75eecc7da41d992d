//! Metrics of the controller in Prometheus' format.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::core::effect::Figures;

/// Buckets of durations, from 0.5 ms to 16 s.
const BUCKETS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0,
    8.0, 16.0,
];

/// The label of pending claims.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// The reason; the event about the pod has the details.
    pub reason: &'static str,
}

/// All metrics. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Number of claims allocated.
    pub allocations: Counter,
    /// Number of allocations released because the pod ended or could not run there.
    pub releases: Counter,
    /// Number of writes that moved or restored claims of bound pods.
    pub repairs: Counter,
    /// Number of writes dropped because the claim had changed.
    pub conflicts: Counter,
    /// Number of writes that failed for another reason.
    pub write_errors: Counter,
    /// Seconds from the arrival of the watch event to the stored allocation.
    pub latency: Histogram,
    /// Seconds of one plan and of the decisions around it.
    pub plan_time: Histogram,
    /// Number of plans that ended before all pods were reached.
    pub plans_cut: Counter,
    /// Number of searches that ended without a decision because the steps of a pod were spent.
    pub undecided_plans: Counter,
    /// Pending claims by reason.
    pub pending: Family<ReasonLabel, Gauge>,
    /// Nodes kept free for a pod that has been pending for long: one or none.
    pub kept: Gauge,
    /// Devices of which more is allocated than they have.
    pub overcommitted: Gauge,
    /// Claims of bound pods that are not on the node of the pod.
    pub misplaced: Gauge,
    /// Claims deleted while a bound pod uses them.
    pub orphaned: Gauge,
    /// Writes without an answer for 30 seconds or longer.
    pub unanswered: Gauge,
    /// Number of times that the running sums differed from a fresh count.
    pub drift: Counter,
    /// 1 while this process leads.
    pub leading: Gauge<f64, AtomicU64>,
}

impl Metrics {
    /// Creates the metrics and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            allocations: Counter::default(),
            releases: Counter::default(),
            repairs: Counter::default(),
            conflicts: Counter::default(),
            write_errors: Counter::default(),
            latency: Histogram::new(BUCKETS),
            plan_time: Histogram::new(BUCKETS),
            plans_cut: Counter::default(),
            undecided_plans: Counter::default(),
            pending: Family::default(),
            kept: Gauge::default(),
            overcommitted: Gauge::default(),
            misplaced: Gauge::default(),
            orphaned: Gauge::default(),
            unanswered: Gauge::default(),
            drift: Counter::default(),
            leading: Gauge::default(),
        };
        let registry = registry.sub_registry_with_prefix("tessera_controller");
        registry.register("allocations", "Claims allocated", metrics.allocations.clone());
        registry.register("releases", "Allocations released", metrics.releases.clone());
        registry.register(
            "repairs",
            "Writes that moved or restored claims of bound pods",
            metrics.repairs.clone(),
        );
        registry.register(
            "conflicts",
            "Writes dropped because the claim had changed",
            metrics.conflicts.clone(),
        );
        registry.register(
            "write_errors",
            "Writes that failed for another reason than a changed claim",
            metrics.write_errors.clone(),
        );
        registry.register_with_unit(
            "allocation_latency",
            "Time from watch event to stored allocation",
            Unit::Seconds,
            metrics.latency.clone(),
        );
        registry.register_with_unit(
            "plan",
            "Time of one plan and of the decisions around it",
            Unit::Seconds,
            metrics.plan_time.clone(),
        );
        registry.register(
            "plans_cut",
            "Plans that ended before all pods were reached; the next plan continues",
            metrics.plans_cut.clone(),
        );
        registry.register(
            "undecided_plans",
            "Searches that ended without a decision because the steps of a pod were spent",
            metrics.undecided_plans.clone(),
        );
        registry.register("pending_claims", "Pending claims by reason", metrics.pending.clone());
        registry.register(
            "kept_nodes",
            "Nodes kept free for a pod that has been pending for long",
            metrics.kept.clone(),
        );
        registry.register(
            "overcommitted_devices",
            "Devices of which more is allocated than they have",
            metrics.overcommitted.clone(),
        );
        registry.register(
            "misplaced_claims",
            "Claims of bound pods that are not on the node of the pod",
            metrics.misplaced.clone(),
        );
        registry.register(
            "orphaned_claims",
            "Claims deleted while a bound pod uses them",
            metrics.orphaned.clone(),
        );
        registry.register(
            "unanswered_writes",
            "Writes without an answer for 30 seconds or longer",
            metrics.unanswered.clone(),
        );
        registry.register(
            "usage_drift",
            "Times that running sums differed from a fresh count and were corrected",
            metrics.drift.clone(),
        );
        registry.register("leading", "1 while this process leads", metrics.leading.clone());
        metrics
    }

    /// Adds the figures of one step of the core, which took this long.
    pub(crate) fn record(&self, figures: &Figures, took: Duration) {
        if figures.is_planned {
            self.plan_time.observe(took.as_secs_f64());
        }
        self.allocations.inc_by(figures.allocations.len() as u64);
        for allocation in &figures.allocations {
            self.latency.observe(allocation.as_secs_f64());
        }
        self.releases.inc_by(figures.releases);
        self.repairs.inc_by(figures.repairs);
        self.conflicts.inc_by(figures.conflicts);
        self.write_errors.inc_by(figures.write_errors);
        self.plans_cut.inc_by(figures.cut_plans);
        self.undecided_plans.inc_by(figures.undecided_plans);
        self.drift.inc_by(figures.drifts);
        let gauges = [
            (&self.kept, figures.kept_nodes),
            (&self.overcommitted, figures.overcommitted),
            (&self.misplaced, figures.misplaced),
            (&self.orphaned, figures.orphaned),
            (&self.unanswered, figures.unanswered),
        ];
        for (gauge, value) in gauges {
            value.map(|value| gauge.set(value));
        }
        if let Some(pending) = &figures.pending {
            self.pending.clear();
            for (reason, claims) in pending {
                self.pending.get_or_create(&ReasonLabel { reason }).set(*claims);
            }
        }
    }
}
