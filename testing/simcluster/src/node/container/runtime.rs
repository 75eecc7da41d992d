//! The owner of all containers of a node.

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
use super::spec::{BindMount, InitSpec, Order, Report, RunAs};
use super::supervisor::INIT;
use super::unstarted;

/// What a runtime needs to know.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Where containers keep their root, log and spec. Made if missing.
    pub directory: PathBuf,
    /// Where CDI specs are looked for.
    pub cdi_directories: Vec<PathBuf>,
    /// What can be run.
    pub images: ImageStore,
    /// The program with the subcommands `container-init` and `container-enter`:
    /// `tessera-simcluster`.
    pub init_program: PathBuf,
}

/// Names a container on its node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId {
    /// UID of its pod.
    pub pod_uid: String,
    /// Its name in the pod.
    pub name: String,
    /// How many ran before it under this name.
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
    /// Its name on the node.
    pub id: ContainerId,
    /// Image reference.
    pub image: String,
    /// Host name inside.
    pub hostname: String,
    /// Replaces the image's entrypoint if not empty.
    pub command: Vec<String>,
    /// Arguments.
    pub args: Vec<String>,
    /// The pod's environment; wins over the image's. CDI edits win over both.
    pub env: BTreeMap<String, String>,
    /// The pod's volumes.
    pub mounts: Vec<BindMount>,
    /// Fully qualified CDI device names, in order.
    pub cdi_devices: Vec<String>,
    /// Working directory.
    pub working_dir: PathBuf,
    /// Whether `/` is read-only.
    pub read_only_root: bool,
    /// Who runs it.
    pub user: RunAs,
    /// `no_new_privs`.
    pub no_new_privileges: bool,
    /// A user namespace of its own.
    pub user_namespace: bool,
}

/// A container was not created. There is no record of it then, and starting it may be tried again.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The reference names no image of this node.
    #[error("container image \"{image}\" is not present")]
    NoImage {
        /// The reference.
        image: String,
    },
    /// The CDI devices cannot be injected.
    #[error("failed to create the container")]
    Cdi(#[from] CdiError),
    /// Neither image nor pod says what to run.
    #[error("no command specified")]
    NoCommand,
    /// Its directory, log or supervisor could not be made.
    #[error("failed to start the container's supervisor")]
    Supervisor {
        /// Why.
        source: io::Error,
    },
    /// It exists already.
    #[error("container {} of pod {} exists already", id.name, id.pod_uid)]
    Exists {
        /// Its name.
        id: ContainerId,
    },
    /// The runtime has been shut down.
    #[error("the container runtime is shut down")]
    ShutDown,
}

/// What a container is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Being set up.
    Starting,
    /// The program runs.
    Running {
        /// Its process id on the node.
        pid: i32,
        /// Since when.
        started_at: Timestamp,
    },
    /// It ended, or never began.
    Exited {
        /// Exit code; 128 if it never began.
        code: i32,
        /// The signal that ended it.
        signal: Option<i32>,
        /// Since when it ran, if it did.
        started_at: Option<Timestamp>,
        /// When it ended.
        finished_at: Timestamp,
        /// Why it never began.
        message: Option<String>,
    },
}

/// What is known of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub id: ContainerId,
    /// What it is doing.
    pub state: State,
    /// Standard output and error.
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
    /// Closing it closes the supervisor's socket, which kills.
    orders: mpsc::UnboundedSender<Order>,
}

impl Runtime {
    /// A runtime without containers.
    pub fn new(options: RuntimeOptions) -> Self {
        let (changes, _) = watch::channel(0);
        Self { inner: Arc::new(Inner { options, containers: Mutex::default(), changes }) }
    }

    /// Starts a container; returns once its program runs or is known to have failed.
    ///
    /// # Errors
    /// It was not created. A container that was created and whose program did not start has the
    /// state `Exited` with a message instead.
    pub async fn start(&self, config: ContainerConfig) -> Result<(), StartError> {
        let id = config.id.clone();
        let is_unstarted =
            self.inner.options.images.get(&config.image).is_some_and(|image| image.unstarted);
        let spec = self.plan(config)?;
        let (orders, to_supervisor) = mpsc::unbounded_channel();
        let log = self.inner.admit(&id, orders)?;
        if is_unstarted {
            self.start_none(id, spec, to_supervisor);
            return Ok(());
        }
        match self.spawn(&id, &spec, &log) {
            Ok((child, socket)) => {
                let (started, ack) = oneshot::channel();
                let task =
                    Supervision { runtime: self.inner.clone(), id, child, started: Some(started) };
                tokio::spawn(task.run(socket, to_supervisor));
                // The task only drops the sender after it has recorded the end.
                let _ = ack.await;
                Ok(())
            }
            Err(source) => {
                self.inner.lock().by_id.remove(&id);
                Err(StartError::Supervisor { source })
            }
        }
    }

    /// A container without a process.
    fn start_none(&self, id: ContainerId, spec: InitSpec, orders: mpsc::UnboundedReceiver<Order>) {
        let inner = self.inner.clone();
        let started_at = Timestamp::now();
        if let Err(message) = unstarted::check(&spec) {
            let message = Some(message);
            let ended = State::Exited {
                code: 128,
                signal: None,
                started_at: None,
                finished_at: started_at,
                message,
            };
            return inner.record(&id, ended);
        }
        // No process has the number of the idle task.
        inner.record(&id, State::Running { pid: 0, started_at });
        tokio::spawn(async move {
            let ended = unstarted::end(&spec, started_at, orders).await;
            inner.record(&id, ended);
        });
    }

    /// Everything that is decided before a process exists.
    fn plan(&self, config: ContainerConfig) -> Result<InitSpec, StartError> {
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
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(&self.inner.options.init_program)
            .arg(INIT)
            .arg(&spec_file)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(output.try_clone()?)
            .stderr(output)
            .kill_on_drop(true)
            .spawn()?;
        Ok((child, UnixStream::from_std(ours)?))
    }

    fn container_directory(&self, id: &ContainerId) -> PathBuf {
        self.inner.options.directory.join(id.directory_name())
    }

    /// Tells when any state has changed: the value is a count of changes.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    /// The containers of a pod, by name and attempt.
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

    /// The pods that have containers here, ended ones included.
    pub fn pods(&self) -> Vec<String> {
        let mut pods: Vec<_> =
            self.inner.lock().by_id.keys().map(|id| id.pod_uid.clone()).collect();
        pods.dedup();
        pods
    }

    /// Sends SIGTERM to the container's program.
    pub fn terminate(&self, id: &ContainerId) {
        self.inner.order(id, Order::Terminate);
    }

    /// Sends SIGKILL to the container's program, and thereby to all of its processes.
    pub fn kill(&self, id: &ContainerId) {
        self.inner.order(id, Order::Kill);
    }

    /// Forgets the ended containers of a pod, with their logs.
    ///
    /// # Errors
    /// A directory could not be removed; its container is forgotten all the same.
    pub fn remove_ended(&self, pod_uid: &str) -> io::Result<()> {
        let mut gone = Vec::new();
        self.inner.lock().by_id.retain(|id, entry| {
            let remove =
                id.pod_uid == pod_uid && matches!(entry.container.state, State::Exited { .. });
            if remove {
                gone.extend(
                    Some(self.container_directory(id)).filter(|directory| directory.exists()),
                );
            }
            !remove
        });
        gone.into_iter().map(fs::remove_dir_all).fold(Ok(()), Result::and)
    }

    /// Kills everything and waits until it has ended. Nothing can be started afterwards.
    pub async fn shut_down(&self) {
        let mut changes = self.subscribe();
        self.inner.lock().shut_down = true;
        loop {
            let alive: Vec<_> = self.inner.alive();
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

    /// Records a new container, before its process exists, so that nobody starts it twice.
    fn admit(
        &self,
        id: &ContainerId,
        orders: mpsc::UnboundedSender<Order>,
    ) -> Result<PathBuf, StartError> {
        let mut containers = self.lock();
        if containers.shut_down {
            return Err(StartError::ShutDown);
        }
        if containers.by_id.contains_key(id) {
            return Err(StartError::Exists { id: id.clone() });
        }
        let log = self.options.directory.join(id.directory_name()).join("output.log");
        let container = Container { id: id.clone(), state: State::Starting, log: log.clone() };
        containers.by_id.insert(id.clone(), Entry { container, orders });
        Ok(log)
    }

    fn alive(&self) -> Vec<ContainerId> {
        let containers = self.lock();
        let alive = |entry: &&Entry| !matches!(entry.container.state, State::Exited { .. });
        containers.by_id.values().filter(alive).map(|entry| entry.container.id.clone()).collect()
    }

    fn order(&self, id: &ContainerId, order: Order) {
        if let Some(entry) = self.lock().by_id.get(id) {
            // The task ends with the container, so nobody is left to be told.
            let _ = entry.orders.send(order);
        }
    }

    fn record(&self, id: &ContainerId, state: State) {
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
    let mut command =
        if config.command.is_empty() { image.entrypoint.clone() } else { config.command };
    command.extend(config.args);
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

/// The task that accompanies one supervisor.
struct Supervision {
    runtime: Arc<Inner>,
    id: ContainerId,
    child: Child,
    started: Option<oneshot::Sender<()>>,
}

impl Supervision {
    async fn run(mut self, socket: UnixStream, orders: mpsc::UnboundedReceiver<Order>) {
        let (reports, to_supervisor) = socket.into_split();
        // Aborted with the task, which closes the socket's writing half; the other half goes with
        // `reports`.
        let pass_on = tokio::spawn(pass_on(orders, to_supervisor));
        let ended = self.follow(reports).await;
        let _ = self.child.wait().await;
        pass_on.abort();
        self.runtime.record(&self.id, ended);
        drop(self.started.take());
    }

    /// Records what the supervisor reports and returns how it ended.
    async fn follow(&mut self, reports: OwnedReadHalf) -> State {
        let mut lines = BufReader::new(reports).lines();
        let mut began = None;
        let exited = |code, signal, started_at, message| State::Exited {
            code,
            signal,
            started_at,
            finished_at: Timestamp::now(),
            message,
        };
        while let Ok(Some(line)) = lines.next_line().await {
            match serde_json::from_str(&line) {
                Ok(Report::Started { pid }) => {
                    let started_at = Timestamp::now();
                    began = Some(started_at);
                    self.runtime.record(&self.id, State::Running { pid, started_at });
                    self.started.take().map(|started| started.send(()));
                }
                Ok(Report::Failed { message }) => return exited(128, None, None, Some(message)),
                Ok(Report::Exited { code, signal }) => return exited(code, signal, began, None),
                Err(error) => tracing::warn!(%error, line, "supervisor said something unknown"),
            }
        }
        exited(137, Some(9), began, Some("the container's supervisor died".into()))
    }
}

async fn pass_on(mut orders: mpsc::UnboundedReceiver<Order>, mut supervisor: OwnedWriteHalf) {
    while let Some(order) = orders.recv().await {
        let Ok(mut line) = serde_json::to_vec(&order) else { continue };
        line.push(b'\n');
        if supervisor.write_all(&line).await.is_err() {
            return;
        }
    }
}
