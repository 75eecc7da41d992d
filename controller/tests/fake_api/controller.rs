//! The controller on a fake API server, and the other clients of the cluster.
#![allow(dead_code, reason = "each test binary uses its own part")]

use k8s_openapi::jiff::Timestamp;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tessera_allocator::PlanSettings;
use tessera_api::names::ManagedDrivers;
use tessera_controller::metrics::Metrics;
use tessera_controller::shell::{Clients, Shell};
use tessera_controller::watch;
use tessera_runtime::supervisor::Supervisor;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::FakeApi;
use super::objects::{bound, class, node, pod, slice};

/// A running controller. It starts at the epoch, the creation time of pods without one, and its
/// clock is tokio's.
pub(crate) struct Controller {
    pub(crate) stop: CancellationToken,
    pub(crate) task: JoinHandle<bool>,
    pub(crate) metrics: Metrics,
    /// Its watches and writers, which end with it.
    tasks: Supervisor,
}

impl Controller {
    pub(crate) fn start(api: &FakeApi) -> Self {
        Self::start_with(api, PlanSettings::default())
    }

    pub(crate) fn start_with(api: &FakeApi, settings: PlanSettings) -> Self {
        Self::start_managing(api, settings, ManagedDrivers::default())
    }

    pub(crate) fn start_managing(
        api: &FakeApi,
        settings: PlanSettings,
        drivers: ManagedDrivers,
    ) -> Self {
        let stop = CancellationToken::new();
        let metrics = Metrics::new(&mut Registry::default());
        let mut tasks = Supervisor::new(stop.clone());
        let (sender, changes) = watch::queue();
        watch::start(&api.client(), &drivers, &metrics, &mut tasks, sender);
        let started = Instant::now();
        let seconds = move || i64::try_from(started.elapsed().as_secs()).unwrap();
        let shell = Shell::new(
            Clients { client: api.client(), evictions: api.client() },
            "test",
            settings,
            metrics.clone(),
            &mut tasks,
        )
        .managing(drivers)
        .with_clock(move || Timestamp::from_second(seconds()).unwrap());
        let task = tokio::spawn(shell.run(changes, stop.clone()));
        Self { stop, task, metrics, tasks }
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        assert!(self.task.await.unwrap(), "each write is answered");
        drop(self.tasks);
    }
}

/// Returns a cluster of one node, `node-a`, with this number of GPUs, and their class.
pub(crate) fn cluster(gpus: usize) -> FakeApi {
    let api = FakeApi::new();
    api.put("deviceclasses", class());
    add_node(&api, "node-a", gpus);
    api
}

pub(crate) fn add_node(api: &FakeApi, name: &str, gpus: usize) {
    api.put("nodes", node(name));
    api.put("resourceslices", slice(name, gpus));
}

pub(crate) fn allocation(api: &FakeApi, claim: &str) -> Option<Value> {
    let object = api.get("resourceclaims", "default", claim)?;
    Some(object["status"]["allocation"].clone()).filter(|a| !a.is_null())
}

/// Returns the node of the claim's first device.
pub(crate) fn place(api: &FakeApi, claim: &str) -> Option<String> {
    Some(allocation(api, claim)?["devices"]["results"][0]["pool"].as_str().unwrap().to_owned())
}

pub(crate) fn event(api: &FakeApi, pod: &str, reason: &str) -> Option<String> {
    let events = api.list("events");
    let event = events.iter().find(|e| e["regarding"]["name"] == pod && e["reason"] == reason)?;
    Some(event["note"].as_str().unwrap().to_owned())
}

/// Adds the pod to `reservedFor` of a claim, as kube-scheduler's PreBind and
/// kube-controller-manager do.
pub(crate) fn reserve(api: &FakeApi, pod_name: &str, claim: &str) {
    let mut object = api.get("resourceclaims", "default", claim).unwrap();
    let entry = json!({"resource": "pods", "name": pod_name, "uid": format!("uid-{pod_name}")});
    match object["status"]["reservedFor"].as_array_mut() {
        Some(list) => list.push(entry),
        None => object["status"]["reservedFor"] = json!([entry]),
    }
    api.put("resourceclaims", object);
}

/// Reserves and binds a pod whose claims are allocated on `node-a`, as kube-scheduler does.
pub(crate) fn reserve_and_bind(api: &FakeApi, pod_name: &str, claims: &[&str]) {
    for name in claims {
        reserve(api, pod_name, name);
    }
    api.put("pods", bound(pod(pod_name, claims), "node-a"));
}

/// Clears a claim's status, as kube-scheduler's PostFilter and kube-controller-manager do. Returns
/// the object.
pub(crate) fn clear(api: &FakeApi, claim: &str) -> Value {
    let mut cleared = api.get("resourceclaims", "default", claim).unwrap();
    cleared.as_object_mut().unwrap().remove("status");
    api.put("resourceclaims", cleared)
}

/// Returns the bodies of the writes of a claim that the fake has served.
pub(crate) fn claim_writes(api: &FakeApi, claim: &str) -> Vec<Value> {
    let path = format!("resourceclaims/{claim}");
    let ours =
        |path_of: &str| path_of.ends_with(&path) || path_of.ends_with(&format!("{path}/status"));
    api.writes().into_iter().filter(|w| ours(&w.path)).map(|w| w.body).collect()
}
