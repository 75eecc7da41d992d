//! The API server through kubectl. Every test is skipped, with a report on stderr, if kubectl is
//! not installed.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tessera_simcluster::api::{ApiOptions, ApiServer, User};
use tessera_test_support::{report_skip, test_name};

struct Kubectl {
    _api: ApiServer,
    directory: tempfile::TempDir,
    program: PathBuf,
}

impl Kubectl {
    async fn start(test: &str) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program =
            std::env::split_paths(&path).map(|dir| dir.join("kubectl")).find(|file| file.is_file());
        let Some(program) = program else {
            report_skip(test, "kubectl is not in PATH");
            return None;
        };
        let api = ApiServer::start(ApiOptions::default()).await.unwrap();
        let directory = tempfile::tempdir().unwrap();
        api.write_kubeconfig(&User::admin(), &directory.path().join("config")).unwrap();
        Some(Self { _api: api, directory, program })
    }

    /// Runs kubectl and returns its output, and true if it succeeded.
    async fn run(&self, arguments: &[&str], input: &str) -> (String, bool) {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("KUBECONFIG", self.directory.path().join("config"))
            .env("HOME", self.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let input = input.to_owned();
        let output = tokio::task::spawn_blocking(move || {
            let mut child = command.spawn().unwrap();
            child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
            child.wait_with_output().unwrap()
        });
        let output = output.await.unwrap();
        let text =
            [output.stdout, output.stderr].map(|part| String::from_utf8(part).unwrap()).concat();
        (text, output.status.success())
    }

    async fn ok(&self, arguments: &[&str], input: &str) -> String {
        let (output, success) = self.run(arguments, input).await;
        assert!(success, "kubectl {arguments:?}: {output}");
        output
    }
}

const MANIFEST: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: demo}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: gpu, namespace: demo}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.tessera.dev}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: demo}
spec:
  resourceClaims: [{name: gpu, resourceClaimTemplateName: gpu}]
  containers:
  - {name: main, image: 'tessera/probe:e2e', resources: {claims: [{name: gpu}], requests: {cpu: '1'}}}
";

#[tokio::test(flavor = "multi_thread")]
async fn apply_get_and_delete_work() {
    let Some(kubectl) = Kubectl::start(test_name!()).await else { return };
    let output = kubectl.ok(&["apply", "-f", "-"], MANIFEST).await;
    assert!(output.contains("resourceclaimtemplate.resource.k8s.io/gpu created"), "{output}");
    let output = kubectl.ok(&["apply", "-f", "-"], MANIFEST).await;
    assert!(output.contains("pod/p unchanged"), "{output}");
    let table = kubectl.ok(&["get", "pods", "-n", "demo"], "").await;
    assert!(
        table.starts_with("NAME   READY   STATUS    RESTARTS")
            && table.contains("p      0/1     Pending"),
        "{table}"
    );
    let everywhere = kubectl.ok(&["get", "pods", "-A"], "").await;
    assert!(everywhere.contains("demo"), "{everywhere}");
    let phase =
        kubectl.ok(&["get", "pod", "p", "-n", "demo", "-o", "jsonpath={.status.phase}"], "").await;
    assert_eq!(phase, "Pending");
    kubectl.ok(&["label", "pod", "p", "-n", "demo", "a=b"], "").await;
    kubectl
        .ok(
            &[
                "wait",
                "pod",
                "p",
                "-n",
                "demo",
                "--for=jsonpath={.status.phase}=Pending",
                "--timeout=300s",
            ],
            "",
        )
        .await;
    let output = kubectl.ok(&["describe", "pod", "p", "-n", "demo"], "").await;
    assert!(output.contains("a=b"), "{output}");
    kubectl.ok(&["delete", "pod", "p", "-n", "demo"], "").await;
    let (output, success) = kubectl.run(&["get", "pod", "p", "-n", "demo"], "").await;
    assert!(
        !success && output.contains("Error from server (NotFound): pods \"p\" not found"),
        "{output}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_refused_by_name() {
    let Some(kubectl) = Kubectl::start(test_name!()).await else { return };
    let manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndota: {a: b}\n";
    let (output, success) = kubectl.run(&["apply", "-f", "-"], manifest).await;
    assert!(
        !success && output.contains("strict decoding error: unknown field \"dota\""),
        "{output}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn server_side_apply_and_patches_work() {
    let Some(kubectl) = Kubectl::start(test_name!()).await else { return };
    let manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: b}\n";
    kubectl.ok(&["apply", "--server-side", "-f", "-"], manifest).await;
    kubectl
        .ok(
            &[
                "patch",
                "cm",
                "a",
                "--type=json",
                "-p",
                r#"[{"op":"add","path":"/data/c","value":"d"}]"#,
            ],
            "",
        )
        .await;
    kubectl.ok(&["patch", "cm", "a", "--type=merge", "-p", r#"{"data":{"a":null}}"#], "").await;
    let data = kubectl.ok(&["get", "cm", "a", "-o", "jsonpath={.data}"], "").await;
    assert_eq!(data, r#"{"c":"d"}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn api_resources_and_version_are_served() {
    let Some(kubectl) = Kubectl::start(test_name!()).await else { return };
    let output = kubectl.ok(&["api-resources"], "").await;
    assert!(output.contains("resourceslices") && output.contains("resource.k8s.io/v1"), "{output}");
    assert!(kubectl.ok(&["version"], "").await.contains("Server Version: v1.37.1"));
}
