//! Per-share Prometheus metrics, read from the ledger at scrape time.

use std::time::Duration;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};
use tessera_api::labels::metric;

use super::{LedgerUsage, Ledgers, ShareUsage};

/// A collector that reads ledgers.
#[derive(Debug)]
pub struct ShareCollector(pub Ledgers);

/// Labels of a share. `uuid` is the UUID of the GPU, as in NVIDIA's exporters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ShareLabels {
    namespace: String,
    resourceclaim: String,
    request: String,
    uuid: String,
    share: String,
}

impl ShareLabels {
    fn of(share: &ShareUsage) -> Self {
        Self {
            namespace: share.namespace.to_string(),
            resourceclaim: share.claim.to_string(),
            request: share.request.to_string(),
            uuid: share.gpu.to_string(),
            share: share.share.to_string(),
        }
    }
}

/// A value of a share, or `None` if its ledger is unreadable.
type Value = fn(&ShareUsage) -> Option<u64>;

/// Returns a [`Value`] that is read from the ledger.
macro_rules! of_ledger {
    ($value:expr) => {
        |share| {
            let value: fn(&LedgerUsage) -> u64 = $value;
            share.usage.as_ref().ok().map(value)
        }
    };
}

const GAUGES: [(&str, &str, Value); 6] = [
    (metric::SHARE_MEMORY_LIMIT, "GPU memory limit of the share, in bytes", |share| {
        Some(share.limit_bytes)
    }),
    (
        metric::SHARE_CORES,
        "Compute of the share, in percent of the GPU; 0 is best effort",
        |share| Some(share.cores_percent.into()),
    ),
    (
        metric::SHARE_LEDGER_READABLE,
        "1 if the ledger of the share is readable and valid, else 0",
        |share| Some(share.usage.is_ok().into()),
    ),
    (
        metric::SHARE_MEMORY_USED,
        "GPU memory that living processes of the share hold, in bytes",
        of_ledger!(LedgerUsage::used_bytes),
    ),
    (
        metric::SHARE_MEMORY_PEAK,
        "Peak of the used GPU memory of the share, in bytes",
        of_ledger!(|usage| usage.peak_bytes),
    ),
    (
        metric::SHARE_PROCESSES,
        "Living processes that have used the GPU through the share",
        of_ledger!(|usage| usage.processes.len() as u64),
    ),
];

const COUNTERS: [(&str, &str, Value); 4] = [
    (
        metric::SHARE_MEMORY_REFUSALS,
        "GPU memory allocations refused because of the limit of the share",
        of_ledger!(|usage| usage.refused),
    ),
    (
        metric::SHARE_LAUNCHES,
        "Kernel launches of processes of the share",
        of_ledger!(|usage| usage.launches),
    ),
    (
        metric::SHARE_THROTTLED_LAUNCHES,
        "Kernel launches of processes of the share that were throttled",
        of_ledger!(|usage| usage.throttled_launches),
    ),
    (
        metric::SHARE_UNKNOWN_FUNCTIONS,
        "Driver functions newer than the interceptor that were returned to programs; their calls are not counted",
        of_ledger!(|usage| usage.unknown_functions),
    ),
];

/// A duration in a ledger.
type Time = fn(&LedgerUsage) -> Duration;

const TIMES: [(&str, &str, Time); 2] = [
    (
        metric::SHARE_GPU_SECONDS,
        "GPU time of processes of the share as measured by the interceptor, in seconds",
        |usage| usage.gpu_time,
    ),
    (
        metric::SHARE_THROTTLED_SECONDS,
        "Time that kernel launches were throttled, summed over processes of the share, in seconds",
        |usage| usage.throttled,
    ),
];

impl Collector for ShareCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shares = self.0.read();
        let shares: Vec<_> = shares.iter().map(|share| (ShareLabels::of(share), share)).collect();
        for (name, help, value) in GAUGES {
            let of = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            encode_all(&mut encoder, (name, help, value), &shares, of)?;
        }
        for (name, help, value) in COUNTERS {
            encode_all(&mut encoder, (name, help, value), &shares, ConstCounter::new)?;
        }
        for (name, help, time) in TIMES {
            let mut family = encoder.encode_descriptor(
                name,
                help,
                None,
                ConstCounter::new(0.0).metric_type(),
            )?;
            for (labels, share) in &shares {
                if let Ok(usage) = &share.usage {
                    ConstCounter::new(time(usage).as_secs_f64())
                        .encode(family.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

fn encode_all<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, value): (&str, &str, Value),
    shares: &[(ShareLabels, &ShareUsage)],
    metric: impl Fn(u64) -> M,
) -> Result<(), std::fmt::Error> {
    let kind = metric(0).metric_type();
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, share) in shares {
        if let Some(found) = value(share) {
            metric(found).encode(family.encode_family(labels)?)?;
        }
    }
    Ok(())
}
