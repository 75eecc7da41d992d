//! Starts the parts of the controller and connects them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use prometheus_client::registry::Registry;
use tessera_allocator::PlanSettings;
use tessera_api::names::ManagedDrivers;
use tessera_dialect::Converter;
use tessera_runtime::address::ListenAddress;
use tessera_runtime::cluster::{client, client_without_retries};
use tessera_runtime::log;
use tessera_runtime::open_files;
use tessera_runtime::server::health::probe;
use tessera_runtime::signals::stop_on_signal;
use tessera_runtime::supervisor::Supervisor;

use crate::args::{Args, ControllerCommand};
use crate::core::RecoverySettings;
use crate::fence::{self, FenceRestorer};
use crate::lead::{Connect, Leadership, lead};
use crate::leadership::Tenure;
use crate::loads::LoadSampler;
use crate::metrics::Metrics;
use crate::shell::{Clients, Shell};
use crate::webhook::certificate::{self, ServedCertificate};
use crate::webhook::publish::{CertificateSource, WebhookPublisher};
use crate::webhook::serve::{self, ServedWebhook};
use crate::webhook::settings;
use crate::{node_groups, server, watch};

/// The time for which tasks may finish when the controller stops.
const GRACE: Duration = Duration::from_secs(5);

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Some(ControllerCommand::Healthz) => {
            return Ok(probe(&args.health_socket.context("healthz needs --health-socket")?)?);
        }
        Some(ControllerCommand::Readyz) => {
            return Ok(probe(&args.ready_socket.context("readyz needs --ready-socket")?)?);
        }
        None => {}
    }
    let Args {
        kubeconfig,
        namespace,
        identity,
        leader_elect,
        log_format,
        nominate_nodes,
        preemption,
        recovery,
        ..
    } = args;
    let (delay, ListenAddress(address)) = (args.reservation_delay_seconds, args.metrics_address);
    let recovery = RecoverySettings {
        policy: recovery,
        delay: Duration::from_secs(args.recovery_delay_seconds.into()),
    };
    let fence = args.fence_rules.as_deref().map(fence::file::read).transpose()?;
    let drivers = fence.iter().flatten().map(|rule| rule.driver().clone());
    let drivers: ManagedDrivers = drivers.collect();
    let converter = args.dialects.as_deref().map(settings::read).transpose()?.map(Arc::new);
    let node_groups = args.node_groups.as_deref();
    let node_groups = node_groups.map(|path| node_groups::read(path, &namespace)).transpose()?;
    log::start(log_format);
    open_files::raise_limit();
    let identity = identity.filter(|i| !i.is_empty()).unwrap_or_else(default_identity);
    let stop = stop_on_signal("stopping").context("cannot wait for signals")?;
    let client = client(kubeconfig.as_deref()).await?;
    let evictions = client_without_retries(kubeconfig.as_deref()).await?;
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let mut tasks = Supervisor::new(stop.clone());
    let publisher = args.webhook_address.0.map(|address| {
        let source = args.webhook_certificate;
        let of_webhook = Webhook { address, source, namespace: namespace.clone() };
        start_webhook(of_webhook, converter.clone(), &client, &mut registry, &mut tasks)
            .with_context(|| format!("cannot serve --webhook-address {address}"))
    });
    let (webhook, publisher) = publisher.transpose()?.unzip();
    if let Some(address) = address {
        server::serve(address, registry, &mut tasks)
            .with_context(|| format!("cannot serve --metrics-address {address}"))?;
    }
    if let Some(path) = args.health_socket {
        server::serve_health(&path, &mut tasks)
            .with_context(|| format!("cannot serve --health-socket {}", path.display()))?;
    }
    if let Some(path) = args.ready_socket {
        let served = publisher.as_ref().map(WebhookPublisher::served);
        server::serve_ready(&path, served, &mut tasks)
            .with_context(|| format!("cannot serve --ready-socket {}", path.display()))?;
    }
    let settings =
        PlanSettings { reservation_delay: (delay > 0).then_some(delay), ..PlanSettings::default() };
    let loads =
        args.sample_load.then(|| LoadSampler::new(client.clone(), &namespace, metrics.clone()));
    let leadership = leader_elect
        .then(|| Leadership::start(connect(kubeconfig), namespace, identity.clone(), &mut tasks))
        .transpose()
        .context("cannot start the thread that renews the Lease")?;
    let watched = drivers.clone();
    let make_shell = |client, metrics: Metrics, tasks: &mut Supervisor| {
        Shell::new(Clients { client, evictions }, &identity, settings, metrics, tasks)
            .managing(drivers)
            .nominating(nominate_nodes)
            .preempting(preemption)
            .recovering(recovery)
            .converting(converter)
            .asking_for_nodes(node_groups)
    };
    let fence = fence.map(|rules| FenceRestorer::new(&client, rules, &identity, metrics.clone()));
    let leader = LeaderTasks { publisher, fence, watched, loads };
    let worked = work(client, leadership, make_shell, leader, metrics, &mut tasks).await;
    stop.cancel();
    // A lost leadership ends the process at once: tasks that write live as long as the process, and
    // a slow scraper must not prolong it.
    worked?;
    tasks.shut_down(GRACE).await;
    if let Some(webhook) = webhook {
        // kube-apiserver refuses the pods of reviews that are cut off.
        let _ = tokio::time::timeout(GRACE, webhook.ended()).await;
    }
    Ok(())
}

/// Flags of the admission webhook.
struct Webhook {
    address: SocketAddr,
    source: CertificateSource,
    namespace: String,
}

/// The parts that the leader runs beside the core: the writers of other objects, and the watches.
struct LeaderTasks {
    publisher: Option<WebhookPublisher>,
    fence: Option<FenceRestorer>,
    /// Drivers whose slices are watched.
    watched: ManagedDrivers,
    loads: Option<LoadSampler>,
}

/// Serves the admission webhook. Returns also the publisher of its objects, for when this process
/// leads.
fn start_webhook(
    webhook: Webhook,
    converter: Option<Arc<Converter>>,
    client: &Client,
    registry: &mut Registry,
    tasks: &mut Supervisor,
) -> std::io::Result<(ServedWebhook, WebhookPublisher)> {
    let Webhook { address, source, namespace } = webhook;
    let served = Arc::new(ServedCertificate::default());
    let webhook = serve::serve(address, converter.clone(), served.clone(), registry, tasks)?;
    let following = certificate::follow(client.clone(), namespace.clone(), served.clone());
    tasks.spawn("webhook-certificate", following);
    let clock = || Timestamp::now().as_second();
    let publisher =
        WebhookPublisher::new(client.clone(), &namespace, converter, served, source, clock);
    Ok((webhook, publisher))
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
    leader: LeaderTasks,
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
    if let Some(publisher) = leader.publisher {
        tasks.spawn("webhook-publisher", publisher.during(tenure.clone()).run());
    }
    if let Some(fence) = leader.fence {
        tasks.spawn("fence", fence.during(tenure.clone()).run());
    }
    // Only now: the cache of a standby could be older than the last writes of the previous leader.
    let (changes, arrivals) = watch::queue();
    if let Some(loads) = leader.loads {
        tasks.spawn("loads", loads.run(changes.clone()));
    }
    watch::start(&client, &leader.watched, &metrics, tasks, changes);
    let shell = make_shell(client, metrics, tasks).during(tenure);
    lead(leadership, shell, arrivals, tasks).await
}

fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), std::process::id())
}
