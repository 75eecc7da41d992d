//! Compares the memory that processes of pods hold, as NVML reports it, with ledgers.
//!
//! A process that runs without the interceptor has no slot in a ledger. A process whose ledger was
//! overwritten holds more than its slot says. The audit stops neither: it reports them to the
//! operator of the node.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::{
    events,
    names::{ClaimDeviceName, GpuUuid},
};
use tessera_gpu::{GpuLibrary, GpuProcess};
use tessera_intercept_abi::ProcessReport;
use tessera_runtime::{error_chain::chain, supervisor::blocking};
use tokio::{sync::mpsc, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    Ledgers, ShareUsage,
    process::{HostProcess, ProcFs},
};
use crate::{
    context_memory::MAX_UNCHARGED_BYTES,
    events::{ClaimEvent, NodeEvent},
    metrics::DriverMetrics,
    mps::Mps,
};

/// Interval of rounds. Each makes a few calls to NVML per GPU in use.
const INTERVAL: Duration = Duration::from_secs(30);

/// The audit of one node's GPUs in use.
pub struct UsageAudit {
    ledgers: Ledgers,
    gpus: Arc<dyn GpuLibrary>,
    processes: ProcFs,
    metrics: Arc<DriverMetrics>,
    events: AuditEvents,
    /// The MPS daemons, whose servers hold memory for other processes.
    mps: Mps,
    /// The GPUs of the last round; false if the comparison was not possible.
    audited: BTreeMap<GpuUuid, bool>,
    /// Reported processes per GPU, and the bytes that they hold beyond their ledgers.
    totals: BTreeMap<GpuUuid, (usize, u64)>,
    /// Findings of the last round.
    suspected: BTreeSet<SuspectProcess>,
    /// Findings that were reported and still exist.
    reported: BTreeSet<SuspectProcess>,
    /// Shares with unreadable ledgers; true if that was reported.
    unreadable: BTreeMap<ClaimDeviceName, bool>,
}

/// Receivers of what the audit finds.
#[derive(Clone, Debug)]
pub struct AuditEvents {
    /// Events on the Node.
    pub node: mpsc::UnboundedSender<NodeEvent>,
    /// Events on the pods of claims.
    pub claims: mpsc::Sender<ClaimEvent>,
}

impl std::fmt::Debug for UsageAudit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UsageAudit").field("reported", &self.reported).finish_non_exhaustive()
    }
}

/// A suspicious process on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SuspectProcess {
    gpu: GpuUuid,
    pid: u32,
    start_ticks: u64,
}

/// A process that holds more memory than ledgers account for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnaccountedProcess {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The PID in the host's namespace.
    pub pid: u32,
    /// The process.
    pub process: HostProcess,
    /// The UID of its pod.
    pub pod_uid: String,
    /// Bytes that it holds as NVML reports, or `None` if NVML does not report them.
    pub held_bytes: Option<u64>,
    /// Bytes that ledgers account for, or `None` if no ledger has the process.
    pub accounted_bytes: Option<u64>,
}

impl UnaccountedProcess {
    /// Returns the bytes that no ledger accounts for.
    #[must_use]
    pub fn excess_bytes(&self) -> u64 {
        self.held_bytes.unwrap_or(0).saturating_sub(self.accounted_bytes.unwrap_or(0))
    }

    fn suspect(&self) -> SuspectProcess {
        SuspectProcess {
            gpu: self.gpu.clone(),
            pid: self.pid,
            start_ticks: self.process.start_ticks,
        }
    }

    fn note(&self) -> String {
        let Self { gpu, pid, process, pod_uid, held_bytes, accounted_bytes } = self;
        let held = held_bytes.map_or("an unknown amount".to_owned(), mebibytes);
        let accounted = accounted_bytes.map_or("is in no ledger".to_owned(), |bytes| {
            format!("has {} in its ledgers", mebibytes(bytes))
        });
        format!(
            "process {pid} ({}) of the pod with UID {pod_uid} holds {held} of {gpu} and {accounted}: it has no share of that GPU, \
             runs without the interceptor, allocates memory that the interceptor does not count yet (docs/operator/limitations.md), or has overwritten its ledger. \
             Find the pod with `kubectl get pods -A -o json | jq '.items[].metadata | select(.uid == \"{pod_uid}\")'`",
            process.name
        )
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

impl UsageAudit {
    /// Returns an audit that compares `ledgers` with the processes that `gpus` reports and
    /// `processes` shows, without those of the pod of `mps`.
    #[must_use]
    pub fn new(
        ledgers: Ledgers,
        gpus: Arc<dyn GpuLibrary>,
        processes: ProcFs,
        metrics: Arc<DriverMetrics>,
        events: AuditEvents,
        mps: Mps,
    ) -> Self {
        let (audited, totals, suspected, reported, unreadable) = Default::default();
        Self {
            ledgers,
            gpus,
            processes,
            metrics,
            events,
            mps,
            audited,
            totals,
            suspected,
            reported,
            unreadable,
        }
    }

    /// Audits until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut audit = self;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(INTERVAL) => {}
            }
            // NVML may hang: the thread is left behind then when the driver stops.
            let round = blocking(move || {
                audit.round();
                audit
            });
            tokio::select! {
                () = stop.cancelled() => return,
                after = round => audit = after,
            }
        }
    }

    /// Compares all GPUs in use once.
    pub fn round(&mut self) {
        let shares = self.ledgers.read();
        let gpus: BTreeSet<_> = shares.iter().map(|share| share.gpu.clone()).collect();
        let servers =
            self.mps.supervisor_pid().and_then(|pid| self.processes.process(pid)?.pod_uid);
        self.audited.clear();
        let mut found = Vec::new();
        for gpu in gpus {
            let of_gpu: Vec<_> = shares.iter().filter(|share| share.gpu == gpu).collect();
            let is_audited = match self.gpus.processes(&gpu) {
                Ok(processes) => {
                    let is_visible = |held: &GpuProcess| self.processes.process(held.pid).is_some();
                    let found_on_it = unaccounted(&gpu, &processes, &of_gpu, &self.processes);
                    // Memory of MPS servers is their own, or that of clients, which are compared
                    // themselves.
                    found.extend(
                        found_on_it.into_iter().filter(|of| Some(&of.pod_uid) != servers.as_ref()),
                    );
                    // One may exit in between. If none is visible, /proc is not the host's.
                    processes.is_empty() || processes.iter().any(is_visible)
                }
                Err(error) => {
                    tracing::debug!(%gpu, error = %chain(&error), "cannot read processes of GPU");
                    false
                }
            };
            let is_readable = of_gpu.iter().all(|share| share.usage.is_ok());
            self.audited.insert(gpu, is_audited && is_readable);
        }
        self.report(&found);
        self.report_unreadable(&shares);
    }

    /// Reports ledgers that are unreadable in two rounds in a row, once: a share that is being
    /// unprepared has no ledger for a moment.
    fn report_unreadable(&mut self, shares: &[ShareUsage]) {
        let mut unreadable = BTreeMap::new();
        for share in shares {
            let Err(error) = &share.usage else { continue };
            let before = self.unreadable.get(&share.share).copied();
            unreadable.insert(share.share.clone(), before.is_some());
            if before != Some(false) {
                continue;
            }
            let note = format!(
                "ledger of ResourceClaim {} for {} is unreadable ({}): its containers have overwritten it or hold locks on it. \
                 Their GPU memory and compute are not measured, and CUDA may refuse memory. Delete the pod",
                share.claim,
                share.gpu,
                chain(error)
            );
            tracing::warn!(namespace = %share.namespace, claim = %share.claim, note, "ledger is unreadable");
            let (namespace, claim) = (share.namespace.clone(), share.claim.clone());
            let (uid, reason) = (share.share.claim().clone(), events::LEDGER_UNREADABLE);
            // A full queue has the events of other claims; the metric has all of them.
            let _ = self.events.claims.try_send(ClaimEvent { namespace, claim, uid, reason, note });
        }
        self.unreadable = unreadable;
    }

    /// Reports findings of two rounds in a row: a process may start or exit between the reads of
    /// NVML and of its ledger.
    fn report(&mut self, found: &[UnaccountedProcess]) {
        let now: BTreeSet<SuspectProcess> = found.iter().map(UnaccountedProcess::suspect).collect();
        let certain: Vec<_> =
            found.iter().filter(|f| self.suspected.contains(&f.suspect())).collect();
        let is_unknown = |audited: &BTreeMap<_, _>, gpu: &GpuUuid| audited.get(gpu) == Some(&false);
        let mut totals: BTreeMap<GpuUuid, (usize, u64)> = BTreeMap::new();
        for finding in &certain {
            let (processes, bytes) = totals.entry(finding.gpu.clone()).or_default();
            *processes += 1;
            *bytes = bytes.saturating_add(finding.excess_bytes());
        }
        // Values of a GPU that could not be compared stay.
        self.totals.retain(|gpu, _| is_unknown(&self.audited, gpu));
        self.totals.extend(totals);
        self.metrics.set_unaccounted(&self.totals, &self.audited);
        self.reported
            .retain(|suspect| now.contains(suspect) || is_unknown(&self.audited, &suspect.gpu));
        for finding in certain {
            if self.reported.insert(finding.suspect()) {
                let note = finding.note();
                tracing::warn!(note, "process holds memory that no ledger accounts for");
                // The receiver is gone when the driver stops.
                let _ = self
                    .events
                    .node
                    .send(NodeEvent { reason: events::GPU_MEMORY_UNACCOUNTED, note });
            }
        }
        self.suspected = now;
    }
}

/// Returns the bytes of the slots of a process in a ledger, or `None` if it has no slot there.
fn bytes_of(share: &ShareUsage, is_own: impl Fn(&ProcessReport) -> bool) -> Option<u64> {
    let taken = share.usage.as_ref().ok()?;
    let slots = taken.processes.iter().filter(|slot| is_own(slot));
    // A forged slot accounts for no more than the grant.
    Some(slots.map(|slot| slot.used_bytes).reduce(u64::saturating_add)?.min(share.limit_bytes))
}

/// Returns the bytes that ledgers account for a process.
///
/// A slot identifies its process as the process's own `/proc` shows it. Without such a slot (no
/// `/proc`, or a time namespace with another origin), a slot with the host PID of the process
/// counts. Any process of the container could have written that PID, so the process must have the
/// ledger mapped, as the kernel reports; that is read once for each ledger.
fn accounted(
    of_gpu: &[&ShareUsage],
    pid: u32,
    process: &HostProcess,
    proc: &ProcFs,
) -> Option<u64> {
    let itself = (process.own_pid, process.pid_namespace, process.start_ticks);
    let by_itself =
        |slot: &ProcessReport| (slot.pid, slot.pid_namespace, slot.start_ticks) == itself;
    let by_host = |slot: &ProcessReport| slot.host_pid == Some(pid);
    let has_mapped =
        |share: &ShareUsage| share.usage.as_ref().is_ok_and(|taken| proc.maps(pid, taken.file));
    let own = of_gpu.iter().filter_map(|share| bytes_of(share, by_itself));
    let by_host_pid =
        of_gpu.iter().filter_map(|share| bytes_of(share, by_host).filter(|_| has_mapped(share)));
    // Mappings are read only if the first is empty.
    own.reduce(u64::saturating_add).or_else(|| by_host_pid.reduce(u64::saturating_add))
}

/// Returns the processes of pods on one GPU that hold more than its shares, `of_gpu`, account for.
/// Processes outside of pods are ignored.
fn unaccounted(
    gpu: &GpuUuid,
    processes: &[GpuProcess],
    of_gpu: &[&ShareUsage],
    proc: &ProcFs,
) -> Vec<UnaccountedProcess> {
    // The processes of an unreadable ledger are unknown. They are those that have it mapped.
    let unreadable: Vec<_> = of_gpu.iter().filter_map(|share| share.usage.as_ref().err()).collect();
    let may_be_of_unreadable =
        |pid| unreadable.iter().any(|ledger| ledger.file.is_none_or(|file| proc.maps(pid, file)));
    let judge = |held: &GpuProcess| {
        let process = proc.process(held.pid)?;
        let pod_uid = process.pod_uid.clone()?;
        let accounted_bytes = accounted(of_gpu, held.pid, &process, proc);
        let (gpu, pid, held_bytes) = (gpu.clone(), held.pid, held.bytes);
        let finding =
            UnaccountedProcess { gpu, pid, process, pod_uid, held_bytes, accounted_bytes };
        let is_found = finding.excess_bytes() > MAX_UNCHARGED_BYTES
            && (accounted_bytes.is_some() || !may_be_of_unreadable(pid));
        is_found.then_some(finding)
    };
    processes.iter().filter_map(judge).collect()
}
