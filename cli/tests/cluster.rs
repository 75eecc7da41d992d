//! The program against an API server: lists, snapshots, and errors about permissions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;
mod live;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fixture::{Fixture, device};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{Patch, PatchParams};
use live::{Live, errors};
use serde_json::{Value, json};
use tessera_cli::cluster::{Cluster, ClusterTarget};
use tessera_simcluster::api::{ApiError, Kind};

fn forbidden(kind: &Kind) -> ApiError {
    ApiError::forbidden(kind, "", "User \"reader\" cannot list resource")
}

#[tokio::test]
async fn cluster_and_its_snapshot_give_the_same_results() {
    let live = Live::new().await;
    live.claim("greedy-gpu", "500Gi").await;
    live.pod("greedy", "greedy-gpu").await;
    let saved = live.call(&["snapshot", "-o", "cluster.json.gz"]).await;
    assert!(saved.status.success(), "{}", errors(&saved));
    let report = errors(&saved);
    assert!(
        report.contains("saved cluster.json.gz: 3 nodes, 5 GPUs, 1 ResourceClaim, 1 pod ("),
        "{report}"
    );
    std::fs::write(
        live.directory.path().join("pods.yaml"),
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [],
          resourceClaims: [{name: gpu, resourceClaimTemplateName: quarter}]}}",
    )
    .unwrap();
    let file = ["--snapshot", "cluster.json.gz"];
    for arguments in
        [&["explain", "pod", "greedy"][..], &["tree"], &["simulate", "-f", "pods.yaml"]]
    {
        let (seen, read) =
            (live.json(arguments).await, live.json(&[arguments, &file].concat()).await);
        assert_eq!(seen, read, "{arguments:?}");
    }
    let explained = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(explained["claims"][0]["reason"], "InsufficientDevices");
    let simulated = live.json(&["simulate", "-f", "pods.yaml"]).await;
    assert_eq!(
        (&simulated["pods"][0]["result"], &simulated["pods"][0]["node"]),
        (&json!("Fits"), &json!("node-a"))
    );
    live.cluster.stop().await;
}

#[tokio::test]
async fn simulation_writes_nothing() {
    let live = Live::new().await;
    std::fs::write(
        live.directory.path().join("pods.yaml"),
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [],
          resourceClaims: [{name: gpu, resourceClaimTemplateName: quarter}]}}",
    )
    .unwrap();
    let before = live.cluster.api().revision();
    live.json(&["simulate", "-f", "pods.yaml"]).await;
    live.json(&["tree"]).await;
    assert_eq!(live.cluster.api().revision(), before);
    live.cluster.stop().await;
}

#[tokio::test]
async fn reads_all_pages() {
    let live = Live::new().await;
    for number in 0..5 {
        live.claim(&format!("claim-{number}"), "1Mi").await;
    }
    let target =
        ClusterTarget { kubeconfig: Some(live.cluster.kubeconfig().to_owned()), context: None };
    let read = Cluster::connect(&target).await.unwrap().with_page(2).read().await.unwrap();
    let names = read.resource_claims.iter().filter_map(|claim| claim.metadata.name.as_deref());
    assert_eq!(names.collect::<Vec<_>>(), ["claim-0", "claim-1", "claim-2", "claim-3", "claim-4"]);
    live.cluster.stop().await;
}

#[tokio::test]
async fn missing_permission_names_the_role() {
    let live = Live::new().await;
    live.refuse("pods", forbidden);
    let output = live.call(&["tree"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("not permitted to list pods"), "{}", errors(&output));
    assert!(errors(&output).contains("tessera-viewer"), "{}", errors(&output));
    live.cluster.stop().await;
}

#[tokio::test]
async fn api_server_without_dra_is_too_old() {
    let live = Live::new().await;
    live.refuse("resourceslices", |_| ApiError::no_such_path());
    let output = live.call(&["tree"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors(&output)
            .contains("does not serve resourceslices.resource.k8s.io in resource.k8s.io/v1"),
        "{}",
        errors(&output)
    );
    assert!(errors(&output).contains("Kubernetes 1.36 or newer"), "{}", errors(&output));
    live.cluster.stop().await;
}

#[tokio::test]
async fn controller_is_unknown_without_permission_for_leases() {
    let live = Live::new().await;
    live.claim("greedy-gpu", "500Gi").await;
    live.pod("greedy", "greedy-gpu").await;
    let absent = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(absent["findings"][0]["code"], "ControllerAbsent");
    let lease = json!({"metadata": {"name": "tessera-controller"}, "spec": {
        "holderIdentity": "controller-0", "leaseDurationSeconds": 15, "renewTime": "2026-01-10T12:00:00.000000Z",
    }});
    live.create::<Lease>(Some("team-a"), lease).await;
    let down = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(down["findings"][0]["code"], "ControllerDown");
    live.refuse("leases", forbidden);
    let unknown = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(unknown["findings"][0]["code"], "ControllerUnknown");
    live.cluster.stop().await;
}

/// Answers with the metrics of a share whose GPU time grows by half a second with each request.
async fn serve_driver_metrics() -> u16 {
    let requests = Arc::new(AtomicU32::new(0));
    let metrics = move || {
        let half_seconds = requests.fetch_add(1, Ordering::Relaxed);
        let share = format!(
            r#"{{namespace="team-a",resourceclaim="trainer-gpu",request="gpu",uuid="{}",share="s"}}"#,
            fixture::uuid("aa")
        );
        let (bytes, seconds) = (3_u64 << 30, 10.0 + f64::from(half_seconds) / 2.0);
        let text = format!(
            "# TYPE tessera_share_memory_used_bytes gauge\n\
             tessera_share_memory_used_bytes{share} {bytes}\n\
             tessera_share_gpu_seconds_total{share} {seconds}\n# EOF\n"
        );
        std::future::ready(text)
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let routes = axum::Router::new().route("/metrics", axum::routing::get(metrics));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    port
}

impl Live {
    async fn allocated(&self, claim: &str, node: &str, gpu: &str) {
        self.claim(claim, "19Gi").await;
        let mut staged = Fixture::new();
        staged.tenant(claim, node, gpu, "19Gi", "25");
        let status = staged.snapshot.resource_claims.pop().unwrap().status;
        let claims: Api<ResourceClaim> = Api::namespaced(self.cluster.client(), "team-a");
        let patch = Patch::Merge(json!({ "status": status }));
        claims.patch_status(claim, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Creates the driver's pod of a node.
    async fn driver(&self, node: &str, port: u16) {
        let pod = json!({
            "metadata": {"name": "driver", "labels": {"app.kubernetes.io/name": "tessera-driver"}},
            "spec": {"nodeName": node, "containers": [{
                "name": "driver", "image": "example/driver",
                "ports": [{"name": "metrics", "containerPort": port}],
            }]},
        });
        self.create::<Pod>(Some("team-a"), pod).await;
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), "team-a");
        let status = json!({"status": {"phase": "Running", "podIP": "127.0.0.1"}});
        pods.patch_status("driver", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }
}

#[tokio::test]
async fn tree_shows_use_read_from_the_drivers() {
    let live = Live::new().await;
    live.allocated("trainer-gpu", "node-a", &device("aa")).await;
    live.allocated("batch-gpu", "node-b", &device("ba")).await;
    live.driver("node-a", serve_driver_metrics().await).await;
    let output = live.call(&["tree", "--usage", "-o", "json"]).await;
    assert!(output.status.success(), "{}", errors(&output));
    assert!(
        errors(&output).contains("no use of node node-b: no running pod"),
        "{}",
        errors(&output)
    );
    let tree: Value = serde_json::from_slice(&output.stdout).unwrap();
    let used = &tree["nodes"][0]["gpus"][0]["shares"][0]["used"];
    assert_eq!(used["memory"], "3Gi", "{tree}");
    // Half a second of GPU time in two seconds, or more on a busy machine.
    assert!((1..=25).contains(&used["cores"].as_u64().unwrap()), "{tree}");
    assert_eq!(tree["nodes"][1]["gpus"][0]["shares"][0]["used"], Value::Null);
    let text = live.call(&["tree", "--usage"]).await;
    let text = String::from_utf8(text.stdout).unwrap();
    let line = text.lines().find(|line| line.contains("trainer-gpu")).unwrap();
    assert!(line.contains("3.0/19.0") && line.contains("/25%"), "{text}");
    live.cluster.stop().await;
}

#[tokio::test]
async fn use_that_cannot_be_read_is_a_warning() {
    let live = Live::new().await;
    live.allocated("trainer-gpu", "node-a", &device("aa")).await;
    // Not the port of the driver: the path is not found there.
    let api_server = live.cluster.api().address().port();
    live.driver("node-a", api_server).await;
    let output = live.call(&["tree", "--usage"]).await;
    assert!(output.status.success(), "{}", errors(&output));
    let warning = "no use of node node-a: cannot read the metrics of pod team-a/driver";
    assert!(errors(&output).contains(warning), "{}", errors(&output));
    live.cluster.stop().await;
}

#[tokio::test]
async fn use_is_not_read_from_a_snapshot() {
    let live = Live::new().await;
    let output = live.call(&["tree", "--usage", "--snapshot", "cluster.json.gz"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("cannot be used with"), "{}", errors(&output));
    live.cluster.stop().await;
}
