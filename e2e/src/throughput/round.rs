//! One round of the benchmark: a new control plane, one allocator, one load.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::DeleteParams;
use kube::runtime::watcher;
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use tessera_api::slice::Fence;
use tokio::time::Instant;

use super::load::{Load, PodTimes};
use super::plan::{Allocator, Limits, Workload};
use super::preparation::{
    NAMESPACE, TIMEOUT, wait_default_service_account, wait_nodes_schedulable,
    wait_policies_in_force,
};
use super::quantiles::percentile;
use super::scheduler;
use super::usage::{self, Usages};
use crate::hollow::{HollowNodes, HollowNodesSpec};
use crate::wait::{self, CheckResult};

/// Quantiles of a duration in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DurationQuantiles {
    /// Median.
    pub p50_s: f64,
    /// 99th percentile.
    pub p99_s: f64,
    /// Maximum.
    pub max_s: f64,
}

/// Result of one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The allocator.
    pub allocator: Allocator,
    /// Client limits of kube-controller-manager and kube-scheduler.
    pub limits: Limits,
    /// The workload.
    pub workload: Workload,
    /// Version of the API server.
    pub kubernetes: String,
    /// Number of pods divided by the time from the first creation to the last binding.
    pub bound_per_second: f64,
    /// Time from the first creation to the last, in seconds.
    pub creating_s: f64,
    /// Time from a pod's creation to its binding.
    pub to_binding: DurationQuantiles,
    /// Time from a pod's creation to its claim.
    pub to_claim: DurationQuantiles,
    /// Time from the claim to its allocation.
    pub claim_to_allocation: DurationQuantiles,
    /// Time from the allocation to the pod's binding.
    pub allocation_to_binding: DurationQuantiles,
    /// Number of failed scheduling attempts of kube-scheduler.
    pub failed_attempts: f64,
    /// CPU time of each component during the load, and its peak memory since its start.
    pub usage: Usages,
    /// CPU time of all other processes of the machine during the load, in seconds. The components
    /// and this program are excluded.
    pub other_processes_s: f64,
}

/// Parameters of a round.
#[derive(Clone, Debug)]
pub struct RoundParameters {
    /// The allocator.
    pub allocator: Allocator,
    /// Client limits with which the components run.
    pub limits: Limits,
    /// The workload.
    pub workload: Workload,
}

/// Runs a round on the new control plane of `client`. The files in `pids` contain the process IDs
/// of the components.
///
/// # Errors
/// Returns an error if a request fails, a component exits, or pods are not bound.
pub async fn run(
    parameters: RoundParameters,
    client: &Client,
    pids: &Path,
) -> anyhow::Result<Round> {
    let Workload { nodes, gpus, .. } = parameters.workload;
    let fence = match parameters.allocator {
        Allocator::Stock => Fence::Stock,
        Allocator::Tessera | Allocator::Dialects | Allocator::Converted => Fence::Taint,
    };
    wait_policies_in_force(client).await?;
    let began = Instant::now();
    let hollow =
        HollowNodes::create(client, "throughput", HollowNodesSpec { nodes, gpus, fence }).await?;
    let measured = async {
        wait_nodes_schedulable(client, nodes).await?;
        eprintln!("    {nodes} nodes are ready after {:.0} s", began.elapsed().as_secs_f64());
        measure(&parameters, client, &hollow, pids).await
    };
    tokio::select! {
        Err(error) = hollow.keep_ready() => Err(error),
        round = measured => round,
    }
}

async fn measure(
    parameters: &RoundParameters,
    client: &Client,
    hollow: &HollowNodes,
    pids: &Path,
) -> anyhow::Result<Round> {
    let load = Load::new(client, NAMESPACE, &parameters.workload, hollow.placement(), pids);
    let load = match parameters.allocator {
        Allocator::Dialects => load.of_dialects()?,
        Allocator::Converted => load.of_converted()?,
        Allocator::Stock | Allocator::Tessera => load,
    };
    wait_default_service_account(client).await?;
    load.prepare().await?;
    // Warm-up: all components have listed, connected and compiled before the measurement.
    load.run("warm-up", 1, None).await?;
    delete_warm_up(client).await?;
    let before = Reading::take(pids).await?;
    let times = load.run("pod", parameters.workload.pods, parameters.workload.rate).await?;
    let after = Reading::take(pids).await?;
    let kubernetes = client.apiserver_version().await?.git_version;
    round(parameters, kubernetes, &times, &before, &after)
}

/// Values read before and after the load.
#[derive(Debug, Default)]
struct Reading {
    usages: Usages,
    failed_attempts: f64,
    /// CPU time of the whole machine and of this program, in seconds.
    machine_s: f64,
    own_s: f64,
}

impl Reading {
    async fn take(pids: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            failed_attempts: scheduler::failed_attempts().await?,
            usages: usage::read(pids)?,
            machine_s: usage::of_machine()?,
            own_s: usage::of_this_process()?,
        })
    }
}

fn round(
    parameters: &RoundParameters,
    kubernetes: String,
    times: &[PodTimes],
    before: &Reading,
    after: &Reading,
) -> anyhow::Result<Round> {
    let usage = usage::between(&before.usages, &after.usages);
    let components: f64 = usage.values().map(|usage| usage.cpu_s).sum();
    let other_processes_s =
        after.machine_s - before.machine_s - (after.own_s - before.own_s) - components;
    let of =
        |from: fn(&PodTimes) -> Instant, to: fn(&PodTimes) -> Instant| quantiles(times, from, to);
    let first = times.iter().map(|t| t.created).min();
    let last = |at: fn(&PodTimes) -> Instant| Some(seconds(first?, times.iter().map(at).max()?));
    let missing = || anyhow::anyhow!("no pod was created");
    let whole = last(|t| t.bound).ok_or_else(missing)?;
    Ok(Round {
        allocator: parameters.allocator,
        limits: parameters.limits,
        workload: parameters.workload.clone(),
        kubernetes,
        bound_per_second: f64::from(u32::try_from(times.len())?) / whole,
        creating_s: last(|t| t.created).ok_or_else(missing)?,
        to_binding: of(|t| t.created, |t| t.bound).ok_or_else(missing)?,
        to_claim: of(|t| t.created, |t| t.claimed).ok_or_else(missing)?,
        claim_to_allocation: of(|t| t.claimed, |t| t.allocated).ok_or_else(missing)?,
        allocation_to_binding: of(|t| t.allocated, |t| t.bound).ok_or_else(missing)?,
        failed_attempts: after.failed_attempts - before.failed_attempts,
        usage,
        other_processes_s,
    })
}

fn quantiles(
    times: &[PodTimes],
    from: fn(&PodTimes) -> Instant,
    to: fn(&PodTimes) -> Instant,
) -> Option<DurationQuantiles> {
    let all: Vec<f64> = times.iter().map(|t| seconds(from(t), to(t))).collect();
    Some(DurationQuantiles {
        p50_s: percentile(&all, 50)?,
        p99_s: percentile(&all, 99)?,
        max_s: percentile(&all, 100)?,
    })
}

/// Returns the time between two instants; negative if `to` was observed before `from`.
fn seconds(from: Instant, to: Instant) -> f64 {
    to.checked_duration_since(from).map_or_else(|| -(from - to).as_secs_f64(), |d| d.as_secs_f64())
}

async fn delete_warm_up(client: &Client) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    pods.delete("warm-up-1", &DeleteParams::default().grace_period(0)).await?;
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let check = CheckResult::none_left;
    Ok(wait::until(
        claims,
        watcher::Config::default(),
        "the claim of the warm-up to be deleted",
        TIMEOUT,
        check,
    )
    .await?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::throughput::usage::Usage;

    fn times(created: Instant, ms: [u64; 3]) -> PodTimes {
        let [claimed, allocated, bound] = ms.map(|ms| created + Duration::from_millis(ms));
        PodTimes { created, claimed, allocated, bound }
    }

    fn reading(etcd_s: f64, failed_attempts: f64, machine_s: f64, own_s: f64) -> Reading {
        let usages =
            Usages::from([("etcd".to_owned(), Usage { cpu_s: etcd_s, peak_rss_mib: 1.0 })]);
        Reading { usages, failed_attempts, machine_s, own_s }
    }

    fn of(pods: &[PodTimes], before: &Reading, after: &Reading) -> Round {
        let workload = Workload { pods: 2, nodes: 1, gpus: 1, memory: 20, cores: 25, rate: None };
        let parameters =
            RoundParameters { allocator: Allocator::Tessera, limits: Limits::Default, workload };
        round(&parameters, "v1.37.1".to_owned(), pods, before, after).unwrap()
    }

    fn is(value: f64, expected: f64) -> bool {
        (value - expected).abs() < 1e-9
    }

    #[test]
    fn throughput_counts_from_first_creation_to_last_binding() {
        let began = Instant::now();
        let pods = [
            times(began + Duration::from_secs(1), [100, 300, 1000]),
            times(began, [100, 200, 400]),
        ];
        let round = of(&pods, &Reading::default(), &Reading::default());
        assert!(is(round.bound_per_second, 1.0) && is(round.creating_s, 1.0), "{round:?}");
        assert!(is(round.to_binding.p50_s, 0.4) && is(round.to_binding.max_s, 1.0), "{round:?}");
        assert!(is(round.claim_to_allocation.max_s, 0.2), "{round:?}");
    }

    #[test]
    fn cpu_of_other_processes_excludes_components() {
        let pods = [times(Instant::now(), [1, 2, 3])];
        let round = of(&pods, &reading(1.0, 3.0, 100.0, 5.0), &reading(3.0, 10.0, 110.0, 6.0));
        assert!(
            is(round.usage["etcd"].cpu_s, 2.0) && is(round.other_processes_s, 7.0),
            "{round:?}"
        );
        assert!(is(round.failed_attempts, 7.0), "{round:?}");
    }

    #[test]
    fn events_out_of_order_give_negative_duration() {
        let now = Instant::now();
        assert!(is(seconds(now + Duration::from_secs(1), now), -1.0));
    }
}
