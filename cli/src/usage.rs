//! Actual use of GPUs: read from the metrics of the drivers, through the API server.
//!
//! ```text
//! driver pods --> GET pods/NAME:PORT/proxy/metrics, twice --> memory, GPU time --> shares of the tree
//! ```
//!
//! Only the node's driver knows the use: it reads the ledgers of the containers.

mod exposition;

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Serialize;
use tessera_api::metrics;
use tessera_api::quantity::Quantity;
use tokio::time::Instant;

use crate::tree::{GpuShare, GpuTree};

/// Time between the two requests to a driver. GPU time is averaged over it.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// Time limit of a request to a driver.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Number of drivers that are asked at the same time.
const CONCURRENT: usize = 16;

/// Label of the driver's pods in the Helm chart.
const DRIVER_LABEL: &str = "app.kubernetes.io/name=tessera-driver";

/// Name of the container port that serves metrics.
const PORT_NAME: &str = "metrics";

/// Actual use of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ShareUse {
    /// Memory that processes hold.
    pub memory: Quantity,
    /// GPU time in percent of one GPU, averaged over [`INTERVAL`]; none if it was not measured
    /// twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u64>,
}

/// Error of a read of one node's metrics. The other nodes are shown.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The pods of the drivers cannot be listed.
    #[error("cannot list the pods of tessera-driver in all namespaces")]
    List(#[source] Box<kube::Error>),
    /// The node has no running driver.
    #[error("no use of node {node}: no running pod with the label {DRIVER_LABEL}")]
    NoDriver {
        /// The node.
        node: String,
    },
    /// The driver's metrics cannot be read.
    #[error(
        "no use of node {node}: cannot read the metrics of pod {pod} (needs `get` on pods/proxy)"
    )]
    Request {
        /// The node.
        node: String,
        /// Namespace and name of the pod.
        pod: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The driver did not answer in time.
    #[error("no use of node {node}: pod {pod} did not answer within {} s", TIMEOUT.as_secs())]
    TimedOut {
        /// The node.
        node: String,
        /// Namespace and name of the pod.
        pod: String,
    },
}

/// Allocation that metrics are about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ShareKey {
    namespace: String,
    claim: String,
    request: String,
    uuid: String,
}

/// Values of a share at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct ShareReading {
    memory_bytes: f64,
    gpu_seconds: f64,
}

/// Values of all shares of a node at one time.
#[derive(Debug, Clone)]
struct NodeReading {
    at: Instant,
    shares: BTreeMap<ShareKey, ShareReading>,
}

impl NodeReading {
    fn parse(text: &str, at: Instant) -> Self {
        let gpu_seconds = format!("{}_total", metrics::SHARE_GPU_SECONDS.name());
        let mut shares: BTreeMap<ShareKey, ShareReading> = BTreeMap::new();
        for sample in exposition::samples(text) {
            let is_memory = sample.name == metrics::SHARE_MEMORY_USED.name();
            if !is_memory && sample.name != gpu_seconds {
                continue;
            }
            let label = |name: &str| sample.labels.get(name).cloned().unwrap_or_default();
            let key = ShareKey {
                namespace: label("namespace"),
                claim: label("resourceclaim"),
                request: label("request"),
                uuid: label("uuid"),
            };
            // A request may have several shares of one GPU.
            let reading = shares.entry(key).or_default();
            if is_memory {
                reading.memory_bytes += sample.value;
            } else {
                reading.gpu_seconds += sample.value;
            }
        }
        Self { at, shares }
    }

    /// Returns the use of each share, with the GPU time since `before`.
    fn since(&self, before: &Self) -> impl Iterator<Item = (&ShareKey, ShareUse)> {
        let elapsed = (self.at - before.at).as_secs_f64();
        self.shares.iter().map(move |(key, now)| {
            // A counter that decreased belongs to a new share with the same names.
            let used = before.shares.get(key).map(|before| now.gpu_seconds - before.gpu_seconds);
            let used = used.filter(|seconds| *seconds >= 0.0 && elapsed > 0.0);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "saturates"
            )]
            let cores = used.map(|seconds| (seconds / elapsed * 100.0).round() as u64);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "saturates"
            )]
            let memory = Quantity::from_bytes(now.memory_bytes as u64);
            (key, ShareUse { memory, cores })
        })
    }
}

/// The driver's pod of a node.
#[derive(Debug, Clone, PartialEq)]
struct DriverPod {
    namespace: String,
    name: String,
    port: i32,
}

impl DriverPod {
    /// Returns the node and its pod if the pod serves metrics.
    fn read(pod: Pod) -> Option<(String, Self)> {
        let is_running = pod.status.as_ref()?.phase.as_deref() == Some("Running");
        if !is_running || pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let spec = pod.spec?;
        let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
        let port = ports.into_iter().find(|port| port.name.as_deref() == Some(PORT_NAME))?;
        let (namespace, name) = (pod.metadata.namespace?, pod.metadata.name?);
        Some((spec.node_name?, Self { namespace, name, port: port.container_port }))
    }

    async fn metrics(&self, client: &Client, node: &str) -> Result<NodeReading, UsageError> {
        let Self { namespace, name, port } = self;
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics");
        let pod = format!("{namespace}/{name}");
        let failed = |source| UsageError::Request {
            node: node.to_owned(),
            pod: pod.clone(),
            source: Box::new(source),
        };
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| failed(kube::Error::HttpError(error)))?;
        match tokio::time::timeout(TIMEOUT, client.request_text(request)).await {
            Ok(text) => Ok(NodeReading::parse(&text.map_err(failed)?, Instant::now())),
            Err(_) => Err(UsageError::TimedOut { node: node.to_owned(), pod }),
        }
    }
}

/// Reads the actual use of the tree's shares and writes it into the tree. Takes [`INTERVAL`].
///
/// Returns the nodes whose use is missing, with the reason.
///
/// # Errors
/// The pods of the drivers cannot be listed.
pub async fn add_usage(client: &Client, tree: &mut GpuTree) -> Result<Vec<UsageError>, UsageError> {
    let pods: Api<Pod> = Api::all(client.clone());
    let mut pods = pods
        .list(&ListParams::default().labels(DRIVER_LABEL))
        .await
        .map_err(|error| UsageError::List(Box::new(error)))?
        .items;
    // During an update a node has two drivers; the newer one is asked.
    pods.sort_by(|a, b| a.metadata.creation_timestamp.cmp(&b.metadata.creation_timestamp));
    let drivers: BTreeMap<String, DriverPod> =
        pods.into_iter().filter_map(DriverPod::read).collect();
    let nodes = tree.nodes.iter().filter(|node| node.gpus.iter().any(|gpu| !gpu.shares.is_empty()));
    let (mut asked, mut errors) = (Vec::new(), Vec::new());
    for node in nodes {
        match drivers.get(&node.name) {
            Some(driver) => asked.push((node.name.clone(), driver)),
            None => errors.push(UsageError::NoDriver { node: node.name.clone() }),
        }
    }
    let readings = asked.into_iter().map(|(node, driver)| async move {
        let first = driver.metrics(client, &node).await?;
        tokio::time::sleep_until(first.at + INTERVAL).await;
        let second = driver.metrics(client, &node).await?;
        Ok((node, first, second))
    });
    let readings: Vec<_> = stream::iter(readings).buffer_unordered(CONCURRENT).collect().await;
    for reading in readings {
        match reading {
            Ok((node, first, second)) => record(tree, &node, &first, &second),
            Err(error) => errors.push(error),
        }
    }
    Ok(errors)
}

/// Writes the use of a node's shares into the tree. A share without metrics has used nothing yet.
fn record(tree: &mut GpuTree, node: &str, first: &NodeReading, second: &NodeReading) {
    let uses: BTreeMap<&ShareKey, ShareUse> = second.since(first).collect();
    let gpus =
        tree.nodes.iter_mut().filter(|view| view.name == node).flat_map(|view| &mut view.gpus);
    for gpu in gpus {
        let Some(uuid) = gpu.uuid.clone() else { continue };
        for share in &mut gpu.shares {
            let GpuShare { namespace, claim, request, .. } = share;
            let key = ShareKey {
                namespace: namespace.clone(),
                claim: claim.clone(),
                request: request.clone(),
                uuid: uuid.clone(),
            };
            share.used = uses.get(&key).copied();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(memory: &[u64], gpu_seconds: f64, at: Instant) -> NodeReading {
        let labels = "namespace=\"a\",resourceclaim=\"c\",request=\"gpu\",uuid=\"GPU-1\"";
        let mut text =
            format!("tessera_share_gpu_seconds_total{{{labels},share=\"0\"}} {gpu_seconds}\n");
        for (share, bytes) in memory.iter().enumerate() {
            let line =
                format!("tessera_share_memory_used_bytes{{{labels},share=\"{share}\"}} {bytes}\n");
            text.push_str(&line);
        }
        NodeReading::parse(&text, at)
    }

    #[test]
    fn use_is_memory_now_and_gpu_time_since() {
        let start = Instant::now();
        let before = reading(&[1], 10.0, start);
        let now = reading(&[3, 4], 10.5, start + INTERVAL);
        let uses: Vec<ShareUse> = now.since(&before).map(|(_, share)| share).collect();
        assert_eq!(uses, [ShareUse { memory: Quantity::from_bytes(7), cores: Some(25) }]);
    }

    #[test]
    fn gpu_time_of_a_new_share_is_unknown() {
        let start = Instant::now();
        let empty = NodeReading::parse("", start);
        let now = reading(&[3], 10.5, start + INTERVAL);
        let restarted = reading(&[3], 0.5, start + 2 * INTERVAL);
        for (before, now) in [(&empty, &now), (&now, &restarted)] {
            assert!(now.since(before).all(|(_, share)| share.cores.is_none()));
        }
    }
}
