//! A random attack: a hostile namespace beside an honest one whose waiting times are measured.
//!
//! First the honest namespace is alone (peace), then the hostile one creates, changes and deletes
//! objects as fast as it may. Throughout, every change of every claim is observed: no device is
//! overcommitted, no share is allocated twice. In the end, every honest pod has been served, and
//! nothing is left after both namespaces are deleted.

mod honest;
mod hostile;
mod monitor;
mod observer;
mod report;
mod restarts;
mod shapes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client, Config};
use serde_json::json;
use tessera_e2e::inventory::GpuInventory;
use tessera_e2e::leftovers;
use tessera_e2e::operations::Operations;

pub use self::report::{AttackReport, LatencySummary, ProcessReport};

use self::hostile::Hostile;
use self::monitor::Monitor;
use self::observer::Observer;
use self::report::Violations;
use crate::cluster::{self, AttackedCluster};
use crate::objects::UNSTARTED_IMAGE;
use crate::processes::{self, Process};

/// Namespace whose waiting times are measured.
const HONEST: &str = "attack-honest";

/// Namespace of the attacker.
const HOSTILE: &str = "attack-hostile";

/// Time limit for the deletion of a namespace with all its objects on a loaded machine.
const DELETED_WITHIN: Duration = Duration::from_secs(600);

/// The cluster that is attacked.
#[derive(Clone)]
pub struct Target {
    /// Configuration of the administrator's client.
    pub config: Config,
    /// The administrator's client.
    pub client: Client,
    /// Operations on the machines, to find files that are left; `None` if there are none.
    pub operations: Option<Operations>,
    /// The measured processes.
    pub processes: MeasuredProcesses,
    /// Image of the pods.
    pub image: String,
    /// True on a cluster with authorization, which must grant rights to the attacker.
    pub has_rbac: bool,
}

/// Processes whose memory and CPU time are measured.
#[derive(Clone, Debug)]
pub enum MeasuredProcesses {
    /// Controller and drivers among the descendants of a process.
    Below(u32),
    /// These processes.
    Listed(Vec<u32>),
}

impl MeasuredProcesses {
    fn find(&self) -> anyhow::Result<Vec<Process>> {
        match self {
            Self::Below(pid) => processes::tessera_below(*pid),
            Self::Listed(pids) => Ok(pids.iter().filter_map(|pid| Process::find(*pid)).collect()),
        }
    }
}

impl Target {
    /// Returns a simulated cluster as a target.
    ///
    /// # Errors
    /// Returns an error if the cluster has exited.
    pub fn simulated(cluster: &AttackedCluster) -> anyhow::Result<Self> {
        Ok(Self {
            config: cluster.config().clone(),
            client: cluster.client.clone(),
            operations: Some(cluster.operations()),
            processes: MeasuredProcesses::Below(cluster.pid()?),
            image: UNSTARTED_IMAGE.to_owned(),
            has_rbac: false,
        })
    }
}

/// Phases, load and seed of an attack.
#[derive(Clone, Copy, Debug)]
pub struct AttackPlan {
    /// Seed of the attacker's choices.
    pub seed: u64,
    /// Time in which the honest namespace is alone.
    pub peace: Duration,
    /// Time of the attack.
    pub attack: Duration,
    /// Interval at which the honest namespace creates pods, whether or not earlier ones are
    /// served.
    pub interval: Duration,
    /// Number of the attacker's clients, each with one request at a time.
    pub workers: usize,
    /// Most objects of each kind that a client of the attacker keeps.
    pub objects: usize,
    /// Requests per second of each of the attacker's clients; `None` for as many as are answered.
    pub rate: Option<u32>,
    /// True if the attacker may create DeviceClasses, which takes an administrator's rights.
    pub classes: bool,
    /// Interval at which the controller is killed or stopped during the attack, and started again;
    /// `None` for never. The target needs operations.
    pub restart_every: Option<Duration>,
}

/// A phase of the attack as the progress line shows it.
#[derive(Clone, Debug)]
pub struct Progress {
    /// `peace`, `attack` or `clean-up`.
    pub phase: &'static str,
    /// Time since the begin of the phase.
    pub elapsed: Duration,
    /// Duration of the phase; of the clean-up the longest for one namespace.
    pub duration: Duration,
    /// Number of honest pods that were served in this phase.
    pub served: usize,
    /// Number of honest pods that wait.
    pub waiting: usize,
    /// Number of the attacker's requests.
    pub requests: u64,
    /// Resident memory of each process in MiB, by label.
    pub memory_mib: Vec<(String, f64)>,
}

/// Interval of the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Attacks a cluster and reports what came of it.
///
/// # Errors
/// Returns an error if the cluster cannot be prepared or observed. Violated invariants are in the
/// report.
pub async fn run(
    target: &Target,
    plan: AttackPlan,
    progress: impl Fn(&Progress),
) -> anyhow::Result<AttackReport> {
    prepare(target).await?;
    let inventory = GpuInventory::read(&target.client).await?;
    anyhow::ensure!(!inventory.is_empty(), "the cluster has no GPU of Tessera");
    let restarted = plan.restart_every.zip(target.operations.as_ref());
    anyhow::ensure!(
        plan.restart_every.is_none() || restarted.is_some(),
        "the controller of this cluster cannot be restarted: no operations"
    );
    let violations = Violations::default();
    let observer = Observer::start(&target.client, HONEST, &inventory, violations.clone()).await?;
    let monitor = Monitor::start(target.clone()).await?;
    let hostile = Arc::new(Hostile::new(target, plan, &inventory)?);
    let honest = honest::Honest::new(target, &observer, violations.clone());

    let show = |phase, duration, begun: Instant| {
        let (served, waiting) = honest.counts();
        let (requests, memory_mib) = (hostile.requests(), monitor.memory());
        let elapsed = begun.elapsed();
        progress(&Progress { phase, elapsed, duration, served, waiting, requests, memory_mib });
    };
    let before = monitor.cpu_times();
    let begun = Instant::now();
    let peace = with_progress(honest.run("peace", plan.peace, plan.interval), || {
        show("peace", plan.peace, begun)
    })
    .await?;
    let between = monitor.cpu_times();
    let begun = Instant::now();
    let attacking = async {
        let end = Instant::now() + plan.attack;
        let restarts = async {
            match restarted {
                Some((interval, operations)) => {
                    restarts::run(operations, interval, end, &violations).await
                }
                None => 0,
            }
        };
        tokio::join!(honest.run("attack", plan.attack, plan.interval), hostile.run(end), restarts,)
    };
    let (attack, (), restarts) =
        with_progress(attacking, || show("attack", plan.attack, begun)).await;
    let attack = attack?;
    let after = monitor.cpu_times();
    let begun = Instant::now();
    let cleaning = clean_up(target, &hostile, &violations);
    with_progress(cleaning, || show("clean-up", DELETED_WITHIN, begun)).await?;
    let (leader_changes, processes) = monitor.finish([&before, &between, &after]).await?;
    let shares = observer.finish();
    Ok(AttackReport {
        seed: plan.seed,
        peace: LatencySummary::new(plan.peace, &peace),
        attack: LatencySummary::new(plan.attack, &attack),
        requests: hostile.outcomes(),
        shares,
        restarts,
        leader_changes,
        processes,
        violations: violations.take(),
    })
}

/// Calls `show` from time to time until the future is ready.
async fn with_progress<F: Future>(future: F, show: impl Fn()) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        tokio::select! {
            output = &mut future => return output,
            _ = ticks.tick() => show(),
        }
    }
}

/// Creates both namespaces anew, and grants the attacker a user's rights in its own.
async fn prepare(target: &Target) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(target.client.clone());
    for name in [HONEST, HOSTILE] {
        leftovers::delete_namespace(&target.client, name, DELETED_WITHIN).await?;
        cluster::create(&namespaces, json!({"metadata": {"name": name}})).await?;
    }
    if target.has_rbac {
        hostile::grant_rights(target).await?;
    }
    Ok(())
}

/// Deletes both namespaces and reports what is left.
async fn clean_up(
    target: &Target,
    hostile: &Hostile,
    violations: &Violations,
) -> anyhow::Result<()> {
    violations.add_error("the attacker cannot withdraw", hostile.withdraw().await);
    for name in [HONEST, HOSTILE] {
        let deleted = leftovers::delete_namespace(&target.client, name, DELETED_WITHIN).await;
        violations.add_error("objects are left", deleted);
    }
    let released = leftovers::none_allocated(&target.client).await;
    violations.add_error("devices are left allocated", released);
    let Some(operations) = &target.operations else { return Ok(()) };
    for node in GpuInventory::read(&target.client).await?.nodes() {
        let residue = wait_no_residue(operations, node).await;
        violations.add_error("files are left", residue);
    }
    Ok(())
}

/// Waits until a node has no files of claims. No watch reports that.
async fn wait_no_residue(operations: &Operations, node: &str) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(500));
    loop {
        ticks.tick().await;
        let residue = operations.run(&["residue", node]).await.context("cannot list files")?;
        if residue.trim().is_empty() {
            return Ok(());
        }
        anyhow::ensure!(begun.elapsed() < DELETED_WITHIN, "on {node}:\n{residue}");
    }
}
