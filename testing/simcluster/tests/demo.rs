//! The demo as `make demo` runs it: it shows every step and leaves nothing, however it ends.
//!
//! Runs the real driver, controller, probe and libraries, which are beside this crate's program
//! once they are built (`make build`).

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, LogParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Config};
use rustix::process::{Pid, Signal, kill_process};
use tessera_simcluster::node::namespaces;
use tessera_test_support::{report_skip, test_name};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tessera-simcluster");

/// Time limit. The demo takes a few seconds, more on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Returns true if the machine allows no namespaces. The skip is reported on standard error.
fn skipped(test: &str) -> bool {
    match namespaces::check_support(Path::new(PROGRAM)) {
        Ok(()) => false,
        Err(reason) => {
            report_skip(test, format!("namespaces are unavailable: {reason}"));
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

/// Returns the command lines that name the directory: those of all processes of the demo.
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

/// Starts `demo --keep` and returns it with the path of its kubeconfig, once it prints that.
fn kept(directory: &Path) -> (Child, PathBuf) {
    let mut child = demo(directory).arg("--keep").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut output = String::new();
    for line in lines {
        let line = line.unwrap();
        if let Some((_, path)) = line.split_once("export KUBECONFIG=") {
            return (child, path.into());
        }
        output.push_str(&line);
        output.push('\n');
    }
    panic!("the demo ended early: {}\n{output}", child.wait().unwrap());
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn demo_shows_each_step_and_leaves_nothing() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = demo(directory.path()).output().unwrap();
    let output_text = text(&output);
    assert!(output.status.success(), "{output_text}");
    for part in [
        "node-a  8 x NVIDIA H100 80GB HBM3, 79.65 GiB each",
        "node-b  4 x NVIDIA A100 80GB PCIe, 80.00 GiB each",
        "kind: ResourceClaimTemplate",
        "report 1 GPU",
        "19.00 GiB by cuMemGetInfo",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "% of the GPU's time (limit 25 %)",
        "tessera_share_memory_used_bytes{",
        "GPUs available for ResourceClaim pod-5-gpu-",
        "wrote the allocation",
        "bound the pod",
        "pod-5 runs",
        "Cleaned up",
        "demo --keep",
    ] {
        assert!(output_text.contains(part), "no `{part}` in:\n{output_text}");
    }
    assert_nothing_left(directory.path());
}

#[test]
fn kept_demo_ends_at_ctrl_c_and_leaves_nothing() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (mut child, _) = kept(directory.path());
    assert!(!processes_of(directory.path()).is_empty());
    signal(&child, Signal::INT);
    assert!(child.wait().unwrap().success());
    assert_nothing_left(directory.path());
}

/// Returns the documents of README's first example.
fn readme_example() -> Vec<DynamicObject> {
    let readme = include_str!("../../../README.md");
    let (_, example) = readme.split_once("```yaml\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    example.split("---\n").map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}

/// Creates the objects and returns the log of the pod `trainer` once it has succeeded.
async fn run_readme_example(kubeconfig: &Path) -> String {
    // The choice fails if a provider is already installed, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
    let client = Client::try_from(config).unwrap();
    for object in readme_example() {
        let types = object.types.clone().unwrap();
        let kind = GroupVersionKind::try_from(&types).unwrap();
        let resource = ApiResource::from_gvk(&kind);
        let api: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &resource);
        api.create(&PostParams::default(), &object).await.unwrap();
    }
    let pods: Api<Pod> = Api::default_namespaced(client);
    let has_succeeded = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        status.is_some_and(|status| status.phase.as_deref() == Some("Succeeded"))
    };
    let succeeded = await_condition(pods.clone(), "trainer", has_succeeded);
    tokio::time::timeout(TIMEOUT, succeeded).await.unwrap().unwrap();
    pods.logs("trainer", &LogParams::default()).await.unwrap()
}

#[tokio::test]
async fn kept_demo_runs_the_first_pod_of_readme() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (mut child, kubeconfig) = kept(directory.path());
    let log = run_readme_example(&kubeconfig).await;
    assert!(log.contains("\"nvmlTotalBytes\":20401094656"), "{log}");
    signal(&child, Signal::INT);
    assert!(child.wait().unwrap().success());
}

#[test]
fn killed_demo_leaves_no_processes_and_mounts() {
    if skipped(test_name!()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (mut child, _) = kept(directory.path());
    assert!(!processes_of(directory.path()).is_empty());
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    // The kernel ends the other processes, which are not children of this one.
    let began = Instant::now();
    while !processes_of(directory.path()).is_empty() && began.elapsed() < TIMEOUT {
        std::thread::yield_now();
    }
    assert_eq!(processes_of(directory.path()), Vec::<String>::new());
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(&directory.path().display().to_string()), "{mounts}");
}

#[test]
fn demo_without_namespaces_shows_the_rest() {
    // A user namespace that allows no further ones, and a process in it without the capability to
    // create other namespaces.
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
    let output_text = text(&output);
    assert!(output.status.success(), "{output_text}");
    for part in ["allows no user namespaces", "NVIDIA H100 80GB HBM3", "allocated: all of it"] {
        assert!(output_text.contains(part), "no `{part}` in:\n{output_text}");
    }
    assert_nothing_left(directory.path());
}
