//! One round: a fresh control plane, one allocator, one load.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tessera_api::slice::Fence;
use tokio::time::Instant;

use super::load::{Load, PodTimes};
use super::plan::{Allocator, Limits, Workload};
use super::quantiles::percentile;
use super::scheduler;
use super::usage::{self, Usages};
use crate::hollow::{HollowNodes, Shape};
use crate::inventory::DRIVER;
use crate::wait::{self, Verdict};

/// kube-controller-manager takes the taints of new nodes away, one request each, under its own
/// limits.
const PATIENCE: Duration = Duration::from_secs(300);

/// Nothing tells when an admission policy is in force, so it is tried.
const TRY_EVERY: Duration = Duration::from_millis(200);

/// Where the pods are. It is the only load of its cluster.
const NAMESPACE: &str = "default";

/// Quantiles of a time, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The median.
    pub p50_s: f64,
    /// The 99th percentile.
    pub p99_s: f64,
    /// The longest.
    pub longest_s: f64,
}

/// What one round came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Who allocated.
    pub allocator: Allocator,
    /// Client limits of kube-controller-manager and kube-scheduler.
    pub limits: Limits,
    /// What was done.
    pub workload: Workload,
    /// The API server's version.
    pub kubernetes: String,
    /// All pods, by the time from the first creation to the last binding.
    pub bound_per_second: f64,
    /// From the first creation to the last, seconds.
    pub creating_s: f64,
    /// From a pod's creation to its binding.
    pub to_binding: Times,
    /// From its creation to its claim.
    pub to_claim: Times,
    /// From its claim to the allocation.
    pub claim_to_allocation: Times,
    /// From the allocation to the binding.
    pub allocation_to_binding: Times,
    /// Attempts of kube-scheduler at a pod that came to nothing.
    pub attempts_in_vain: f64,
    /// CPU time of each component during the load; its peak of memory since it was started.
    pub usage: Usages,
    /// CPU time that the machine meanwhile gave to others than the components and this program,
    /// seconds.
    pub elsewhere_s: f64,
}

/// Which round.
#[derive(Clone, Debug)]
pub struct Task {
    /// Who allocates.
    pub allocator: Allocator,
    /// The limits with which the components run.
    pub limits: Limits,
    /// What is done.
    pub workload: Workload,
}

/// Runs a round on the control plane of `client`, which is as good as new. Components' process
/// numbers are in files of `pids`.
///
/// # Errors
/// What the API server says; a component that has ended; pods that are not bound.
pub async fn run(task: Task, client: &Client, pids: &Path) -> anyhow::Result<Round> {
    let Workload { nodes, gpus, .. } = task.workload;
    let fence = match task.allocator {
        Allocator::Stock => Fence::Stock,
        Allocator::Tessera => Fence::Managed,
    };
    policies_are_in_force(client).await?;
    let began = Instant::now();
    let hollow = HollowNodes::join(client, "throughput", Shape { nodes, gpus, fence }).await?;
    let measured = async {
        are_schedulable(client, nodes).await?;
        eprintln!("    {nodes} nodes are ready after {:.0} s", began.elapsed().as_secs_f64());
        measure(&task, client, &hollow, pids).await
    };
    tokio::select! {
        Err(error) = hollow.keep_ready() => Err(error),
        round = measured => round,
    }
}

async fn measure(
    task: &Task,
    client: &Client,
    hollow: &HollowNodes,
    pids: &Path,
) -> anyhow::Result<Round> {
    let load = Load::new(client, NAMESPACE, &task.workload, hollow.placement(), pids);
    has_service_account(client).await?;
    load.prepare().await?;
    // Everybody has listed, connected and compiled what they need before the clock starts.
    load.run("warm-up", 1, None).await?;
    remove_warm_up(client).await?;
    let before = Reading::take(pids).await?;
    let times = load.run("pod", task.workload.pods, task.workload.rate).await?;
    let after = Reading::take(pids).await?;
    let kubernetes = client.apiserver_version().await?.git_version;
    round(task, kubernetes, &times, &before, &after)
}

/// What is read before and after the load.
#[derive(Debug, Default)]
struct Reading {
    usages: Usages,
    attempts_in_vain: f64,
    /// CPU time of the whole machine and of this program, seconds.
    machine_s: f64,
    own_s: f64,
}

impl Reading {
    async fn take(pids: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            attempts_in_vain: scheduler::attempts_in_vain().await?,
            usages: usage::read(pids)?,
            machine_s: usage::of_machine()?,
            own_s: usage::of_this_process()?,
        })
    }
}

fn round(
    task: &Task,
    kubernetes: String,
    times: &[PodTimes],
    before: &Reading,
    after: &Reading,
) -> anyhow::Result<Round> {
    let usage = usage::between(&before.usages, &after.usages);
    let components: f64 = usage.values().map(|usage| usage.cpu_s).sum();
    let elsewhere_s =
        after.machine_s - before.machine_s - (after.own_s - before.own_s) - components;
    let of =
        |from: fn(&PodTimes) -> Instant, to: fn(&PodTimes) -> Instant| quantiles(times, from, to);
    let first = times.iter().map(|t| t.created).min();
    let last = |at: fn(&PodTimes) -> Instant| Some(seconds(first?, times.iter().map(at).max()?));
    let missing = || anyhow::anyhow!("no pod was created");
    let whole = last(|t| t.bound).ok_or_else(missing)?;
    Ok(Round {
        allocator: task.allocator,
        limits: task.limits,
        workload: task.workload.clone(),
        kubernetes,
        bound_per_second: f64::from(u32::try_from(times.len())?) / whole,
        creating_s: last(|t| t.created).ok_or_else(missing)?,
        to_binding: of(|t| t.created, |t| t.bound).ok_or_else(missing)?,
        to_claim: of(|t| t.created, |t| t.claimed).ok_or_else(missing)?,
        claim_to_allocation: of(|t| t.claimed, |t| t.allocated).ok_or_else(missing)?,
        allocation_to_binding: of(|t| t.allocated, |t| t.bound).ok_or_else(missing)?,
        attempts_in_vain: after.attempts_in_vain - before.attempts_in_vain,
        usage,
        elsewhere_s,
    })
}

fn quantiles(
    times: &[PodTimes],
    from: fn(&PodTimes) -> Instant,
    to: fn(&PodTimes) -> Instant,
) -> Option<Times> {
    let all: Vec<f64> = times.iter().map(|t| seconds(from(t), to(t))).collect();
    Some(Times {
        p50_s: percentile(&all, 50)?,
        p99_s: percentile(&all, 99)?,
        longest_s: percentile(&all, 100)?,
    })
}

/// Negative where the later thing was seen first.
fn seconds(from: Instant, to: Instant) -> f64 {
    to.checked_duration_since(from).map_or_else(|| -(from - to).as_secs_f64(), |d| d.as_secs_f64())
}

/// Waits until the administrator may not publish a GPU any more, which only the policies forbid.
async fn policies_are_in_force(client: &Client) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let forged = serde_json::from_value(json!({
        "metadata": {"name": "forged"},
        "spec": {"driver": DRIVER, "nodeName": "forged", "pool": {"name": "forged", "generation": 1, "resourceSliceCount": 1}},
    }))?;
    let tried = PostParams { dry_run: true, ..PostParams::default() };
    let mut ticks = tokio::time::interval(TRY_EVERY);
    let denied = async {
        loop {
            ticks.tick().await;
            match slices.create(&tried, &forged).await {
                Err(kube::Error::Api(status))
                    if status.message.contains("only tessera-driver publishes") =>
                {
                    break Ok(());
                }
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        }
    };
    let waited = tokio::time::timeout(PATIENCE, denied).await;
    Ok(waited.map_err(|_| {
        anyhow::anyhow!("the admission policies are not in force after {PATIENCE:?}")
    })??)
}

/// Waits until kube-controller-manager has made the account that every pod runs under.
async fn has_service_account(client: &Client) -> anyhow::Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    let judge = |account: Option<&ServiceAccount>| {
        account.map_or_else(|| Verdict::NotYet("it is not there".to_owned()), |_| Verdict::Done(()))
    };
    Ok(wait::until_one(accounts, "default", "the default service account", PATIENCE, judge).await?)
}

/// Waits until no node has a taint of kube-controller-manager's any more: new ones have
/// `not-ready`.
async fn are_schedulable(client: &Client, nodes: u32) -> anyhow::Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let judge = |seen: &[Node]| {
        let is_free = |node: &&Node| {
            let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
            !taints.any(|taint| taint.key.starts_with("node.kubernetes.io/"))
        };
        match seen.iter().filter(is_free).count() {
            free if free >= nodes as usize => Verdict::Done(()),
            free => Verdict::NotYet(format!("{free} of {nodes} are")),
        }
    };
    let what = "the nodes to be free of the taint node.kubernetes.io/not-ready";
    Ok(wait::until(api, watcher::Config::default(), what, PATIENCE, judge).await?)
}

async fn remove_warm_up(client: &Client) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    pods.delete("warm-up-1", &DeleteParams::default().grace_period(0)).await?;
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let judge = |claims: &[ResourceClaim]| match claims.len() {
        0 => Verdict::Done(()),
        left => Verdict::NotYet(format!("{left} are left")),
    };
    Ok(wait::until(
        claims,
        watcher::Config::default(),
        "the claim of the warm-up to go",
        PATIENCE,
        judge,
    )
    .await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::throughput::usage::Usage;

    fn times(created: Instant, ms: [u64; 3]) -> PodTimes {
        let [claimed, allocated, bound] = ms.map(|ms| created + Duration::from_millis(ms));
        PodTimes { created, claimed, allocated, bound }
    }

    fn reading(etcd_s: f64, attempts_in_vain: f64, machine_s: f64, own_s: f64) -> Reading {
        let usages =
            Usages::from([("etcd".to_owned(), Usage { cpu_s: etcd_s, peak_rss_mib: 1.0 })]);
        Reading { usages, attempts_in_vain, machine_s, own_s }
    }

    fn of(pods: &[PodTimes], before: &Reading, after: &Reading) -> Round {
        let workload = Workload { pods: 2, nodes: 1, gpus: 1, memory: 20, cores: 25, rate: None };
        let task = Task { allocator: Allocator::Tessera, limits: Limits::Default, workload };
        round(&task, "v1.37.1".to_owned(), pods, before, after).unwrap()
    }

    fn is(value: f64, expected: f64) -> bool {
        (value - expected).abs() < 1e-9
    }

    #[test]
    fn a_rounds_throughput_runs_from_the_first_creation_to_the_last_binding() {
        let began = Instant::now();
        let pods = [
            times(began + Duration::from_secs(1), [100, 300, 1000]),
            times(began, [100, 200, 400]),
        ];
        let round = of(&pods, &Reading::default(), &Reading::default());
        assert!(is(round.bound_per_second, 1.0) && is(round.creating_s, 1.0), "{round:?}");
        assert!(
            is(round.to_binding.p50_s, 0.4) && is(round.to_binding.longest_s, 1.0),
            "{round:?}"
        );
        assert!(is(round.claim_to_allocation.longest_s, 0.2), "{round:?}");
    }

    #[test]
    fn what_others_used_is_what_nobody_else_did() {
        let pods = [times(Instant::now(), [1, 2, 3])];
        let round = of(&pods, &reading(1.0, 3.0, 100.0, 5.0), &reading(3.0, 10.0, 110.0, 6.0));
        assert!(is(round.usage["etcd"].cpu_s, 2.0) && is(round.elsewhere_s, 7.0), "{round:?}");
        assert!(is(round.attempts_in_vain, 7.0), "{round:?}");
    }

    #[test]
    fn what_is_seen_out_of_order_is_a_negative_time() {
        let now = Instant::now();
        assert!(is(seconds(now + Duration::from_secs(1), now), -1.0));
    }
}
