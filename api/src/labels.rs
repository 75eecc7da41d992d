//! Names that operators see: labels, event reasons, metrics. Constants, so that the parts and their
//! docs agree.

/// Label: the tool that made an object.
pub const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";

/// Reasons of the events that we write on pods, claims and nodes (`Event.reason`: CamelCase, at
/// most 128 bytes).
pub mod event {
    /// The controller allocated the pod's claims.
    pub const ALLOCATED: &str = "GpuAllocated";
    /// No node fits; the message counts the reasons.
    pub const NO_FIT: &str = "GpuNoFit";
    /// The claim asks for what can never be granted as written.
    pub const CLAIM_REFUSED: &str = "GpuClaimRefused";
    /// An allocation was taken back, because the pod cannot run there.
    pub const RELEASED: &str = "GpuReleased";
    /// The driver could not prepare the claim on the node.
    pub const PREPARE_FAILED: &str = "GpuPrepareFailed";
    /// The driver could not take the claim down.
    pub const UNPREPARE_FAILED: &str = "GpuUnprepareFailed";
    /// GPUs of the node are not published, against what its operator may expect.
    pub const NOT_PUBLISHED: &str = "GpuNotPublished";
    /// A GPU stopped working or vanished.
    pub const UNHEALTHY: &str = "GpuUnhealthy";
    /// A process of a pod holds memory of a GPU that no ledger accounts for.
    pub const MEMORY_UNACCOUNTED: &str = "GpuMemoryUnaccounted";
    /// The MPS control daemon of a GPU ended while claims share the GPU by it.
    pub const MPS_DAEMON_FAILED: &str = "GpuMpsDaemonFailed";
}

/// Names of metrics, without the `_total` that counters get when exposed.
pub mod metric {
    /// Gauge: GPUs that are published.
    pub const GPUS_PUBLISHED: &str = "tessera_gpus_published";
    /// Gauge by `reason`: GPUs that are on the node and not published.
    pub const GPUS_UNPUBLISHED: &str = "tessera_gpus_unpublished";
    /// Counter by `operation` and `outcome`: Prepare and Unprepare of claims.
    pub const CLAIM_OPERATIONS: &str = "tessera_claim_operations";
    /// Histogram by `operation`: seconds that Prepare and Unprepare took.
    pub const CLAIM_OPERATION_SECONDS: &str = "tessera_claim_operation_seconds";
    /// Gauge: claims that are prepared on the node.
    pub const CLAIMS_PREPARED: &str = "tessera_claims_prepared";
    /// Gauge: claims that are prepared on the node and that the API does not have so any more.
    pub const CLAIMS_ORPHANED: &str = "tessera_claims_orphaned";
    /// Gauge per share: bytes of GPU memory that its containers may take.
    pub const SHARE_MEMORY_LIMIT: &str = "tessera_share_memory_limit_bytes";
    /// Gauge per share: bytes that its living processes hold.
    pub const SHARE_MEMORY_USED: &str = "tessera_share_memory_used_bytes";
    /// Gauge per share: the most bytes that were held at one time.
    pub const SHARE_MEMORY_PEAK: &str = "tessera_share_memory_peak_bytes";
    /// Counter per share: requests for memory that the limit refused.
    pub const SHARE_MEMORY_REFUSALS: &str = "tessera_share_memory_refusals";
    /// Gauge per share: percent of the GPU's compute; 0 = best effort.
    pub const SHARE_CORES: &str = "tessera_share_cores_percent";
    /// Counter per share: kernel launches.
    pub const SHARE_LAUNCHES: &str = "tessera_share_kernel_launches";
    /// Counter per share: functions handed out that no release has that the library knows.
    pub const SHARE_UNKNOWN_FUNCTIONS: &str = "tessera_share_unknown_functions";
    /// Counter per share: GPU time of its processes, in seconds.
    pub const SHARE_GPU_SECONDS: &str = "tessera_share_gpu_seconds";
    /// Counter per share: time that launches were held back, in seconds.
    pub const SHARE_THROTTLED_SECONDS: &str = "tessera_share_throttled_seconds";
    /// Counter per share: launches that were held back.
    pub const SHARE_THROTTLED_LAUNCHES: &str = "tessera_share_throttled_launches";
    /// Gauge per share: living processes that have used the GPU.
    pub const SHARE_PROCESSES: &str = "tessera_share_processes";
    /// Gauge per share: 1 while its ledger can be read, 0 where not, such as where its containers
    /// have ruined it.
    pub const SHARE_LEDGER_READABLE: &str = "tessera_share_ledger_readable";
    /// Gauge per GPU: processes of pods that hold memory which no ledger accounts for.
    pub const UNACCOUNTED_PROCESSES: &str = "tessera_gpu_unaccounted_processes";
    /// Gauge per GPU: 1 where its processes could be compared with ledgers, 0 where not.
    pub const AUDITED: &str = "tessera_gpu_audited";
    /// Gauge per GPU: bytes that they hold beyond what is accounted for.
    pub const UNACCOUNTED_MEMORY: &str = "tessera_gpu_unaccounted_memory_bytes";
    /// Gauge per GPU that claims share by MPS: 1 while its control daemon answers.
    pub const MPS_DAEMON_READY: &str = "tessera_mps_daemon_ready";
    /// Gauge per GPU that claims share by MPS: how often its control daemon was started; above 1,
    /// clients have lost their contexts.
    pub const MPS_DAEMON_STARTS: &str = "tessera_mps_daemon_starts";
    /// Counter by `outcome`: allocations written, refused and given up.
    pub const ALLOCATIONS: &str = "tessera_allocations";
    /// Histogram: seconds from the watch event that made room to the allocation written.
    pub const ALLOCATION_SECONDS: &str = "tessera_allocation_seconds";
    /// Gauge by `reason`: devices that fell to each reason in the last plan of the claims that
    /// still wait.
    pub const WAITING_DEVICES: &str = "tessera_waiting_devices";
}
