//! `container-init`: the process between the runtime and a container's program.
//!
//! ```text
//! runtime        --socket: orders down, reports up------------>  container-init
//! container-init --pipe: a setup error, or end of file at exec->  container-enter
//! ```
//!
//! `container-init` runs in new mount, pid, uts and ipc namespaces. `container-enter` builds the
//! root file system, then becomes the program (pid 1).
//!
//! The socket is the supervisor's standard input. When it closes, the runtime has ended and the
//! container is killed, so no container outlives the runtime.

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
use super::spec::{InitSpec, SupervisorOrder, SupervisorReport};
use crate::node::namespaces;

/// Subcommand that runs [`supervise`].
pub const INIT: &str = "container-init";
/// Subcommand that runs [`enter`].
pub const ENTER: &str = "container-enter";

/// Runs the container described by `spec` and returns when it has ended.
///
/// Must be called while the process has a single thread, since namespaces are entered by thread.
/// The process stays single-threaded: the kernel refuses threads to a process whose children start
/// in another pid namespace.
///
/// # Errors
/// Returns an error if the socket on standard input is unusable. Other errors are reported over it.
pub fn supervise(spec: &Path) -> io::Result<()> {
    let mut runtime = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    match enter_namespaces() {
        Ok(reactor) => reactor.block_on(run(spec, runtime)),
        Err(error) => {
            let message = format!("cannot create container namespaces: {error}");
            send(&mut runtime, &SupervisorReport::Failed { message })
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
        Err(message) => return send(&mut runtime, &SupervisorReport::Failed { message }),
    };
    send(&mut runtime, &SupervisorReport::Started { pid: pid.as_raw_nonzero().get() })?;
    let orders = runtime.try_clone()?;
    orders.set_nonblocking(true)?;
    let mut orders = BufReader::new(tokio::net::UnixStream::from_std(orders)?).lines();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            () = execute_next_order(&mut orders, pid) => {}
        }
    };
    let (code, signal) = exit_status(status);
    // Both halves are one socket, which must still accept the last report.
    runtime.set_nonblocking(false)?;
    send(&mut runtime, &SupervisorReport::Exited { code, signal })
}

fn send(runtime: &mut UnixStream, report: &SupervisorReport) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    runtime.write_all(&line)
}

async fn start(spec: &Path) -> Result<(Child, Pid), String> {
    let failed = |error: io::Error| format!("cannot start container: {error}");
    let (mut failure, mut child) = spawn_enter(spec).map_err(failed)?;
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    let pid = pid.expect("invariant: a child that was not waited for has a pid");
    let mut message = String::new();
    failure.read_to_string(&mut message).map_err(failed)?;
    if message.is_empty() {
        return Ok((child, pid));
    }
    let _ = child.wait().await;
    Err(message)
}

/// Starts `container-enter`. The pipe's write end is the child's standard input, since std passes
/// no other descriptors.
fn spawn_enter(spec: &Path) -> io::Result<(PipeReader, Child)> {
    let (failure, writer) = io::pipe()?;
    let child = Command::new(std::env::current_exe()?)
        .arg(ENTER)
        .arg(spec)
        .stdin(Stdio::from(OwnedFd::from(writer)))
        .spawn()?;
    Ok((failure, child))
}

/// Executes one order. Kills the container if the runtime has closed the socket.
async fn execute_next_order(orders: &mut Lines<BufReader<tokio::net::UnixStream>>, pid: Pid) {
    let Ok(Some(line)) = orders.next_line().await else {
        let _ = kill_process(pid, Signal::KILL);
        return std::future::pending().await;
    };
    let signal = match serde_json::from_str(&line) {
        Ok(SupervisorOrder::Terminate) => Signal::TERM,
        Ok(SupervisorOrder::Kill) => Signal::KILL,
        Err(_) => return,
    };
    // An error means that it has just ended, which `wait` reports.
    let _ = kill_process(pid, signal);
}

fn exit_status(status: ExitStatus) -> (i32, Option<i32>) {
    match (status.code(), status.signal()) {
        (Some(code), _) => (code, None),
        (None, Some(signal)) => (128 + signal, Some(signal)),
        (None, None) => (255, None),
    }
}

/// Sets the container up and becomes its program. Returns only on failure; the caller then exits.
pub fn enter(spec: &Path) -> io::Result<()> {
    let mut failure = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    // The supervisor waits on its main thread; without it the container would never be ended.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let message =
        match read(spec).map_err(|error| format!("cannot read `{}`: {error}", spec.display())) {
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
