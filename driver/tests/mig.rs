//! MIG devices: published, created at Prepare and destroyed at Unprepare, on the fake NVML.

mod fakes;

use std::{
    panic::resume_unwind,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use fakes::{
    container::inject,
    kubelet::Kubelet,
    node::{Node, asked},
};
use serde_json::{Value, json};
use tessera_api::names::GpuUuid;
use tessera_driver::driver::{Driver, DriverDependencies};
use tessera_fake_world::{
    FakeNode, artifact,
    mig::{GpuInstance as FakeInstance, NodeMig},
    shipped,
    tree::Libraries,
};
use tessera_gpu::{
    CapabilityNode, ComputeInstance, GpuInstance, MigLibrary, MigLibraryError, NvmlLibrary,
    NvmlOptions,
};
use tessera_proto::dra_v1;

/// Index of the GPU in MIG mode in the world `mixed`.
const IN_MIG_MODE: usize = 3;

/// Profile 1g.10gb, at memory slice 6.
const SMALL: &str = "mig-1g10gb-19-6";

/// Profile 3g.40gb, at memory slice 4: it overlaps [`SMALL`].
const LARGE: &str = "mig-3g40gb-9-4";

static NVML: LazyLock<Libraries> = LazyLock::new(|| Libraries {
    nvml: artifact::nvml().expect("the fake NVML is built"),
    cuda: None,
});

/// A node with a GPU in MIG mode, whose NVML is the fake library.
struct MigNode {
    node: Node,
    machine: FakeNode,
}

impl MigNode {
    fn new() -> Self {
        let node = Node::with_gpus(0);
        let directory = node.path("machine");
        std::fs::create_dir(&directory).expect("made");
        let machine = FakeNode::create(shipped::MIXED, &NVML, &directory).expect("a machine");
        Self { node, machine }
    }

    fn library(&self) -> Arc<NvmlLibrary> {
        Arc::new(NvmlLibrary::new(NvmlOptions {
            driver_root: self.machine.driver_root.clone(),
            sysfs_root: self.machine.sysfs_root.clone(),
            proc_root: NodeMig::new(&self.machine.control).proc_root(),
            mig: true,
            ..NvmlOptions::default()
        }))
    }

    async fn start(&self) -> Driver {
        self.start_with(self.library()).await
    }

    /// Starts a driver whose MIG calls go to this library, and waits for its slices.
    async fn start_with(&self, mig: Arc<dyn MigLibrary>) -> Driver {
        let dependencies = DriverDependencies {
            client: self.node.api.client(),
            gpus: self.library(),
            mig,
            mounts: Arc::new(self.node.mounts.clone()),
        };
        let driver = Driver::start(self.node.settings(), dependencies).await.expect("it starts");
        let api = &self.node.api;
        api.wait_for("ResourceSlices", |api| (!api.slices().is_empty()).then_some(())).await;
        driver
    }

    async fn kubelet(&self) -> Kubelet {
        Kubelet::register(&self.node.path("kubelet")).await
    }

    fn gpu(&self) -> GpuUuid {
        GpuUuid::new(&self.machine.world.gpus[IN_MIG_MODE].uuid).expect("a UUID")
    }

    fn device(&self, part: &str) -> String {
        format!("{}-{part}", self.gpu().device_name())
    }

    /// Allocates a claim with these MIG devices, and returns the kubelet's reference to it.
    fn allocate(&self, name: &str, parts: &[&str]) -> dra_v1::Claim {
        let result = |(index, part): (usize, &&str)| {
            json!({
                "request": format!("mig-{index}"), "driver": "gpu.tessera.dev", "pool": "node-a",
                "device": self.device(part),
            })
        };
        let results: Vec<Value> = parts.iter().enumerate().map(result).collect();
        let mut claim = fakes::node::claim(name, &[]);
        claim["status"]["allocation"]["devices"]["results"] = json!(results);
        self.node.api.put_claim(claim);
        asked(name)
    }

    /// Returns the instances that exist.
    fn instances(&self) -> Vec<FakeInstance> {
        let gpu = &self.machine.world.gpus[IN_MIG_MODE];
        NodeMig::new(&self.machine.control).state(gpu).gpu_instances
    }

    /// Creates an instance as another program would, with a compute instance if it has slices.
    fn create_foreign(&self, profile: u32, start: u32, slices: u32) {
        let gpu = &self.machine.world.gpus[IN_MIG_MODE];
        let created = NodeMig::new(&self.machine.control).create(gpu, profile, start, slices);
        created.expect("it fits");
    }

    /// Returns the published devices whose names contain the text.
    fn published(&self, text: &str) -> Vec<Value> {
        let slices = self.node.api.slices();
        let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array());
        let name = |device: &&Value| device["name"].as_str().is_some_and(|n| n.contains(text));
        devices.flatten().filter(name).cloned().collect()
    }
}

fn claims_in_journal(node: &MigNode) -> usize {
    let text = std::fs::read_to_string(node.node.paths().journal()).unwrap_or_default();
    let journal: Value = serde_json::from_str(&text).unwrap_or_default();
    journal["claims"].as_object().map_or(0, serde_json::Map::len)
}

#[tokio::test]
async fn gpu_in_mig_mode_is_published_as_mig_devices() {
    let node = MigNode::new();
    let driver = node.start().await;
    let devices = node.published("-mig-");
    assert_eq!(devices.len(), 25, "7 + 7 + 4 + 3 + 2 + 1 + 1 placements");
    let sets: Vec<Value> = node
        .node
        .api
        .slices()
        .iter()
        .filter_map(|slice| slice["spec"]["sharedCounters"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(sets.len(), 1);
    assert_eq!(sets[0]["counters"]["memory-slice-7"]["value"], "1");
    let small = &node.published(SMALL)[0];
    assert_eq!(small["attributes"]["type"]["string"], "mig");
    assert_eq!(small["attributes"]["profile"]["string"], "1g.10gb");
    assert_eq!(small["attributes"]["parentUUID"]["string"], node.gpu().as_str());
    assert_eq!(small["capacity"]["memory"]["value"], "9728Mi");
    assert!(small["allowMultipleAllocations"].is_null());
    let consumed = &small["consumesCounters"][0];
    assert_eq!(consumed["counterSet"], sets[0]["name"]);
    assert_eq!(consumed["counters"]["memory-slice-6"]["value"], "1");
    assert!(consumed["counters"]["memory-slice-5"].is_null());
    assert_eq!(consumed["counters"]["multiprocessors"]["value"], "14");
    let whole = node.gpu().device_name();
    assert!(node.published("gpu-").iter().all(|device| device["name"] != whole.as_str()));
    driver.stop().await;
}

#[tokio::test]
async fn prepare_creates_instances_and_unprepare_destroys_them() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    let claim = node.allocate("a", &[SMALL]);
    let devices = kubelet.prepare(claim.clone()).await.expect("prepared");
    let found = node.instances();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].profile, found[0].start, found[0].compute.len()), (19, 6, 1));
    assert_eq!(devices[0].device_name, node.device(SMALL));
    assert_eq!(devices[0].share_id, None);

    let container = inject(&node.node.path("cdi"), &devices);
    let linux = container.linux().clone().expect("Linux");
    let nodes = linux.devices().clone().expect("devices");
    let names: Vec<String> = nodes.iter().map(|node| node.path().display().to_string()).collect();
    // Minors of GPU 3: from 3 + 3 * 135, of its instance with ID 1: 9 later.
    for name in ["/dev/nvidia-caps/nvidia-cap417", "/dev/nvidia-caps/nvidia-cap418"] {
        assert!(names.iter().any(|found| found == name), "{names:?}");
    }
    assert!(
        nodes.iter().filter(|n| n.path().starts_with("/dev/nvidia-caps")).all(|n| n.major() == 510)
    );
    let mounts = fakes::container::mounts(&container);
    assert!(!mounts.keys().any(|path| path.contains("tessera")), "no interceptor: {mounts:?}");

    assert_eq!(kubelet.prepare(claim.clone()).await.expect("again"), devices);
    assert_eq!(node.instances(), found, "a second Prepare changes nothing");
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(node.instances().is_empty());
    assert!(node.node.traces().is_empty(), "{:#?}", node.node.traces());
    driver.stop().await;
}

#[tokio::test]
async fn instance_of_another_program_is_left_and_its_slices_taken() {
    let node = MigNode::new();
    node.create_foreign(9, 4, 3);
    let foreign = node.instances();
    let driver = node.start().await;
    assert!(node.published("-mig-").iter().all(|device| {
        let counters = device["consumesCounters"][0]["counters"].as_object().expect("counters");
        (4..8).all(|slice| !counters.contains_key(&format!("memory-slice-{slice}")))
    }));
    assert_eq!(node.published("mig-1g10gb-19-").len(), 4);
    let kubelet = node.kubelet().await;
    // As another allocator would, or this one before the instance was created.
    let refused = kubelet.prepare(node.allocate("a", &[SMALL])).await.expect_err("it is taken");
    assert!(refused.contains("3g.40gb that no claim of this node has"), "{refused}");
    kubelet.unprepare(asked("a")).await.expect("unprepared");
    assert_eq!(node.instances(), foreign);
    driver.stop().await;
}

#[tokio::test]
async fn empty_instance_that_appears_late_is_not_taken_for_ours() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    // After the inventory was read, and without a compute instance.
    node.create_foreign(19, 6, 0);
    let foreign = node.instances();
    let refused = kubelet.prepare(node.allocate("a", &[SMALL])).await.expect_err("it is taken");
    assert!(refused.contains("another instance has them"), "{refused}");
    kubelet.unprepare(asked("a")).await.expect("unprepared");
    assert_eq!(node.instances(), foreign);
    driver.stop().await;
}

#[tokio::test]
async fn claim_waits_for_the_slices_of_one_that_ends() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    kubelet.prepare(node.allocate("a", &[SMALL])).await.expect("prepared");
    let second = node.allocate("b", &[LARGE]);
    let later = async {
        // The claim was read: the attempt has begun, and finds the slices in use.
        node.node.api.wait_for("the attempt", |api| (api.claim_reads() > 1).then_some(())).await;
        assert_eq!(node.instances().len(), 1);
        kubelet.unprepare(asked("a")).await.expect("unprepared");
    };
    let (prepared, ()) = tokio::join!(kubelet.prepare(second), later);
    prepared.expect("prepared");
    let found = node.instances();
    assert_eq!((found.len(), found[0].profile, found[0].start), (1, 9, 4));
    driver.stop().await;
}

#[tokio::test]
async fn restart_keeps_instances_and_publishes_all_devices() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    kubelet.prepare(node.allocate("a", &[SMALL])).await.expect("prepared");
    let before = node.instances();
    driver.stop().await;
    node.node.api.wipe_slices();
    let driver = node.start().await;
    assert_eq!(node.instances(), before);
    assert_eq!(node.published("-mig-").len(), 25, "the instance is not another program's");
    driver.stop().await;
}

#[tokio::test]
async fn reboot_loses_instances_and_prepare_creates_them_again() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    let claim = node.allocate("a", &[SMALL]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    let before = node.instances();
    driver.stop().await;
    NodeMig::new(&node.machine.control).reboot().expect("removed");

    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    kubelet.prepare(claim.clone()).await.expect("prepared again");
    let after = node.instances();
    assert_eq!((after[0].profile, after[0].start), (before[0].profile, before[0].start));
    assert_ne!(after[0].compute[0].uuid, before[0].compute[0].uuid, "a new UUID");
    let journal = std::fs::read_to_string(node.node.paths().journal()).expect("a journal");
    assert!(journal.contains(&after[0].compute[0].uuid));
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(node.instances().is_empty());
    driver.stop().await;
}

#[tokio::test]
async fn successor_with_the_same_id_is_not_destroyed() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    let claim = node.allocate("a", &[SMALL]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    let ours = node.instances();
    // An administrator destroys it and creates another at the same place.
    NodeMig::new(&node.machine.control).reboot().expect("removed");
    node.create_foreign(19, 6, 1);
    let theirs = node.instances();
    assert_eq!(theirs[0].id, ours[0].id);
    kubelet.unprepare(claim).await.expect("unprepared");
    assert_eq!(node.instances(), theirs);
    driver.stop().await;
}

#[tokio::test]
async fn busy_instance_is_destroyed_when_its_process_has_ended() {
    let node = MigNode::new();
    let driver = node.start().await;
    let kubelet = node.kubelet().await;
    let claim = node.allocate("a", &[SMALL]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    let set_busy = |busy| {
        let gpu = &node.machine.world.gpus[IN_MIG_MODE];
        NodeMig::new(&node.machine.control).set_busy(gpu, busy).expect("written");
    };
    set_busy(true);
    let refused = kubelet.unprepare(claim.clone()).await.expect_err("in use");
    assert!(refused.contains("in use by a process"), "{refused}");
    assert_eq!(claims_in_journal(&node), 1);
    set_busy(false);
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(node.instances().is_empty());
    driver.stop().await;
}

#[tokio::test]
async fn death_at_every_call_leaves_nothing_behind() {
    for call in 0.. {
        let node = MigNode::new();
        // An instance of another program survives everything.
        node.create_foreign(14, 0, 2);
        let foreign = node.instances();
        let dying = DyingMig::new(node.library(), call);
        let driver = node.start_with(dying.clone()).await;
        let kubelet = node.kubelet().await;
        let claim = node.allocate("a", &[SMALL, "mig-2g20gb-14-4"]);
        let prepared = kubelet.prepare(claim.clone()).await;
        let unprepared = match prepared {
            Ok(_) => kubelet.unprepare(claim.clone()).await,
            Err(_) => Err("it died before".to_owned()),
        };
        let has_died = dying.has_died();
        assert_eq!(has_died, unprepared.is_err(), "call {call}: {unprepared:?}");
        driver.stop().await;

        // The next process repairs the node, and serves the kubelet's next call.
        let driver = node.start().await;
        let kubelet = node.kubelet().await;
        kubelet.unprepare(claim.clone()).await.expect("unprepared");
        assert_eq!(node.instances(), foreign, "call {call}");
        assert_eq!(claims_in_journal(&node), 0, "call {call}");
        kubelet.prepare(claim.clone()).await.expect("prepared");
        assert_eq!(node.instances().len(), 3, "call {call}");
        driver.stop().await;
        if !has_died {
            assert!(call > 20, "all calls of Prepare and Unprepare were interrupted: {call}");
            return;
        }
    }
}

/// A library whose process dies at one call, as by `kill -9`: before or after its effect, in turn.
struct DyingMig {
    inner: Arc<NvmlLibrary>,
    /// Points until death.
    left: AtomicUsize,
}

impl DyingMig {
    fn new(inner: Arc<NvmlLibrary>, points: usize) -> Arc<Self> {
        Arc::new(Self { inner, left: AtomicUsize::new(points + 1) })
    }

    fn has_died(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }

    /// A point before or after a call. After death all further calls die as well.
    fn point(&self) {
        let left = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1)));
        if left.is_ok_and(|left| left <= 1) {
            // Without a message of the panic hook.
            resume_unwind(Box::new("the process dies"));
        }
    }

    fn call<T>(&self, call: impl FnOnce(&NvmlLibrary) -> T) -> T {
        self.point();
        let result = call(&self.inner);
        self.point();
        result
    }
}

impl MigLibrary for DyingMig {
    fn gpu_instances(
        &self,
        gpu: &GpuUuid,
        profile: u32,
    ) -> Result<Vec<GpuInstance>, MigLibraryError> {
        self.call(|mig| mig.gpu_instances(gpu, profile))
    }

    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: u32,
        start: u32,
    ) -> Result<u32, MigLibraryError> {
        self.call(|mig| mig.create_gpu_instance(gpu, profile, start))
    }

    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
    ) -> Result<ComputeInstance, MigLibraryError> {
        self.call(|mig| mig.create_compute_instance(gpu, gpu_instance))
    }

    fn destroy_gpu_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
    ) -> Result<(), MigLibraryError> {
        self.call(|mig| mig.destroy_gpu_instance(gpu, gpu_instance))
    }

    fn capability_nodes(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<[CapabilityNode; 2], MigLibraryError> {
        self.call(|mig| mig.capability_nodes(gpu, gpu_instance, compute_instance))
    }
}
