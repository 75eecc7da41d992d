//! Measured loads of GPUs: the leader asks the driver of each node (ADR 138).
//!
//! ```text
//! watch of the driver's pods --> addresses --every 30 s--> GET /load of each --> changes of the core
//! ```
//!
//! A driver that does not answer is asked again in the next round; the core forgets loads that are
//! not renewed.

mod request;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tessera_api::names::NodeName;
use tessera_runtime::cluster::with_backoff;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::core::event::Change;
use crate::metrics::Metrics;
use crate::watch::Arrival;

/// Interval of the rounds. The drivers' averages are of a minute.
const INTERVAL: Duration = Duration::from_secs(30);

/// Number of drivers that are asked at the same time.
const CONCURRENT: usize = 32;

/// Label of the driver's pods, which the chart sets.
const DRIVER_PODS: &str = "app.kubernetes.io/name=tessera-driver";

/// Name of the port of the driver's metrics, which the chart sets.
const METRICS_PORT: &str = "metrics";

/// Addresses of the drivers, by node.
type Drivers = BTreeMap<NodeName, SocketAddr>;

/// Asks the drivers for the loads of their GPUs.
pub(crate) struct LoadSampler {
    pods: Api<Pod>,
    metrics: Metrics,
}

impl LoadSampler {
    /// Returns a sampler of the drivers in the namespace.
    pub(crate) fn new(client: Client, namespace: &str, metrics: Metrics) -> Self {
        Self { pods: Api::namespaced(client, namespace), metrics }
    }

    /// Samples until the receiver of `changes` is dropped.
    pub(crate) async fn run(self, changes: mpsc::Sender<Arrival>) {
        let (addresses, drivers) = watch::channel(Drivers::new());
        tokio::select! {
            () = changes.closed() => {}
            () = follow(self.pods, &addresses) => {}
            () = sample(&drivers, &changes, &self.metrics) => {}
        }
    }
}

/// Follows the addresses of the drivers, for ever.
async fn follow(pods: Api<Pod>, addresses: &watch::Sender<Drivers>) {
    let config = watcher::Config::default().labels(DRIVER_PODS);
    let events = with_backoff(watcher(pods, config), watcher::DefaultBackoff::default());
    let events = events.modify(|pod| pod.metadata.managed_fields = None);
    let mut events = std::pin::pin!(events.into_stream());
    // Pods by name: a node has two for a moment when the driver is replaced.
    let (mut known, mut listing) = (BTreeMap::new(), BTreeMap::new());
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => listing.clear(),
            Ok(watcher::Event::InitApply(pod)) => listing.extend(entry(&pod)),
            Ok(watcher::Event::InitDone) => known = std::mem::take(&mut listing),
            Ok(watcher::Event::Apply(pod)) => {
                known.remove(&pod.metadata.name.clone().unwrap_or_default());
                known.extend(entry(&pod));
            }
            Ok(watcher::Event::Delete(pod)) => {
                known.remove(&pod.metadata.name.unwrap_or_default());
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot watch the pods of the driver, retrying");
                continue;
            }
        }
        addresses.send_replace(known.values().cloned().collect());
    }
}

/// Returns the name of a running driver pod, its node and its address.
fn entry(pod: &Pod) -> Option<(String, (NodeName, SocketAddr))> {
    let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref()?);
    let is_running =
        pod.metadata.deletion_timestamp.is_none() && status.phase.as_deref() == Some("Running");
    let mut ports = spec.containers.iter().flat_map(|of| of.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some(METRICS_PORT))?.container_port;
    let address = status.pod_ip.as_ref()?.parse().ok()?;
    let node = NodeName::new(spec.node_name.as_ref()?).ok()?;
    let address = SocketAddr::new(address, u16::try_from(port).ok()?);
    is_running.then_some((pod.metadata.name.clone()?, (node, address)))
}

/// Asks all drivers in rounds, until nothing receives the changes.
async fn sample(
    drivers: &watch::Receiver<Drivers>,
    changes: &mpsc::Sender<Arrival>,
    metrics: &Metrics,
) {
    let mut rounds = interval(INTERVAL);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        let asked = drivers.borrow().clone();
        let answers = stream::iter(asked).map(async |(node, address)| {
            let answer = request::load(address).await;
            metrics.count_load_sample(answer.is_ok());
            (node, address, answer)
        });
        let mut answers = std::pin::pin!(answers.buffer_unordered(CONCURRENT));
        while let Some((node, address, answer)) = answers.next().await {
            let load = match answer {
                Ok(load) => load,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(%node, %address, error, "cannot read the load of a node");
                    continue;
                }
            };
            let arrival = Arrival { change: Change::Measured { node, load }, at: Instant::now() };
            if changes.send(arrival).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn driver(phase: &str, address: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "tessera-driver-x"},
            "spec": {"nodeName": "node-a", "containers": [
                {"name": "mps"},
                {"name": "driver", "ports": [{"name": "metrics", "containerPort": 9400}]},
            ]},
            "status": {"phase": phase, "podIP": address},
        }))
        .expect("a pod")
    }

    #[test]
    fn a_running_driver_has_an_address() {
        let (_, (node, address)) = entry(&driver("Running", "fd00::7")).expect("an address");
        assert_eq!((node.as_str(), address.to_string().as_str()), ("node-a", "[fd00::7]:9400"));
        assert_eq!(entry(&driver("Pending", "10.0.0.7")), None);
        let mut ending = driver("Running", "10.0.0.7");
        ending.metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).expect("a time"));
        assert_eq!(entry(&ending), None);
    }
}
