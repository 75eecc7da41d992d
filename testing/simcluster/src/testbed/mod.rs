//! Test bed: all of Tessera on a simulated cluster, for the demo and the scenarios.
//!
//! ```text
//! this process: API server, controllers, scheduler, kubelets, container runtimes        (fakes)
//!   |-- tessera-controller            real program, own process
//!   |-- tessera-driver, per node      real program, own process; NVML and sysfs of a fake world
//!   '-- containers                    namespaces; the CDI edits that the driver wrote
//! ```

pub(crate) mod chaos;
pub(crate) mod classes;
pub(crate) mod control;
pub(crate) mod namespaces;
pub(crate) mod node;
pub(crate) mod process;
pub(crate) mod programs;
mod slices;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tessera_api::names::CONTROLLER_LEASE;
use tessera_simcluster::api::{ApiOptions, Policies, User};
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};

use self::chaos::Chaos;
use self::node::{NodeSettings, TestNode};
use self::process::{Process, ProcessSpec};
use self::programs::Programs;

/// Namespace of Tessera's own objects.
const NAMESPACE: &str = "tessera-system";

/// Node names and their worlds.
pub(crate) const NODES: [(&str, &str); 2] =
    [("node-a", "h100-8-nvswitch"), ("node-b", "a100-4-pcie")];

/// Configuration of a [`TestBed`].
#[derive(Clone, Debug)]
pub(crate) struct TestBedOptions {
    /// Directory of all files. Its path must be short, because socket paths are limited.
    pub(crate) directory: PathBuf,
    pub(crate) programs: Programs,
    /// Name and world of each node.
    pub(crate) nodes: Vec<(String, PathBuf)>,
    /// Pause before the kubelet retries a failed step of a pod.
    pub(crate) sync_period: std::time::Duration,
    /// True to give driver and controller an adjustable wall clock, for `chaos`.
    pub(crate) clocks: bool,
    /// True to run the probe for every unknown image.
    pub(crate) any_image: bool,
    /// True to serve the metrics of controller and drivers, each on a free port.
    pub(crate) metrics: bool,
}

/// A running test bed.
pub(crate) struct TestBed {
    cluster: SimCluster,
    pub(crate) nodes: Vec<TestNode>,
    pub(crate) controller: Process,
    directory: PathBuf,
    chaos: Option<Chaos>,
    controller_metrics: Option<SocketAddr>,
}

impl TestBed {
    /// Starts everything and waits until the drivers have registered and published their GPUs.
    pub(crate) async fn start(options: TestBedOptions) -> anyhow::Result<Self> {
        let TestBedOptions {
            directory,
            programs,
            nodes: worlds,
            sync_period,
            clocks,
            any_image,
            metrics,
        } = options;
        let cluster = start_cluster(&directory).await?;
        classes::create(&cluster.client()).await?;
        create_lease(&cluster.client()).await?;
        let user = User::service_account(NAMESPACE, "tessera-controller");
        let kubeconfig = cluster.kubeconfig_for(&user)?;
        let controller_metrics = metrics.then(process::free_address).transpose()?;
        let mut controller =
            controller_spec(&programs, &kubeconfig, &directory, controller_metrics);
        if clocks {
            controller =
                chaos::with_clock(controller, &programs, &directory.join("controller.clock"))?;
        }
        let controller = Process::start(controller).await?;
        let settings = NodeSettings {
            programs: &programs,
            base: &directory,
            sync_period,
            clocks,
            any_image,
            metrics,
        };
        let mut nodes = Vec::new();
        for (name, world) in worlds {
            nodes.push(TestNode::start(&cluster, &settings, name, &world).await?);
        }
        for node in &mut nodes {
            node.wait_until_ready().await?;
        }
        let names: Vec<_> = nodes.iter().map(|node| node.name().to_owned()).collect();
        let mut test_bed =
            Self { cluster, nodes, controller, directory, chaos: None, controller_metrics };
        let client = test_bed.client();
        tokio::select! {
            published = slices::wait_until_published(&client, &names) => published?,
            exited = test_bed.exited() => return Err(exited),
        }
        Ok(test_bed)
    }

    pub(crate) fn client(&self) -> Client {
        self.cluster.client()
    }

    /// Returns the path of the administrator's kubeconfig.
    pub(crate) fn kubeconfig(&self) -> &std::path::Path {
        self.cluster.kubeconfig()
    }

    /// Resolves when a program has exited by itself, with its last output.
    pub(crate) async fn exited(&mut self) -> anyhow::Error {
        let drivers = self.nodes.iter_mut().map(|node| Box::pin(node.driver.exited()));
        tokio::select! {
            exited = self.controller.exited() => exited,
            (exited, ..) = futures::future::select_all(drivers) => exited,
        }
    }

    /// Removes or restores the chart's admission policies.
    pub(crate) fn set_policies(&self, on: bool) {
        self.cluster.api().set_policies(if on { Policies::all() } else { Policies::none() });
    }

    /// Prints the logs of the programs, for a failure whose directory is removed.
    pub(crate) fn print_logs(&self) {
        let drivers = self.nodes.iter().map(|node| &node.driver);
        for process in [&self.controller].into_iter().chain(drivers) {
            eprintln!("--- {}", process.log().display());
            eprint!("{}", process.tail());
        }
    }

    /// Returns the addresses of `/metrics` with the names of the programs.
    pub(crate) fn metrics(&self) -> Vec<(String, SocketAddr)> {
        let drivers = self.nodes.iter().filter_map(|node| {
            Some((format!("tessera-driver on {}", node.name()), node.metrics()?))
        });
        let controller =
            self.controller_metrics.map(|address| ("tessera-controller".to_owned(), address));
        drivers.chain(controller).collect()
    }

    /// Returns the directory of the logs.
    pub(crate) fn directory(&self) -> &std::path::Path {
        &self.directory
    }

    pub(crate) fn node(&mut self, name: &str) -> anyhow::Result<&mut TestNode> {
        let node = self.nodes.iter_mut().find(|node| node.name() == name);
        node.with_context(|| format!("unknown node `{name}`"))
    }

    /// Stops everything: controller and kubelets first, so that nothing new is started.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.controller.stop().await?;
        for node in self.nodes {
            node.stop().await?;
        }
        self.cluster.stop().await;
        Ok(())
    }
}

async fn start_cluster(directory: &std::path::Path) -> anyhow::Result<SimCluster> {
    let mut api = ApiOptions { policies: Policies::all(), ..ApiOptions::default() };
    api.namespaces.push(NAMESPACE.to_owned());
    let options =
        ClusterOptions { api, directory: Some(directory.to_owned()), ..ClusterOptions::default() };
    SimCluster::start(options).await.context("cannot start simulated cluster")
}

/// Creates a Lease that was released by an earlier leader. Without a Lease the controller waits for
/// 14 seconds.
async fn create_lease(client: &Client) -> anyhow::Result<()> {
    let metadata = ObjectMeta { name: Some(CONTROLLER_LEASE.to_owned()), ..ObjectMeta::default() };
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    let spec = LeaseSpec {
        holder_identity: Some(String::new()),
        lease_duration_seconds: Some(1),
        lease_transitions: Some(0),
        renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
        ..LeaseSpec::default()
    };
    let lease = Lease { metadata, spec: Some(spec) };
    leases.create(&PostParams::default(), &lease).await.context("cannot create Lease")?;
    Ok(())
}

fn controller_spec(
    programs: &Programs,
    kubeconfig: &std::path::Path,
    directory: &std::path::Path,
    metrics: Option<SocketAddr>,
) -> ProcessSpec {
    ProcessSpec::new(&programs.controller, directory.join("controller.log"))
        .argument("--kubeconfig", kubeconfig)
        .argument("--namespace", NAMESPACE)
        .argument("--identity", "tessera-controller-demo")
        // The default is for larger clusters.
        .argument("--nominate-nodes", "always")
        .argument("--metrics-address", process::address_text(metrics))
        .argument("--health-socket", directory.join("health.sock"))
}
