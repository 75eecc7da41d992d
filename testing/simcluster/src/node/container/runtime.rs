//! The container runtime of a node, owner of all its containers.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot, watch};

use super::cdi::{self, CdiError, Edits};
use super::image::{Image, ImageStore};
use super::spec::{BindMount, InitSpec, RunAs, SupervisorOrder, SupervisorReport};
use super::supervisor::INIT;
use super::unstarted;

/// Configuration of a [`Runtime`].
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Directory of container roots, logs and specs. Created if missing.
    pub directory: PathBuf,
    /// Directories that are searched for CDI specs.
    pub cdi_directories: Vec<PathBuf>,
    /// Images that can be run.
    pub images: ImageStore,
    /// Program with the subcommands `container-init` and `container-enter`: `tessera-simcluster`.
    pub init_program: PathBuf,
}

/// Identifies a container on its node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId {
    /// UID of its pod.
    pub pod_uid: String,
    /// Its name in the pod.
    pub name: String,
    /// Number of earlier containers of this name.
    pub attempt: u32,
}

impl ContainerId {
    fn directory_name(&self) -> String {
        format!("{}_{}_{}", self.pod_uid, self.name, self.attempt)
    }
}

/// A container to start.
#[derive(Clone, Debug)]
pub struct ContainerConfig {
    /// Identifier on the node.
    pub id: ContainerId,
    /// Image reference.
    pub image: String,
    /// Host name inside.
    pub hostname: String,
    /// Replaces the image's entrypoint if not empty.
    pub command: Vec<String>,
    /// Arguments.
    pub args: Vec<String>,
    /// The pod's environment. It overrides the image's; CDI edits override both.
    pub env: BTreeMap<String, String>,
    /// The pod's volumes.
    pub mounts: Vec<BindMount>,
    /// Fully qualified CDI device names, in order.
    pub cdi_devices: Vec<String>,
    /// Working directory.
    pub working_dir: PathBuf,
    /// True if `/` is read-only.
    pub read_only_root: bool,
    /// User and groups.
    pub user: RunAs,
    /// Sets `no_new_privs`.
    pub no_new_privileges: bool,
    /// Creates a user namespace for the container.
    pub user_namespace: bool,
}

/// Error returned when a container was not created. No record of it exists, and it may be started
/// again.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The node has no image of this reference.
    #[error("container image \"{image}\" is not present")]
    NoImage {
        /// Image reference.
        image: String,
    },
    /// The CDI devices cannot be injected.
    #[error("cannot create container")]
    Cdi(#[from] CdiError),
    /// Neither the image nor the pod sets a command.
    #[error("no command specified")]
    NoCommand,
    /// Its directory, log or supervisor could not be created.
    #[error("cannot start container supervisor")]
    Supervisor {
        /// Cause.
        source: io::Error,
    },
    /// It exists already.
    #[error("container {} of pod {} already exists", id.name, id.pod_uid)]
    Exists {
        /// Identifier of the container.
        id: ContainerId,
    },
    /// The runtime has been shut down.
    #[error("container runtime is shut down")]
    ShutDown,
}

/// Life-cycle state of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Being set up.
    Starting,
    /// The program runs.
    Running {
        /// Process id on the node.
        pid: i32,
        /// Start time.
        started_at: Timestamp,
    },
    /// The program ended, or never started.
    Exited {
        /// Exit code; 128 if it never started.
        code: i32,
        /// Signal that ended it.
        signal: Option<i32>,
        /// Start time, if it started.
        started_at: Option<Timestamp>,
        /// End time.
        finished_at: Timestamp,
        /// Reason why it never started.
        message: Option<String>,
    },
}

/// A container and its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Identifier.
    pub id: ContainerId,
    /// ContainerState.
    pub state: ContainerState,
    /// File of standard output and error.
    pub log: PathBuf,
}

/// All containers of one node. Cheap to clone. Containers run until [`Runtime::shut_down`] or the
/// end of this process.
#[derive(Clone, Debug)]
pub struct Runtime {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: RuntimeOptions,
    containers: Mutex<Containers>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Containers {
    by_id: BTreeMap<ContainerId, Entry>,
    shut_down: bool,
}

#[derive(Debug)]
struct Entry {
    container: Container,
    /// Closing it closes the supervisor's socket, which kills the container.
    orders: mpsc::UnboundedSender<SupervisorOrder>,
}

impl Runtime {
    /// Creates a runtime without containers.
    pub fn new(options: RuntimeOptions) -> Self {
        let (changes, _) = watch::channel(0);
        Self { inner: Arc::new(Inner { options, containers: Mutex::default(), changes }) }
    }

    /// Starts a container. Returns once its program runs or has failed.
    ///
    /// # Errors
    /// Returns an error if the container was not created. If it was created but its program did not
    /// start, its state is `Exited` with a message.
    pub async fn start(&self, config: ContainerConfig) -> Result<(), StartError> {
        let id = config.id.clone();
        let is_unstarted =
            self.inner.options.images.get(&config.image).is_some_and(|image| image.unstarted);
        let spec = self.resolve(config)?;
        let (orders, to_supervisor) = mpsc::unbounded_channel();
        let log = self.inner.register(&id, orders)?;
        if is_unstarted {
            self.start_unstarted(id, spec, to_supervisor);
            return Ok(());
        }
        match self.spawn(&id, &spec, &log) {
            Ok((child, socket)) => {
                let (started, ack) = oneshot::channel();
                let task =
                    Supervision { runtime: self.inner.clone(), id, child, started: Some(started) };
                tokio::spawn(task.run(socket, to_supervisor));
                // The task drops the sender only after it has recorded the end.
                let _ = ack.await;
                Ok(())
            }
            Err(source) => {
                self.inner.lock().by_id.remove(&id);
                Err(StartError::Supervisor { source })
            }
        }
    }

    /// Runs a container without a process.
    fn start_unstarted(
        &self,
        id: ContainerId,
        spec: InitSpec,
        orders: mpsc::UnboundedReceiver<SupervisorOrder>,
    ) {
        let inner = self.inner.clone();
        let started_at = Timestamp::now();
        if let Err(message) = unstarted::check(&spec) {
            let message = Some(message);
            let ended = ContainerState::Exited {
                code: 128,
                signal: None,
                started_at: None,
                finished_at: started_at,
                message,
            };
            return inner.record(&id, ended);
        }
        // No process has id 0.
        inner.record(&id, ContainerState::Running { pid: 0, started_at });
        tokio::spawn(async move {
            let ended = unstarted::end(&spec, started_at, orders).await;
            inner.record(&id, ended);
        });
    }

    /// Resolves everything that is decided before a process exists.
    fn resolve(&self, config: ContainerConfig) -> Result<InitSpec, StartError> {
        let options = &self.inner.options;
        let image = options
            .images
            .get(&config.image)
            .ok_or(StartError::NoImage { image: config.image.clone() })?;
        let edits = cdi::resolve(&options.cdi_directories, &config.cdi_devices)?;
        let root = self.container_directory(&config.id).join("rootfs");
        init_spec(config, &image, edits, root)
    }

    fn spawn(
        &self,
        id: &ContainerId,
        spec: &InitSpec,
        log: &Path,
    ) -> io::Result<(Child, UnixStream)> {
        let directory = self.container_directory(id);
        fs::create_dir_all(&spec.root)?;
        let spec_file = directory.join("spec.json");
        fs::write(&spec_file, serde_json::to_vec_pretty(spec)?)?;
        let output = fs::File::create(log)?;
        let (own_end, supervisor_end) = std::os::unix::net::UnixStream::pair()?;
        own_end.set_nonblocking(true)?;
        let child = Command::new(&self.inner.options.init_program)
            .arg(INIT)
            .arg(&spec_file)
            .stdin(Stdio::from(OwnedFd::from(supervisor_end)))
            .stdout(output.try_clone()?)
            .stderr(output)
            .kill_on_drop(true)
            .spawn()?;
        Ok((child, UnixStream::from_std(own_end)?))
    }

    fn container_directory(&self, id: &ContainerId) -> PathBuf {
        self.inner.options.directory.join(id.directory_name())
    }

    /// Returns a receiver whose value counts state changes.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    /// Returns the containers of a pod, by name and attempt.
    pub fn containers(&self, pod_uid: &str) -> Vec<Container> {
        let containers = self.inner.lock();
        containers
            .by_id
            .values()
            .map(|entry| &entry.container)
            .filter(|c| c.id.pod_uid == pod_uid)
            .cloned()
            .collect()
    }

    /// Returns the UIDs of pods that have containers here, including ended ones.
    pub fn pods(&self) -> Vec<String> {
        let mut pods: Vec<_> =
            self.inner.lock().by_id.keys().map(|id| id.pod_uid.clone()).collect();
        pods.dedup();
        pods
    }

    /// Sends SIGTERM to the container's program.
    pub fn terminate(&self, id: &ContainerId) {
        self.inner.send_order(id, SupervisorOrder::Terminate);
    }

    /// Sends SIGKILL to the container's program, which ends all of its processes.
    pub fn kill(&self, id: &ContainerId) {
        self.inner.send_order(id, SupervisorOrder::Kill);
    }

    /// Removes the ended containers of a pod, with their logs.
    ///
    /// # Errors
    /// Returns an error if a directory could not be removed; the container's record is removed
    /// anyway.
    pub fn remove_ended(&self, pod_uid: &str) -> io::Result<()> {
        let mut gone = Vec::new();
        self.inner.lock().by_id.retain(|id, entry| {
            let remove = id.pod_uid == pod_uid
                && matches!(entry.container.state, ContainerState::Exited { .. });
            if remove {
                gone.extend(
                    Some(self.container_directory(id)).filter(|directory| directory.exists()),
                );
            }
            !remove
        });
        gone.into_iter().map(fs::remove_dir_all).fold(Ok(()), Result::and)
    }

    /// Kills all containers and waits for their end. No container can be started afterwards.
    pub async fn shut_down(&self) {
        let mut changes = self.subscribe();
        self.inner.lock().shut_down = true;
        loop {
            let alive: Vec<_> = self.inner.running_ids();
            if alive.is_empty() {
                return;
            }
            alive.iter().for_each(|id| self.kill(id));
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Containers> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a new container before its process exists, so that it is not started twice.
    fn register(
        &self,
        id: &ContainerId,
        orders: mpsc::UnboundedSender<SupervisorOrder>,
    ) -> Result<PathBuf, StartError> {
        let mut containers = self.lock();
        if containers.shut_down {
            return Err(StartError::ShutDown);
        }
        if containers.by_id.contains_key(id) {
            return Err(StartError::Exists { id: id.clone() });
        }
        let log = self.options.directory.join(id.directory_name()).join("output.log");
        let container =
            Container { id: id.clone(), state: ContainerState::Starting, log: log.clone() };
        containers.by_id.insert(id.clone(), Entry { container, orders });
        Ok(log)
    }

    fn running_ids(&self) -> Vec<ContainerId> {
        let containers = self.lock();
        let alive =
            |entry: &&Entry| !matches!(entry.container.state, ContainerState::Exited { .. });
        containers.by_id.values().filter(alive).map(|entry| entry.container.id.clone()).collect()
    }

    fn send_order(&self, id: &ContainerId, order: SupervisorOrder) {
        if let Some(entry) = self.lock().by_id.get(id) {
            // The task ends with the container, so a failed send needs no handling.
            let _ = entry.orders.send(order);
        }
    }

    fn record(&self, id: &ContainerId, state: ContainerState) {
        if let Some(entry) = self.lock().by_id.get_mut(id) {
            entry.container.state = state;
        }
        self.changes.send_modify(|count| *count += 1);
    }
}

fn init_spec(
    config: ContainerConfig,
    image: &Image,
    edits: Edits,
    root: PathBuf,
) -> Result<InitSpec, StartError> {
    let mut command = image.entrypoint.clone();
    if !image.ignores_command {
        if !config.command.is_empty() {
            command = config.command;
        }
        command.extend(config.args);
    }
    if command.is_empty() {
        return Err(StartError::NoCommand);
    }
    let mut env = image.env.clone();
    env.insert("HOSTNAME".into(), config.hostname.clone());
    env.extend(config.env);
    env.extend(edits.env);
    let mut user = config.user;
    user.groups.extend(edits.groups);
    Ok(InitSpec {
        root,
        hostname: config.hostname,
        files: image.files.clone(),
        mounts: config.mounts.into_iter().chain(edits.mounts).collect(),
        devices: edits.devices,
        command,
        env,
        working_dir: config.working_dir,
        read_only_root: config.read_only_root,
        user,
        no_new_privileges: config.no_new_privileges,
        user_namespace: config.user_namespace,
    })
}

/// Task that manages one supervisor.
struct Supervision {
    runtime: Arc<Inner>,
    id: ContainerId,
    child: Child,
    started: Option<oneshot::Sender<()>>,
}

impl Supervision {
    async fn run(mut self, socket: UnixStream, orders: mpsc::UnboundedReceiver<SupervisorOrder>) {
        let (reports, to_supervisor) = socket.into_split();
        // Aborted with the task, which closes the socket's write half; the other half closes with
        // `reports`.
        let pass_on = tokio::spawn(forward_orders(orders, to_supervisor));
        let ended = self.handle_reports(reports).await;
        let _ = self.child.wait().await;
        pass_on.abort();
        self.runtime.record(&self.id, ended);
        drop(self.started.take());
    }

    /// Records the supervisor's reports and returns the final state.
    async fn handle_reports(&mut self, reports: OwnedReadHalf) -> ContainerState {
        let mut lines = BufReader::new(reports).lines();
        let mut began = None;
        let exited = |code, signal, started_at, message| ContainerState::Exited {
            code,
            signal,
            started_at,
            finished_at: Timestamp::now(),
            message,
        };
        while let Ok(Some(line)) = lines.next_line().await {
            match serde_json::from_str(&line) {
                Ok(SupervisorReport::Started { pid }) => {
                    let started_at = Timestamp::now();
                    began = Some(started_at);
                    self.runtime.record(&self.id, ContainerState::Running { pid, started_at });
                    self.started.take().map(|started| started.send(()));
                }
                Ok(SupervisorReport::Failed { message }) => {
                    return exited(128, None, None, Some(message));
                }
                Ok(SupervisorReport::Exited { code, signal }) => {
                    return exited(code, signal, began, None);
                }
                Err(error) => {
                    tracing::warn!(%error, line, "invalid report from container supervisor")
                }
            }
        }
        exited(137, Some(9), began, Some("container supervisor exited unexpectedly".into()))
    }
}

async fn forward_orders(
    mut orders: mpsc::UnboundedReceiver<SupervisorOrder>,
    mut supervisor: OwnedWriteHalf,
) {
    while let Some(order) = orders.recv().await {
        let Ok(mut line) = serde_json::to_vec(&order) else { continue };
        line.push(b'\n');
        if supervisor.write_all(&line).await.is_err() {
            return;
        }
    }
}
