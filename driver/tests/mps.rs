//! Claims that share their GPU by MPS: the driver asks for control daemons and waits for them; who
//! runs them stands in.

mod stand_in;

use std::{collections::BTreeSet, fs, path::PathBuf, sync::Arc, time::Duration};

use serde_json::{Value, json};
use stand_in::{
    container::{inject, mounts},
    gpus::uuid,
    node::{Node, Share, asked, configured},
};
use tessera_driver::{
    driver::{Driver, DriverSettings},
    kubelet::plugin::{ClaimRef, ClaimHandler, PreparedDevice},
};
use tessera_intercept_abi::Grant;
use tessera_mps_protocol::{MpsPaths, lock::KeeperLock};
use tessera_proto::dra_v1;
use tokio::task::JoinHandle;

/// Who runs the daemons of a node.
struct Keeper {
    paths: MpsPaths,
    _lock: KeeperLock,
}

impl Keeper {
    fn of(node: &Node) -> Self {
        let paths = mps_paths(node);
        let lock = KeeperLock::take(&paths).expect("a lock").expect("nobody else");
        Self { paths, _lock: lock }
    }

    fn says(&self, gpu: u32, status: &Value) {
        fs::create_dir_all(self.paths.daemon(&uuid(gpu))).expect("made");
        fs::write(self.paths.status(&uuid(gpu)), status.to_string()).expect("written");
    }

    fn is_ready(&self, gpu: u32) {
        self.says(gpu, &json!({"state": "Ready", "message": "", "starts": 1}));
    }
}

fn mps_paths(node: &Node) -> MpsPaths {
    MpsPaths::new(node.paths().root())
}

/// The GPUs that want a daemon.
fn wanted(node: &Node) -> BTreeSet<String> {
    let entries = fs::read_dir(mps_paths(node).wanted()).into_iter().flatten();
    entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect()
}

fn only(gpu: u32) -> BTreeSet<String> {
    BTreeSet::from([uuid(gpu).to_string()])
}

/// A driver whose claims may share by MPS, with a clock that stands still unless all wait for it.
async fn started(node: &Node) -> Driver {
    let settings = DriverSettings { mps: true, ..node.settings() };
    let driver = node.start_with(settings, Arc::new(node.mounts.clone())).await.expect("it starts");
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

/// What a container gets: variables of MPS, and where its mounts come from.
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
async fn a_claim_waits_for_the_daemon_of_its_gpu_and_becomes_a_client_of_it() {
    let node = Node::with_gpus(2);
    let driver = started(&node).await;
    let keeper = Keeper::of(&node);
    let compute = json!({"policy": "Fixed", "priority": "Low"});
    let waiting = begin(&driver, by_mps(&node, "a", &[(1, 4, 25)], &compute));
    node.api.wait_for("the wish for a daemon", |_| (wanted(&node) == only(1)).then_some(())).await;
    keeper.says(1, &json!({"state": "Starting", "message": "", "starts": 1}));
    let reads = node.api.claim_reads();
    node.api.wait_for("another attempt", |api| (api.claim_reads() > reads + 1).then_some(())).await;
    assert!(!waiting.is_finished());
    assert!(
        fs::read_dir(node.paths().grants()).expect("a directory").next().is_none(),
        "nothing is given yet"
    );
    keeper.is_ready(1);
    let devices = waiting.await.expect("no panic").expect("prepared, once the daemon was ready");

    let (variables, source) = container(&node, &devices);
    let expected = [
        "CUDA_MPS_PIPE_DIRECTORY=/dev/tessera/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        // 4 GiB, and one for contexts, which are not charged here.
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5120M",
        "CUDA_MPS_CLIENT_PRIORITY=1",
    ];
    assert_eq!(variables, expected.map(str::to_owned).into());
    assert_eq!(source("/dev/tessera/mps"), Some(keeper.paths.pipe(&uuid(1))));
    assert_eq!(source("/dev/shm"), Some(keeper.paths.shm(&uuid(1))));
    let share = devices[0].cdi_devices[1].rsplit_once('=').expect("an id").1;
    let grant = grant(source(&format!("/dev/tessera/{share}/grant")));
    assert!(grant.mps && grant.memory_limit_bytes == 4 << 30);
}

#[tokio::test]
async fn who_has_no_cap_is_told_of_none() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let keeper = Keeper::of(&node);
    keeper.is_ready(0);
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
async fn a_daemon_is_wanted_until_the_last_claim_of_its_gpu_is_gone() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let keeper = Keeper::of(&node);
    keeper.is_ready(0);
    for name in ["a", "b"] {
        prepare(&driver, by_mps(&node, name, &[(0, 4, 10)], &json!({}))).await.expect("prepared");
    }
    unprepare(&driver, "a").await;
    assert_eq!(wanted(&node), only(0));
    let plain = node.allocate("plain", &[(0, 1, 0)]);
    let error = prepare(&driver, plain.clone()).await.expect_err("shared in another way");
    assert!(error.contains("in use with sharing MPS"), "{error}");
    unprepare(&driver, "b").await;
    assert_eq!(wanted(&node), BTreeSet::new());
    prepare(&driver, plain).await.expect("the GPU is free");
}

#[tokio::test]
async fn a_claim_whose_daemon_does_not_come_says_why_and_keeps_what_it_is_to_have_until_it_is_unprepared()
 {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let claim = by_mps(&node, "a", &[(0, 10, 0)], &json!({}));
    let error = prepare(&driver, claim.clone()).await.expect_err("nobody runs daemons");
    assert!(
        error.contains("see why the pod of the DaemonSet tessera-mps is not running here"),
        "{error}"
    );
    let keeper = Keeper::of(&node);
    keeper.says(0, &json!({"state": "Failed", "message": "exec: not found", "starts": 9}));
    let error = prepare(&driver, claim.clone()).await.expect_err("the daemon fails");
    assert!(error.contains("is not ready: exec: not found"), "{error}");
    assert_eq!(wanted(&node), only(0), "or it would never come");
    let error =
        prepare(&driver, by_mps(&node, "b", &[(0, 10, 0)], &json!({}))).await.expect_err("taken");
    assert!(error.contains("do not fit beside 10Gi"), "{error}");

    keeper.is_ready(0);
    prepare(&driver, claim).await.expect("the kubelet comes again");
    unprepare(&driver, "a").await;
    assert_eq!((wanted(&node), node.traces()), (BTreeSet::new(), BTreeSet::new()));
}

#[tokio::test]
async fn who_does_not_share_by_mps_needs_nothing_of_it() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    prepare(&driver, node.allocate("plain", &[(0, 4, 0)])).await.expect("prepared");
    assert!(!mps_paths(&node).root().exists(), "nothing is made for nobody");
    unprepare(&driver, "plain").await;
    // What cannot be asked for keeps nothing in the journal.
    fs::write(mps_paths(&node).root(), "in the way").expect("written");
    let error = prepare(&driver, by_mps(&node, "a", &[(0, 4, 0)], &json!({})))
        .await
        .expect_err("in the way");
    assert!(
        error.contains("files by which MPS control daemons are asked for cannot be used"),
        "{error}"
    );
    fs::remove_file(mps_paths(&node).root()).expect("there");
    prepare(&driver, node.allocate("all", &[(0, 16, 0)])).await.expect("all of the GPU is free");
}

#[tokio::test]
async fn to_unprepare_a_claim_ends_its_waiting_and_gives_the_daemon_up() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let _keeper = Keeper::of(&node);
    let waiting = begin(&driver, by_mps(&node, "a", &[(0, 4, 0)], &json!({})));
    node.api.wait_for("the wish for a daemon", |_| (wanted(&node) == only(0)).then_some(())).await;
    unprepare(&driver, "a").await;
    let error = waiting.await.expect("no panic").expect_err("ended");
    assert!(error.contains("unprepared the claim meanwhile"), "{error}");
    assert_eq!((wanted(&node), node.traces()), (BTreeSet::new(), BTreeSet::new()));
}

#[tokio::test]
async fn what_is_wanted_is_made_anew_from_the_journal_when_the_driver_starts() {
    let node = Node::with_gpus(3);
    let driver = started(&node).await;
    let keeper = Keeper::of(&node);
    keeper.is_ready(0);
    let claim = by_mps(&node, "a", &[(0, 4, 0)], &json!({}));
    let before = prepare(&driver, claim.clone()).await.expect("prepared");
    let _never = begin(&driver, by_mps(&node, "begun", &[(1, 4, 0)], &json!({})));
    node.api
        .wait_for("the wish for a daemon", |_| {
            wanted(&node).contains(uuid(1).as_str()).then_some(())
        })
        .await;
    driver.stop().await;
    fs::remove_file(keeper.paths.wanted_of(&uuid(0))).expect("there");
    fs::write(keeper.paths.wanted_of(&uuid(2)), "").expect("written");

    // Its Prepare goes on beside the next driver, as that of an instance that is being replaced
    // does.
    tokio::time::resume();
    let driver = node.start().await;
    assert_eq!(
        wanted(&node),
        BTreeSet::from([0, 1].map(|gpu| uuid(gpu).to_string())),
        "nobody wants the third"
    );
    driver.stop().await;
    // Dead, it has left nothing that is locked.
    fs::remove_file(node.paths().asked().join(stand_in::node::uid("begun"))).expect("there");
    // MPS is off by now: what is prepared keeps what it has.
    let driver = node.start().await;
    tokio::time::pause();
    assert_eq!(wanted(&node), only(0), "what was only begun is taken back");
    assert_eq!(prepare(&driver, claim).await.expect("prepared"), before);
    let error =
        prepare(&driver, by_mps(&node, "b", &[(0, 1, 0)], &json!({}))).await.expect_err("off");
    assert!(error.contains("install Tessera with mps.enabled=true"), "{error}");
}

#[tokio::test]
async fn gpus_say_that_they_can_be_shared_by_mps_and_the_operator_is_told_when_a_daemon_fails() {
    let node = Node::with_gpus(1);
    let driver = started(&node).await;
    let attribute = node.api.slices()[0]["spec"]["devices"][0]["attributes"]["mps"]["bool"].clone();
    assert_eq!(attribute, Value::Bool(true));
    let keeper = Keeper::of(&node);
    keeper.is_ready(0);
    prepare(&driver, by_mps(&node, "a", &[(0, 4, 0)], &json!({}))).await.expect("prepared");
    let metric = |name: &str| {
        let text = driver.metrics().render();
        text.lines().any(|line| *line == format!("{name}{{uuid=\"{}\"}} 1", uuid(0)))
    };
    // The clock stands still unless all wait: the watch has had its turns when this ends.
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(metric("tessera_mps_daemon_ready"));
    assert!(metric("tessera_mps_daemon_starts"));

    keeper.says(0, &json!({"state": "Failed", "message": "signal 9", "starts": 1}));
    let event = node.api.wait_for("an event", |api| api.events().pop()).await;
    assert_eq!(
        (&event["reason"], &event["regarding"]["kind"]),
        (&json!("GpuMpsDaemonFailed"), &json!("Node"))
    );
    assert!(event["note"].as_str().expect("a note").contains("failed (signal 9)"), "{event}");
    assert!(!metric("tessera_mps_daemon_ready"));
}
