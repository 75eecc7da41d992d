//! Exit codes and errors of the program.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use std::process::{Command, Output, Stdio};

use fixture::{Fixture, device, program, share};
use tempfile::TempDir;

/// A directory with a saved snapshot.
struct Saved {
    directory: TempDir,
}

impl Saved {
    fn new() -> Self {
        let mut fixture = Fixture::new();
        fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
        fixture.pending("greedy", share("500Gi", "0"));
        let directory = TempDir::new().unwrap();
        fixture.snapshot.save(&directory.path().join("cluster.json.gz")).unwrap();
        Self { directory }
    }

    fn call(&self, arguments: &[&str]) -> Output {
        call(self.directory.path(), arguments)
    }
}

/// Runs the program without a kubeconfig.
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
fn exit_code_is_2_for_pending_and_0_for_success() {
    let saved = Saved::new();
    let from = ["--snapshot", "cluster.json.gz", "-n", "team-a"];
    let with = |arguments: &[&str]| saved.call(&[arguments, &from].concat());
    assert_eq!(code(&with(&["explain", "pod", "trainer"])), Some(0));
    assert_eq!(code(&with(&["explain", "pod", "greedy"])), Some(2));
    assert_eq!(code(&with(&["explain", "claim", "greedy-gpu"])), Some(2));
    assert_eq!(code(&with(&["explain", "greedy/greedy-gpu"])), Some(2));
    assert_eq!(code(&with(&["explain", "pod/trainer"])), Some(0));
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
fn exit_code_of_errors_is_1() {
    let saved = Saved::new();
    assert_eq!(
        code(&saved.call(&["explain", "pod", "unknown", "--snapshot", "cluster.json.gz"])),
        Some(1)
    );
    assert_eq!(code(&saved.call(&["explain", "node", "x"])), Some(1));
    assert_eq!(code(&saved.call(&["tree", "--snapshot", "none"])), Some(1));
    assert_eq!(code(&saved.call(&["--help"])), Some(0));
    assert_eq!(code(&saved.call(&["--version"])), Some(0));
}

#[test]
fn missing_kubeconfig_is_reported_once_with_alternatives() {
    let saved = Saved::new();
    let output = saved.call(&["tree"]);
    assert_eq!(code(&output), Some(1));
    let alternatives = "(use --kubeconfig, $KUBECONFIG or --snapshot)";
    assert!(errors(&output).contains(alternatives), "{}", errors(&output));
    let output = saved.call(&["tree", "--kubeconfig", "/nonexistent"]);
    assert_eq!(
        errors(&output),
        format!(
            "error: cannot load kubeconfig \"/nonexistent\": no such file or directory \
             {alternatives}\n"
        )
    );
}

#[test]
fn unreachable_api_server_is_named() {
    let saved = Saved::new();
    // A port without a listener.
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
fn help_has_examples_and_fits_the_line() {
    let saved = Saved::new();
    for command in ["tree", "explain", "simulate", "snapshot"] {
        let help = String::from_utf8(saved.call(&[command, "--help"]).stdout).unwrap();
        assert!(
            help.contains(&format!("kubectl tessera {command}")) && help.contains("Examples:"),
            "{help}"
        );
        // Hard-wrapped text would leave stumps: lines that end early within a sentence.
        let long = help.lines().find(|line| line.chars().count() > 100);
        assert_eq!(long, None, "{help}");
    }
}

#[test]
fn unknown_node_is_an_error() {
    let saved = Saved::new();
    let output = saved.call(&["tree", "node-x", "--snapshot", "cluster.json.gz"]);
    assert_eq!(code(&output), Some(1));
    assert!(errors(&output).contains("node `node-x` publishes no GPUs"), "{}", errors(&output));
}

#[test]
fn a_claim_cannot_control_the_terminal() {
    let mut fixture = Fixture::new();
    let mut request = share("1Gi", "0");
    let hostile = "'\u{1b}]0;owned\u{7}\u{9b}31m' == ''\n\nPod team-a/greedy (Running): fine";
    request["exactly"]["selectors"] = serde_json::json!([{"cel": {"expression": hostile}}]);
    fixture.pending("greedy", request);
    let directory = TempDir::new().unwrap();
    fixture.snapshot.save(&directory.path().join("cluster.json.gz")).unwrap();
    for format in ["table", "json", "yaml"] {
        let arguments = ["explain", "pod", "greedy", "-n", "team-a", "--snapshot"];
        let output =
            call(directory.path(), &[&arguments[..], &["cluster.json.gz", "-o", format]].concat());
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(text.contains("owned"), "{text}");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{format}: {text:?}");
        assert!(!text.contains("\nPod team-a/greedy (Running)"), "{text}");
    }
}
