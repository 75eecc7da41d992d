//! The fake control daemon of one GPU.

use std::{
    collections::BTreeMap,
    fs::{self, File, Permissions},
    io::{self, BufRead, BufReader, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use rustix::{net::sockopt::socket_peercred, process::getuid};

use crate::{
    environment::{Environment, Failure, VISIBLE_DEVICES},
    log::Log,
    protocol::{ClientRequest, END, Line},
};

/// Error that ends the daemon.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another daemon is running.
    #[error("An instance of this daemon is already running")]
    Running,
    /// The daemon is configured to fail.
    #[error("the daemon was configured to fail at its start")]
    ConfiguredFailure,
    /// The daemon has no GPU, or several.
    #[error("invalid {VISIBLE_DEVICES} `{0}`: expected the UUID of one GPU")]
    NoDevice(String),
    /// A call of the operating system failed.
    #[error("cannot {operation} `{path}`", path = .path.display())]
    Io {
        /// Operation that failed.
        operation: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Runs the daemon until it receives `quit`.
///
/// # Errors
/// Returns [`DaemonError`], which is also logged.
pub fn run(environment: &Environment) -> Result<(), DaemonError> {
    let log = Log::open(&environment.log).map_err(failed("log to", &environment.log))?;
    let listener = start(environment, &log).inspect_err(|error| log.line(&error.to_string()))?;
    if environment.failure == Some(Failure::Hang) {
        return hang(&listener);
    }
    let daemon =
        Arc::new(Daemon { environment: environment.clone(), log, clients: Mutex::default() });
    for connection in listener.incoming().flatten() {
        let daemon = Arc::clone(&daemon);
        thread::spawn(move || daemon.serve(&connection));
    }
    Ok(())
}

fn start(environment: &Environment, log: &Log) -> Result<UnixListener, DaemonError> {
    if environment.failure == Some(Failure::Start) {
        return Err(DaemonError::ConfiguredFailure);
    }
    if !environment.devices.starts_with("GPU-") || environment.devices.contains(',') {
        return Err(DaemonError::NoDevice(environment.devices.clone()));
    }
    let socket = environment.socket();
    if UnixStream::connect(&socket).is_ok() {
        return Err(DaemonError::Running);
    }
    check_shared_memory(Path::new("/dev/shm"))?;
    log.line(&format!("Starting control daemon using socket {}", socket.display()));
    let listener = listen(&socket).map_err(failed("listen at", &socket))?;
    let pid_file = environment.pid_file();
    fs::write(&pid_file, format!("{}\n", process::id())).map_err(failed("write", &pid_file))?;
    log.line(&format!(
        "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={}",
        environment.pipe.display()
    ));
    Ok(listener)
}

fn listen(socket: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = socket.parent() {
        fs::create_dir_all(directory)?;
    }
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    // Connecting needs write permission, and clients run as any user.
    fs::set_permissions(socket, Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Checks that files can be created in the directory through which servers and clients share
/// memory.
fn check_shared_memory(directory: &Path) -> Result<(), DaemonError> {
    let file = directory.join(format!("cuda.shm.{:x}.{:x}", getuid().as_raw(), process::id()));
    File::create(&file).map_err(failed("create", &file))?;
    fs::remove_file(&file).map_err(failed("remove", &file))
}

/// Accepts connections and never answers.
fn hang(listener: &UnixListener) -> Result<(), DaemonError> {
    let mut unanswered = Vec::new();
    for connection in listener.incoming() {
        unanswered.push(connection);
    }
    Ok(())
}

struct Daemon {
    environment: Environment,
    log: Log,
    /// Number of connections of each client, by PID.
    clients: Mutex<BTreeMap<i32, usize>>,
}

impl Daemon {
    /// Answers the requests of a connection until it is closed.
    fn serve(&self, connection: &UnixStream) {
        let mut client = None;
        for line in BufReader::new(connection).lines() {
            let Ok(line) = line else { break };
            let line = Line::from(line.as_str());
            let answer = match &line {
                Line::Client(request) => {
                    client = client.or_else(|| self.admit(connection, request));
                    format!("ok device={}\n", self.environment.devices)
                }
                other => self.answer(other),
            };
            let mut stream = connection;
            let written =
                stream.write_all(answer.as_bytes()).and_then(|()| stream.write_all(&[END]));
            if line == Line::Quit {
                self.quit();
            }
            if written.is_err() {
                break;
            }
        }
        if let Some(pid) = client {
            self.disconnect(pid);
        }
    }

    fn answer(&self, line: &Line) -> String {
        let clients = || self.clients().keys().copied().collect::<Vec<_>>();
        match line {
            Line::DefaultPercentage => "100.0\n".to_owned(),
            // NVIDIA's daemon starts its server for the first client.
            Line::Servers if clients().is_empty() => String::new(),
            Line::Servers => format!("{}\n", process::id()),
            Line::Clients => clients().iter().map(|pid| format!("{pid}\n")).collect(),
            Line::DeviceClients => {
                let of_device = |pid: &i32| format!("{} {pid}\n", self.environment.devices);
                clients().iter().map(of_device).collect()
            }
            Line::Quit => String::new(),
            Line::Unknown(line) => format!("Unknown command: {line}\n"),
            Line::Client(_) => unreachable!("a client request is handled by the caller"),
        }
    }

    /// Registers the peer process as a client, with the PID that the kernel reports.
    fn admit(&self, connection: &UnixStream, request: &ClientRequest) -> Option<i32> {
        let peer = socket_peercred(connection).ok()?;
        let (pid, user) = (peer.pid.as_raw_nonzero().get(), peer.uid.as_raw());
        let ClientRequest { percentage, memory, priority, .. } = request;
        self.log.line(&format!(
            "NEW CLIENT {pid} from user {user}: active thread percentage {percentage}, memory limit {memory}, priority {priority}"
        ));
        *self.clients().entry(pid).or_default() += 1;
        Some(pid)
    }

    fn disconnect(&self, pid: i32) {
        let mut clients = self.clients();
        let left = clients.get(&pid).map_or(0, |connections| connections - 1);
        if left == 0 {
            clients.remove(&pid);
            self.log.line(&format!("Client {pid} disconnected"));
        } else {
            clients.insert(pid, left);
        }
    }

    fn quit(&self) -> ! {
        self.log.line("Exiting control daemon");
        let _ = fs::remove_file(self.environment.pid_file());
        let _ = fs::remove_file(self.environment.socket());
        process::exit(0)
    }

    fn clients(&self) -> MutexGuard<'_, BTreeMap<i32, usize>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DaemonError {
    let path = path.to_owned();
    move |source| DaemonError::Io { operation, path, source }
}
