//! The program against the API server of a simulated cluster.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fmt::Debug;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kube::api::PostParams;
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_simcluster::api::{ApiError, Fault, KINDS, Kind};
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};

use crate::fixture::{Fixture, node, program, read, share, slice};

/// A fake API server with the objects of a small cluster, without controllers.
pub(crate) struct Live {
    pub(crate) cluster: SimCluster,
    pub(crate) directory: TempDir,
}

impl Live {
    pub(crate) async fn new() -> Self {
        Self::with_controllers(false).await
    }

    /// Returns a cluster with or without the controllers of claims, and without a scheduler.
    pub(crate) async fn with_controllers(controllers: bool) -> Self {
        let options = ClusterOptions { controllers, scheduler: None, ..ClusterOptions::default() };
        let live = Self {
            cluster: SimCluster::start(options).await.unwrap(),
            directory: TempDir::new().unwrap(),
        };
        let objects = Fixture::new().snapshot;
        live.create::<Namespace>(None, json!({"metadata": {"name": "team-a"}})).await;
        for class in objects.device_classes {
            live.create::<DeviceClass>(None, json!(class)).await;
        }
        for published in objects.resource_slices {
            let name = published.spec.node_name.clone().unwrap();
            live.create::<Node>(None, node(&name)).await;
            live.create::<ResourceSlice>(None, slice(&name, json!(published.spec.devices))).await;
        }
        let template = json!({"metadata": {"name": "quarter"}, "spec": {"spec": {"devices": {"requests": [share("19Gi", "25")]}}}});
        live.create::<ResourceClaimTemplate>(Some("team-a"), template).await;
        live
    }

    pub(crate) async fn create<K>(&self, namespace: Option<&str>, object: Value)
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

    pub(crate) async fn claim(&self, name: &str, memory: &str) {
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [share(memory, "0")]}}});
        self.create::<ResourceClaim>(Some("team-a"), claim).await;
    }

    pub(crate) async fn pod(&self, name: &str, claim: &str) {
        let pod = json!({"metadata": {"name": name}, "spec": {
            "containers": [{"name": "main", "image": "example/main"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
        }});
        self.create::<Pod>(Some("team-a"), pod).await;
    }

    /// Runs the program in a temporary directory.
    pub(crate) async fn call(&self, arguments: &[&str]) -> Output {
        call(self.cluster.kubeconfig(), self.directory.path(), arguments).await
    }

    /// Returns the standard output as JSON.
    pub(crate) async fn json(&self, arguments: &[&str]) -> Value {
        let output = self.call(&[arguments, &["-o", "json", "-n", "team-a"]].concat()).await;
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", errors(&output)))
    }

    /// Refuses lists of that resource.
    pub(crate) fn refuse(&self, plural: &'static str, answer: fn(&Kind) -> ApiError) {
        let kind = KINDS.iter().find(|kind| kind.plural == plural).unwrap();
        self.cluster.api().set_fault_hook(Some(Arc::new(move |request| {
            let is_it = request.verb == "list" && request.resource == plural;
            if is_it { Fault::Refuse(answer(kind)) } else { Fault::None }
        })));
    }
}

pub(crate) async fn call(kubeconfig: &Path, directory: &Path, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(program());
    command
        .args(arguments)
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .current_dir(directory)
        .stdin(Stdio::null());
    command.output().await.unwrap()
}

pub(crate) fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}
