//! Starts the parts of the controller and connects them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use kube::Client;
use prometheus_client::registry::Registry;
use tessera_allocator::PlanSettings;
use tessera_runtime::address::ListenAddress;
use tessera_runtime::cluster::client;
use tessera_runtime::log;
use tessera_runtime::open_files;
use tessera_runtime::server::health::probe;
use tessera_runtime::signals::stop_on_signal;
use tessera_runtime::supervisor::Supervisor;

use crate::args::{Args, ControllerCommand};
use crate::lead::{Connect, Leadership, lead};
use crate::leadership::Tenure;
use crate::metrics::Metrics;
use crate::shell::Shell;
use crate::{server, watch};

/// The time for which tasks may finish when the controller stops.
const GRACE: Duration = Duration::from_secs(5);

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    if let Some(ControllerCommand::Healthz) = args.command {
        return Ok(probe(&args.health_socket.context("healthz needs --health-socket")?)?);
    }
    let Args { kubeconfig, namespace, identity, leader_elect, log_format, nominate_nodes, .. } =
        args;
    let (delay, ListenAddress(address)) = (args.reservation_delay_seconds, args.metrics_address);
    log::start(log_format);
    open_files::raise_limit();
    let identity = identity.filter(|i| !i.is_empty()).unwrap_or_else(default_identity);
    let stop = stop_on_signal("stopping").context("cannot wait for signals")?;
    let client = client(kubeconfig.as_deref()).await?;
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let mut tasks = Supervisor::new(stop.clone());
    if let Some(address) = address {
        server::serve(address, registry, &mut tasks)
            .with_context(|| format!("cannot serve --metrics-address {address}"))?;
    }
    if let Some(path) = args.health_socket {
        server::serve_health(&path, &mut tasks)
            .with_context(|| format!("cannot serve --health-socket {}", path.display()))?;
    }
    let settings =
        PlanSettings { reservation_delay: (delay > 0).then_some(delay), ..PlanSettings::default() };
    let leadership = leader_elect
        .then(|| Leadership::start(connect(kubeconfig), namespace, identity.clone(), &mut tasks))
        .transpose()
        .context("cannot start the thread that renews the Lease")?;
    let make_shell = |client, metrics: Metrics, tasks: &mut Supervisor| {
        Shell::new(client, &identity, settings, metrics, tasks).nominating(nominate_nodes)
    };
    let worked = work(client, leadership, make_shell, metrics, &mut tasks).await;
    stop.cancel();
    // A lost leadership ends the process at once: tasks that write live as long as the process, and
    // a slow scraper must not prolong it.
    worked?;
    tasks.shut_down(GRACE).await;
    Ok(())
}

fn connect(kubeconfig: Option<PathBuf>) -> Connect {
    Box::new(move || Box::pin(async move { Ok(client(kubeconfig.as_deref()).await?) }))
}

/// Waits for leadership, if there is an election, and runs the core until the token of `tasks` is
/// cancelled or leadership is lost.
async fn work(
    client: Client,
    mut leadership: Option<Leadership>,
    make_shell: impl FnOnce(Client, Metrics, &mut Supervisor) -> Shell,
    metrics: Metrics,
    tasks: &mut Supervisor,
) -> anyhow::Result<()> {
    let tenure = match &mut leadership {
        None => Tenure::endless(),
        Some(leadership) => {
            let acquired = tokio::select! {
                biased;
                acquired = leadership.acquired() => acquired?,
                failure = tasks.failed() => return Err(failure.into()),
            };
            match acquired {
                Some(tenure) => tenure,
                None => return Ok(()),
            }
        }
    };
    metrics.leading.set(1.0);
    // Only now: the cache of a standby could be older than the last writes of the previous leader.
    let changes = watch::start(&client, &metrics, tasks);
    let shell = make_shell(client, metrics, tasks).during(tenure);
    lead(leadership, shell, changes, tasks).await
}

fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), std::process::id())
}
