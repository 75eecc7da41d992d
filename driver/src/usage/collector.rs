//! Metrics of every share, read from its ledger when somebody scrapes.

use std::time::Duration;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};
use tessera_api::labels::metric;

use super::{Ledgers, ShareUse, Taken};

/// Collects from `Ledgers`.
#[derive(Debug)]
pub struct ShareCollector(pub Ledgers);

/// Which share. `uuid` is the GPU's, as in NVIDIA's exporters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ShareLabels {
    namespace: String,
    resourceclaim: String,
    request: String,
    uuid: String,
    share: String,
}

impl ShareLabels {
    fn of(share: &ShareUse) -> Self {
        Self {
            namespace: share.namespace.to_string(),
            resourceclaim: share.claim.to_string(),
            request: share.request.to_string(),
            uuid: share.gpu.to_string(),
            share: share.share.to_string(),
        }
    }
}

/// A figure of a share; none where its ledger does not say.
type Figure = fn(&ShareUse) -> Option<u64>;

/// A figure of a ledger that can be read.
macro_rules! taken {
    ($figure:expr) => {
        |share| {
            let figure: fn(&Taken) -> u64 = $figure;
            share.taken.as_ref().ok().map(figure)
        }
    };
}

const GAUGES: [(&str, &str, Figure); 6] = [
    (
        metric::SHARE_MEMORY_LIMIT,
        "Bytes of GPU memory that the share's containers may take",
        |share| Some(share.limit_bytes),
    ),
    (
        metric::SHARE_CORES,
        "Percent of the GPU's compute that the share has; 0 = best effort",
        |share| Some(share.cores_percent.into()),
    ),
    (
        metric::SHARE_LEDGER_READABLE,
        "1 while the share's ledger can be read, 0 where not, such as where its containers have ruined it",
        |share| Some(share.taken.is_ok().into()),
    ),
    (
        metric::SHARE_MEMORY_USED,
        "Bytes of GPU memory that the share's living processes hold",
        taken!(Taken::used_bytes),
    ),
    (
        metric::SHARE_MEMORY_PEAK,
        "The most bytes of GPU memory that were taken of the share at one time",
        taken!(|taken| taken.peak_bytes),
    ),
    (
        metric::SHARE_PROCESSES,
        "Living processes that have used the GPU through the share",
        taken!(|taken| taken.processes.len() as u64),
    ),
];

const COUNTERS: [(&str, &str, Figure); 4] = [
    (
        metric::SHARE_MEMORY_REFUSALS,
        "Requests for GPU memory that the share's limit refused",
        taken!(|taken| taken.refused),
    ),
    (
        metric::SHARE_LAUNCHES,
        "Kernel launches of the share's processes",
        taken!(|taken| taken.launches),
    ),
    (
        metric::SHARE_THROTTLED_LAUNCHES,
        "Launches of the share's processes that were held back, since the share had no more of the GPU's time",
        taken!(|taken| taken.throttled_launches),
    ),
    (
        metric::SHARE_UNKNOWN_FUNCTIONS,
        "Times that a program was handed out a driver function newer than the interceptor, which passes uncounted",
        taken!(|taken| taken.unknown_functions),
    ),
];

/// A time that a ledger has.
type Time = fn(&Taken) -> Duration;

const TIMES: [(&str, &str, Time); 2] = [
    (
        metric::SHARE_GPU_SECONDS,
        "GPU time of the share's processes, as the interceptor measured it",
        |taken| taken.gpu_time,
    ),
    (
        metric::SHARE_THROTTLED_SECONDS,
        "Time that launches of the share's processes were held back, added up over processes",
        |taken| taken.throttled,
    ),
];

impl Collector for ShareCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shares = self.0.read();
        let shares: Vec<_> = shares.iter().map(|share| (ShareLabels::of(share), share)).collect();
        for (name, help, figure) in GAUGES {
            let of = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            encode_all(&mut encoder, (name, help, figure), &shares, of)?;
        }
        for (name, help, figure) in COUNTERS {
            encode_all(&mut encoder, (name, help, figure), &shares, ConstCounter::new)?;
        }
        for (name, help, time) in TIMES {
            let mut family = encoder.encode_descriptor(
                name,
                help,
                None,
                ConstCounter::new(0.0).metric_type(),
            )?;
            for (labels, share) in &shares {
                if let Ok(taken) = &share.taken {
                    ConstCounter::new(time(taken).as_secs_f64())
                        .encode(family.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

fn encode_all<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, figure): (&str, &str, Figure),
    shares: &[(ShareLabels, &ShareUse)],
    metric: impl Fn(u64) -> M,
) -> Result<(), std::fmt::Error> {
    let kind = metric(0).metric_type();
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, share) in shares {
        if let Some(value) = figure(share) {
            metric(value).encode(family.encode_family(labels)?)?;
        }
    }
    Ok(())
}
