//! PID server: sends each process that connects its PID in the host's namespace, as the kernel
//! reports it.
//!
//! ```text
//! <state-dir>/host/pid.sock  --- directory mounted read-only ---> /dev/tessera/host/pid.sock
//! ```
//!
//! Clients are untrusted: the server never reads from a connection. It writes 16 bytes, which fit
//! into any new socket, and closes it. It serves one connection at a time, at a limited rate. A
//! client that floods it only keeps other processes of the node from learning their PID, which none
//! of them needs (`docs/adr/0086-host-pids-and-usage-audit.md`).
//!
//! The server has a thread of its own, which is never joined. Closing a connection closes the files
//! that the client has passed into it, and that may block as long as the client wants: a TCP socket
//! that lingers.
//!
//! The name of the socket belongs to the instance that renamed its socket last. An instance that
//! stops leaves the file. If no instance answers there, the next that checks takes the name.

use std::{
    fs::{self, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use tessera_intercept_abi::host_pid;
use tessera_runtime::{error_chain::chain, supervisor::Supervisor};
use tokio::{
    net::{UnixListener, UnixStream},
    time::{MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::state::{StatePaths, sole_lock};

/// Replies per batch, and the pause after a batch, which is shorter than a process waits. A process
/// connects once, so 2,560 replies per second suffice for all processes that start on a node.
const MAX_REPLIES_PER_BATCH: u32 = 64;
const PAUSE: Duration = Duration::from_millis(25);

/// Interval of checks that some instance answers at the name.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause after an error, which the next connection would probably meet as well.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Errors of binding the socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} `{path}`", path = .path.display())]
pub struct HostPidsError {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Creates the directory that containers get. Must be called before any claim is prepared or
/// repaired: its CDI spec names the directory.
///
/// # Errors
/// [`HostPidsError`].
pub fn make_directory(paths: &StatePaths) -> Result<(), HostPidsError> {
    let directory = paths.host();
    fs::create_dir_all(&directory).map_err(failed("create", &directory))?;
    // Any user of a container may search it, whatever the umask is, and only the driver may write.
    fs::set_permissions(&directory, Permissions::from_mode(0o755))
        .map_err(failed("set permissions of", &directory))
}

/// The PID server, bound to the name.
#[derive(Debug)]
pub struct HostPids {
    paths: StatePaths,
    listener: UnixListener,
    /// Device and inode of the socket.
    identity: (u64, u64),
    replies: u32,
}

impl HostPids {
    /// Takes the name, or returns `None` if another instance is taking it now.
    ///
    /// # Errors
    /// [`HostPidsError`].
    pub fn bind(paths: &StatePaths) -> Result<Option<Self>, HostPidsError> {
        make_directory(paths)?;
        let lock = paths.host_lock();
        let Some(_lock) = sole_lock::take(&lock).map_err(failed("lock", &lock))? else {
            return Ok(None);
        };
        let name = paths.host().join(host_pid::SOCKET);
        let new = name.with_extension("new");
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &new)(error));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&new).map_err(failed("bind", &new))?;
        // Connecting needs the permission to write.
        fs::set_permissions(&new, Permissions::from_mode(0o666))
            .map_err(failed("set permissions of", &new))?;
        let identity = identity(&new).map_err(failed("stat", &new))?;
        fs::rename(&new, &name).map_err(failed("rename to", &name))?;
        Ok(Some(Self { paths: paths.clone(), listener, identity, replies: 0 }))
    }

    /// Serves until `stop`, or until no instance answers at the name.
    async fn serve_bound(&mut self, stop: &CancellationToken) {
        let mut checks = interval(CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = checks.tick() => if !self.is_reachable() { return },
                accepted = self.listener.accept() => match accepted {
                    Ok((client, _)) => self.reply(client).await,
                    Err(error) => {
                        tracing::debug!(%error, "cannot accept connection to host PID socket");
                        sleep(ERROR_PAUSE).await;
                    }
                },
            }
        }
    }

    async fn reply(&mut self, client: UnixStream) {
        if let Err(error) = send_pid(client) {
            tracing::trace!(%error, "cannot send host PID to process");
        }
        self.replies += 1;
        if self.replies.is_multiple_of(MAX_REPLIES_PER_BATCH) {
            sleep(PAUSE).await;
        }
    }

    /// Returns true if this instance or another one answers at the name.
    fn is_reachable(&self) -> bool {
        let name = self.paths.host().join(host_pid::SOCKET);
        identity(&name).is_ok_and(|found| found == self.identity) || is_answered(&name)
    }
}

/// Starts the thread of the server, which is never joined: a client may block it for ever.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn(tasks: &mut Supervisor, paths: StatePaths) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stop = tasks.stop_token();
    tasks.spawn_thread("host-pids", move || runtime.block_on(serve(paths, stop)))
}

/// Serves until `stop`. Errors are retried: no claim depends on the server.
pub async fn serve(paths: StatePaths, stop: CancellationToken) {
    let mut is_logged = false;
    while !stop.is_cancelled() {
        match HostPids::bind(&paths) {
            Ok(Some(mut bound)) => {
                is_logged = false;
                bound.serve_bound(&stop).await;
                continue;
            }
            Ok(None) => {}
            Err(error) if is_logged => {
                tracing::debug!(error = %chain(&error), "host PID socket is still unavailable")
            }
            Err(error) => {
                is_logged = true;
                tracing::warn!(error = %chain(&error), "host PID socket is unavailable");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(ERROR_PAUSE) => {}
        }
    }
}

fn send_pid(client: UnixStream) -> io::Result<()> {
    // 0 or none if the process is in a PID namespace that this one does not see.
    let pid = client.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
    // Does not block: the answer fits into the socket buffer.
    client.into_std()?.write_all(&host_pid::answer(pid))
}

/// Returns true if a process listens at the name, even with a full backlog.
fn is_answered(name: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (Ok(socket), Ok(address)) = (
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None),
        SocketAddrUnix::new(name),
    ) else {
        return false;
    };
    matches!(connect(&socket, &address), Ok(()) | Err(Errno::AGAIN))
}

/// Device and inode of a file. Unique as long as the file is open.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostPidsError {
    let path = path.to_owned();
    move |source| HostPidsError { operation, path, source }
}
