//! Tells processes of containers what the host calls them: whoever connects is answered with its
//! PID, as the kernel says it.
//!
//! ```text
//!  <state-dir>/host/pid.sock  ---- the directory, read-only, in each container with a share ---> /dev/tessera/host/pid.sock
//! ```
//!
//! Whoever connects is nobody's friend. It is not listened to: 16 bytes fit into any new socket,
//! and the connection is closed. One connection is looked at at a time, and so many in a while; who
//! comes in floods keeps only others of the node from learning their PID, which nobody needs
//! (`docs/adr/0086-host-pids-and-usage-audit.md`).
//!
//! All of it is done by a thread of its own, for which nobody waits. To close a connection is to
//! close the files that the caller has passed into it, and that may take as long as the caller
//! likes: a TCP socket that lingers.
//!
//! The socket's name belongs to the instance that took it last, by a rename. One that stops leaves
//! it: where nobody answers, the next that looks takes it.

use std::{
    fs::{self, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use tessera_intercept_abi::host_pid;
use tessera_runtime::error_chain::chain;
use tokio::{
    net::{UnixListener, UnixStream},
    time::{MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::state::{StatePaths, sole_lock};

/// Answers in one go, and the pause after them, which is shorter than a process waits. A process
/// asks once in its life, so 2,560 in a second are all that start on a node.
const AT_ONCE: u32 = 64;
const PAUSE: Duration = Duration::from_millis(25);

/// Between looks whether the name still leads to somebody.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// After an error that the next connection would meet as well.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// Why nobody can be told.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} `{path}`", path = .path.display())]
pub struct HostPidsError {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Makes the directory that containers get. Before any claim is prepared or repaired: its CDI spec
/// names it.
///
/// # Errors
/// [`HostPidsError`].
pub fn make_directory(paths: &StatePaths) -> Result<(), HostPidsError> {
    let directory = paths.host();
    fs::create_dir_all(&directory).map_err(failed("create", &directory))?;
    // Whoever runs in a container passes through, whatever the umask says, and nobody but this
    // driver writes.
    fs::set_permissions(&directory, Permissions::from_mode(0o755))
        .map_err(failed("open up", &directory))
}

/// The socket, and who answers there.
#[derive(Debug)]
pub struct HostPids {
    paths: StatePaths,
    listener: UnixListener,
    /// Device and inode of the socket.
    identity: (u64, u64),
    answered: u32,
}

impl HostPids {
    /// Takes the name. `None` where another instance is about to: that one answers.
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
        let listener = UnixListener::bind(&new).map_err(failed("listen at", &new))?;
        // To connect is to write.
        fs::set_permissions(&new, Permissions::from_mode(0o666))
            .map_err(failed("open up", &new))?;
        let identity = identity(&new).map_err(failed("look at", &new))?;
        fs::rename(&new, &name).map_err(failed("rename to", &name))?;
        Ok(Some(Self { paths: paths.clone(), listener, identity, answered: 0 }))
    }

    /// Answers until `stop`, or until the name leads to nobody.
    async fn answer(&mut self, stop: &CancellationToken) {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = looks.tick() => if !self.is_found() { return },
                accepted = self.listener.accept() => match accepted {
                    Ok((caller, _)) => self.tell(caller).await,
                    Err(error) => {
                        tracing::debug!(%error, "nobody can be told what the host calls it");
                        sleep(AFTER_ERROR).await;
                    }
                },
            }
        }
    }

    async fn tell(&mut self, caller: UnixStream) {
        if let Err(error) = tell(caller) {
            tracing::trace!(%error, "a process did not wait to be told what the host calls it");
        }
        self.answered += 1;
        if self.answered.is_multiple_of(AT_ONCE) {
            sleep(PAUSE).await;
        }
    }

    /// Whether somebody answers at the name: this instance, or the one that took it.
    fn is_found(&self) -> bool {
        let name = self.paths.host().join(host_pid::SOCKET);
        identity(&name).is_ok_and(|found| found == self.identity) || is_answered(&name)
    }
}

/// Has a thread of its own answer until `stop`. Nobody waits for its end: a caller may have it
/// close something for ever.
///
/// # Errors
/// There can be no thread.
pub fn spawn(paths: StatePaths, stop: CancellationToken) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = move || runtime.block_on(serve(paths, stop));
    thread::Builder::new().name("host-pids".to_owned()).spawn(answer)?;
    Ok(())
}

/// Answers until `stop`. What cannot be done is tried again: nothing depends on it.
pub async fn serve(paths: StatePaths, stop: CancellationToken) {
    let mut said = false;
    while !stop.is_cancelled() {
        match HostPids::bind(&paths) {
            Ok(Some(mut bound)) => {
                said = false;
                bound.answer(&stop).await;
                continue;
            }
            Ok(None) => {}
            Err(error) if said => {
                tracing::debug!(error = %chain(&error), "still nobody is told what the host calls it")
            }
            Err(error) => {
                said = true;
                tracing::warn!(error = %chain(&error), "processes are not told what the host calls them");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(AFTER_ERROR) => {}
        }
    }
}

fn tell(caller: UnixStream) -> io::Result<()> {
    // 0, or nothing, where the process is in no PID namespace that this one sees.
    let pid = caller.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
    // It does not wait: who does not read is told all the same.
    caller.into_std()?.write_all(&host_pid::answer(pid))
}

/// Whether somebody listens, be it with more callers than fit.
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

/// Of an inode that is open, which no other gets meanwhile.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostPidsError {
    let path = path.to_owned();
    move |source| HostPidsError { operation, path, source }
}
