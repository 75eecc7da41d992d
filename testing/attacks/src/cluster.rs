//! The cluster under attack: a simulated one with the real driver and controller.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_api::names::CONTROLLER_LEASE;
use tessera_e2e::operations::Operations;
use tessera_e2e::served::{self, ServedCluster};
use tessera_e2e::wait::{self, CheckResult};

use crate::processes::{self, Process};

/// Namespace of Tessera's own objects.
pub const SYSTEM_NAMESPACE: &str = "tessera-system";

/// A running cluster. Its processes are killed when this value is dropped.
pub struct AttackedCluster {
    directory: TempDir,
    served: ServedCluster,
    config: Config,
    /// The administrator's client.
    pub client: Client,
}

/// State of the leader election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leadership {
    holder: Option<String>,
    transitions: Option<i32>,
    controller: Option<u32>,
}

impl AttackedCluster {
    /// Starts a cluster with two nodes, eight and four GPUs of 80 GiB. `None`, with the reason on
    /// standard error, if this machine cannot create user namespaces.
    ///
    /// # Errors
    /// Returns an error if the programs are not built or the cluster does not start.
    pub async fn start() -> anyhow::Result<Result<Self, String>> {
        let program = simcluster()?;
        if let Some(reason) = served::namespaces_unavailable(&program).await? {
            return Ok(Err(format!("user namespaces are unavailable: {reason}")));
        }
        let directory = TempDir::with_prefix("tattack-")?;
        let served = ServedCluster::start(&program, directory.path(), &["--metrics"]).await?;
        let config = read_config(&directory.path().join("kubeconfig")).await?;
        let client = Client::try_from(config.clone())?;
        Ok(Ok(Self { directory, served, config, client }))
    }

    /// Returns the configuration of the administrator's client.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the operations on the cluster's machines.
    pub fn operations(&self) -> Operations {
        Operations::new(self.directory.path().join("node.sh"))
    }

    /// Returns the process ID of the simulated cluster.
    ///
    /// # Errors
    /// Returns an error if it has exited.
    pub fn pid(&self) -> anyhow::Result<u32> {
        self.served.pid().context("the cluster has exited")
    }

    /// Returns the running controller.
    ///
    /// # Errors
    /// Returns an error if it does not run.
    pub fn controller(&self) -> anyhow::Result<Process> {
        self.find(|process| process.program() == "tessera-controller")
    }

    /// Returns the running driver of a node.
    ///
    /// # Errors
    /// Returns an error if it does not run.
    pub fn driver(&self, node: &str) -> anyhow::Result<Process> {
        self.find(|process| process.argument("--node-name") == Some(node))
    }

    fn find(&self, is_wanted: impl Fn(&Process) -> bool) -> anyhow::Result<Process> {
        let processes = processes::tessera_below(self.pid()?)?;
        processes.into_iter().find(is_wanted).context("a program of the cluster has exited")
    }

    /// Returns the API of objects in a namespace.
    pub fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Creates a namespace.
    ///
    /// # Errors
    /// Returns an error if the API server refuses it.
    pub async fn create_namespace(&self, name: &str) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        create(&namespaces, json!({"metadata": {"name": name}})).await.map(drop)
    }

    /// Returns the state of the leader election.
    ///
    /// # Errors
    /// Returns an error if the Lease or the controller does not exist.
    pub async fn leadership(&self) -> anyhow::Result<Leadership> {
        let leases: Api<Lease> = self.api(SYSTEM_NAMESPACE);
        let spec = leases.get(CONTROLLER_LEASE).await?.spec.unwrap_or_default();
        Ok(Leadership {
            holder: spec.holder_identity,
            transitions: spec.lease_transitions,
            controller: self.controller().ok().map(|process| process.pid),
        })
    }

    /// Waits until a claim is allocated.
    ///
    /// # Errors
    /// Returns an error if it is not allocated in time.
    pub async fn wait_allocated(
        &self,
        namespace: &str,
        claim: &str,
        within: Duration,
    ) -> anyhow::Result<()> {
        let check = |claim: Option<&ResourceClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            let is_allocated = status.is_some_and(|status| status.allocation.is_some());
            CheckResult::done_if(is_allocated, || json!(status).to_string())
        };
        let condition = format!("claim {claim} to be allocated");
        Ok(wait::until_one(self.api(namespace), claim, &condition, within, check).await?)
    }

    /// Stops the cluster and waits for its end.
    ///
    /// # Errors
    /// Returns an error if it does not stop, or leaves anything.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.served.stop().await
    }
}

/// Returns the path of `tessera-simcluster`, beside this program or, for a test, above it.
fn simcluster() -> anyhow::Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name("tessera-simcluster");
    if beside.is_file() { Ok(beside) } else { served::program() }
}

/// Reads a kubeconfig.
///
/// # Errors
/// Returns an error if the file cannot be read or is invalid.
pub async fn read_config(path: &Path) -> anyhow::Result<Config> {
    // If several providers are linked in, rustls does not choose one. An error means that one is
    // already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(path)
        .with_context(|| format!("cannot read kubeconfig `{}`", path.display()))?;
    Ok(Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?)
}

/// Creates an object.
///
/// # Errors
/// Returns an error if the API server refuses it.
pub async fn create<K>(api: &Api<K>, object: Value) -> anyhow::Result<K>
where
    K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}
