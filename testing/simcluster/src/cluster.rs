//! A complete cluster in one process: API server, controllers and scheduler. Nodes join through
//! [`crate::node`] with a kubeconfig, as kubelets do.

use std::path::{Path, PathBuf};

use kube::Client;
use tempfile::TempDir;

use crate::api::{ApiOptions, ApiServer, StartError, User};
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

/// Error returned when a cluster does not start or a kubeconfig cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The API server did not start.
    #[error("cannot start fake API server")]
    Api(#[from] StartError),
    /// The kubeconfig directory could not be created.
    #[error("cannot create kubeconfig directory; is TMPDIR writable?")]
    Directory(#[source] std::io::Error),
    /// A kubeconfig could not be written.
    #[error("cannot write kubeconfig `{path}`")]
    Kubeconfig {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
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
    /// Returns a [`ClusterError`] if the server cannot listen or the admin's kubeconfig cannot be
    /// written.
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
    /// Returns [`ClusterError::Kubeconfig`] if the file cannot be written.
    pub fn kubeconfig_for(&self, user: &User) -> Result<PathBuf, ClusterError> {
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

fn write(api: &ApiServer, user: &User, path: &Path) -> Result<(), ClusterError> {
    api.write_kubeconfig(user, path)
        .map_err(|source| ClusterError::Kubeconfig { path: path.to_owned(), source })
}
