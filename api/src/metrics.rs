//! Names and help texts of the Prometheus metrics, in one list.
//!
//! Prefixes: `tessera_controller_` and `tessera_driver_` for the state of that program,
//! `tessera_gpu_`, `tessera_share_` and `tessera_mps_` for objects of a node, which its driver
//! exports. Base units, and the unit last (`_seconds`, `_bytes`, `_percent`). A counter's name is
//! listed without the `_total` that the exposition format appends.
//! `docs/reference/metrics.md` is generated from [`ALL`].

/// Type of a metric in the exposition format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A sum that only grows.
    Counter,
    /// A value at the time of the scrape.
    Gauge,
    /// Observations in buckets.
    Histogram,
    /// Labels with the constant value 1.
    Info,
}

impl MetricKind {
    /// Returns the type's name in the exposition format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }

    /// Returns the suffix that the exposition format appends to the name.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge | Self::Histogram => "",
            Self::Info => "_info",
        }
    }
}

/// One metric. Only this module makes values of it: a metric that is not listed cannot be
/// registered by its description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricDescription {
    name: &'static str,
    kind: MetricKind,
    labels: &'static [&'static str],
    help: &'static str,
}

impl MetricDescription {
    /// Returns the name, without the suffix of its kind.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns its type.
    #[must_use]
    pub const fn kind(&self) -> MetricKind {
        self.kind
    }

    /// Returns the names of its labels.
    #[must_use]
    pub const fn labels(&self) -> &'static [&'static str] {
        self.labels
    }

    /// Returns the help text: the quantity that is counted, without a full stop, which the
    /// exposition appends.
    #[must_use]
    pub const fn help(&self) -> &'static str {
        self.help
    }
}

macro_rules! metrics {
    ($($constant:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)+) => {
        $(
            #[doc = concat!("`", $name, "`: ", $help, ".")]
            pub const $constant: MetricDescription = MetricDescription {
                name: $name,
                kind: MetricKind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )+

        /// All metrics, with the names of their constants.
        pub const ALL: &[(&str, MetricDescription)] = &[$((stringify!($constant), $constant)),+];
    };
}

metrics! {
    CONTROLLER_ALLOCATIONS = Counter "tessera_controller_allocations" []
        "Claims allocated";
    CONTROLLER_RELEASES = Counter "tessera_controller_releases" []
        "Allocations cleared because the pod went away or could not run on the node";
    CONTROLLER_REPAIRS = Counter "tessera_controller_repairs" []
        "Writes that moved claims to the nodes of the pods bound with them";
    CONTROLLER_RESIZES = Counter "tessera_controller_resizes" []
        "Writes that changed the sizes of a claim's shares";
    CONTROLLER_CONFLICTS = Counter "tessera_controller_conflicts" []
        "Writes refused because the claim was modified after planning";
    CONTROLLER_WRITE_ERRORS = Counter "tessera_controller_write_errors" []
        "Failed writes of claims, other than conflicts";
    CONTROLLER_NOMINATIONS = Counter "tessera_controller_nominations" []
        "Writes and removals of a pod's nominatedNodeName";
    CONTROLLER_NOMINATION_ERRORS = Counter "tessera_controller_nomination_errors" []
        "Writes of a pod's nominatedNodeName that were refused or had no response";
    CONTROLLER_TEMPLATE_WRITES = Counter "tessera_controller_template_writes" []
        "Claim templates of converted pods created and deleted";
    CONTROLLER_TEMPLATE_ERRORS = Counter "tessera_controller_template_errors" []
        "Writes of claim templates that were refused or had no response";
    CONTROLLER_FAILED_GROUPS = Counter "tessera_controller_failed_groups" []
        "Pod groups that kube-scheduler could not place as a whole, so that their devices were released";
    CONTROLLER_PREEMPTION_ATTEMPTS = Counter "tessera_controller_preemption_attempts" []
        "Searches for pods of lower priority to evict so that a pod gets its devices";
    CONTROLLER_EVICTIONS = Counter "tessera_controller_evictions" ["result"]
        "Evictions of pods by result: evicted, refused by a PodDisruptionBudget, or failed";
    CONTROLLER_PREEMPTIONS = Gauge "tessera_controller_preemptions" []
        "Pods for which room is being made and that have no devices yet";
    CONTROLLER_PLACEHOLDER_PODS = Gauge "tessera_controller_placeholder_pods" ["group"]
        "Placeholder pods by which a cluster autoscaler is asked for nodes, by group of nodes";
    CONTROLLER_PLACEHOLDER_ERRORS = Counter "tessera_controller_placeholder_errors" []
        "Writes of placeholder pods that were refused or had no response";
    CONTROLLER_FENCE_RESTORES = Counter "tessera_controller_fence_restores" []
        "DeviceTaintRules of the fence that were deleted or changed and are restored";
    CONTROLLER_FENCE_MISSING = Gauge "tessera_controller_fence_missing" ["rule"]
        "1 while a DeviceTaintRule of the fence does not exist or has another content, 0 otherwise";
    CONTROLLER_ADMISSION_REVIEWS = Counter "tessera_controller_admission_reviews" ["dialect", "result"]
        "Reviews by the admission webhook: of pods by dialect (converted, left, refused, malformed), of GpuConfigs without one (left, refused)";
    CONTROLLER_ADMISSION_REVIEW = Histogram "tessera_controller_admission_review_seconds" []
        "Seconds of one review by the admission webhook, without the transfer";
    CONTROLLER_WEBHOOK_CERTIFICATE_EXPIRY = Gauge "tessera_controller_webhook_certificate_expiry_timestamp_seconds" []
        "End of the validity of the certificate that this replica serves, in seconds since the epoch; 0 without one";
    CONTROLLER_ALLOCATION_LATENCY = Histogram "tessera_controller_allocation_latency_seconds" []
        "Seconds from the watch event to the persisted allocation";
    CONTROLLER_PLAN = Histogram "tessera_controller_plan_seconds" []
        "Seconds of one step of the controller that planned, from its events to its effects";
    CONTROLLER_PLANS_CUT = Counter "tessera_controller_plans_cut" []
        "Plans that ended at their budget before all pods were planned, and were continued by the next";
    CONTROLLER_SEARCH_BUDGETS_EXCEEDED = Counter "tessera_controller_search_budgets_exceeded" []
        "Searches for the devices of a pod that ended at the step budget without a decision";
    CONTROLLER_SELECTOR_STEPS = Counter "tessera_controller_selector_steps" ["namespace"]
        "Steps spent on the CEL selectors of pods in the namespace, each about 0.5 us of CPU time";
    CONTROLLER_LONG_SEARCH_STEPS = Counter "tessera_controller_long_search_steps" ["namespace"]
        "Steps spent on pods of the namespace whose search needs more than 40000 on one node, each about 0.5 us of CPU time";
    CONTROLLER_PENDING_CLAIMS = Gauge "tessera_controller_pending_claims" ["reason"]
        "Claims that are not allocated, by event reason; of insufficient devices by the most frequent cause";
    CONTROLLER_RESERVED_NODES = Gauge "tessera_controller_reserved_nodes" []
        "Nodes reserved for starved pods (0 or 1)";
    CONTROLLER_QUOTA = Gauge "tessera_controller_gpuquota" ["namespace", "gpuquota", "resource", "type"]
        "Limits (type hard) and use (type used) of GpuQuotas: bytes of memory, percent of a GPU, shares, whole GPUs";
    CONTROLLER_OVERCOMMITTED_DEVICES = Gauge "tessera_controller_overcommitted_devices" []
        "Devices of which more is allocated than they have";
    CONTROLLER_MISPLACED_CLAIMS = Gauge "tessera_controller_misplaced_claims" []
        "Claims of bound pods that are not allocated on the pod's node";
    CONTROLLER_ORPHANED_CLAIMS = Gauge "tessera_controller_orphaned_claims" []
        "Claims deleted while a bound pod uses them";
    CONTROLLER_UNANSWERED_WRITES = Gauge "tessera_controller_unanswered_writes" []
        "Writes that the API server has not answered for 30 seconds or longer";
    CONTROLLER_LOAD_SAMPLES = Counter "tessera_controller_load_samples" ["result"]
        "Requests to drivers for the load of their GPUs, by result: answered or failed";
    CONTROLLER_MEASURED_NODES = Gauge "tessera_controller_measured_nodes" []
        "Nodes whose load was reported within 90 seconds, by which LeastLoaded places pods";
    CONTROLLER_USAGE_DRIFT = Counter "tessera_controller_usage_drift" []
        "Corrections of the cached sums of allocated capacity";
    CONTROLLER_WATCH_SYNCED = Gauge "tessera_controller_watch_synced" ["kind"]
        "1 if the objects of the kind have been listed, 0 if not; nothing is planned while one is 0";
    CONTROLLER_WATCH_FAILURES = Counter "tessera_controller_watch_failures" ["kind", "reason"]
        "Failed lists and watches; Forbidden is a missing permission, for which the kind is not listed";
    CONTROLLER_LEADING = Gauge "tessera_controller_leading" []
        "1 while this process holds the Lease, 0 otherwise";

    DRIVER_BUILD = Info "tessera_driver_build" ["version"]
        "Build information";
    DRIVER_CLAIM_OPERATIONS = Counter "tessera_driver_claim_operations" ["operation", "outcome"]
        "Claims that the kubelet asked to prepare or unprepare";
    DRIVER_CLAIM_OPERATION_SECONDS = Histogram "tessera_driver_claim_operation_seconds" ["operation"]
        "Seconds from the kubelet's call to the answer for one claim";
    DRIVER_PREPARE_RETRIES = Counter "tessera_driver_prepare_retries" []
        "Attempts to prepare a claim after the first";
    DRIVER_PREPARED_CLAIMS = Gauge "tessera_driver_prepared_claims" []
        "Claims in the journal";
    DRIVER_ORPHANED_CLAIMS = Gauge "tessera_driver_orphaned_claims" []
        "Prepared claims whose ResourceClaim is gone or allocated otherwise";
    DRIVER_PUBLISHED_GPUS = Gauge "tessera_driver_published_gpus" []
        "GPUs in the ResourceSlices of the node";
    DRIVER_UNHEALTHY_GPUS = Gauge "tessera_driver_unhealthy_gpus" []
        "Published GPUs that are tainted as unhealthy";
    DRIVER_UNPUBLISHED_GPUS = Gauge "tessera_driver_unpublished_gpus" ["reason"]
        "GPUs of the node that are not published, by reason";
    DRIVER_NVML_UP = Gauge "tessera_driver_nvml_up" []
        "1 while NVML responds, 0 otherwise";
    DRIVER_SLICE_WRITES = Counter "tessera_driver_slice_writes" ["verb"]
        "Writes of ResourceSlices";
    DRIVER_SLICE_FAILURES = Counter "tessera_driver_slice_failures" []
        "Failed reconciliations of the ResourceSlices";
    DRIVER_REGISTERED = Gauge "tessera_driver_registered" []
        "1 while the driver is registered with the kubelet, 0 otherwise";

    GPU_INFO = Gauge "tessera_gpu_info" ["uuid", "node", "index", "product"]
        "1 for each published GPU, with NVML's index and product name";
    GPU_MEMORY = Gauge "tessera_gpu_memory_bytes" ["uuid"]
        "Bytes of memory of each published GPU, without oversubscription";
    GPU_UTILIZATION = Gauge "tessera_gpu_utilization_percent" ["uuid"]
        "Percent of the last minute in which the GPU ran kernels, by NVML";
    GPU_UNACCOUNTED_PROCESSES = Gauge "tessera_gpu_unaccounted_processes" ["uuid"]
        "Processes of pods that hold memory of the GPU which no ledger accounts for";
    GPU_UNACCOUNTED_MEMORY = Gauge "tessera_gpu_unaccounted_memory_bytes" ["uuid"]
        "Bytes of GPU memory that processes of pods hold beyond their ledgers";
    GPU_AUDITED = Gauge "tessera_gpu_audited" ["uuid"]
        "1 if all processes of the GPU were compared with ledgers in the last audit, 0 if some could not be";

    MPS_DAEMON_READY = Gauge "tessera_mps_daemon_ready" ["uuid"]
        "1 while the MPS control daemon of the GPU answers, 0 otherwise";
    MPS_DAEMON_STARTS = Counter "tessera_mps_daemon_starts" ["uuid"]
        "Starts of the GPU's MPS control daemon; each after the first ended the contexts of its clients";

    SHARE_INFO = Gauge "tessera_share_info" ["namespace", "resourceclaim", "request", "uuid", "share", "pod", "node"]
        "1 for each pod of the share's claim, as the claim was last read: when it was prepared, and every five minutes; pod is empty before";
    SHARE_MEMORY_LIMIT = Gauge "tessera_share_memory_limit_bytes" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Bytes of GPU memory granted to the share";
    SHARE_MEMORY_USED = Gauge "tessera_share_memory_used_bytes" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Bytes of GPU memory held by living processes of the share";
    SHARE_MEMORY_PEAK = Gauge "tessera_share_memory_peak_bytes" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Largest number of bytes held at the same time";
    SHARE_MEMORY_REFUSALS = Counter "tessera_share_memory_refusals" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Requests for memory that the limit refused";
    SHARE_CORES = Gauge "tessera_share_cores_percent" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Percent of the GPU's compute granted to the share; 0 if it is best effort";
    SHARE_REFUSED_BYTES = Gauge "tessera_share_last_refused_bytes" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Size of the last refused memory allocation; 0 if there was none";
    SHARE_LAUNCHES = Counter "tessera_share_kernel_launches" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Kernel launches";
    SHARE_UNKNOWN_FUNCTIONS = Counter "tessera_share_unknown_functions" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Driver functions returned to programs that the interceptor does not know";
    SHARE_GPU_SECONDS = Counter "tessera_share_gpu_seconds" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "GPU time of the share's processes in seconds";
    SHARE_GPU_TIME_GAIN = Gauge "tessera_share_gpu_time_gain" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "GPU time that NVML reports as a part of the charged GPU time; 1 if it is not measured";
    SHARE_DRIVER_MEMORY = Gauge "tessera_share_driver_memory_bytes" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "GPU memory of contexts and kernel code beyond what the share's processes were charged";
    SHARE_THROTTLED_SECONDS = Counter "tessera_share_throttled_seconds" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Seconds for which launches were delayed";
    SHARE_THROTTLED_LAUNCHES = Counter "tessera_share_throttled_launches" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Launches that were delayed";
    SHARE_PROCESSES = Gauge "tessera_share_processes" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "Living processes that have used the GPU";
    SHARE_LEDGER_READABLE = Gauge "tessera_share_ledger_readable" ["namespace", "resourceclaim", "request", "uuid", "share"]
        "1 if the share's ledger can be read, 0 if it is missing, corrupt, or has too many locks";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const PREFIXES: [&str; 5] = [
        "tessera_controller_",
        "tessera_driver_",
        "tessera_gpu_",
        "tessera_share_",
        "tessera_mps_",
    ];

    #[test]
    fn names_are_unique_and_follow_prometheus() {
        let names: BTreeSet<&str> = ALL.iter().map(|(_, metric)| metric.name()).collect();
        assert_eq!(names.len(), ALL.len());
        for (_, metric) in ALL {
            let (name, kind) = (metric.name(), metric.kind());
            assert!(PREFIXES.iter().any(|prefix| name.starts_with(prefix)), "{name}");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
            assert!(!name.ends_with("_total"), "{name}");
            // Series that come and go are gauges with this suffix, as those of kube-state-metrics.
            assert!(!name.ends_with("_info") || kind == MetricKind::Gauge, "{name}");
        }
    }

    #[test]
    fn histograms_have_a_unit_and_help_is_a_phrase() {
        for (constant, metric) in ALL {
            if metric.kind() == MetricKind::Histogram {
                assert!(metric.name().ends_with("_seconds"), "{constant}");
            }
            let help = metric.help();
            assert!(help.len() > 5 && !help.ends_with('.'), "{constant}: {help}");
        }
    }
}
