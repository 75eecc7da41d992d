//! One cluster of stand-ins, real controllers as processes of their own, and an eye on every claim.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_api::names::DELETE_PROTECTION_FINALIZER;
use tessera_e2e::inventory::GpuInventory;
use tessera_e2e::trials::ledger::DeviceLedger;
use tessera_e2e::wait::{self, Verdict};
use tessera_simcluster::api::{ApiOptions, ApiServer, Fault, RequestInfo, User};
use tessera_simcluster::cluster::{ClusterOptions, SimCluster};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Namespace of the controller and its Lease.
const NAMESPACE: &str = "tessera-system";

/// Namespace of a tenant; the pods of others are in `default`.
const TENANT: &str = "tenant";

/// Longer than anything here takes on a loaded machine, a lease that runs out included.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// A request of a controller, and when it came.
pub(crate) type Seen = (Instant, RequestInfo);

/// What is done to the requests of controllers.
type Decide = Box<dyn Fn(&RequestInfo) -> Fault + Send + Sync>;

pub(crate) struct Rig {
    directory: TempDir,
    cluster: SimCluster,
    /// The administrator, untouched by faults.
    pub(crate) client: Client,
    seen: watch::Sender<Vec<Seen>>,
    over: JoinHandle<()>,
    overseen: watch::Receiver<Overseen>,
}

/// What the eye on the claims has seen.
#[derive(Clone, Default)]
struct Overseen {
    /// The claim and the id of each share that was ever given.
    shares: Vec<(String, String)>,
    /// How each claim is.
    claims: BTreeMap<String, ClaimState>,
    /// What became of claims, in order. A write that is sent again for want of an answer changes
    /// nothing.
    changes: Vec<(String, Change)>,
    /// The newest version of a claim.
    version: u64,
    /// What must never be. Nothing after it is looked at.
    wrong: Option<String>,
}

/// What is done to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It has got the finalizer.
    Protected,
    /// It has got an allocation.
    Allocated,
    /// It has none any more.
    Released,
}

#[derive(Clone, Copy, Default)]
struct ClaimState {
    is_protected: bool,
    is_allocated: bool,
}

impl Overseen {
    fn take(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        self.compare(claim);
        for (of, share) in shares_in(claim) {
            match self.shares.iter().find(|(_, known)| *known == share) {
                Some((by, _)) if *by == of => {}
                Some((by, _)) => return Err(format!("share {share} is {by}'s and {of}'s")),
                None => self.shares.push((of, share)),
            }
        }
        self.version = self.version.max(version_of(claim));
        Ok(())
    }

    fn compare(&mut self, claim: &ResourceClaim) {
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
        let happened = changes.into_iter().filter(|(happened, _)| *happened);
        self.changes.extend(happened.map(|(_, change)| (name.clone(), change)));
    }
}

/// Whether a controller asks.
pub(crate) fn is_controller(request: &RequestInfo) -> bool {
    request.user.name.ends_with(":tessera-controller")
}

impl Rig {
    /// A cluster with one node for each number, with so many GPUs of 80 GiB.
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
        let (sees, overseen) = watch::channel(Overseen::default());
        let ledger = DeviceLedger::new(&GpuInventory::read(&client).await.unwrap());
        let over = tokio::spawn(watch_over(client.clone(), ledger, sees));
        let rig = Self {
            directory: TempDir::with_prefix("tfaults-").unwrap(),
            cluster,
            client,
            seen: watch::Sender::default(),
            over,
            overseen,
        };
        rig.decide(|_| Fault::None);
        rig
    }

    pub(crate) fn api(&self) -> &ApiServer {
        self.cluster.api()
    }

    /// From now on this decides over the requests of controllers, and only theirs.
    pub(crate) fn decide(&self, decide: impl Fn(&RequestInfo) -> Fault + Send + Sync + 'static) {
        let (seen, decide): (_, Decide) = (self.seen.clone(), Box::new(decide));
        self.api().set_fault_hook(Some(Arc::new(move |request| {
            if !is_controller(request) {
                return Fault::None;
            }
            seen.send_modify(|seen| seen.push((Instant::now(), request.clone())));
            decide(request)
        })));
    }

    /// The controllers' requests so far that pass the filter.
    pub(crate) fn requests(&self, filter: impl Fn(&RequestInfo) -> bool) -> Vec<Seen> {
        self.seen.borrow().iter().filter(|(_, request)| filter(request)).cloned().collect()
    }

    /// Waits until controllers have made so many requests that pass the filter.
    pub(crate) async fn requested(&self, count: usize, filter: impl Fn(&RequestInfo) -> bool) {
        let mut seen = self.seen.subscribe();
        let enough =
            |seen: &Vec<Seen>| seen.iter().filter(|(_, request)| filter(request)).count() >= count;
        let waiting = tokio::time::timeout(PATIENCE, seen.wait_for(enough)).await;
        let _ = waiting.expect("the controller does not ask for it").unwrap();
    }

    /// Starts a controller; `elects` is whether it needs the Lease.
    pub(crate) fn controller(&self, identity: &str, elects: bool) -> Controller {
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
            .args(["--leader-elect", if elects { "true" } else { "false" }])
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

    /// Creates a claim for so much memory, and a pod of the same name that uses it.
    pub(crate) async fn pod(&self, name: &str, memory: &str) {
        create::<ResourceClaim>(&self.claims(), claim(name, memory)).await;
        create::<Pod>(&self.pods(), pod(name)).await;
    }

    pub(crate) fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Objects of the tenant.
    pub(crate) fn tenants<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), TENANT)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Waits until the pods are bound: their claims are allocated and reserved then.
    pub(crate) async fn bound(&self, names: &[String]) {
        let judge = |pods: &[Pod]| {
            let is_bound =
                |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            let bound: Vec<_> =
                pods.iter().filter(is_bound).filter_map(|p| p.metadata.name.clone()).collect();
            let left: Vec<_> = names.iter().filter(|name| !bound.contains(name)).cloned().collect();
            if left.is_empty() {
                Verdict::Done(())
            } else {
                Verdict::NotYet(format!("not bound: {left:?}"))
            }
        };
        wait::until(self.pods(), Default::default(), "pods to be bound", PATIENCE, judge)
            .await
            .unwrap();
    }

    /// Waits for an event of that reason on the pod.
    pub(crate) async fn told(&self, pod: &str, reason: &str) {
        let selector = watcher::Config::default()
            .fields(&format!("involvedObject.name={pod},reason={reason}"));
        let judge = |events: &[Event]| match events {
            [] => Verdict::NotYet("no such event".to_owned()),
            _ => Verdict::Done(()),
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        wait::until(events, selector, &format!("event {reason} on {pod}"), PATIENCE, judge)
            .await
            .unwrap();
    }

    pub(crate) async fn is_allocated(&self, name: &str) -> bool {
        self.claims()
            .get(name)
            .await
            .unwrap()
            .status
            .is_some_and(|status| status.allocation.is_some())
    }

    /// The same, and the pod comes before all others.
    pub(crate) async fn urgent_pod(&self, name: &str, memory: &str) {
        create::<ResourceClaim>(&self.claims(), claim(name, memory)).await;
        let mut pod = pod(name);
        pod["spec"]["priority"] = 1000.into();
        create::<Pod>(&self.pods(), pod).await;
    }

    /// Creates a pod that no scheduler looks at, and waits until its claim is allocated.
    pub(crate) async fn unbindable(&self, name: &str, memory: &str) {
        create::<ResourceClaim>(&self.claims(), claim(name, memory)).await;
        let mut pod = pod(name);
        pod["spec"]["schedulerName"] = "nobody".into();
        create::<Pod>(&self.pods(), pod).await;
        self.allocated(name).await;
    }

    /// Waits until the claim has an allocation.
    pub(crate) async fn allocated(&self, name: &str) {
        self.claim_until(name, "allocated", true).await;
    }

    /// Waits until the claim has no allocation.
    pub(crate) async fn released(&self, name: &str) {
        self.claim_until(name, "released", false).await;
    }

    async fn claim_until(&self, name: &str, what: &str, allocated: bool) {
        let judge = |claim: Option<&ResourceClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            match status.is_some_and(|status| status.allocation.is_some()) == allocated {
                true => Verdict::Done(()),
                false => Verdict::NotYet(json!(status).to_string()),
            }
        };
        let what = format!("claim {name} to be {what}");
        wait::until_one(self.claims(), name, &what, PATIENCE, judge).await.unwrap();
    }

    /// Deletes a pod and does not wait for a kubelet, of which there is none.
    pub(crate) async fn delete_now(&self, pod: &str) {
        self.pods().delete(pod, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// All events of that reason.
    pub(crate) async fn events(&self, reason: &str) -> usize {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        events
            .list(&ListParams::default().fields(&format!("reason={reason}")))
            .await
            .unwrap()
            .items
            .len()
    }

    pub(crate) fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Waits until the Lease is held by `holder`.
    pub(crate) async fn led_by(&self, holder: &str) -> Lease {
        let judge = |lease: Option<&Lease>| {
            let spec = lease.and_then(|lease| lease.spec.as_ref());
            match spec.and_then(|spec| spec.holder_identity.as_deref()) {
                Some(found) if found == holder => Verdict::Done(lease.cloned().unwrap()),
                other => Verdict::NotYet(format!("{other:?}")),
            }
        };
        let what = format!("the Lease to be held by {holder}");
        wait::until_one(self.leases(), "tessera-controller", &what, PATIENCE, judge).await.unwrap()
    }

    /// How often the claim was given a share until now, as far as anybody could see.
    pub(crate) async fn shares_of(&self, claim: &str) -> usize {
        self.oversee().await.shares.iter().filter(|(of, _)| of == claim).count()
    }

    /// What was done to the claim until now, as far as anybody could see.
    pub(crate) async fn changes_of(&self, claim: &str) -> Vec<Change> {
        let seen = self.oversee().await;
        seen.changes.iter().filter(|(of, _)| of == claim).map(|(_, change)| *change).collect()
    }

    /// What the eye on the claims has seen, all that is now among it: its watch may be behind
    /// others.
    async fn oversee(&self) -> Overseen {
        let claims = self.claims().list(&ListParams::default()).await.unwrap();
        let newest = claims.iter().map(version_of).max().unwrap_or_default();
        let mut overseen = self.overseen.clone();
        let seen = overseen.wait_for(|seen| seen.version >= newest || seen.wrong.is_some());
        let seen =
            tokio::time::timeout(PATIENCE, seen).await.expect("the eye on the claims is closed");
        let seen = seen.unwrap().clone();
        assert_eq!(seen.wrong, None);
        seen
    }

    /// Ends the test: nothing was over-committed at any moment.
    pub(crate) async fn finish(self) {
        self.oversee().await;
        self.over.abort();
        self.cluster.stop().await;
    }
}

/// A controller's process. It ends with the test.
pub(crate) struct Controller {
    child: Child,
    log: PathBuf,
    clock: PathBuf,
}

impl Controller {
    /// Sets the time of day for this process so many seconds ahead of the machine's.
    pub(crate) fn set_clock_ahead(&self, seconds: i64) {
        // In place: the process has the file mapped.
        let file = std::fs::File::options().write(true).open(&self.clock).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Ends it as a crash would.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub(crate) async fn ended(&mut self) -> std::process::ExitStatus {
        self.child.wait().await.unwrap()
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Memory that the process has resident, in MiB.
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

/// Looks at every change of every claim; ends only with what is wrong.
async fn watch_over(client: Client, mut ledger: DeviceLedger, sees: watch::Sender<Overseen>) {
    let claims: Api<ResourceClaim> = Api::all(client);
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    let wrong = loop {
        match stream.try_next().await {
            Ok(Some(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim))) => {
                if let Err(error) = ledger.see(&claim) {
                    break format!("over-committed: {error}");
                }
                let mut doubled = None;
                sees.send_modify(|seen| doubled = seen.take(&claim).err());
                if let Some(doubled) = doubled {
                    break doubled;
                }
            }
            Ok(Some(watcher::Event::Delete(claim))) => ledger.forget(&claim),
            Ok(Some(watcher::Event::Init)) if ledger.holding() > 0 => {
                break "the watch over the devices was interrupted".to_owned();
            }
            Ok(_) | Err(_) => {}
        }
    };
    sees.send_modify(|seen| seen.wrong = Some(wrong));
}

fn version_of(claim: &ResourceClaim) -> u64 {
    claim.metadata.resource_version.as_ref().unwrap().parse().unwrap()
}

fn shares_in(claim: &ResourceClaim) -> Vec<(String, String)> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_ref()).into_iter().flatten();
    let name = claim.metadata.name.clone().unwrap_or_default();
    results.filter_map(|result| Some((name.clone(), result.share_id.clone()?))).collect()
}

/// A file that cargo builds beside this test; `make test` does.
pub(crate) fn built(file: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join(file);
    assert!(path.is_file(), "no {}: run `make build` first", path.display());
    path
}

pub(crate) async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

/// As a leader before has given it back.
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
