//! A whole cluster in one process: API server, controllers and scheduler. Nodes join through
//! [`crate::node`], by the kubeconfig, as kubelets do.

use std::path::{Path, PathBuf};

use kube::Client;
use tempfile::TempDir;

use crate::api::{ApiOptions, ApiServer, StartError, User};
use crate::controllers::Controllers;
use crate::scheduler::{Scheduler, SchedulerOptions};

/// What the cluster consists of.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// The API server.
    pub api: ApiOptions,
    /// Whether claims, namespaces and garbage are looked after.
    pub controllers: bool,
    /// The scheduler, if there is one.
    pub scheduler: Option<SchedulerOptions>,
    /// Where kubeconfigs are written; a temporary directory of the cluster's own without.
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

/// Why a cluster did not start, or a kubeconfig was not written.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The API server did not start.
    #[error("the API server stand-in did not start")]
    Api(#[from] StartError),
    /// There is no place for kubeconfigs.
    #[error("cannot make a directory for kubeconfigs; is TMPDIR writable?")]
    Directory(#[source] std::io::Error),
    /// A kubeconfig was not written.
    #[error("cannot write kubeconfig `{path}`")]
    Kubeconfig {
        /// Where it was to be.
        path: PathBuf,
        /// What the file system said.
        source: std::io::Error,
    },
}

/// A running cluster. Dropping it ends its tasks; [`SimCluster::stop`] waits for them.
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
    /// [`ClusterError`] when the server cannot listen or the admin's kubeconfig cannot be written.
    pub async fn start(options: ClusterOptions) -> Result<Self, ClusterError> {
        let ClusterOptions { api, controllers, scheduler, directory } = options;
        let directory = match directory {
            Some(path) => Directory::Given(path),
            None => Directory::Own(
                TempDir::with_prefix("tessera-sim-").map_err(ClusterError::Directory)?,
            ),
        };
        let api = ApiServer::start(api).await?;
        let admin = directory.path().join("admin.kubeconfig");
        write(&api, &User::admin(), &admin)?;
        let controllers = controllers.then(|| Controllers::start(&api));
        let scheduler = scheduler.map(|options| Scheduler::start(&api, options));
        Ok(Self { api, directory, admin, controllers, scheduler })
    }

    /// The API server, for compaction, faults, policies and clients of other users.
    pub fn api(&self) -> &ApiServer {
        &self.api
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.admin
    }

    /// Writes a kubeconfig for a user, for example a driver's node-bound service account.
    ///
    /// # Errors
    /// [`ClusterError::Kubeconfig`].
    pub fn kubeconfig_for(&self, user: &User) -> Result<PathBuf, ClusterError> {
        let mut name = user.name.replace([':', '/'], "-");
        if let Some(node) = user.node_name() {
            name = format!("{name}-on-{node}");
        }
        let path = self.directory.path().join(format!("{name}.kubeconfig"));
        write(&self.api, user, &path)?;
        Ok(path)
    }

    /// A client of the administrator.
    pub fn client(&self) -> Client {
        self.api.client(&User::admin())
    }

    /// Stops the scheduler, as a crash would. Does nothing where none runs.
    pub async fn stop_scheduler(&mut self) {
        if let Some(scheduler) = self.scheduler.take() {
            scheduler.stop().await;
        }
    }

    /// Starts a scheduler again, or another one after [`Self::stop_scheduler`].
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

fn write(api: &ApiServer, user: &User, path: &Path) -> Result<(), ClusterError> {
    api.write_kubeconfig(user, path)
        .map_err(|source| ClusterError::Kubeconfig { path: path.to_owned(), source })
}
