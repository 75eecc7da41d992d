//! The demo, as `make demo` runs it: it shows what it says, and leaves nothing, however it ends.
//!
//! Runs the real driver, controller, probe and libraries, which lie beside this crate's program
//! once they are built (`make build`).

#![expect(clippy::unwrap_used, reason = "a test says by panicking where it stands")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tessera_simcluster::node::namespaces;
use tessera_test_support::{report_skip, test_name};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tessera-simcluster");

/// The demo takes a second or two; a debug build on a busy machine, more.
const TIMEOUT: Duration = Duration::from_secs(300);

/// True where the machine allows no namespaces; said on standard error, for the list of skipped
/// tests.
fn skipped(test: &str) -> bool {
    match namespaces::check_support(Path::new(PROGRAM)) {
        Ok(()) => false,
        Err(reason) => {
            report_skip(test, format!("no namespaces here: {reason}"));
            true
        }
    }
}

fn demo(directory: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("demo").env("TMPDIR", directory).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Processes whose command line or working files name the directory: everything that the demo
/// starts does.
fn processes_of(directory: &Path) -> Vec<String> {
    let name = directory.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(command) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        if command.contains(&name) {
            found.push(command);
        }
    }
    found
}

fn assert_nothing_left(directory: &Path) {
    assert_eq!(processes_of(directory), Vec::<String>::new());
    let files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.is_empty(), "{files:?}");
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(&directory.display().to_string()), "{mounts}");
}

/// Starts `demo --keep` and reads its output up to the line with the kubeconfig.
fn kept(directory: &Path) -> Child {
    let mut child = demo(directory).arg("--keep").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut said = String::new();
    for line in lines {
        let line = line.unwrap();
        if line.contains("export KUBECONFIG=") {
            return child;
        }
        said.push_str(&line);
        said.push('\n');
    }
    panic!("the demo ended before it was at its end: {}\n{said}", child.wait().unwrap());
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn the_demo_shows_each_step_and_leaves_nothing() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = demo(directory.path()).output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for part in [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100 80GB PCIe",
        "kind: ResourceClaimTemplate",
        "it sees 1 GPU",
        "19.00 GiB in all",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "GPUs available",
        "room appeared -> allocation written",
        "pod-5 runs",
        "Everything is taken down",
    ] {
        assert!(said.contains(part), "no `{part}` in:\n{said}");
    }
    assert_nothing_left(directory.path());
}

#[test]
fn a_demo_that_is_kept_ends_at_ctrl_c_and_leaves_nothing() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut child = kept(directory.path());
    assert!(!processes_of(directory.path()).is_empty());
    signal(&child, Signal::INT);
    assert!(child.wait().unwrap().success());
    assert_nothing_left(directory.path());
}

#[test]
fn a_demo_that_is_killed_takes_its_processes_and_mounts_along() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut child = kept(directory.path());
    assert!(!processes_of(directory.path()).is_empty());
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    // The kernel ends the rest; nobody can be waited for.
    let began = Instant::now();
    while !processes_of(directory.path()).is_empty() && began.elapsed() < TIMEOUT {
        std::thread::yield_now();
    }
    assert_eq!(processes_of(directory.path()), Vec::<String>::new());
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(&directory.path().display().to_string()), "{mounts}");
}

#[test]
fn without_namespaces_the_demo_says_so_and_shows_the_rest() {
    // A user namespace that allows no further ones, and a process in it without the right to make
    // any other kind.
    let forbid = "echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all --inh-caps -all \"$@\"";
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", forbid, "sh", PROGRAM, "demo"]);
    let output = match command.env("TMPDIR", directory.path()).stdin(Stdio::null()).output() {
        Ok(output)
            if !text(&output).contains("unshare: ") && !text(&output).contains("setpriv: ") =>
        {
            output
        }
        Ok(output) => return report_skip(test_name!(), text(&output)),
        Err(error) => return report_skip(test_name!(), format!("unshare: {error}")),
    };
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for part in ["allows no user namespaces", "NVIDIA H100 80GB HBM3", "it took", "all of it"] {
        assert!(said.contains(part), "no `{part}` in:\n{said}");
    }
    assert_nothing_left(directory.path());
}
