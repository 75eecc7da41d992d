//! `container-init`: the process between the runtime and a container's program.
//!
//! ```text
//! runtime --socket (orders down, reports up)--> container-init   new mount, pid, uts and ipc namespaces
//!                                                 |  pipe: a setup error, or end of file at exec
//!                                                 v
//!                                               container-enter  builds the root, then becomes the program (pid 1)
//! ```
//!
//! The socket is the supervisor's standard input. When it closes, the runtime is gone and the
//! container is killed, so nothing outlives the runtime whatever way it ends.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::UnshareFlags;
use tessera_runtime::error_chain::chain;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, Command};

use super::rootfs;
use super::spec::{InitSpec, Order, Report};
use crate::node::namespaces;

/// The subcommand that runs [`supervise`].
pub const INIT: &str = "container-init";
/// The subcommand that runs [`enter`].
pub const ENTER: &str = "container-enter";

/// Runs the container that `spec` describes and returns when it has ended.
///
/// Must be called while the process has a single thread: namespaces are entered by thread. It stays
/// that way, since the kernel refuses threads to a process whose children are to be born into
/// another pid namespace.
///
/// # Errors
/// The socket on standard input cannot be used. Everything else is reported over it.
pub fn supervise(spec: &Path) -> io::Result<()> {
    let mut runtime = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    match enter_namespaces() {
        Ok(reactor) => reactor.block_on(run(spec, runtime)),
        Err(error) => {
            let message = format!("failed to make the container's namespaces: {error}");
            send(&mut runtime, &Report::Failed { message })
        }
    }
}

fn enter_namespaces() -> io::Result<tokio::runtime::Runtime> {
    namespaces::enter(UnshareFlags::NEWPID | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

async fn run(spec: &Path, mut runtime: UnixStream) -> io::Result<()> {
    let (mut child, pid) = match start(spec).await {
        Ok(started) => started,
        Err(message) => return send(&mut runtime, &Report::Failed { message }),
    };
    send(&mut runtime, &Report::Started { pid: pid.as_raw_nonzero().get() })?;
    let orders = runtime.try_clone()?;
    orders.set_nonblocking(true)?;
    let mut orders = BufReader::new(tokio::net::UnixStream::from_std(orders)?).lines();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            () = obey_next(&mut orders, pid) => {}
        }
    };
    let (code, signal) = outcome(status);
    // Both halves are one socket, which must not refuse the last report.
    runtime.set_nonblocking(false)?;
    send(&mut runtime, &Report::Exited { code, signal })
}

fn send(runtime: &mut UnixStream, report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    runtime.write_all(&line)
}

async fn start(spec: &Path) -> Result<(Child, Pid), String> {
    let failed = |error: io::Error| format!("failed to start the container: {error}");
    let (mut failure, mut child) = spawn_enter(spec).map_err(failed)?;
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    let pid = pid.expect("invariant: a child that nobody has waited for has a pid");
    let mut message = String::new();
    failure.read_to_string(&mut message).map_err(failed)?;
    if message.is_empty() {
        return Ok((child, pid));
    }
    let _ = child.wait().await;
    Err(message)
}

/// The pipe's writing end is the child's standard input: it needs a descriptor, and std passes no
/// others.
fn spawn_enter(spec: &Path) -> io::Result<(PipeReader, Child)> {
    let (failure, writer) = io::pipe()?;
    let child = Command::new(std::env::current_exe()?)
        .arg(ENTER)
        .arg(spec)
        .stdin(Stdio::from(OwnedFd::from(writer)))
        .spawn()?;
    Ok((failure, child))
}

/// Follows one order; without a runtime to give any, kills and leaves the rest to `wait`.
async fn obey_next(orders: &mut Lines<BufReader<tokio::net::UnixStream>>, pid: Pid) {
    let Ok(Some(line)) = orders.next_line().await else {
        let _ = kill_process(pid, Signal::KILL);
        return std::future::pending().await;
    };
    let signal = match serde_json::from_str(&line) {
        Ok(Order::Terminate) => Signal::TERM,
        Ok(Order::Kill) => Signal::KILL,
        Err(_) => return,
    };
    // An error means that it has just ended, which `wait` tells.
    let _ = kill_process(pid, signal);
}

fn outcome(status: ExitStatus) -> (i32, Option<i32>) {
    match (status.code(), status.signal()) {
        (Some(code), _) => (code, None),
        (None, Some(signal)) => (128 + signal, Some(signal)),
        (None, None) => (255, None),
    }
}

/// Sets the container up and becomes its program. Comes back only to say what failed; the caller
/// then exits.
pub fn enter(spec: &Path) -> io::Result<()> {
    let mut failure = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    // The supervisor waits on its main thread; without it nobody would ever end this container.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let message =
        match read(spec).map_err(|error| format!("failed to read `{}`: {error}", spec.display())) {
            Ok(spec) => match rootfs::become_program(&spec) {
                Ok(never) => match never {},
                Err(error) => chain(&error),
            },
            Err(message) => message,
        };
    failure.write_all(message.as_bytes())
}

fn read(spec: &Path) -> io::Result<InitSpec> {
    Ok(serde_json::from_slice(&std::fs::read(spec)?)?)
}
