//! Claims that share their GPU by MPS: the driver requests control daemons and waits for them. The
//! test replaces tessera-mps.

mod fakes;

use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use fakes::{
    container::{inject, mounts},
    gpus::uuid,
    node::{Node, Share, asked, configured},
};
use serde_json::{Value, json};
use tessera_driver::{
    driver::{Driver, DriverSettings},
    kubelet::plugin::{ClaimHandler, ClaimRef, PreparedDevice},
};
use tessera_intercept_abi::Grant;
use tessera_mps_protocol::{MpsPaths, lock::SupervisorLock};
use tessera_proto::dra_v1;
use tokio::task::JoinHandle;

/// A fake tessera-mps.
struct FakeMps {
    paths: MpsPaths,
    _lock: SupervisorLock,
}

impl FakeMps {
    fn start(node: &Node) -> Self {
        let paths = mps_paths(node);
        let lock = SupervisorLock::acquire(&paths).expect("a lock").expect("the lock is free");
        Self { paths, _lock: lock }
    }

    fn report(&self, gpu: u32, status: &Value) {
        fs::create_dir_all(self.paths.daemon(&uuid(gpu))).expect("made");
        fs::write(self.paths.status(&uuid(gpu)), status.to_string()).expect("written");
    }

    fn set_ready(&self, gpu: u32) {
        self.report(gpu, &json!({"state": "Ready", "message": "", "starts": 1}));
    }
}

fn mps_paths(node: &Node) -> MpsPaths {
    MpsPaths::new(node.paths().root())
}

fn only(gpu: u32) -> BTreeSet<String> {
    BTreeSet::from([uuid(gpu).to_string()])
}

/// Starts a driver whose claims may share by MPS, and pauses the clock.
async fn started(node: &Node) -> Driver {
    let settings = DriverSettings { mps: true, ..node.settings() };
    let driver = node.start_as(settings).await;
    node.api.wait_for("a ResourceSlice", |api| (!api.slices().is_empty()).then_some(())).await;
    tokio::time::pause();
    driver
}

/// Allocates a claim that shares by MPS.
fn by_mps(node: &Node, name: &str, shares: &[Share], compute: &Value) -> dra_v1::Claim {
    node.api.put_claim(configured(name, shares, &json!({"sharing": "MPS", "compute": compute})));
    asked(name)
}

fn begin(driver: &Driver, claim: dra_v1::Claim) -> JoinHandle<Result<Vec<PreparedDevice>, String>> {
    let claims = driver.claims().clone();
    tokio::spawn(async move { claims.prepare(ClaimRef::from(claim)).await })
}

async fn prepare(driver: &Driver, claim: dra_v1::Claim) -> Result<Vec<PreparedDevice>, String> {
    begin(driver, claim).await.expect("no panic")
}

async fn unprepare(driver: &Driver, name: &str) {
    driver.claims().unprepare(ClaimRef::from(asked(name))).await.expect("unprepared");
}

/// Returns the MPS variables of a container, and a function from mount points to sources.
fn container(
    node: &Node,
    devices: &[PreparedDevice],
) -> (BTreeSet<String>, impl Fn(&str) -> Option<PathBuf>) {
    let device = |device: &PreparedDevice| dra_v1::Device {
        cdi_device_ids: device.cdi_devices.clone(),
        ..dra_v1::Device::default()
    };
    let spec = inject(&node.path("cdi"), &devices.iter().map(device).collect::<Vec<_>>());
    let variables =
        spec.process().as_ref().and_then(|process| process.env().clone()).unwrap_or_default();
    let mounts = mounts(&spec);
    let of_mps =
        variables.into_iter().filter(|variable| variable.starts_with("CUDA_MPS_")).collect();
    (of_mps, move |path: &str| mounts.get(path).map(|(source, _)| source.into()))
}

fn grant(source: Option<PathBuf>) -> Grant {
    Grant::parse(&fs::read(source.expect("a mount")).expect("a file")).expect("a grant")
}

#[tokio::test]
async fn claim_waits_for_daemon_and_becomes_its_client() {
    let node = Node::with_gpus(2);
    let driver = started(&node).await;
    let mps = FakeMps::start(&node);
    let compute = json!({"policy": "Fixed", "priority": "Low"});
    let waiting = begin(&driver, by_mps(&node, "a", &[(1, 4, 25)], &compute));
    node.api
        .wait_for("the request of a daemon", |_| {
            (node.requested_daemons() == only(1)).then_some(())
        })
        .await;
    mps.report(1, &json!({"state": "Starting", "message": "", "starts": 1}));
    let reads = node.api.claim_reads();
    node.api.wait_for("another attempt", |api| (api.claim_reads() > reads + 1).then_some(())).await;
    assert!(!waiting.is_finished());
    assert!(
        fs::read_dir(node.paths().grants()).expect("a directory").next().is_none(),
        "no grant is written yet"
    );
    mps.set_ready(1);
    let devices = waiting.await.expect("no panic").expect("prepared after the daemon was ready");

    let (variables, source) = container(&node, &devices);
    let expected = [
        "CUDA_MPS_PIPE_DIRECTORY=/dev/tessera/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        // 4 GiB, and 1 GiB for contexts, which are not charged here.
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5120M",
        "CUDA_MPS_CLIENT_PRIORITY=1",
    ];
    assert_eq!(variables, expected.map(str::to_owned).into());
    assert_eq!(source("/dev/tessera/mps"), Some(mps.paths.pipe(&uuid(1))));
    assert_eq!(source("/dev/shm"), Some(mps.paths.shm(&uuid(1))));
    let share = devices[0].cdi_devices[1].rsplit_once('=').expect("an id").1;
    let grant = grant(source(&format!("/dev/tessera/{share}/grant")));
    assert!(grant.mps && grant.memory_limit_bytes == 4 << 30);
}

#[tokio::test]
async fn share_without_cap_gets_no_percentage() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let mps = FakeMps::start(&node);
    mps.set_ready(0);
    for (name, cores, compute) in
        [("none", 50, json!({"policy": "None"})), ("nothing", 0, json!({"policy": "Fixed"}))]
    {
        let devices = prepare(&driver, by_mps(&node, name, &[(0, 1, cores)], &compute))
            .await
            .expect("prepared");
        let (variables, _) = container(&node, &devices);
        assert!(!variables.iter().any(|variable| variable.contains("PERCENTAGE")), "{variables:?}");
        assert!(!variables.iter().any(|variable| variable.contains("PRIORITY")), "{variables:?}");
    }
}

#[tokio::test]
async fn daemon_is_requested_until_last_claim_is_gone() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let mps = FakeMps::start(&node);
    mps.set_ready(0);
    for name in ["a", "b"] {
        prepare(&driver, by_mps(&node, name, &[(0, 4, 10)], &json!({}))).await.expect("prepared");
    }
    unprepare(&driver, "a").await;
    assert_eq!(node.requested_daemons(), only(0));
    let plain = node.allocate("plain", &[(0, 1, 0)]);
    let error = prepare(&driver, plain.clone()).await.expect_err("another sharing mode");
    assert!(error.contains("in use with sharing MPS"), "{error}");
    unprepare(&driver, "b").await;
    assert_eq!(node.requested_daemons(), BTreeSet::new());
    prepare(&driver, plain).await.expect("the GPU is free");
}

#[tokio::test]
async fn waiting_claim_reports_reason_and_keeps_its_share() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let claim = by_mps(&node, "a", &[(0, 10, 0)], &json!({}));
    let error = prepare(&driver, claim.clone()).await.expect_err("tessera-mps is not running");
    assert!(
        error.contains("see why its pod of the DaemonSet tessera-mps does not run here"),
        "{error}"
    );
    let mps = FakeMps::start(&node);
    mps.report(0, &json!({"state": "Failed", "message": "exec: not found", "starts": 9}));
    let error = prepare(&driver, claim.clone()).await.expect_err("the daemon fails");
    assert!(error.contains("is not ready: exec: not found"), "{error}");
    assert_eq!(node.requested_daemons(), only(0), "the daemon must stay requested");
    let error =
        prepare(&driver, by_mps(&node, "b", &[(0, 10, 0)], &json!({}))).await.expect_err("used");
    assert!(error.contains("10Gi of 16Gi used"), "{error}");

    mps.set_ready(0);
    prepare(&driver, claim).await.expect("the kubelet calls again");
    unprepare(&driver, "a").await;
    assert_eq!((node.requested_daemons(), node.traces()), (BTreeSet::new(), BTreeSet::new()));
}

#[tokio::test]
async fn claims_without_mps_need_no_mps_files() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    prepare(&driver, node.allocate("plain", &[(0, 4, 0)])).await.expect("prepared");
    assert!(!mps_paths(&node).root().exists(), "no file is created");
    unprepare(&driver, "plain").await;
    // A failed request is rolled back.
    fs::write(mps_paths(&node).root(), "blocking").expect("written");
    let error =
        prepare(&driver, by_mps(&node, "a", &[(0, 4, 0)], &json!({}))).await.expect_err("blocking");
    assert!(error.contains("cannot access MPS daemon request files"), "{error}");
    fs::remove_file(mps_paths(&node).root()).expect("there");
    prepare(&driver, node.allocate("all", &[(0, 16, 0)])).await.expect("all of the GPU is free");
}

#[tokio::test]
async fn unprepare_cancels_wait_and_releases_daemon() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let _mps = FakeMps::start(&node);
    let waiting = begin(&driver, by_mps(&node, "a", &[(0, 4, 0)], &json!({})));
    node.api
        .wait_for("the request of a daemon", |_| {
            (node.requested_daemons() == only(0)).then_some(())
        })
        .await;
    unprepare(&driver, "a").await;
    let error = waiting.await.expect("no panic").expect_err("ended");
    assert!(error.contains("unprepared the claim meanwhile"), "{error}");
    assert_eq!((node.requested_daemons(), node.traces()), (BTreeSet::new(), BTreeSet::new()));
}

#[tokio::test]
async fn start_restores_daemon_requests_from_journal() {
    let node = Node::with_gpus(3);
    let driver = started(&node).await;
    let mps = FakeMps::start(&node);
    mps.set_ready(0);
    let claim = by_mps(&node, "a", &[(0, 4, 0)], &json!({}));
    let before = prepare(&driver, claim.clone()).await.expect("prepared");
    let _never = begin(&driver, by_mps(&node, "begun", &[(1, 4, 0)], &json!({})));
    node.api
        .wait_for("the request of a daemon", |_| {
            node.requested_daemons().contains(uuid(1).as_str()).then_some(())
        })
        .await;
    driver.stop().await;
    fs::remove_file(mps.paths.wanted_file(&uuid(0))).expect("there");
    fs::write(mps.paths.wanted_file(&uuid(2)), "").expect("written");

    // Its Prepare continues beside the next driver, as in the old instance of an update.
    tokio::time::resume();
    let driver = node.start().await;
    assert_eq!(
        node.requested_daemons(),
        BTreeSet::from([0, 1].map(|gpu| uuid(gpu).to_string())),
        "no claim needs the third"
    );
    driver.stop().await;
    // A dead process would hold no lock.
    fs::remove_file(node.paths().asked().join(fakes::node::uid("begun"))).expect("there");
    // MPS is disabled now: prepared claims do not change.
    let driver = node.start().await;
    tokio::time::pause();
    assert_eq!(node.requested_daemons(), only(0), "the started claim is rolled back");
    assert_eq!(prepare(&driver, claim).await.expect("prepared"), before);
    let error =
        prepare(&driver, by_mps(&node, "b", &[(0, 1, 0)], &json!({}))).await.expect_err("off");
    assert!(error.contains("install Tessera with mps.enabled=true"), "{error}");
}

#[tokio::test]
async fn publishes_mps_attribute_and_reports_daemon_failure() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let attribute = node.api.slices()[0]["spec"]["devices"][0]["attributes"]["mps"]["bool"].clone();
    assert_eq!(attribute, Value::Bool(true));
    let mps = FakeMps::start(&node);
    mps.set_ready(0);
    prepare(&driver, by_mps(&node, "a", &[(0, 4, 0)], &json!({}))).await.expect("prepared");
    let metric = |name: &str| {
        let text = driver.metrics().render();
        text.lines().any(|line| *line == format!("{name}{{uuid=\"{}\"}} 1", uuid(0)))
    };
    // The clock is paused: the watch has made its rounds when this ends.
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(metric("tessera_mps_daemon_ready"));
    assert!(metric("tessera_mps_daemon_starts_total"));

    mps.report(0, &json!({"state": "Failed", "message": "signal 9", "starts": 1}));
    let event = node.api.wait_for("an event", |api| api.events().pop()).await;
    assert_eq!(
        (&event["reason"], &event["regarding"]["kind"]),
        (&json!("GpuMpsDaemonFailed"), &json!("Node"))
    );
    assert!(event["note"].as_str().expect("a note").contains("failed (signal 9)"), "{event}");
    assert!(!metric("tessera_mps_daemon_ready"));
}
