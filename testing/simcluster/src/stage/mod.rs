//! The whole of Tessera on a cluster of stand-ins: what the demo shows and the scenarios run on.
//!
//! ```text
//! this process: API server, controllers, scheduler, kubelets, container runtimes        (stand-ins)
//!   |-- tessera-controller            real program, own process
//!   |-- tessera-driver, per node      real program, own process; NVML and sysfs of a fake world
//!   '-- containers                    namespaces; the CDI edits that the driver wrote
//! ```

pub(crate) mod chaos;
pub(crate) mod classes;
pub(crate) mod control;
pub(crate) mod machine;
pub(crate) mod nest;
pub(crate) mod process;
pub(crate) mod programs;
mod slices;

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
use self::machine::{Common, Machine};
use self::process::{Process, ProcessSpec};
use self::programs::Programs;

/// Namespace of Tessera's own objects.
const NAMESPACE: &str = "tessera-system";

/// Node names and the worlds that they have.
pub(crate) const NODES: [(&str, &str); 2] =
    [("node-a", "h100-8-nvswitch"), ("node-b", "a100-4-pcie")];

/// Where things are, and what they are made of.
#[derive(Clone, Debug)]
pub(crate) struct StageOptions {
    /// Everything is written under it; short, since sockets are.
    pub(crate) directory: PathBuf,
    pub(crate) programs: Programs,
    /// Name and world of each node.
    pub(crate) nodes: Vec<(String, PathBuf)>,
    /// Pause before the kubelet tries a failed step of a pod again.
    pub(crate) sync_period: std::time::Duration,
    /// Whether driver and controller get a wall clock that can be set, for `chaos`.
    pub(crate) clocks: bool,
}

/// Everything, running.
pub(crate) struct Stage {
    cluster: SimCluster,
    pub(crate) machines: Vec<Machine>,
    pub(crate) controller: Process,
    directory: PathBuf,
    chaos: Option<Chaos>,
}

impl Stage {
    /// Starts everything and waits until the drivers are registered and have published their GPUs.
    pub(crate) async fn raise(options: StageOptions) -> anyhow::Result<Self> {
        let StageOptions { directory, programs, nodes, sync_period, clocks } = options;
        let cluster = start_cluster(&directory).await?;
        classes::create(&cluster.client()).await?;
        create_lease(&cluster.client()).await?;
        let user = User::service_account(NAMESPACE, "tessera-controller");
        let kubeconfig = cluster.kubeconfig_for(&user)?;
        let mut controller = controller_spec(&programs, &kubeconfig, &directory);
        if clocks {
            controller =
                chaos::with_clock(controller, &programs, &directory.join("controller.clock"))?;
        }
        let controller = Process::start(controller).await?;
        let common = Common { programs: &programs, base: &directory, sync_period, clocks };
        let mut machines = Vec::new();
        for (name, world) in nodes {
            let machine = Machine::start(&cluster, &common, name, &world).await?;
            machines.push(machine);
        }
        for machine in &mut machines {
            machine.ready().await?;
        }
        let nodes: Vec<_> = machines.iter().map(|machine| machine.name().to_owned()).collect();
        let mut stage = Self { cluster, machines, controller, directory, chaos: None };
        let client = stage.client();
        tokio::select! {
            published = slices::published(&client, &nodes) => published?,
            died = stage.died() => return Err(died),
        }
        Ok(stage)
    }

    pub(crate) fn client(&self) -> Client {
        self.cluster.client()
    }

    /// For kubectl.
    pub(crate) fn kubeconfig(&self) -> &std::path::Path {
        self.cluster.kubeconfig()
    }

    /// Resolves when one of the programs has ended by itself, with what it said last.
    pub(crate) async fn died(&mut self) -> anyhow::Error {
        let drivers = self.machines.iter_mut().map(|machine| Box::pin(machine.driver.died()));
        tokio::select! {
            died = self.controller.died() => died,
            (died, ..) = futures::future::select_all(drivers) => died,
        }
    }

    /// As if somebody had removed the chart's admission policies, or put them back.
    pub(crate) fn switch_policies(&self, on: bool) {
        self.cluster.api().set_policies(if on { Policies::all() } else { Policies::none() });
    }

    /// Prints what the programs logged, for a failure that leaves nothing else behind.
    pub(crate) fn print_logs(&self) {
        let drivers = self.machines.iter().map(|machine| &machine.driver);
        for process in [&self.controller].into_iter().chain(drivers) {
            eprintln!("--- {}", process.log().display());
            eprint!("{}", process.tail());
        }
    }

    /// Where logs are.
    pub(crate) fn directory(&self) -> &std::path::Path {
        &self.directory
    }

    pub(crate) fn machine(&mut self, name: &str) -> anyhow::Result<&mut Machine> {
        let machine = self.machines.iter_mut().find(|machine| machine.name() == name);
        machine.with_context(|| format!("no node `{name}`"))
    }

    /// Ends everything: controller and kubelets first, so that nothing is started any more.
    pub(crate) async fn lower(mut self) -> anyhow::Result<()> {
        self.controller.stop().await?;
        for machine in self.machines {
            machine.stop().await?;
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
    SimCluster::start(options).await.context("the cluster of stand-ins did not start")
}

/// Creates a Lease that a leader before has given back: where there is none, a controller waits 14
/// seconds.
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
    leases.create(&PostParams::default(), &lease).await.context("failed to create the Lease")?;
    Ok(())
}

fn controller_spec(
    programs: &Programs,
    kubeconfig: &std::path::Path,
    directory: &std::path::Path,
) -> ProcessSpec {
    ProcessSpec::new(&programs.controller, directory.join("controller.log"))
        .argument("--kubeconfig", kubeconfig)
        .argument("--namespace", NAMESPACE)
        .argument("--identity", "tessera-controller-demo")
        .argument("--metrics-address", "")
}
