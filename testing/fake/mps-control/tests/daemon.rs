//! Tests of the fake program as a process.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tessera_fake_mps_control::{client::Client, protocol::ClientRequest};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fake-mps-control");
const GPU: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

/// Timeout that is far longer than any test step.
const TIMEOUT: Duration = Duration::from_secs(300);

struct TestBed(tempfile::TempDir);

/// A daemon process that is killed on drop.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl TestBed {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn pipe(&self) -> PathBuf {
        self.0.path().join("pipe")
    }

    fn program(&self) -> Command {
        let mut program = Command::new(PROGRAM);
        program.env("CUDA_MPS_PIPE_DIRECTORY", self.pipe());
        program.env("CUDA_MPS_LOG_DIRECTORY", self.0.path().join("log"));
        program.env("CUDA_VISIBLE_DEVICES", GPU).stdin(Stdio::null());
        program.stdout(Stdio::piped()).stderr(Stdio::piped());
        program
    }

    fn daemon(&self) -> Daemon {
        let daemon = Daemon(self.program().args(["-f", "-M"]).spawn().expect("started"));
        eventually("the daemon answers", || self.send("get_server_list\n").status.success());
        daemon
    }

    fn send(&self, commands: &str) -> Output {
        let mut front_end = self.program().stdin(Stdio::piped()).spawn().expect("started");
        // The program may have exited already, without an answer.
        let _ = front_end.stdin.take().expect("piped").write_all(commands.as_bytes());
        front_end.wait_with_output().expect("exits")
    }

    fn answer(&self, commands: &str) -> String {
        let output = self.send(commands);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.0.path().join("log/control.log")).expect("a log")
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn request() -> ClientRequest {
    ClientRequest { pid: 1, uid: 1, percentage: 50.0, memory: "0=4G".to_owned(), priority: 0 }
}

#[test]
fn commands_are_answered_one_by_one() {
    let testbed = TestBed::new();
    let _daemon = testbed.daemon();
    assert_eq!(testbed.answer("get_default_active_thread_percentage\n"), "100.0\n");
    assert_eq!(testbed.answer("get_client_list\nhave_tea\n"), "Unknown command: have_tea\n");
    assert!(testbed.log().contains("Starting control daemon using socket"), "{}", testbed.log());
}

#[test]
fn connected_process_is_client_under_its_kernel_pid() {
    let testbed = TestBed::new();
    let daemon = testbed.daemon();
    let this = std::process::id();
    let client = Client::connect(&testbed.pipe(), &request()).expect("admitted");
    assert_eq!(client.device(), GPU);
    assert_eq!(testbed.answer("get_server_list\n"), format!("{}\n", daemon.0.id()));
    assert_eq!(testbed.answer("get_client_list 12\n"), format!("{this}\n"));
    assert_eq!(testbed.answer("get_device_client_list\n"), format!("{GPU} {this}\n"));
    let user = rustix::process::getuid().as_raw();
    let line = format!(
        "NEW CLIENT {this} from user {user}: active thread percentage 50, memory limit 0=4G"
    );
    assert!(testbed.log().contains(&line), "{}", testbed.log());
    drop(client);
    eventually("the client has disconnected", || testbed.answer("get_client_list\n").is_empty());
}

#[test]
fn quit_exits_and_removes_socket() {
    let testbed = TestBed::new();
    let mut daemon = testbed.daemon();
    let pid =
        std::fs::read_to_string(testbed.pipe().join("nvidia-cuda-mps-control.pid")).expect("a PID");
    assert_eq!(pid.trim(), daemon.0.id().to_string());
    testbed.answer("quit -t 5\n");
    assert!(daemon.0.wait().expect("exits").success());
    assert_eq!(std::fs::read_dir(testbed.pipe()).expect("there").count(), 0);
    let output = testbed.send("quit\n");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "Cannot find MPS control daemon process\n");
}

/// Returns the output of a daemon that fails to start, and its log.
fn failed_start(testbed: &TestBed, daemon: &mut Command) -> (String, String) {
    let output = daemon.arg("-f").output().expect("exits");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    (String::from_utf8(output.stderr).expect("text"), testbed.log())
}

#[test]
fn second_daemon_fails_and_stale_socket_is_replaced() {
    let testbed = TestBed::new();
    let daemon = testbed.daemon();
    let (output, log) = failed_start(&testbed, &mut testbed.program());
    assert_eq!(output, "An instance of this daemon is already running\n");
    assert!(log.contains(output.trim()), "{log}");
    drop(daemon);
    assert!(Path::new(&testbed.pipe()).join("control").exists());
    let _daemon = testbed.daemon();
}

#[test]
fn start_fails_when_configured_or_without_gpu_uuid() {
    let testbed = TestBed::new();
    let (output, log) = failed_start(&testbed, testbed.program().env("FAKE_MPS_FAIL", "start"));
    assert!(
        output.contains("configured to fail") && log.contains("configured to fail"),
        "{output}{log}"
    );
    let (output, _) = failed_start(&testbed, testbed.program().env("CUDA_VISIBLE_DEVICES", "0"));
    assert!(output.contains("expected the UUID"), "{output}");
}
