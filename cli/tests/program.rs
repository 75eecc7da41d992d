//! The program as it is called: exit codes, and errors that say what to do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stage;

use std::process::{Command, Output, Stdio};

use stage::{Stage, device, program, share};
use tempfile::TempDir;

/// A saved snapshot, and calls with it.
struct Saved {
    directory: TempDir,
}

impl Saved {
    fn new() -> Self {
        let mut stage = Stage::new();
        stage.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
        stage.claim("greedy-gpu", share("500Gi", "0"));
        stage.pod("greedy", &["greedy-gpu"]);
        let directory = TempDir::new().unwrap();
        stage.snapshot.save(&directory.path().join("cluster.json.gz")).unwrap();
        Self { directory }
    }

    fn call(&self, arguments: &[&str]) -> Output {
        call(self.directory.path(), arguments)
    }
}

/// Calls the program where there is no kubeconfig.
fn call(directory: &std::path::Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program());
    command
        .args(arguments)
        .current_dir(directory)
        .env_clear()
        .env("HOME", directory)
        .stdin(Stdio::null());
    command.output().unwrap()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn what_waits_or_does_not_fit_ends_with_2_and_what_is_well_with_0() {
    let saved = Saved::new();
    let from = ["--snapshot", "cluster.json.gz", "-n", "team-a"];
    let with = |arguments: &[&str]| saved.call(&[arguments, &from].concat());
    assert_eq!(code(&with(&["explain", "pod", "trainer"])), Some(0));
    assert_eq!(code(&with(&["explain", "pod", "greedy"])), Some(2));
    assert_eq!(code(&with(&["explain", "claim", "greedy-gpu"])), Some(2));
    assert_eq!(code(&with(&["tree"])), Some(0));
    let pod = |memory: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{containers: [], resourceClaims: [{{name: g, resourceClaimName: c}}]}}}}
---
{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: c}}, spec: {{devices: {{requests: [{{name: gpu, exactly:
  {{deviceClassName: gpu.tessera.dev, capacity: {{requests: {{memory: {memory}}}}}}}}}]}}}}}}
"
        )
    };
    std::fs::write(saved.directory.path().join("fits.yaml"), pod("1Gi")).unwrap();
    std::fs::write(saved.directory.path().join("not.yaml"), pod("500Gi")).unwrap();
    assert_eq!(code(&with(&["simulate", "-f", "fits.yaml"])), Some(0));
    assert_eq!(code(&with(&["simulate", "-f", "not.yaml"])), Some(2));
}

#[test]
fn errors_end_with_1_those_of_the_command_line_too() {
    let saved = Saved::new();
    assert_eq!(
        code(&saved.call(&["explain", "pod", "nobody", "--snapshot", "cluster.json.gz"])),
        Some(1)
    );
    assert_eq!(code(&saved.call(&["explain", "node", "x"])), Some(1));
    assert_eq!(code(&saved.call(&["tree", "--snapshot", "none"])), Some(1));
    assert_eq!(code(&saved.call(&["--help"])), Some(0));
    assert_eq!(code(&saved.call(&["--version"])), Some(0));
}

#[test]
fn without_a_kubeconfig_the_ways_out_are_named() {
    let saved = Saved::new();
    let output = saved.call(&["tree"]);
    assert_eq!(code(&output), Some(1));
    for way in ["--kubeconfig FILE", "$KUBECONFIG", "--snapshot FILE"] {
        assert!(errors(&output).contains(way), "{}", errors(&output));
    }
}

#[test]
fn an_api_server_that_is_away_is_named() {
    let saved = Saved::new();
    // A port that was free a moment ago, and that nobody listens on.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let kubeconfig = format!(
        "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}],
          clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{port}'}}}}], users: [{{name: u, user: {{}}}}]}}"
    );
    std::fs::write(saved.directory.path().join("kubeconfig"), kubeconfig).unwrap();
    let output = saved.call(&["tree", "--kubeconfig", "kubeconfig"]);
    assert_eq!(code(&output), Some(1));
    assert!(errors(&output).contains(&format!("http://127.0.0.1:{port}")), "{}", errors(&output));
}

#[test]
fn help_teaches_each_command_with_examples() {
    let saved = Saved::new();
    for command in ["tree", "explain", "simulate", "snapshot"] {
        let help = String::from_utf8(saved.call(&[command, "--help"]).stdout).unwrap();
        assert!(
            help.contains(&format!("kubectl tessera {command}")) && help.contains("Examples:"),
            "{help}"
        );
    }
}

#[test]
fn a_node_that_shows_nothing_is_an_error() {
    let saved = Saved::new();
    let output = saved.call(&["tree", "node-x", "--snapshot", "cluster.json.gz"]);
    assert_eq!(code(&output), Some(1));
    assert!(errors(&output).contains("node `node-x` publishes no GPUs"), "{}", errors(&output));
}
