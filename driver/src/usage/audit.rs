//! Compares, slowly and for ever, what NVML says that processes of pods hold with what ledgers say.
//!
//! A process that does without the library has no slot in any ledger; one whose ledger was
//! rewritten holds more than its slot says. Neither is stopped by this: it is found, and the
//! operator of the node is told.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::{labels::event, names::GpuUuid};
use tessera_gpu::{GpuLibrary, GpuProcess};
use tessera_intercept_abi::ProcessReport;
use tessera_runtime::error_chain::chain;
use tokio::{sync::mpsc, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    Ledgers, ShareUse,
    process::{HostProcess, ProcFs},
};
use crate::{context_memory::MOST_UNCHARGED, events::NodeNews, metrics::Metrics, mps::Mps};

/// Between rounds: soon enough to be of use, and a few calls to NVML per GPU in use.
const EVERY: Duration = Duration::from_secs(30);

/// The audit of one node's GPUs in use.
pub struct UsageAudit {
    ledgers: Ledgers,
    gpus: Arc<dyn GpuLibrary>,
    processes: ProcFs,
    metrics: Arc<Metrics>,
    news: mpsc::UnboundedSender<NodeNews>,
    /// Whose processes serve those of others.
    mps: Mps,
    /// GPUs that the last round could say something of.
    audited: BTreeMap<GpuUuid, bool>,
    /// What is said of GPUs: processes, and the bytes that they hold beyond what is accounted for.
    totals: BTreeMap<GpuUuid, (usize, u64)>,
    /// What the last round found.
    suspected: BTreeSet<Suspect>,
    /// What the operator was told of, as long as it lasts.
    told: BTreeSet<Suspect>,
}

impl std::fmt::Debug for UsageAudit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UsageAudit").field("told", &self.told).finish_non_exhaustive()
    }
}

/// One process on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Suspect {
    gpu: GpuUuid,
    pid: u32,
    start_ticks: u64,
}

/// A process that holds more than is accounted for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unaccounted {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The process, as the machine numbers it.
    pub pid: u32,
    /// Who it is.
    pub process: HostProcess,
    /// The pod that it belongs to.
    pub pod_uid: String,
    /// Bytes that NVML says it holds; none where NVML does not say.
    pub held_bytes: Option<u64>,
    /// Bytes that ledgers have for it; none where it is in none.
    pub accounted_bytes: Option<u64>,
}

impl Unaccounted {
    /// Bytes beyond what is accounted for.
    #[must_use]
    pub fn excess_bytes(&self) -> u64 {
        self.held_bytes.unwrap_or(0).saturating_sub(self.accounted_bytes.unwrap_or(0))
    }

    fn suspect(&self) -> Suspect {
        Suspect { gpu: self.gpu.clone(), pid: self.pid, start_ticks: self.process.start_ticks }
    }

    fn note(&self) -> String {
        let Self { gpu, pid, process, pod_uid, held_bytes, accounted_bytes } = self;
        let held = held_bytes.map_or("an unknown amount".to_owned(), mebibytes);
        let accounted = accounted_bytes.map_or("is in no ledger".to_owned(), |bytes| {
            format!("has {} in its ledgers", mebibytes(bytes))
        });
        format!(
            "process {pid} ({}) of the pod with UID {pod_uid} holds {held} of {gpu} and {accounted}: it has no share of that GPU, \
             does without Tessera's library, takes what the library does not count yet (README), or has rewritten its ledger. \
             Find the pod with `kubectl get pods -A -o json | jq '.items[].metadata | select(.uid == \"{pod_uid}\")'`",
            process.name
        )
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

impl UsageAudit {
    /// Compares `ledgers` with what `gpus` says of the processes that `processes` shows; those of
    /// the pod that runs `mps` are left out.
    #[must_use]
    pub fn new(
        ledgers: Ledgers,
        gpus: Arc<dyn GpuLibrary>,
        processes: ProcFs,
        metrics: Arc<Metrics>,
        news: mpsc::UnboundedSender<NodeNews>,
        mps: Mps,
    ) -> Self {
        let (audited, totals, suspected, told) = Default::default();
        Self { ledgers, gpus, processes, metrics, news, mps, audited, totals, suspected, told }
    }

    /// Audits until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut audit = self;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(EVERY) => {}
            }
            // A library that hangs must hang nothing else.
            let round = tokio::task::spawn_blocking(move || {
                audit.round();
                audit
            });
            tokio::select! {
                () = stop.cancelled() => return,
                done = round => match done {
                    Ok(after) => audit = after,
                    Err(error) => {
                        tracing::error!(%error, "the audit of what processes hold ended");
                        return;
                    }
                },
            }
        }
    }

    /// One comparison of everything.
    pub fn round(&mut self) {
        let shares = self.ledgers.read();
        let gpus: BTreeSet<_> = shares.iter().map(|share| share.gpu.clone()).collect();
        let servers = self.mps.keeper_pid().and_then(|pid| self.processes.process(pid)?.pod_uid);
        self.audited.clear();
        let mut found = Vec::new();
        for gpu in gpus {
            let of_gpu: Vec<_> = shares.iter().filter(|share| share.gpu == gpu).collect();
            let is_audited = match self.gpus.processes(&gpu) {
                Ok(processes) => {
                    let is_visible = |held: &GpuProcess| self.processes.process(held.pid).is_some();
                    let found_on_it = unaccounted(&gpu, &processes, &of_gpu, &self.processes);
                    // What MPS servers hold is theirs, or that of clients, who are looked at
                    // themselves.
                    found.extend(
                        found_on_it.into_iter().filter(|of| Some(&of.pod_uid) != servers.as_ref()),
                    );
                    // One may end in between; all of them do not.
                    processes.is_empty() || processes.iter().any(is_visible)
                }
                Err(error) => {
                    tracing::debug!(%gpu, error = %chain(&error), "what processes hold is not known");
                    false
                }
            };
            let is_readable = of_gpu.iter().all(|share| share.taken.is_ok());
            self.audited.insert(gpu, is_audited && is_readable);
        }
        self.tell(&found);
    }

    /// Twice in a row, since a process begins and ends in between looking at it and at its ledger.
    fn tell(&mut self, found: &[Unaccounted]) {
        let now: BTreeSet<Suspect> = found.iter().map(Unaccounted::suspect).collect();
        let certain: Vec<_> =
            found.iter().filter(|f| self.suspected.contains(&f.suspect())).collect();
        let could_not_look =
            |audited: &BTreeMap<_, _>, gpu: &GpuUuid| audited.get(gpu) == Some(&false);
        let mut totals: BTreeMap<GpuUuid, (usize, u64)> = BTreeMap::new();
        for finding in &certain {
            let (processes, bytes) = totals.entry(finding.gpu.clone()).or_default();
            *processes += 1;
            *bytes = bytes.saturating_add(finding.excess_bytes());
        }
        // Of a GPU that could not be looked at nothing is known to have changed.
        self.totals.retain(|gpu, _| could_not_look(&self.audited, gpu));
        self.totals.extend(totals);
        self.metrics.unaccounted(&self.totals, &self.audited);
        self.told
            .retain(|suspect| now.contains(suspect) || could_not_look(&self.audited, &suspect.gpu));
        for finding in certain {
            if self.told.insert(finding.suspect()) {
                let note = finding.note();
                tracing::warn!("{note}");
                // Nobody hears it any more where the driver stops.
                let _ = self.news.send(NodeNews { reason: event::MEMORY_UNACCOUNTED, note });
            }
        }
        self.suspected = now;
    }
}

/// What a ledger has for a process, by the slots that are its own. `None`: there is none.
fn bytes_of(share: &ShareUse, is_own: impl Fn(&ProcessReport) -> bool) -> Option<u64> {
    let taken = share.taken.as_ref().ok()?;
    let slots = taken.processes.iter().filter(|slot| is_own(slot));
    // Whatever a tenant writes into its slots, they account for no more than it was granted.
    Some(slots.map(|slot| slot.used_bytes).reduce(u64::saturating_add)?.min(share.limit_bytes))
}

/// What the ledgers have for a process. A slot names its process as that one's own `/proc` has it.
/// Where none does, since there is no `/proc` or it counts from another start (a time namespace), a
/// slot counts by what the host has told its process, which anybody could have written: so the
/// kernel must say that the process has the slot's ledger mapped. It is asked once for each ledger.
fn accounted(of_gpu: &[&ShareUse], pid: u32, process: &HostProcess, proc: &ProcFs) -> Option<u64> {
    let itself = (process.own_pid, process.pid_namespace, process.start_ticks);
    let by_itself =
        |slot: &ProcessReport| (slot.pid, slot.pid_namespace, slot.start_ticks) == itself;
    let by_host = |slot: &ProcessReport| slot.host_pid == Some(pid);
    let has_mapped =
        |share: &ShareUse| share.taken.as_ref().is_ok_and(|taken| proc.maps(pid, taken.file));
    let own = of_gpu.iter().filter_map(|share| bytes_of(share, by_itself));
    let told =
        of_gpu.iter().filter_map(|share| bytes_of(share, by_host).filter(|_| has_mapped(share)));
    // Nobody's mappings are read before the second is needed.
    own.reduce(u64::saturating_add).or_else(|| told.reduce(u64::saturating_add))
}

/// The processes of pods on one GPU that hold more than its shares, `of_gpu`, account for. Others
/// than pods' are not ours to judge.
fn unaccounted(
    gpu: &GpuUuid,
    processes: &[GpuProcess],
    of_gpu: &[&ShareUse],
    proc: &ProcFs,
) -> Vec<Unaccounted> {
    // What a ruined ledger says of its processes nobody knows; that it is ruined is a metric of its
    // own, and so is nothing new.
    let all_readable = of_gpu.iter().all(|share| share.taken.is_ok());
    let judge = |held: &GpuProcess| {
        let process = proc.process(held.pid)?;
        let pod_uid = process.pod_uid.clone()?;
        let accounted_bytes = accounted(of_gpu, held.pid, &process, proc);
        let (gpu, pid, held_bytes) = (gpu.clone(), held.pid, held.bytes);
        let finding = Unaccounted { gpu, pid, process, pod_uid, held_bytes, accounted_bytes };
        let may_be_found = accounted_bytes.is_some() || all_readable;
        (may_be_found && finding.excess_bytes() > MOST_UNCHARGED).then_some(finding)
    };
    processes.iter().filter_map(judge).collect()
}
