//! The program against an API server: what it reads, and what it says when it may not.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stage;

use std::fmt::Debug;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kube::api::PostParams;
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stage::{Stage, node, program, read, share, slice};
use tempfile::TempDir;
use tessera_cli::cluster::{Cluster, Target};
use tessera_simcluster::api::{ApiError, Fault, KINDS, Kind};
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};

/// An API server with the objects of a small cluster, without anybody who would change them.
struct Live {
    cluster: SimCluster,
    directory: TempDir,
}

impl Live {
    async fn new() -> Self {
        let options =
            ClusterOptions { controllers: false, scheduler: None, ..ClusterOptions::default() };
        let live = Self {
            cluster: SimCluster::start(options).await.unwrap(),
            directory: TempDir::new().unwrap(),
        };
        let staged = Stage::new().snapshot;
        live.create::<Namespace>(None, json!({"metadata": {"name": "team-a"}})).await;
        for class in staged.device_classes {
            live.create::<DeviceClass>(None, json!(class)).await;
        }
        for published in staged.resource_slices {
            let name = published.spec.node_name.clone().unwrap();
            live.create::<Node>(None, node(&name)).await;
            live.create::<ResourceSlice>(None, slice(&name, json!(published.spec.devices))).await;
        }
        let template = json!({"metadata": {"name": "quarter"}, "spec": {"spec": {"devices": {"requests": [share("19Gi", "25")]}}}});
        live.create::<ResourceClaimTemplate>(Some("team-a"), template).await;
        live
    }

    async fn create<K>(&self, namespace: Option<&str>, object: Value)
    where
        K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + Debug,
    {
        let resource = kube::api::ApiResource::erase::<K>(&());
        let client = self.cluster.client();
        let api: Api<kube::api::DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        };
        let mut object = object;
        object["apiVersion"] = resource.api_version.clone().into();
        object["kind"] = resource.kind.clone().into();
        api.create(&PostParams::default(), &read(object)).await.unwrap();
    }

    async fn claim(&self, name: &str, memory: &str) {
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [share(memory, "0")]}}});
        self.create::<ResourceClaim>(Some("team-a"), claim).await;
    }

    async fn pod(&self, name: &str, claim: &str) {
        let pod = json!({"metadata": {"name": name}, "spec": {
            "containers": [{"name": "main", "image": "example/main"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
        }});
        self.create::<Pod>(Some("team-a"), pod).await;
    }

    /// Calls the program in a directory of the test's own.
    async fn call(&self, arguments: &[&str]) -> Output {
        call(self.cluster.kubeconfig(), self.directory.path(), arguments).await
    }

    /// What it writes to the standard output as JSON.
    async fn json(&self, arguments: &[&str]) -> Value {
        let output = self.call(&[arguments, &["-o", "json", "-n", "team-a"]].concat()).await;
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", errors(&output)))
    }

    /// Lists of that resource are refused.
    fn refuse(&self, plural: &'static str, answer: fn(&Kind) -> ApiError) {
        let kind = KINDS.iter().find(|kind| kind.plural == plural).unwrap();
        self.cluster.api().set_fault_hook(Some(Arc::new(move |request| {
            let is_it = request.verb == "list" && request.resource == plural;
            if is_it { Fault::Refuse(answer(kind)) } else { Fault::None }
        })));
    }
}

async fn call(kubeconfig: &Path, directory: &Path, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(program());
    command
        .args(arguments)
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .current_dir(directory)
        .stdin(Stdio::null());
    command.output().await.unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn forbidden(kind: &Kind) -> ApiError {
    ApiError::forbidden(kind, "", "User \"reader\" cannot list resource")
}

#[tokio::test]
async fn a_cluster_and_its_snapshot_say_the_same() {
    let live = Live::new().await;
    live.claim("greedy-gpu", "500Gi").await;
    live.pod("greedy", "greedy-gpu").await;
    let saved = live.call(&["snapshot", "-o", "cluster.json.gz"]).await;
    assert!(saved.status.success(), "{}", errors(&saved));
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
async fn a_simulation_writes_nothing() {
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
async fn more_objects_than_a_page_holds_are_all_read() {
    let live = Live::new().await;
    for number in 0..5 {
        live.claim(&format!("claim-{number}"), "1Mi").await;
    }
    let target = Target { kubeconfig: Some(live.cluster.kubeconfig().to_owned()), context: None };
    let read = Cluster::connect(&target).await.unwrap().with_page(2).read().await.unwrap();
    let names = read.resource_claims.iter().filter_map(|claim| claim.metadata.name.as_deref());
    assert_eq!(names.collect::<Vec<_>>(), ["claim-0", "claim-1", "claim-2", "claim-3", "claim-4"]);
    live.cluster.stop().await;
}

#[tokio::test]
async fn what_may_not_be_listed_is_named_with_the_role_that_allows_it() {
    let live = Live::new().await;
    live.refuse("pods", forbidden);
    let output = live.call(&["tree"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("not permitted to list pods"), "{}", errors(&output));
    assert!(errors(&output).contains("tessera-viewer"), "{}", errors(&output));
    live.cluster.stop().await;
}

#[tokio::test]
async fn an_api_server_without_the_resources_of_dra_is_called_too_old() {
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
async fn without_the_right_to_see_leases_it_is_said_that_the_controller_is_unknown() {
    let live = Live::new().await;
    live.claim("greedy-gpu", "500Gi").await;
    live.pod("greedy", "greedy-gpu").await;
    let absent = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(absent["findings"][0]["code"], "ControllerAbsent");
    let lease = json!({"metadata": {"name": "tessera-controller"}, "spec": {
        "holderIdentity": "somebody", "leaseDurationSeconds": 15, "renewTime": "2026-01-10T12:00:00.000000Z",
    }});
    live.create::<Lease>(Some("team-a"), lease).await;
    let down = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(down["findings"][0]["code"], "ControllerDown");
    live.refuse("leases", forbidden);
    let unknown = live.json(&["explain", "pod", "greedy"]).await;
    assert_eq!(unknown["findings"][0]["code"], "ControllerUnknown");
    live.cluster.stop().await;
}
