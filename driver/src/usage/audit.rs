//! Compares the memory that processes of pods hold, as NVML reports it, with ledgers.
//!
//! A process that runs without the interceptor has no slot in a ledger. A process whose ledger was
//! overwritten, or that takes memory past the interceptor, holds more than its slot says: that is
//! counted against its share ([`measurement`](super::measurement)), and reported if the share holds
//! more than its limit. The audit stops no process: it reports them to the operator of the node.

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
use tessera_runtime::{error_chain::chain, supervisor::blocking};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::{
    Ledgers, ShareUsage, UnreadableLedger,
    owners::Owners,
    process::{HostProcess, ProcFs},
};
use crate::{
    events::{ClaimEvent, NodeEvent},
    inventory::HardwareState,
    metrics::DriverMetrics,
    mps::Mps,
};

/// Bytes that a process without a share, or the processes of a share beyond its limit, may hold
/// unreported: NVML reports multiples of 2 MiB, and the overhead of contexts is seen with a delay.
const TOLERANCE_BYTES: u64 = 64 << 20;

/// Interval of rounds. Each makes a few calls to NVML per GPU.
const INTERVAL: Duration = Duration::from_secs(30);

/// The audit of one node's GPUs.
pub struct UsageAudit {
    ledgers: Ledgers,
    gpus: Arc<dyn GpuLibrary>,
    /// The published GPUs; none: only GPUs in use are audited.
    hardware: Option<watch::Receiver<Arc<HardwareState>>>,
    owners: Owners,
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
             runs without the interceptor, has overwritten its ledger, or its share holds more than its limit (docs/operator/limitations.md). \
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
            hardware: None,
            owners: Owners::new(processes),
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

    /// Returns the audit that includes published GPUs without shares.
    #[must_use]
    pub fn with_hardware(self, hardware: watch::Receiver<Arc<HardwareState>>) -> Self {
        Self { hardware: Some(hardware), ..self }
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

    /// Compares all GPUs that are published or in use once.
    pub fn round(&mut self) {
        let shares = self.ledgers.read();
        let mut gpus: BTreeSet<_> = shares.iter().map(|share| share.gpu.clone()).collect();
        // On a published GPU without shares, every process of a pod is one too many.
        if let Some(hardware) = &self.hardware
            && let HardwareState::Known(inventory) = &**hardware.borrow()
        {
            // Processes on MIG devices have no ledger: the hardware holds their limits.
            gpus.extend(inventory.shared_gpus().map(|gpu| gpu.uuid.clone()));
        }
        let servers =
            self.mps.supervisor_pid().and_then(|pid| self.owners.process(pid)?.pod_uid.clone());
        self.audited.clear();
        let mut found = Vec::new();
        let mut reported = BTreeSet::new();
        for gpu in gpus {
            let of_gpu: Vec<_> = shares.iter().filter(|share| share.gpu == gpu).collect();
            let is_audited = match self.gpus.processes(&gpu) {
                Ok(processes) => {
                    reported.extend(processes.iter().map(|held| held.pid));
                    let found_on_it = unaccounted(&gpu, &processes, &of_gpu, &mut self.owners);
                    // Memory of MPS servers is their own, or that of clients, which are compared
                    // themselves.
                    found.extend(
                        found_on_it.into_iter().filter(|of| Some(&of.pod_uid) != servers.as_ref()),
                    );
                    // One may exit in between. If none is visible, /proc is not the host's.
                    processes.is_empty()
                        || processes.iter().any(|held| self.owners.process(held.pid).is_some())
                }
                Err(error) => {
                    tracing::debug!(%gpu, error = %chain(&error), "cannot read processes of GPU");
                    false
                }
            };
            let is_readable = of_gpu.iter().all(|share| share.usage.is_ok());
            self.audited.insert(gpu, is_audited && is_readable);
        }
        self.owners.retain(|pid| reported.contains(&pid));
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

/// Returns the processes of pods on one GPU that hold memory without a slot in the ledgers of its
/// shares, `of_gpu`, or more than their slots say if their share holds more than its limit.
/// Processes outside of pods are ignored.
fn unaccounted(
    gpu: &GpuUuid,
    processes: &[GpuProcess],
    of_gpu: &[&ShareUsage],
    owners: &mut Owners,
) -> Vec<UnaccountedProcess> {
    // The processes of an unreadable ledger are unknown. They are those that have it mapped.
    let unreadable: Vec<_> = of_gpu.iter().filter_map(|share| share.usage.as_ref().err()).collect();
    let mut held_by_share = vec![0_u64; of_gpu.len()];
    let mut found = Vec::new();
    for held in processes {
        let slots = owners.slots(of_gpu, held.pid);
        for share in slots.iter().map(|(share, _)| *share).collect::<BTreeSet<_>>() {
            held_by_share[share] = held_by_share[share].saturating_add(held.bytes.unwrap_or(0));
        }
        let Some(process) = owners.process(held.pid).cloned() else { continue };
        let Some(pod_uid) = process.pod_uid.clone() else { continue };
        let mut may_be_of =
            |ledger: &&UnreadableLedger| ledger.file.is_none_or(|file| owners.maps(held.pid, file));
        if slots.is_empty() && unreadable.iter().any(&mut may_be_of) {
            continue;
        }
        // A forged slot accounts for no more than the grant.
        let charged = slots.iter().map(|(at, slot)| slot.used_bytes.min(of_gpu[*at].limit_bytes));
        let accounted_bytes = charged.reduce(u64::saturating_add);
        let (gpu, pid, held_bytes) = (gpu.clone(), held.pid, held.bytes);
        let process =
            UnaccountedProcess { gpu, pid, process, pod_uid, held_bytes, accounted_bytes };
        found.push((slots.into_iter().map(|(at, _)| at).collect::<Vec<_>>(), process));
    }
    let exceeds = |share: &usize| {
        let limit_bytes = of_gpu[*share].limit_bytes;
        held_by_share[*share] > limit_bytes.saturating_add(TOLERANCE_BYTES)
    };
    let is_found = |(shares, process): &(Vec<usize>, UnaccountedProcess)| {
        process.excess_bytes() > TOLERANCE_BYTES
            && (shares.is_empty() || shares.iter().any(exceeds))
    };
    found.into_iter().filter(is_found).map(|(_, process)| process).collect()
}
