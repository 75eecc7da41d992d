//! A complete cluster in one process: API server, controllers and scheduler. Nodes join through
//! [`crate::node`] with a kubeconfig, as kubelets do.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use kube::Client;
use tempfile::TempDir;

use crate::api::{ApiOptions, ApiServer, User};
use crate::controllers::Controllers;
use crate::scheduler::{Scheduler, SchedulerOptions};

/// Configuration of a [`SimCluster`].
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// The API server.
    pub api: ApiOptions,
    /// True to run the claim, namespace and garbage controllers.
    pub controllers: bool,
    /// The scheduler, or `None` to run none.
    pub scheduler: Option<SchedulerOptions>,
    /// Directory for kubeconfigs; a temporary directory if `None`.
    pub directory: Option<PathBuf>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            api: ApiOptions::default(),
            controllers: true,
            scheduler: Some(SchedulerOptions::default()),
            directory: None,
        }
    }
}

/// A running cluster. Dropping it ends its tasks; [`SimCluster::stop`] waits for their end.
pub struct SimCluster {
    api: ApiServer,
    directory: Directory,
    admin: PathBuf,
    controllers: Option<Controllers>,
    scheduler: Option<Scheduler>,
}

enum Directory {
    Given(PathBuf),
    Own(TempDir),
}

impl Directory {
    fn path(&self) -> &Path {
        match self {
            Self::Given(path) => path,
            Self::Own(temporary) => temporary.path(),
        }
    }
}

impl SimCluster {
    /// Starts a cluster without nodes.
    ///
    /// # Errors
    /// Returns an error if the server cannot listen or the admin's kubeconfig cannot be
    /// written.
    pub async fn start(options: ClusterOptions) -> anyhow::Result<Self> {
        let ClusterOptions { api, controllers, scheduler, directory } = options;
        let directory = match directory {
            Some(path) => Directory::Given(path),
            None => Directory::Own(
                TempDir::with_prefix("tessera-sim-")
                    .context("cannot create kubeconfig directory; is TMPDIR writable?")?,
            ),
        };
        let api = ApiServer::start(api).await.context("cannot start fake API server")?;
        let admin = directory.path().join("admin.kubeconfig");
        write(&api, &User::admin(), &admin)?;
        let controllers = controllers.then(|| Controllers::start(&api));
        let scheduler = scheduler.map(|options| Scheduler::start(&api, options));
        Ok(Self { api, directory, admin, controllers, scheduler })
    }

    /// Returns the API server, for compaction, faults, policies and clients of other users.
    pub fn api(&self) -> &ApiServer {
        &self.api
    }

    /// Returns the path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.admin
    }

    /// Writes a kubeconfig for a user, for example a driver's node-bound service account.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn kubeconfig_for(&self, user: &User) -> anyhow::Result<PathBuf> {
        let mut name = user.name.replace([':', '/'], "-");
        if let Some(node) = user.node_name() {
            name = format!("{name}-on-{node}");
        }
        let path = self.directory.path().join(format!("{name}.kubeconfig"));
        write(&self.api, user, &path)?;
        Ok(path)
    }

    /// Returns a client of the administrator.
    pub fn client(&self) -> Client {
        self.api.client(&User::admin())
    }

    /// Stops the scheduler, as a crash would. Does nothing if none runs.
    pub async fn stop_scheduler(&mut self) {
        if let Some(scheduler) = self.scheduler.take() {
            scheduler.stop().await;
        }
    }

    /// Starts a scheduler, replacing a running one.
    pub fn start_scheduler(&mut self, options: SchedulerOptions) {
        self.scheduler = Some(Scheduler::start(&self.api, options));
    }

    /// Stops everything in order: scheduler, controllers, then the API server.
    pub async fn stop(mut self) {
        self.stop_scheduler().await;
        if let Some(controllers) = self.controllers.take() {
            controllers.stop().await;
        }
        self.api.stop().await;
    }
}

impl Drop for SimCluster {
    fn drop(&mut self) {
        self.api.cancel();
    }
}

fn write(api: &ApiServer, user: &User, path: &Path) -> anyhow::Result<()> {
    api.write_kubeconfig(user, path)
        .with_context(|| format!("cannot write kubeconfig `{}`", path.display()))
}
