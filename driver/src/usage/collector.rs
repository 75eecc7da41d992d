//! Per-share Prometheus metrics, read from the ledger at scrape time.

use std::time::Duration;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};
use tessera_api::{
    metrics::{self, MetricDescription},
    names::NodeName,
};

use super::{LedgerUsage, Ledgers, ShareUsage, measurement::Measurement};
use crate::prepare::claim_pods::ClaimPods;

/// A collector that reads ledgers.
#[derive(Debug)]
pub struct ShareCollector {
    /// The ledgers of the node.
    pub ledgers: Ledgers,
    /// The pods of the claims.
    pub pods: ClaimPods,
    /// The node.
    pub node: NodeName,
}

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

/// Labels of a share and a pod that uses it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PodLabels {
    #[prometheus(flatten)]
    share: ShareLabels,
    pod: String,
    node: String,
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

const GAUGES: [(MetricDescription, Value); 7] = [
    (metrics::SHARE_MEMORY_LIMIT, |share| Some(share.limit_bytes)),
    (metrics::SHARE_CORES, |share| Some(share.cores_percent.into())),
    (metrics::SHARE_LEDGER_READABLE, |share| Some(share.usage.is_ok().into())),
    (metrics::SHARE_MEMORY_USED, of_ledger!(LedgerUsage::used_bytes)),
    (metrics::SHARE_MEMORY_PEAK, of_ledger!(|usage| usage.peak_bytes)),
    (metrics::SHARE_REFUSED_BYTES, of_ledger!(|usage| usage.last_refusal.0)),
    (metrics::SHARE_PROCESSES, of_ledger!(|usage| usage.processes.len() as u64)),
];

const COUNTERS: [(MetricDescription, Value); 4] = [
    (metrics::SHARE_MEMORY_REFUSALS, of_ledger!(|usage| usage.refused)),
    (metrics::SHARE_LAUNCHES, of_ledger!(|usage| usage.launches)),
    (metrics::SHARE_THROTTLED_LAUNCHES, of_ledger!(|usage| usage.throttled_launches)),
    (metrics::SHARE_UNKNOWN_FUNCTIONS, of_ledger!(|usage| usage.unknown_functions)),
];

/// A duration in a ledger and in a measurement.
type Time = fn(&LedgerUsage, &Measurement) -> Duration;

const TIMES: [(MetricDescription, Time); 2] = [
    (metrics::SHARE_GPU_SECONDS, |usage, measured| {
        usage.gpu_time.saturating_add(measured.unmetered)
    }),
    (metrics::SHARE_THROTTLED_SECONDS, |usage, _| usage.throttled),
];

impl Collector for ShareCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shares = self.ledgers.read();
        let shares: Vec<_> = shares.iter().map(|share| (ShareLabels::of(share), share)).collect();
        self.encode_pods(&mut encoder, &shares)?;
        for (description, value) in GAUGES {
            let of = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            encode_all(&mut encoder, (description, value), &shares, of)?;
        }
        for (description, value) in COUNTERS {
            encode_all(&mut encoder, (description, value), &shares, ConstCounter::new)?;
        }
        self.encode_measurements(&mut encoder, &shares)?;
        for (description, time) in TIMES {
            let mut family = encoder.encode_descriptor(
                description.name(),
                description.help(),
                None,
                ConstCounter::new(0.0).metric_type(),
            )?;
            for (labels, share) in &shares {
                if let Ok(usage) = &share.usage {
                    let measured = self.measurement(share).unwrap_or_default();
                    ConstCounter::new(time(usage, &measured).as_secs_f64())
                        .encode(family.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

impl ShareCollector {
    fn measurement(&self, share: &ShareUsage) -> Option<Measurement> {
        Measurement::read(&self.ledgers.paths().grant(&share.share))
    }

    /// Encodes which pods use the shares.
    fn encode_pods(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        shares: &[(ShareLabels, &ShareUsage)],
    ) -> Result<(), std::fmt::Error> {
        let description = metrics::SHARE_INFO;
        let one = ConstGauge::new(1_i64);
        let (name, help) = (description.name(), description.help());
        let mut family = encoder.encode_descriptor(name, help, None, one.metric_type())?;
        for (labels, share) in shares {
            let mut pods: Vec<_> =
                self.pods.of(&share.claim_uid).iter().map(ToString::to_string).collect();
            if pods.is_empty() {
                pods.push(String::new());
            }
            for pod in pods {
                let node = self.node.to_string();
                let labels = PodLabels { share: labels.clone(), pod, node };
                one.encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// Encodes what the measurement of shares has published in their grants.
    fn encode_measurements(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        shares: &[(ShareLabels, &ShareUsage)],
    ) -> Result<(), std::fmt::Error> {
        let measured: Vec<_> = shares
            .iter()
            .filter_map(|(labels, share)| Some((labels, self.measurement(share)?)))
            .collect();
        let mut encode = |description: MetricDescription, value: fn(&Measurement) -> f64| {
            let kind = ConstGauge::new(0.0).metric_type();
            let (name, help) = (description.name(), description.help());
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for (labels, measurement) in &measured {
                ConstGauge::new(value(measurement)).encode(family.encode_family(*labels)?)?;
            }
            Ok(())
        };
        encode(metrics::SHARE_GPU_TIME_GAIN, |measured| measured.gain.as_quotient())?;
        encode(metrics::SHARE_DRIVER_MEMORY, |measured| measured.overhead_bytes as f64)
    }
}

fn encode_all<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    (description, value): (MetricDescription, Value),
    shares: &[(ShareLabels, &ShareUsage)],
    metric: impl Fn(u64) -> M,
) -> Result<(), std::fmt::Error> {
    let kind = metric(0).metric_type();
    let mut family =
        encoder.encode_descriptor(description.name(), description.help(), None, kind)?;
    for (labels, share) in shares {
        if let Some(found) = value(share) {
            metric(found).encode(family.encode_family(labels)?)?;
        }
    }
    Ok(())
}
