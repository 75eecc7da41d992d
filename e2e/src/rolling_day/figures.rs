//! The figures of a day.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Context;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::core::Request;
use kube::{Client, Config};
use serde::Serialize;
use tessera_api::quantity::Quantity;
use tokio::time::Instant;

use super::observer::{Observer, PodRecord};
use super::{DaySize, GPUS};
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::throughput::quantiles::percentile;
use crate::throughput::usage::Usages;

/// Metrics of the controller, on the loopback of its machine.
const CONTROLLER: &str = "http://127.0.0.1:9401";

/// Memory of each GPU.
const GPU_MEMORY: &str = "80Gi";

/// Quantiles of a time in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TimeQuantiles {
    /// Median.
    pub p50_s: f64,
    /// 99th percentile.
    pub p99_s: f64,
}

/// The figures of a day.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Its size.
    pub size: DaySize,
    /// Pods that were created in it.
    pub pods: usize,
    /// Pods of the day that were bound.
    pub bound: usize,
    /// Pods that were evicted, also of those that took the nodes at the begin.
    pub evicted: usize,
    /// Time from the creation of a pod to its binding, with the wait for devices.
    pub to_binding: Option<TimeQuantiles>,
    /// Time from the allocation of a pod's claim to its binding.
    pub allocation_to_binding: Option<TimeQuantiles>,
    /// Time from the answer to a creation to the event of a watch.
    pub watch_lag: Option<TimeQuantiles>,
    /// Part of the GPUs that is allocated, in percent, on average.
    pub allocated_percent: f64,
    /// Part of the allocated GPU time of pods of groups that are not bound, in percent.
    pub waiting_groups_percent: f64,
    /// Part of the allocated GPU time of single pods that are not bound, in percent.
    pub waiting_pods_percent: f64,
    /// CPU time in the day and peak memory of each component.
    pub usage: Usages,
    /// Time from the event of the controller's watch to the stored allocation, as bounds of its
    /// histogram.
    pub allocation_latency: Option<TimeQuantiles>,
}

/// Returns the figures of a day that ends now.
pub(super) fn of(size: DaySize, observer: &Observer, usage: Usages) -> anyhow::Result<Figures> {
    let (began, now) = (observer.began(), Instant::now());
    let of_day: Vec<&PodRecord> = observer.records().filter(|one| one.created >= began).collect();
    let times = |from: fn(&PodRecord) -> Option<Instant>, to: fn(&PodRecord) -> Option<Instant>| {
        let time = |record: &&PodRecord| Some(seconds(from(record)?, to(record)?));
        quantiles(&of_day.iter().filter_map(time).collect::<Vec<f64>>())
    };
    let mut time = GpuTime::default();
    observer.records().for_each(|record| time.add(record, began, now));
    let whole = f64::from(size.nodes * GPUS) * seconds(began, now);
    let percent = |part: f64, whole: f64| if whole > 0.0 { 100.0 * part / whole } else { 0.0 };
    anyhow::ensure!(!of_day.is_empty(), "no pod was created");
    Ok(Figures {
        size,
        pods: of_day.len(),
        bound: of_day.iter().filter(|record| record.bound.is_some()).count(),
        evicted: observer.records().filter(|record| record.is_evicted).count(),
        to_binding: times(|record| Some(record.created), |record| record.bound),
        allocation_to_binding: times(|record| record.allocated, |record| record.bound),
        watch_lag: times(|record| record.answered, |record| record.seen),
        allocated_percent: percent(time.held, whole),
        waiting_groups_percent: percent(time.waiting_groups, time.held),
        waiting_pods_percent: percent(time.waiting_pods, time.held),
        usage,
        allocation_latency: None,
    })
}

/// GPU time in seconds of a GPU.
#[derive(Debug, Default)]
struct GpuTime {
    held: f64,
    waiting_groups: f64,
    waiting_pods: f64,
}

impl GpuTime {
    fn add(&mut self, record: &PodRecord, began: Instant, now: Instant) {
        let Some(allocated) = record.allocated else { return };
        let within = |at: Instant| at.clamp(began, now);
        let (from, until) = (within(allocated), within(record.ended.unwrap_or(now)));
        let bound = within(record.bound.unwrap_or(until)).min(until);
        self.held += record.gpus * seconds(from, until);
        let waiting =
            if record.is_of_group { &mut self.waiting_groups } else { &mut self.waiting_pods };
        *waiting += record.gpus * seconds(from, bound);
    }
}

/// Returns the time between two instants; 0 if `to` was observed before `from`.
fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

fn quantiles(samples: &[f64]) -> Option<TimeQuantiles> {
    Some(TimeQuantiles { p50_s: percentile(samples, 50)?, p99_s: percentile(samples, 99)? })
}

/// Checks that no device of ours has more allocated than its memory.
pub(super) fn check_devices(claims: &[ResourceClaim]) -> anyhow::Result<()> {
    let memory = Quantity::parse(GPU_MEMORY).context("invariant: a quantity")?;
    let mut sums: BTreeMap<(String, String), Quantity> = BTreeMap::new();
    for result in claims.iter().flat_map(device_results).filter(|one| one.driver == DRIVER) {
        let consumed = result.consumed_capacity.as_ref().and_then(|one| one.get("memory"));
        let consumed = consumed.map_or(Ok(memory), |amount| Quantity::parse(&amount.0))?;
        let sum = sums.entry((result.pool.clone(), result.device.clone())).or_default();
        *sum = sum.checked_add(consumed).unwrap_or(*sum);
    }
    let over = sums.iter().find(|(_, sum)| **sum > memory);
    anyhow::ensure!(over.is_none(), "a device has more allocated than {GPU_MEMORY}: {over:?}");
    Ok(())
}

/// Reads the allocations of the controller by the time that they took, by upper bounds in seconds.
///
/// # Errors
/// The controller does not answer.
pub(super) async fn allocations() -> anyhow::Result<Vec<(f64, f64)>> {
    let client = Client::try_from(Config::new(CONTROLLER.parse()?))?;
    let request = Request::new("").get("metrics", &Default::default())?;
    let metrics = client.request_text(request).await;
    let metrics = metrics.with_context(|| format!("no metrics at {CONTROLLER}"))?;
    Ok(buckets(&metrics))
}

fn buckets(metrics: &str) -> Vec<(f64, f64)> {
    let prefix = "tessera_controller_allocation_latency_seconds_bucket{le=\"";
    let bucket = |line: &str| {
        let (bound, count) = line.strip_prefix(prefix)?.split_once("\"} ")?;
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? };
        Some((bound, count.trim().parse().ok()?))
    };
    metrics.lines().filter_map(bucket).collect()
}

/// Returns the bounds between which the quantiles of a histogram's increase are at most.
pub(super) fn latency(before: &[(f64, f64)], after: &[(f64, f64)]) -> Option<TimeQuantiles> {
    let known = |bound: f64| before.iter().find(|(b, _)| *b == bound).map_or(0.0, |(_, n)| *n);
    let increase: Vec<(f64, f64)> =
        after.iter().map(|(bound, count)| (*bound, count - known(*bound))).collect();
    let all = increase.last()?.1;
    let at = |part: f64| increase.iter().find(|(_, n)| *n >= part * all).map(|(bound, _)| *bound);
    (all > 0.0).then_some(TimeQuantiles { p50_s: at(0.5)?, p99_s: at(0.99)? })
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DaySize { nodes, rate, seconds, .. } = self.size;
        writeln!(f, "{nodes} nodes, {rate} arrivals per second, {seconds} s")?;
        let Self { pods, bound, evicted, .. } = self;
        writeln!(f, "pods: {pods} created, {bound} bound, {evicted} evicted")?;
        let times = [
            ("creation to binding, with the wait for devices", self.to_binding),
            ("allocation to binding", self.allocation_to_binding),
            ("watch event to stored allocation, at most", self.allocation_latency),
            ("answer to watch event", self.watch_lag),
        ];
        for (name, quantiles) in times {
            if let Some(TimeQuantiles { p50_s, p99_s }) = quantiles {
                writeln!(f, "{name}: p50 {p50_s:.3} s, p99 {p99_s:.3} s")?;
            }
        }
        writeln!(f, "GPUs allocated: {:.1} %", self.allocated_percent)?;
        let (groups, single) = (self.waiting_groups_percent, self.waiting_pods_percent);
        writeln!(f, "of their time for groups that are not bound: {groups:.2} %")?;
        writeln!(f, "of their time for single pods that are not bound: {single:.2} %")?;
        for (component, usage) in &self.usage {
            let (cpu, memory) = (usage.cpu_s, usage.peak_rss_mib);
            writeln!(f, "{component}: {cpu:.1} s of CPU, {memory:.0} MiB at peak")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn gpu_time_counts_within_the_day_only() {
        let began = Instant::now() + Duration::from_secs(1_000);
        let at = |seconds: i64| {
            let offset = Duration::from_secs(seconds.unsigned_abs());
            if seconds < 0 { began - offset } else { began + offset }
        };
        let record = PodRecord::of_test(4.0, true, [at(-20), at(-10), at(10), at(30)]);
        let mut time = GpuTime::default();
        time.add(&record, began, at(20));
        assert!((time.held - 80.0).abs() < 1e-9 && (time.waiting_groups - 40.0).abs() < 1e-9);
        assert!(time.waiting_pods.abs() < 1e-9, "{time:?}");
    }

    #[test]
    fn latency_is_that_of_the_increase() {
        let name = "tessera_controller_allocation_latency_seconds_bucket";
        let text = |counts: [u32; 3]| {
            let [a, b, all] = counts;
            format!(
                "{name}{{le=\"0.004\"}} {a}\n{name}{{le=\"0.008\"}} {b}\n{name}{{le=\"+Inf\"}} {all}\n"
            )
        };
        let (before, after) = (buckets(&text([100, 100, 100])), buckets(&text([110, 200, 200])));
        let quantiles = latency(&before, &after).unwrap();
        assert!((quantiles.p50_s - 0.008).abs() < 1e-9, "{quantiles:?}");
        assert!(latency(&after, &after).is_none());
    }

    #[test]
    fn device_with_too_much_allocated_is_found() {
        let claim = |memory: &str| -> ResourceClaim {
            let result = serde_json::json!({
                "request": "gpu", "driver": DRIVER, "pool": "n", "device": "gpu-0",
                "consumedCapacity": {"memory": memory},
            });
            serde_json::from_value(serde_json::json!({
                "spec": {}, "status": {"allocation": {"devices": {"results": [result]}}},
            }))
            .unwrap()
        };
        assert!(check_devices(&[claim("40Gi"), claim("40Gi")]).is_ok());
        assert!(check_devices(&[claim("40Gi"), claim("41Gi")]).is_err());
    }
}
