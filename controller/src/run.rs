//! Starts the parts of the controller and connects them.

use std::path::PathBuf;

use anyhow::Context;
use kube::Client;
use prometheus_client::registry::Registry;
use tessera_allocator::PlanSettings;
use tessera_runtime::address::ListenAddress;
use tessera_runtime::cluster::client;
use tessera_runtime::log;
use tessera_runtime::signals::stop_on_signal;
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::lead::{Connect, Leadership, lead};
use crate::leadership::Tenure;
use crate::metrics::Metrics;
use crate::shell::Shell;
use crate::{server, watch};

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let Args { kubeconfig, namespace, identity, leader_elect, log_format, .. } = args;
    let (delay, ListenAddress(address)) = (args.reservation_delay_seconds, args.metrics_address);
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
    let settings =
        PlanSettings { reservation_delay: (delay > 0).then_some(delay), ..PlanSettings::default() };
    let leadership = leader_elect
        .then(|| Leadership::start(connect(kubeconfig), namespace, identity.clone(), stop.clone()))
        .transpose()
        .context("cannot start the thread that renews the Lease")?;
    let worked = work(client, leadership, &identity, settings, metrics, stop.clone()).await;
    stop.cancel();
    // A lost leadership ends the process at once: tasks that write live as long as the process, and
    // a slow scraper must not prolong it.
    worked?;
    serving.await.context("the metrics server panicked")?.context("cannot serve metrics")
}

fn connect(kubeconfig: Option<PathBuf>) -> Connect {
    Box::new(move || Box::pin(async move { Ok(client(kubeconfig.as_deref()).await?) }))
}

/// Waits for leadership, if there is an election, and runs the core until `stop` or until
/// leadership is lost.
async fn work(
    client: Client,
    mut leadership: Option<Leadership>,
    identity: &str,
    settings: PlanSettings,
    metrics: Metrics,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let tenure = match &mut leadership {
        None => Tenure::endless(),
        Some(leadership) => match leadership.acquired().await? {
            Some(tenure) => tenure,
            None => return Ok(()),
        },
    };
    metrics.leading.set(1.0);
    // Only now: the cache of a standby could be older than the last writes of the previous leader.
    let changes = watch::start(&client);
    let shell = Shell::new(client, identity, settings, metrics).during(tenure);
    lead(leadership, shell, changes, stop).await
}

fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), std::process::id())
}
