//! Wiring.

use anyhow::Context;
use kube::Client;
use prometheus_client::registry::Registry;
use tessera_allocator::Settings;
use tessera_cluster_access::client;
use tessera_daemon::address::Address;
use tessera_daemon::log;
use tessera_daemon::signals::stop_on_signal;
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::leadership::{Candidate, Tenure};
use crate::metrics::Metrics;
use crate::planner::Planner;
use crate::{server, watch};

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let Args { kubeconfig, namespace, identity, leader_elect, log_format, .. } = args;
    let (patience, Address(address)) = (args.patience_seconds, args.metrics_address);
    log::start(log_format);
    let identity = identity.filter(|i| !i.is_empty()).unwrap_or_else(default_identity);
    let stop = stop_on_signal("stopping").context("cannot wait for signals")?;
    let client = client(kubeconfig.as_deref()).await?;
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let serving = tokio::spawn({
        let stop = stop.clone();
        async move {
            match address {
                Some(address) => server::serve(address, registry, stop).await,
                None => Ok(()),
            }
        }
    });
    let lease = leader_elect.then_some(namespace.as_str());
    let settings = Settings { patience: (patience > 0).then_some(patience), ..Settings::default() };
    let worked = work(client, lease, identity, settings, metrics, stop.clone()).await;
    stop.cancel();
    // If leadership was lost, at once: tasks that write live as long as the process, and a scraper that reads slowly must not
    // prolong it.
    worked?;
    serving.await.context("the metrics server panicked")?.context("cannot serve metrics")
}

/// Leads, where there is a namespace for its Lease, and plans until `stop` or until leadership is lost.
async fn work(
    client: Client,
    lease: Option<&str>,
    identity: String,
    settings: Settings,
    metrics: Metrics,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut candidate = lease.map(|namespace| Candidate::new(client.clone(), namespace, identity.clone()));
    if let Some(candidate) = &mut candidate {
        tokio::select! {
            () = candidate.acquire() => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
    metrics.leading.set(1.0);
    // Only now: what a standby had seen could be older than the last writes of the leader before it.
    let changes = watch::start(&client);
    let tenure = candidate.as_ref().map_or_else(Tenure::endless, Candidate::tenure);
    let planner = Planner::new(client, &identity, settings, metrics).during(tenure);
    let planner = planner.run(changes, stop.clone());
    match &mut candidate {
        None => {
            planner.await;
        }
        Some(candidate) => {
            let planned = CancellationToken::new();
            let holding = candidate.hold(planned.clone());
            tokio::pin!(planner, holding);
            let ended = tokio::select! {
                // No waiting for writes under way: they end by their own time-out before the lease can pass on.
                lost = &mut holding => return lost.context("leadership lost"),
                ended = &mut planner => ended,
            };
            if !ended {
                tracing::warn!("a write is still without an answer; the Lease is left to run out");
                return Ok(());
            }
            planned.cancel();
            holding.await.context("leadership lost")?;
        }
    }
    Ok(())
}

fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), std::process::id())
}
