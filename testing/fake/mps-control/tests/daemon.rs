//! The stand-in as a process, spoken to as those who use it do.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tessera_fake_mps_control::{client::Client, protocol::Greeting};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fake-mps-control");
const GPU: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

/// Far longer than anything takes here.
const PATIENCE: Duration = Duration::from_secs(300);

struct Bench(tempfile::TempDir);

/// Killed when the test is over, however it ends.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Bench {
    fn set_up() -> Self {
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
        eventually("the daemon answers", || self.say("get_server_list\n").status.success());
        daemon
    }

    fn say(&self, commands: &str) -> Output {
        let mut front_end = self.program().stdin(Stdio::piped()).spawn().expect("started");
        // It may be gone already: nobody answered.
        let _ = front_end.stdin.take().expect("piped").write_all(commands.as_bytes());
        front_end.wait_with_output().expect("it ends")
    }

    fn told(&self, commands: &str) -> String {
        let output = self.say(commands);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.0.path().join("log/control.log")).expect("a log")
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn greeting() -> Greeting {
    Greeting { pid: 1, uid: 1, percentage: 50.0, memory: "0=4G".to_owned(), priority: 0 }
}

#[test]
fn commands_are_answered_one_by_one() {
    let bench = Bench::set_up();
    let _daemon = bench.daemon();
    assert_eq!(bench.told("get_default_active_thread_percentage\n"), "100.0\n");
    assert_eq!(bench.told("get_client_list\nhave_tea\n"), "Unknown command: have_tea\n");
    assert!(bench.log().contains("Starting control daemon using socket"), "{}", bench.log());
}

#[test]
fn a_process_is_a_client_under_the_pid_that_the_kernel_says_while_it_is_connected() {
    let bench = Bench::set_up();
    let daemon = bench.daemon();
    let this = std::process::id();
    let client = Client::connect(&bench.pipe(), &greeting()).expect("admitted");
    assert_eq!(client.device(), GPU);
    assert_eq!(bench.told("get_server_list\n"), format!("{}\n", daemon.0.id()));
    assert_eq!(bench.told("get_client_list 12\n"), format!("{this}\n"));
    assert_eq!(bench.told("get_device_client_list\n"), format!("{GPU} {this}\n"));
    let user = rustix::process::getuid().as_raw();
    let line = format!(
        "NEW CLIENT {this} from user {user}: active thread percentage 50, memory limit 0=4G"
    );
    assert!(bench.log().contains(&line), "{}", bench.log());
    drop(client);
    eventually("the client is gone", || bench.told("get_client_list\n").is_empty());
}

#[test]
fn it_quits_when_told_and_leaves_no_socket() {
    let bench = Bench::set_up();
    let mut daemon = bench.daemon();
    let pid =
        std::fs::read_to_string(bench.pipe().join("nvidia-cuda-mps-control.pid")).expect("a PID");
    assert_eq!(pid.trim(), daemon.0.id().to_string());
    bench.told("quit -t 5\n");
    assert!(daemon.0.wait().expect("it ends").success());
    assert_eq!(std::fs::read_dir(bench.pipe()).expect("there").count(), 0);
    let output = bench.say("quit\n");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "Cannot find MPS control daemon process\n");
}

/// What it says of itself before it ends, and its log.
fn refused(bench: &Bench, daemon: &mut Command) -> (String, String) {
    let output = daemon.arg("-f").output().expect("it ends");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    (String::from_utf8(output.stderr).expect("text"), bench.log())
}

#[test]
fn only_one_listens_and_a_dead_ones_socket_is_in_nobodys_way() {
    let bench = Bench::set_up();
    let daemon = bench.daemon();
    let (said, log) = refused(&bench, &mut bench.program());
    assert_eq!(said, "An instance of this daemon is already running\n");
    assert!(log.contains(said.trim()), "{log}");
    drop(daemon);
    assert!(Path::new(&bench.pipe()).join("control").exists());
    let _daemon = bench.daemon();
}

#[test]
fn it_fails_as_it_is_told_to() {
    let bench = Bench::set_up();
    let (said, log) = refused(&bench, bench.program().env("FAKE_MPS_FAIL", "start"));
    assert!(said.contains("told to fail") && log.contains("told to fail"), "{said}{log}");
    let (said, _) = refused(&bench, bench.program().env("CUDA_VISIBLE_DEVICES", "0"));
    assert!(said.contains("by its UUID"), "{said}");
}
