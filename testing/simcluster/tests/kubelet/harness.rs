//! Harness: an API server without scheduler and controllers, one node, and objects in their final
//! state.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, LogParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tessera_simcluster::api::User;
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};
use tessera_simcluster::node::container::{Image, ImageStore, Runtime, RuntimeOptions};
use tessera_simcluster::node::kubelet::{Kubelet, KubeletOptions};
use tessera_simcluster::node::namespaces;
use tessera_test_support::report_skip;

use super::plugin::{DRIVER, Plugin, Script};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tessera-simcluster");
pub(crate) const NODE: &str = "node-a";

/// Time limit far above any step, so that a hanging test fails with its place.
const TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct Harness {
    plugin: Option<Plugin>,
    directory: tempfile::TempDir,
    cluster: SimCluster,
    pub(crate) client: Client,
    pub(crate) runtime: Runtime,
    pub(crate) script: Script,
}

impl Harness {
    /// Returns `None` if the machine allows no namespaces. The skip is reported on standard error.
    pub(crate) async fn set_up(test: &str) -> Option<Self> {
        if let Err(reason) = namespaces::check_support(PROGRAM.as_ref()) {
            report_skip(test, format!("namespaces are unavailable: {reason}"));
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let cdi = directory.path().join("cdi");
        std::fs::create_dir(&cdi).unwrap();
        let options =
            ClusterOptions { controllers: false, scheduler: None, ..ClusterOptions::default() };
        let cluster = SimCluster::start(options).await.unwrap();
        let mut images = ImageStore::default();
        images.insert("tools", Image::of_programs(&["/bin/sh", "/bin/cat", "/bin/sleep"]).unwrap());
        let runtime = Runtime::new(RuntimeOptions {
            directory: directory.path().join("containers"),
            cdi_directories: vec![cdi.clone()],
            images,
            init_program: PROGRAM.into(),
        });
        let client = cluster.client();
        Some(Self { plugin: None, directory, cluster, client, runtime, script: Script::new(cdi) })
    }

    /// Sets up the harness with a running driver, and a kubelet that has registered it.
    pub(crate) async fn with_driver(test: &str) -> Option<(Self, Kubelet)> {
        let mut harness = Self::set_up(test).await?;
        let plugin = Plugin::serve(&harness.root(), &harness.script);
        let kubelet = harness.register(plugin).await;
        Some((harness, kubelet))
    }

    /// Starts a kubelet and waits until it has registered the driver.
    pub(crate) async fn register(&mut self, plugin: Plugin) -> Kubelet {
        self.plugin = Some(plugin);
        let kubelet = self.kubelet().await;
        kubelet.registered(DRIVER).await;
        kubelet
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.directory.path().join("kubelet")
    }

    pub(crate) async fn kubelet(&self) -> Kubelet {
        self.kubelet_with(Duration::from_secs(30)).await
    }

    pub(crate) async fn kubelet_with(&self, slice_wipe_delay: Duration) -> Kubelet {
        let allocatable = [("cpu", "8"), ("memory", "16Gi"), ("pods", "110")];
        Kubelet::start(KubeletOptions {
            node_name: NODE.into(),
            labels: BTreeMap::new(),
            allocatable: allocatable
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            root: self.root(),
            client: self.cluster.api().client(&User::kubelet(NODE)),
            runtime: self.runtime.clone(),
            sync_period: Duration::from_millis(100),
            slice_wipe_delay,
        })
        .await
        .unwrap()
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Creates a claim as the allocator leaves it.
    pub(crate) async fn claim(&self, name: &str) {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), "default");
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
        });
        api.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
        let results =
            [json!({"request": "gpu", "driver": DRIVER, "pool": "pool", "device": "device"})];
        let status = json!({"status": {"allocation": {"devices": {"results": results}}}});
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    /// Creates a bound pod that uses these claims, and reserves each for it.
    pub(crate) async fn pod(&self, name: &str, claims: &[&str], spec: Value) -> Pod {
        let pod = self.pod_without_reservation(name, claims, spec).await;
        for claim in claims {
            self.reserve(claim, &pod).await;
        }
        pod
    }

    /// Creates a bound pod of one container that runs a script and uses these claims.
    pub(crate) async fn run(&self, name: &str, script: &str, claims: &[&str]) -> Pod {
        self.pod(name, claims, json!({"containers": [container(script, claims)]})).await
    }

    pub(crate) async fn pod_without_reservation(
        &self,
        name: &str,
        claims: &[&str],
        spec: Value,
    ) -> Pod {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "nodeName": NODE,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "resourceClaims": claims.iter().map(|c| json!({"name": c, "resourceClaimName": c})).collect::<Vec<_>>(),
            },
        });
        merge(&mut pod["spec"], spec);
        let parameters = PostParams::default();
        self.pods().create(&parameters, &serde_json::from_value(pod).unwrap()).await.unwrap()
    }

    pub(crate) async fn reserve(&self, claim: &str, pod: &Pod) {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), "default");
        let mut reserved =
            api.get(claim).await.unwrap().status.and_then(|s| s.reserved_for).unwrap_or_default();
        let consumer = json!({"resource": "pods", "name": pod.name_any(), "uid": pod.uid()});
        reserved.push(serde_json::from_value(consumer).unwrap());
        let patch = json!({"status": {"reservedFor": reserved}});
        api.patch_status(claim, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Waits until the pod has this phase.
    pub(crate) async fn phase(&self, name: &str, phase: &str) -> Pod {
        let is = |pod: Option<&Pod>| {
            pod.and_then(|pod| pod.status.as_ref()).and_then(|status| status.phase.as_deref())
                == Some(phase)
        };
        self.until(name, is).await.unwrap()
    }

    pub(crate) async fn until(
        &self,
        name: &str,
        condition: impl Fn(Option<&Pod>) -> bool,
    ) -> Option<Pod> {
        let waiting = await_condition(self.pods(), name, condition);
        tokio::time::timeout(TIMEOUT, waiting)
            .await
            .unwrap_or_else(|_| panic!("timed out waiting for {name}"))
            .unwrap()
    }

    /// Waits until the status of the pod's first container is accepted.
    pub(crate) async fn container_status(&self, pod: &str, accept: impl Fn(&Value) -> bool) {
        self.until(pod, |pod| {
            accept(&serde_json::to_value(pod).unwrap()["status"]["containerStatuses"][0])
        })
        .await;
    }

    pub(crate) async fn gone(&self, name: &str) {
        self.until(name, |pod| pod.is_none()).await;
    }

    pub(crate) async fn delete(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }

    pub(crate) async fn log(&self, pod: &str) -> String {
        self.pods().logs(pod, &LogParams::default()).await.unwrap()
    }

    pub(crate) async fn events(&self, reason: &str) -> Vec<Event> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), "default");
        api.list(&ListParams::default().fields(&format!("reason={reason}"))).await.unwrap().items
    }

    /// Waits for an event with this reason and returns its message.
    pub(crate) async fn event(&self, reason: &str) -> String {
        let waiting = async {
            loop {
                if let Some(event) = self.events(reason).await.into_iter().next() {
                    return event.message.unwrap_or_default();
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(TIMEOUT, waiting).await.unwrap_or_else(|_| panic!("no event {reason}"))
    }
}

/// Returns a container that runs a script and uses these claims.
pub(crate) fn container(script: &str, claims: &[&str]) -> Value {
    let claims: Vec<_> = claims.iter().map(|claim| json!({"name": claim})).collect();
    json!({"name": "c", "image": "tools", "command": ["sh", "-c", script], "resources": {"claims": claims}})
}

/// Script that prints the name of the container's claim.
pub(crate) const ECHO: &str = "echo $CLAIM";

/// Script that runs until SIGTERM.
pub(crate) const WAIT: &str = "trap 'exit 0' TERM; echo claim=$CLAIM; while :; do sleep 0.01; done";

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}
