//! Metrics of the controller in Prometheus' format.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
use tessera_api::metrics::{self, MetricDescription};
use tessera_api::names::Namespace;

use crate::core::effect::{Figures, QuotaFigure};
use crate::core::event::WatchedKind;

/// Buckets of durations, from 0.5 ms to 16 s.
const BUCKETS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0,
    8.0, 16.0,
];

/// The label of figures per namespace.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct NamespaceLabel {
    /// The namespace.
    pub namespace: String,
}

/// The label of pending claims.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// The reason; the event about the pod has the details.
    pub reason: &'static str,
}

/// The label of evictions and of load samples.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// `evicted`, `refused` by a PodDisruptionBudget, or `failed`.
    pub result: &'static str,
}

/// The label of a watched kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabel {
    /// The kind.
    pub kind: &'static str,
}

/// The label of placeholder pods.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct NodeGroupLabel {
    /// The group of nodes.
    pub group: String,
}

/// The label of rules of the fence.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FenceRuleLabel {
    /// Name of the DeviceTaintRule.
    pub rule: String,
}

/// The labels of failed watches.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchFailureLabels {
    /// The kind.
    pub kind: &'static str,
    /// The API server's reason, as far as it is one of a few.
    pub reason: &'static str,
}

/// The labels of quotas, as kube-state-metrics has them for ResourceQuotas.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct QuotaLabels {
    /// The namespace.
    pub namespace: String,
    /// Name of the GpuQuota.
    pub gpuquota: String,
    /// The resource.
    pub resource: &'static str,
    /// `hard` or `used`.
    pub r#type: &'static str,
}

/// Limits and use of GpuQuotas.
#[derive(Debug, Clone, Default)]
pub struct QuotaGauges {
    gauges: Family<QuotaLabels, Gauge<f64, AtomicU64>>,
    /// The series of each namespace.
    series: Arc<Mutex<BTreeMap<Namespace, Vec<QuotaLabels>>>>,
}

impl QuotaGauges {
    /// Sets the series of a namespace. Those of quotas that do not exist any more end.
    fn set(&self, namespace: &Namespace, quotas: &[QuotaFigure]) {
        let mut present = Vec::new();
        for QuotaFigure { quota, resource, hard, used } in quotas {
            for (r#type, amount) in [("hard", hard), ("used", used)] {
                let (namespace, gpuquota) = (namespace.to_string(), quota.to_string());
                let labels = QuotaLabels { namespace, gpuquota, resource: resource.name(), r#type };
                self.gauges.get_or_create(&labels).set(amount.value() as f64);
                present.push(labels);
            }
        }
        let mut series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match present.is_empty() {
            true => series.remove(namespace),
            false => series.insert(namespace.clone(), present.clone()),
        };
        for labels in before.into_iter().flatten().filter(|labels| !present.contains(labels)) {
            self.gauges.remove(&labels);
        }
    }
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
    /// Changes of the sizes of a claim's shares.
    pub resizes: Counter,
    /// Number of writes dropped because the claim had changed.
    pub conflicts: Counter,
    /// Number of writes that failed for another reason.
    pub write_errors: Counter,
    /// Number of nominations written or removed.
    pub nominations: Counter,
    /// Number of nominations that were refused or had no answer.
    pub nomination_errors: Counter,
    /// Number of claim templates created and deleted.
    pub template_writes: Counter,
    /// Number of writes of claim templates that were refused or had no answer.
    pub template_errors: Counter,
    /// Number of searches for pods to evict.
    pub preemption_attempts: Counter,
    /// Groups of pods that kube-scheduler could not place as a whole.
    pub failed_groups: Counter,
    /// Requests for loads, by result.
    pub load_samples: Family<ResultLabel, Counter>,
    /// Nodes whose load is known.
    pub measured_nodes: Gauge,
    /// Number of evictions, by result.
    pub evictions: Family<ResultLabel, Counter>,
    /// Pods for which others were evicted and that have no devices yet.
    pub preemptions: Gauge,
    /// Placeholder pods by group of nodes.
    pub placeholders: Family<NodeGroupLabel, Gauge>,
    /// Number of writes of placeholder pods that were refused or had no answer.
    pub placeholder_errors: Counter,
    /// Number of DeviceTaintRules of the fence that were restored.
    pub fence_restores: Counter,
    /// 1 while a DeviceTaintRule of the fence is not as the chart has it, 0 otherwise.
    pub fence_missing: Family<FenceRuleLabel, Gauge>,
    /// Seconds from the arrival of the watch event to the stored allocation.
    pub latency: Histogram,
    /// Seconds of one plan and of the decisions around it.
    pub plan_time: Histogram,
    /// Number of plans that ended before all pods were reached.
    pub plans_cut: Counter,
    /// Number of searches that ended without a decision because the steps of a pod were spent.
    pub undecided_plans: Counter,
    /// Steps spent on selectors, by namespace of the pods.
    pub selector_steps: Family<NamespaceLabel, Counter>,
    /// Steps spent on long searches, by namespace of the pods.
    pub long_search_steps: Family<NamespaceLabel, Counter>,
    /// Pending claims by reason.
    pub pending: Family<ReasonLabel, Gauge>,
    /// Nodes that are reserved for a pod that has been pending for long: one or none.
    pub reserved_nodes: Gauge,
    /// Devices of which more is allocated than they have.
    pub overcommitted: Gauge,
    /// Claims of bound pods that are not on the node of the pod.
    pub misplaced: Gauge,
    /// Claims deleted while a bound pod uses them.
    pub orphaned: Gauge,
    /// Writes without an answer for 30 seconds or longer.
    pub unanswered: Gauge,
    /// Limits and use of GpuQuotas.
    pub quotas: QuotaGauges,
    /// Number of times that the running sums differed from a fresh count.
    pub drift: Counter,
    /// 1 for each kind that has been listed, 0 for the others.
    pub watch_synced: Family<KindLabel, Gauge>,
    /// Number of failed lists and watches.
    pub watch_failures: Family<WatchFailureLabels, Counter>,
    /// 1 while this process leads.
    pub leading: Gauge<f64, AtomicU64>,
}

impl Metrics {
    /// Creates the metrics and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let created = Self {
            allocations: Counter::default(),
            releases: Counter::default(),
            repairs: Counter::default(),
            resizes: Counter::default(),
            conflicts: Counter::default(),
            write_errors: Counter::default(),
            nominations: Counter::default(),
            nomination_errors: Counter::default(),
            template_writes: Counter::default(),
            template_errors: Counter::default(),
            preemption_attempts: Counter::default(),
            failed_groups: Counter::default(),
            load_samples: Family::default(),
            measured_nodes: Gauge::default(),
            evictions: Family::default(),
            preemptions: Gauge::default(),
            placeholders: Family::default(),
            placeholder_errors: Counter::default(),
            fence_restores: Counter::default(),
            fence_missing: Family::default(),
            latency: Histogram::new(BUCKETS),
            plan_time: Histogram::new(BUCKETS),
            plans_cut: Counter::default(),
            undecided_plans: Counter::default(),
            selector_steps: Family::default(),
            long_search_steps: Family::default(),
            pending: Family::default(),
            reserved_nodes: Gauge::default(),
            overcommitted: Gauge::default(),
            misplaced: Gauge::default(),
            orphaned: Gauge::default(),
            unanswered: Gauge::default(),
            quotas: QuotaGauges::default(),
            drift: Counter::default(),
            watch_synced: Family::default(),
            watch_failures: Family::default(),
            leading: Gauge::default(),
        };
        add(registry, metrics::CONTROLLER_ALLOCATIONS, created.allocations.clone());
        add(registry, metrics::CONTROLLER_RELEASES, created.releases.clone());
        add(registry, metrics::CONTROLLER_REPAIRS, created.repairs.clone());
        add(registry, metrics::CONTROLLER_RESIZES, created.resizes.clone());
        add(registry, metrics::CONTROLLER_CONFLICTS, created.conflicts.clone());
        add(registry, metrics::CONTROLLER_WRITE_ERRORS, created.write_errors.clone());
        add(registry, metrics::CONTROLLER_NOMINATIONS, created.nominations.clone());
        add(registry, metrics::CONTROLLER_NOMINATION_ERRORS, created.nomination_errors.clone());
        add(registry, metrics::CONTROLLER_TEMPLATE_WRITES, created.template_writes.clone());
        add(registry, metrics::CONTROLLER_TEMPLATE_ERRORS, created.template_errors.clone());
        let attempts = created.preemption_attempts.clone();
        add(registry, metrics::CONTROLLER_PREEMPTION_ATTEMPTS, attempts);
        add(registry, metrics::CONTROLLER_LOAD_SAMPLES, created.load_samples.clone());
        add(registry, metrics::CONTROLLER_MEASURED_NODES, created.measured_nodes.clone());
        add(registry, metrics::CONTROLLER_EVICTIONS, created.evictions.clone());
        add(registry, metrics::CONTROLLER_FAILED_GROUPS, created.failed_groups.clone());
        add(registry, metrics::CONTROLLER_PREEMPTIONS, created.preemptions.clone());
        add(registry, metrics::CONTROLLER_PLACEHOLDER_PODS, created.placeholders.clone());
        add(registry, metrics::CONTROLLER_PLACEHOLDER_ERRORS, created.placeholder_errors.clone());
        add(registry, metrics::CONTROLLER_FENCE_RESTORES, created.fence_restores.clone());
        add(registry, metrics::CONTROLLER_FENCE_MISSING, created.fence_missing.clone());
        add(registry, metrics::CONTROLLER_ALLOCATION_LATENCY, created.latency.clone());
        add(registry, metrics::CONTROLLER_PLAN, created.plan_time.clone());
        add(registry, metrics::CONTROLLER_PLANS_CUT, created.plans_cut.clone());
        add(registry, metrics::CONTROLLER_SEARCH_BUDGETS_EXCEEDED, created.undecided_plans.clone());
        add(registry, metrics::CONTROLLER_SELECTOR_STEPS, created.selector_steps.clone());
        add(registry, metrics::CONTROLLER_LONG_SEARCH_STEPS, created.long_search_steps.clone());
        add(registry, metrics::CONTROLLER_PENDING_CLAIMS, created.pending.clone());
        add(registry, metrics::CONTROLLER_RESERVED_NODES, created.reserved_nodes.clone());
        add(registry, metrics::CONTROLLER_OVERCOMMITTED_DEVICES, created.overcommitted.clone());
        add(registry, metrics::CONTROLLER_MISPLACED_CLAIMS, created.misplaced.clone());
        add(registry, metrics::CONTROLLER_ORPHANED_CLAIMS, created.orphaned.clone());
        add(registry, metrics::CONTROLLER_UNANSWERED_WRITES, created.unanswered.clone());
        add(registry, metrics::CONTROLLER_QUOTA, created.quotas.gauges.clone());
        add(registry, metrics::CONTROLLER_USAGE_DRIFT, created.drift.clone());
        add(registry, metrics::CONTROLLER_WATCH_SYNCED, created.watch_synced.clone());
        add(registry, metrics::CONTROLLER_WATCH_FAILURES, created.watch_failures.clone());
        add(registry, metrics::CONTROLLER_LEADING, created.leading.clone());
        created
    }

    /// Sets whether the kind has been listed.
    pub(crate) fn set_synced(&self, kind: WatchedKind, is_synced: bool) {
        let label = KindLabel { kind: kind.name() };
        self.watch_synced.get_or_create(&label).set(i64::from(is_synced));
    }

    /// Sets whether a rule of the fence is not as the chart has it.
    pub(crate) fn set_fence_missing(&self, rule: &str, is_missing: bool) {
        let label = FenceRuleLabel { rule: rule.to_owned() };
        self.fence_missing.get_or_create(&label).set(i64::from(is_missing));
    }

    /// Counts a failed list or watch.
    pub(crate) fn count_watch_failure(&self, kind: WatchedKind, reason: &'static str) {
        let labels = WatchFailureLabels { kind: kind.name(), reason };
        self.watch_failures.get_or_create(&labels).inc();
    }

    /// Counts a request to a driver for its load.
    pub(crate) fn count_load_sample(&self, is_answered: bool) {
        let result = if is_answered { "answered" } else { "failed" };
        self.load_samples.get_or_create(&ResultLabel { result }).inc();
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
        self.resizes.inc_by(figures.resizes);
        self.conflicts.inc_by(figures.conflicts);
        self.write_errors.inc_by(figures.write_errors);
        self.nominations.inc_by(figures.nominations);
        self.nomination_errors.inc_by(figures.nomination_errors);
        self.template_writes.inc_by(figures.template_writes);
        self.template_errors.inc_by(figures.template_errors);
        self.failed_groups.inc_by(figures.failed_groups);
        self.placeholder_errors.inc_by(figures.placeholder_errors);
        for (group, count) in figures.placeholders.iter().flatten() {
            let label = NodeGroupLabel { group: group.to_string() };
            self.placeholders.get_or_create(&label).set(*count);
        }
        self.preemption_attempts.inc_by(figures.preemption_attempts);
        let evictions = [
            ("evicted", figures.evictions),
            ("refused", figures.evictions_refused),
            ("failed", figures.eviction_errors),
        ];
        for (result, number) in evictions {
            self.evictions.get_or_create(&ResultLabel { result }).inc_by(number);
        }
        self.plans_cut.inc_by(figures.cut_plans);
        self.undecided_plans.inc_by(figures.undecided_plans);
        let of_namespaces = [
            (&self.selector_steps, &figures.selector_steps),
            (&self.long_search_steps, &figures.long_search_steps),
        ];
        for (counters, sums) in of_namespaces {
            for (namespace, steps) in sums {
                let label = NamespaceLabel { namespace: namespace.to_string() };
                counters.get_or_create(&label).inc_by(*steps);
            }
        }
        for (namespace, quotas) in &figures.quotas {
            self.quotas.set(namespace, quotas);
        }
        self.drift.inc_by(figures.drifts);
        let gauges = [
            (&self.reserved_nodes, figures.reserved_nodes),
            (&self.overcommitted, figures.overcommitted),
            (&self.misplaced, figures.misplaced),
            (&self.orphaned, figures.orphaned),
            (&self.unanswered, figures.unanswered),
            (&self.preemptions, figures.preemptions),
            (&self.measured_nodes, figures.measured_nodes),
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

/// Registers a metric under its description.
pub(crate) fn add(registry: &mut Registry, description: MetricDescription, metric: impl Metric) {
    registry.register(description.name(), description.help(), metric);
}
