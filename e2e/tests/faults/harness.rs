//! Harness of fault tests: a simulated cluster, controller processes, and an observer of all
//! claims.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceRequestAllocationResult, ResourceClaim, ResourceSlice,
};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_api::names::DELETE_PROTECTION_FINALIZER;
use tessera_e2e::inventory::GpuInventory;
use tessera_e2e::leftovers::device_results;
use tessera_e2e::trials::device_usage::DeviceUsage;
use tessera_e2e::wait::{self, CheckResult};
use tessera_simcluster::api::{ApiOptions, ApiServer, Fault, RequestInfo, User};
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Namespace of the controller and its Lease.
const NAMESPACE: &str = "tessera-system";

/// Namespace of a tenant; other pods are in `default`.
const TENANT: &str = "tenant";

/// Time limit, longer than any operation on a loaded machine, including the expiry of a lease.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// A request of a controller with its time of arrival.
pub(crate) type TimedRequest = (Instant, RequestInfo);

/// Chooses the fault for each request of a controller.
type FaultFn = Box<dyn Fn(&RequestInfo) -> Fault + Send + Sync>;

pub(crate) struct FaultHarness {
    directory: TempDir,
    cluster: SimCluster,
    /// The administrator's client, without faults.
    pub(crate) client: Client,
    seen: watch::Sender<Vec<TimedRequest>>,
    observer: JoinHandle<()>,
    history: watch::Receiver<ClaimHistory>,
}

/// History of all claims.
#[derive(Clone, Default)]
struct ClaimHistory {
    /// Claim and ID of each share that was ever allocated.
    shares: Vec<(String, String)>,
    /// Current state of each claim.
    claims: BTreeMap<String, ClaimState>,
    /// Changes of claims in order. A repeated write without a change is not recorded.
    changes: Vec<(String, Change)>,
    /// Highest resource version of a claim.
    version: u64,
    /// Violated invariant. The observer stops after it.
    violation: Option<String>,
}

/// A change of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The finalizer was added.
    Protected,
    /// An allocation was added.
    Allocated,
    /// The allocation was removed.
    Released,
}

#[derive(Clone, Copy, Default)]
struct ClaimState {
    is_protected: bool,
    is_allocated: bool,
}

impl ClaimHistory {
    fn record(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        self.record_changes(claim);
        for (of, share) in shares_in(claim) {
            match self.shares.iter().find(|(_, known)| *known == share) {
                Some((by, _)) if *by == of => {}
                Some((by, _)) => {
                    return Err(format!("share {share} was allocated to claims {by} and {of}"));
                }
                None => self.shares.push((of, share)),
            }
        }
        self.version = self.version.max(version_of(claim));
        Ok(())
    }

    fn record_changes(&mut self, claim: &ResourceClaim) {
        let name = claim.name_any();
        let now = ClaimState {
            is_protected: claim.finalizers().iter().any(|one| one == DELETE_PROTECTION_FINALIZER),
            is_allocated: claim.status.as_ref().is_some_and(|status| status.allocation.is_some()),
        };
        let before = self.claims.insert(name.clone(), now).unwrap_or_default();
        let changes = [
            (now.is_protected && !before.is_protected, Change::Protected),
            (now.is_allocated && !before.is_allocated, Change::Allocated),
            (before.is_allocated && !now.is_allocated, Change::Released),
        ];
        let changed = changes.into_iter().filter(|(is_change, _)| *is_change);
        self.changes.extend(changed.map(|(_, change)| (name.clone(), change)));
    }
}

/// Returns true if the request is from a controller.
pub(crate) fn is_controller(request: &RequestInfo) -> bool {
    request.user.name.ends_with(":tessera-controller")
}

impl FaultHarness {
    /// Starts a cluster with one node per element, each with that many GPUs of 80 GiB.
    pub(crate) async fn with_nodes(gpus: &[usize]) -> Self {
        let mut api = ApiOptions::default();
        api.namespaces.extend([NAMESPACE, TENANT].map(str::to_owned));
        let cluster =
            SimCluster::start(ClusterOptions { api, ..ClusterOptions::default() }).await.unwrap();
        let client = cluster.api().observer();
        create::<DeviceClass>(&Api::all(client.clone()), class()).await;
        create::<Lease>(&Api::namespaced(client.clone(), NAMESPACE), lease()).await;
        for (number, gpus) in gpus.iter().enumerate() {
            create::<Node>(&Api::all(client.clone()), node(&format!("node-{number}"))).await;
            create::<ResourceSlice>(
                &Api::all(client.clone()),
                slice(&format!("node-{number}"), *gpus),
            )
            .await;
        }
        let (sender, history) = watch::channel(ClaimHistory::default());
        let usage = DeviceUsage::new(&GpuInventory::read(&client).await.unwrap());
        let observer = tokio::spawn(observe_claims(client.clone(), usage, sender));
        let harness = Self {
            directory: TempDir::with_prefix("tfaults-").unwrap(),
            cluster,
            client,
            seen: watch::Sender::default(),
            observer,
            history,
        };
        harness.set_faults(|_| Fault::None);
        harness
    }

    pub(crate) fn api(&self) -> &ApiServer {
        self.cluster.api()
    }

    /// Sets the function that chooses the fault for each request of a controller.
    pub(crate) fn set_faults(
        &self,
        decide: impl Fn(&RequestInfo) -> Fault + Send + Sync + 'static,
    ) {
        let (seen, decide): (_, FaultFn) = (self.seen.clone(), Box::new(decide));
        self.api().set_fault_hook(Some(Arc::new(move |request| {
            if !is_controller(request) {
                return Fault::None;
            }
            seen.send_modify(|seen| seen.push((Instant::now(), request.clone())));
            decide(request)
        })));
    }

    /// Returns the controllers' requests so far that match the filter.
    pub(crate) fn requests(&self, filter: impl Fn(&RequestInfo) -> bool) -> Vec<TimedRequest> {
        self.seen.borrow().iter().filter(|(_, request)| filter(request)).cloned().collect()
    }

    /// Waits until controllers have sent that many requests that match the filter.
    pub(crate) async fn wait_requests(&self, count: usize, filter: impl Fn(&RequestInfo) -> bool) {
        let mut seen = self.seen.subscribe();
        let enough = |seen: &Vec<TimedRequest>| {
            seen.iter().filter(|(_, request)| filter(request)).count() >= count
        };
        let waiting = tokio::time::timeout(TIMEOUT, seen.wait_for(enough)).await;
        let _ = waiting.expect("the controller did not send the requests").unwrap();
    }

    /// Starts a controller, with leader election if `is_electing` is true.
    pub(crate) fn controller(&self, identity: &str, is_electing: bool) -> Controller {
        let user = User::service_account(NAMESPACE, "tessera-controller");
        let kubeconfig = self.cluster.kubeconfig_for(&user).unwrap();
        let log = self.directory.path().join(format!("{identity}.log"));
        let clock = self.directory.path().join(format!("{identity}.clock"));
        std::fs::write(&clock, 0_i64.to_ne_bytes()).unwrap();
        let output = std::fs::File::create(&log).unwrap();
        let child = Command::new(built("tessera-controller"))
            .args(["--namespace", NAMESPACE, "--identity", identity, "--metrics-address", ""])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--leader-elect", if is_electing { "true" } else { "false" }])
            .env("RUST_LOG", "info")
            .env("LD_PRELOAD", built("libtessera_fake_clock.so"))
            .env("TESSERA_FAKE_CLOCK", &clock)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Controller { child, log, clock }
    }

    /// Creates a claim of that much memory, and a pod of the same name that uses it.
    pub(crate) async fn pod(&self, name: &str, memory: &str) {
        self.create_with_claim(pod(name), name, memory).await;
    }

    async fn create_with_claim(&self, pod: Value, name: &str, memory: &str) {
        create::<ResourceClaim>(&self.claims(), claim(name, memory)).await;
        create::<Pod>(&self.pods(), pod).await;
    }

    pub(crate) fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Returns the API of the tenant's objects.
    pub(crate) fn tenant_api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), TENANT)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Waits until the pods are bound; their claims are allocated and reserved then.
    pub(crate) async fn wait_bound(&self, names: &[String]) {
        let check = |pods: &[Pod]| {
            let is_bound =
                |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            let bound: Vec<_> =
                pods.iter().filter(is_bound).filter_map(|p| p.metadata.name.clone()).collect();
            let left: Vec<_> = names.iter().filter(|name| !bound.contains(name)).cloned().collect();
            CheckResult::done_if(left.is_empty(), || format!("not bound: {left:?}"))
        };
        wait::until(self.pods(), Default::default(), "pods to be bound", TIMEOUT, check)
            .await
            .unwrap();
    }

    /// Waits for an event with that reason about the pod.
    pub(crate) async fn wait_event(&self, pod: &str, reason: &str) {
        let selector = watcher::Config::default()
            .fields(&format!("involvedObject.name={pod},reason={reason}"));
        let check = |events: &[Event]| match events {
            [] => CheckResult::Pending("no such event".to_owned()),
            _ => CheckResult::Done(()),
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        wait::until(events, selector, &format!("event {reason} on {pod}"), TIMEOUT, check)
            .await
            .unwrap();
    }

    pub(crate) async fn is_allocated(&self, name: &str) -> bool {
        let claim = self.claims().get(name).await.unwrap();
        claim.status.is_some_and(|status| status.allocation.is_some())
    }

    /// Creates a claim and a pod with a higher priority than all others that evicts none of them.
    pub(crate) async fn urgent_pod(&self, name: &str, memory: &str) {
        let mut pod = pod(name);
        pod["spec"]["priority"] = 1000.into();
        pod["spec"]["preemptionPolicy"] = "Never".into();
        self.create_with_claim(pod, name, memory).await;
    }

    /// Creates a pod for a scheduler that does not exist, and waits until its claim is allocated.
    pub(crate) async fn unbindable(&self, name: &str, memory: &str) {
        let mut pod = pod(name);
        pod["spec"]["schedulerName"] = "none".into();
        self.create_with_claim(pod, name, memory).await;
        self.wait_allocated(name).await;
    }

    /// Waits until the claim is allocated.
    pub(crate) async fn wait_allocated(&self, name: &str) {
        self.wait_claim(name, "allocated", true).await;
    }

    /// Waits until the claim is not allocated.
    pub(crate) async fn wait_released(&self, name: &str) {
        self.wait_claim(name, "released", false).await;
    }

    async fn wait_claim(&self, name: &str, what: &str, allocated: bool) {
        let check = |claim: Option<&ResourceClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            CheckResult::done_if(
                status.is_some_and(|status| status.allocation.is_some()) == allocated,
                || json!(status).to_string(),
            )
        };
        let what = format!("claim {name} to be {what}");
        wait::until_one(self.claims(), name, &what, TIMEOUT, check).await.unwrap();
    }

    /// Deletes a pod without a grace period, because no kubelet runs.
    pub(crate) async fn delete_now(&self, pod: &str) {
        self.pods().delete(pod, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// Returns the number of events with that reason.
    pub(crate) async fn event_count(&self, reason: &str) -> usize {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let of_reason = ListParams::default().fields(&format!("reason={reason}"));
        events.list(&of_reason).await.unwrap().items.len()
    }

    pub(crate) fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Waits until the Lease is held by `holder`.
    pub(crate) async fn wait_leader(&self, holder: &str) -> Lease {
        let check = |lease: Option<&Lease>| {
            let spec = lease.and_then(|lease| lease.spec.as_ref());
            match spec.and_then(|spec| spec.holder_identity.as_deref()) {
                Some(found) if found == holder => CheckResult::Done(lease.cloned().unwrap()),
                other => CheckResult::Pending(format!("{other:?}")),
            }
        };
        let what = format!("the Lease to be held by {holder}");
        wait::until_one(self.leases(), "tessera-controller", &what, TIMEOUT, check).await.unwrap()
    }

    /// Returns the number of shares that were ever allocated to the claim.
    pub(crate) async fn shares_of(&self, claim: &str) -> usize {
        self.wait_history().await.shares.iter().filter(|(of, _)| of == claim).count()
    }

    /// Returns all changes of the claim so far.
    pub(crate) async fn changes_of(&self, claim: &str) -> Vec<Change> {
        let seen = self.wait_history().await;
        seen.changes.iter().filter(|(of, _)| of == claim).map(|(_, change)| *change).collect()
    }

    /// Returns the history, after the observer has processed the newest version of every claim.
    async fn wait_history(&self) -> ClaimHistory {
        let claims = self.claims().list(&ListParams::default()).await.unwrap();
        let newest = claims.iter().map(version_of).max().unwrap_or_default();
        let mut history = self.history.clone();
        let seen = history.wait_for(|seen| seen.version >= newest || seen.violation.is_some());
        let seen =
            tokio::time::timeout(TIMEOUT, seen).await.expect("the claim observer did not catch up");
        let seen = seen.unwrap().clone();
        assert_eq!(seen.violation, None);
        seen
    }

    /// Ends the test, and checks that no device was ever overcommitted.
    pub(crate) async fn finish(self) {
        self.wait_history().await;
        self.observer.abort();
        self.cluster.stop().await;
    }
}

/// A controller process, which is killed when the test ends.
pub(crate) struct Controller {
    child: Child,
    log: PathBuf,
    clock: PathBuf,
}

impl Controller {
    /// Sets the wall clock of this process ahead of the machine's, in seconds.
    pub(crate) fn set_clock_ahead(&self, seconds: i64) {
        // Written in place, because the process has mapped the file.
        let file = std::fs::File::options().write(true).open(&self.clock).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Kills the process with SIGKILL.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub(crate) async fn wait_exit(&mut self) -> std::process::ExitStatus {
        self.child.wait().await.unwrap()
    }

    pub(crate) fn check_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the resident memory of the process in MiB.
    pub(crate) fn resident_mib(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.child.id().unwrap())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let tail = log.lines().rev().take(30).collect::<Vec<_>>().into_iter().rev();
            eprintln!(
                "--- the end of {}\n{}",
                self.log.display(),
                tail.collect::<Vec<_>>().join("\n")
            );
        }
    }
}

/// Observes every change of every claim until an invariant is violated.
async fn observe_claims(
    client: Client,
    mut usage: DeviceUsage,
    history: watch::Sender<ClaimHistory>,
) {
    let claims: Api<ResourceClaim> = Api::all(client);
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    let violation = loop {
        match stream.try_next().await {
            Ok(Some(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim))) => {
                if let Err(error) = usage.update(&claim) {
                    break format!("overcommitted: {error}");
                }
                let mut error = None;
                history.send_modify(|seen| error = seen.record(&claim).err());
                if let Some(error) = error {
                    break error;
                }
            }
            Ok(Some(watcher::Event::Delete(claim))) => usage.remove(&claim),
            Ok(Some(watcher::Event::Init)) if usage.consumer_count() > 0 => {
                break "claim watch was interrupted".to_owned();
            }
            Ok(_) | Err(_) => {}
        }
    };
    history.send_modify(|seen| seen.violation = Some(violation));
}

fn version_of(claim: &ResourceClaim) -> u64 {
    claim.metadata.resource_version.as_ref().unwrap().parse().unwrap()
}

fn shares_in(claim: &ResourceClaim) -> Vec<(String, String)> {
    let share =
        |result: &DeviceRequestAllocationResult| Some((claim.name_any(), result.share_id.clone()?));
    device_results(claim).filter_map(share).collect()
}

/// Returns the path of a file that cargo builds beside this test; `make test` builds it.
pub(crate) fn built(file: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join(file);
    assert!(path.is_file(), "{} is not built: run `make build`", path.display());
    path
}

pub(crate) async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

/// Returns a Lease as a former leader has released it.
fn lease() -> Value {
    json!({
        "metadata": {"name": "tessera-controller"},
        "spec": {
            "holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": 0,
            "renewTime": "2026-11-21T00:00:00.000000Z",
        },
    })
}

fn class() -> Value {
    let selector = json!({"cel": {"expression": "device.driver == 'gpu.tessera.dev'"}});
    json!({"metadata": {"name": "gpu.tessera.dev"}, "spec": {"selectors": [selector]}})
}

fn node(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "250"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

fn slice(node: &str, gpus: usize) -> Value {
    let device = |i: usize| {
        json!({
            "name": format!("gpu-{i}"),
            "allowMultipleAllocations": true,
            "attributes": {"type": {"string": "gpu"}, "index": {"int": i}},
            "capacity": {
                "memory": {"value": "80Gi", "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}},
                "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0", "step": "1"}}},
            },
            "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
        })
    };
    json!({
        "metadata": {"name": format!("slice-{node}")},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": (0..gpus).map(device).collect::<Vec<_>>(),
        },
    })
}

fn claim(name: &str, memory: &str) -> Value {
    let exactly =
        json!({"deviceClassName": "gpu.tessera.dev", "capacity": {"requests": {"memory": memory}}});
    json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    })
}

pub(crate) fn pod(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [{
                "name": "main", "image": "tessera/probe:e2e", "resources": {"claims": [{"name": "gpu"}]},
            }],
        },
    })
}
