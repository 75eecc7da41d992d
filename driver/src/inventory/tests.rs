use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use tessera_api::gpu::{ComputeCapability, CudaVersion, Gpu, Unpublished};
use tessera_cdi::SpecStore;
use tessera_gpu::{GpuMemory, GpuProcess, LibraryError, ProcessUtilization, RecoveryAction, Xid};

use tokio_util::sync::CancellationToken;

use super::{stall::STALLED_AFTER, *};
use crate::base_spec::DriverRoot;

const GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";
const OTHER: &str = "GPU-00000000-0000-0000-0000-000000000002";

fn uuid(text: &str) -> GpuUuid {
    GpuUuid::new(text).expect("a UUID")
}

/// The inventory of a node that has lost [`GPU`].
fn inventory_without_gpu() -> Inventory {
    let lost = Unpublished {
        uuid: Some(uuid(GPU)),
        index: None,
        pci_bus_id: None,
        reason: UnpublishedReason::Lost,
    };
    Inventory::new(vec![gpu(OTHER)], vec![], vec![lost])
}

fn gpu(uuid_text: &str) -> Gpu {
    Gpu {
        uuid: uuid(uuid_text),
        index: 0,
        minor: 0,
        product_name: "NVIDIA T4".into(),
        architecture: "Turing".into(),
        memory_bytes: 16 << 30,
        cuda_compute_capability: ComputeCapability { major: 7, minor: 5 },
        driver_version: "580.95.05".into(),
        cuda_driver_version: CudaVersion { major: 13, minor: 0 },
        pci_bus_id: "0000:01:00.0".parse().expect("an address"),
        pcie_root: None,
        numa_node: None,
        mig: None,
        health: Health::Healthy,
    }
}

/// A fake GPU library whose GPUs and events the test sets.
struct Machine {
    inventory: Mutex<Result<Inventory, ()>>,
    events: Arc<Mutex<mpsc::Receiver<HealthEvent>>>,
    /// Number of started watches.
    watches: AtomicUsize,
    /// The recovery action of every GPU.
    action: Mutex<Option<RecoveryAction>>,
}

struct Events(Arc<Mutex<mpsc::Receiver<HealthEvent>>>);

impl HealthWatch for Events {
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError> {
        Ok(self.0.lock().expect("no panic").recv_timeout(timeout).into_iter().collect())
    }
}

impl GpuLibrary for Machine {
    fn inventory(&self) -> Result<Inventory, LibraryError> {
        self.inventory
            .lock()
            .expect("no panic")
            .clone()
            .map_err(|()| LibraryError::Lost { gpu: uuid(GPU) })
    }

    fn is_outdated(&self) -> bool {
        false
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn utilization(
        &self,
        gpu: &GpuUuid,
        _: u64,
    ) -> Result<Option<ProcessUtilization>, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn busy_percent(&self, gpu: &GpuUuid) -> Result<Option<u8>, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn recovery_action(&self, _: &GpuUuid) -> Result<Option<RecoveryAction>, LibraryError> {
        Ok(*self.action.lock().expect("no panic"))
    }

    fn watch(&self, _: &[GpuUuid]) -> Result<Box<dyn HealthWatch>, LibraryError> {
        self.watches.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Events(Arc::clone(&self.events))))
    }
}

struct TestBed {
    watcher: InventoryWatcher,
    hardware: watch::Receiver<Arc<HardwareState>>,
    health: watch::Receiver<Arc<HealthReport>>,
    journal: watch::Sender<Arc<Journal>>,
    others: watch::Sender<other_allocators::KnownAllocators>,
    node_events: tokio::sync::mpsc::UnboundedReceiver<NodeEvent>,
    machine: Arc<Machine>,
    events: mpsc::Sender<HealthEvent>,
    directory: tempfile::TempDir,
}

fn test_bed() -> TestBed {
    let directory = tempfile::tempdir().expect("a directory");
    let libraries = directory.path().join("root/usr/lib64");
    std::fs::create_dir_all(&libraries).expect("a directory");
    std::fs::write(libraries.join("libcuda.so.1"), "").expect("a library");
    let root = DriverRoot::new(directory.path().join("root"), "/on/the/host");
    let base = BaseSpec::new(SpecStore::new(directory.path()), root);
    let (hardware_sender, hardware) = watch::channel(Arc::default());
    let (health_sender, health) = watch::channel(Arc::default());
    let (journal, journal_receiver) = watch::channel(Arc::default());
    let (others, others_receiver) = watch::channel(Some(Arc::default()));
    let (node_events_sender, node_events) = tokio::sync::mpsc::unbounded_channel();
    let (events, receiver) = mpsc::channel();
    let (inventory, events_of_machine) = (Mutex::new(Err(())), Arc::new(Mutex::new(receiver)));
    let (watches, action) = (AtomicUsize::new(0), Mutex::new(None));
    let machine = Arc::new(Machine { inventory, events: events_of_machine, watches, action });
    let watcher = InventoryWatcher::new(
        machine.clone(),
        PoolName::new("node-a").expect("a pool"),
        Arc::new(base),
        InventoryInputs { journal: journal_receiver, others: others_receiver },
        Arc::default(),
        InventoryOutputs {
            hardware: hardware_sender,
            health: health_sender,
            events: node_events_sender,
        },
    );
    TestBed { watcher, hardware, health, journal, others, node_events, machine, events, directory }
}

fn inventory(gpus: &[&str]) -> Inventory {
    Inventory::new(gpus.iter().map(|uuid| gpu(uuid)).collect(), vec![], vec![])
}

/// Adds a claim with a share of `GPU` to the journal.
fn in_use(bed: &TestBed) {
    let journal: Journal = serde_json::from_value(serde_json::json!({"claims": {"uid": {
        "namespace": "ns", "name": "claim", "state": "Completed", "library": "l",
        "shares": [{"index": 0, "request": "r", "pool": "node-a", "device": GPU.to_lowercase(), "gpu": GPU,
                    "memoryBytes": 1, "coresPercent": 0, "compute": "None"}],
    }}}))
    .expect("a journal");
    bed.journal.send_replace(Arc::new(journal));
}

fn healths(bed: &TestBed) -> Vec<(String, Option<bool>)> {
    bed.health.borrow().devices.iter().map(|found| (found.device.clone(), found.healthy)).collect()
}

#[test]
fn xid_makes_gpu_unhealthy_until_reset() {
    let mut bed = test_bed();
    let healths_of_slice = |bed: &TestBed| {
        let HardwareState::Known(found) = &**bed.hardware.borrow() else { panic!("unknown") };
        [GPU, OTHER].map(|gpu| match &found.gpu(&uuid(gpu)).expect("there").health {
            Health::Healthy => String::new(),
            Health::Unhealthy { code, .. } => code.clone(),
        })
    };
    bed.watcher.found(inventory(&[GPU, OTHER]));
    let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(119)) };
    assert!(bed.watcher.remember(&[event]), "another inventory is due");

    bed.watcher.found(inventory(&[GPU, OTHER]));
    assert_eq!(healths_of_slice(&bed), ["Xid119", ""]);
    assert_eq!(
        healths(&bed),
        [(GPU.to_lowercase(), Some(false)), (OTHER.to_lowercase(), Some(true))]
    );

    bed.watcher.found(inventory_without_gpu());
    bed.watcher.found(inventory(&[GPU, OTHER]));
    assert_eq!(healths_of_slice(&bed), ["", ""]);
    assert_eq!(
        healths(&bed),
        [(GPU.to_lowercase(), Some(true)), (OTHER.to_lowercase(), Some(true))]
    );
}

#[test]
fn gpu_is_unhealthy_while_recovery_action_is_set() {
    let mut bed = test_bed();
    *bed.machine.action.lock().expect("no panic") = Some(RecoveryAction::DrainAndReset);
    let of_an_application = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(109)) };
    let changed = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(154)) };
    assert!(!bed.watcher.remember(std::slice::from_ref(&of_an_application)));
    assert!(
        bed.watcher.remember(&[of_an_application, changed]),
        "the recovery action is to be read"
    );
    bed.watcher.found(inventory(&[GPU]));
    assert_eq!(healths(&bed), [(GPU.to_lowercase(), Some(false))]);
    *bed.machine.action.lock().expect("no panic") = Some(RecoveryAction::None);
    bed.watcher.found(inventory(&[GPU]));
    assert_eq!(healths(&bed), [(GPU.to_lowercase(), Some(true))]);
}

#[test]
fn application_error_leaves_gpu_healthy() {
    let mut bed = test_bed();
    let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(31)) };
    assert!(!bed.watcher.remember(&[event]), "a container could cause inventories at will");
    bed.watcher.found(inventory(&[GPU]));
    assert_eq!(healths(&bed), [(GPU.to_lowercase(), Some(true))]);
}

#[test]
fn known_verdict_triggers_no_inventory() {
    let mut bed = test_bed();
    let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(74)) };
    assert!(bed.watcher.remember(std::slice::from_ref(&event)));
    assert!(!bed.watcher.remember(&[event]));
}

#[test]
fn watch_of_same_gpus_is_kept() {
    let mut bed = test_bed();
    let mut events_of = |gpus: &[&str], xid| {
        let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(xid)) };
        bed.events.send(event.clone()).expect("the library listens");
        let gpus: Vec<_> = gpus.iter().map(|gpu| uuid(gpu)).collect();
        assert_eq!(bed.watcher.next_events(&gpus).expect("watched"), [event]);
        bed.machine.watches.load(Ordering::Relaxed)
    };
    assert_eq!(events_of(&[GPU, OTHER], 45), 1);
    assert_eq!(
        events_of(&[GPU, OTHER], 48),
        1,
        "a new watch would miss events during the inventory"
    );
    assert_eq!(events_of(&[OTHER], 79), 2, "events of the old watch are delivered");
}

#[test]
fn missing_gpu_of_claim_is_reported_unhealthy() {
    let mut bed = test_bed();
    in_use(&bed);
    bed.watcher.found(inventory(&[GPU, OTHER]));
    bed.watcher.found(inventory_without_gpu());
    assert!(bed.watcher.in_trouble, "the next inventory is soon");

    assert_eq!(
        healths(&bed),
        [(GPU.to_lowercase(), Some(false)), (OTHER.to_lowercase(), Some(true))]
    );
    assert!(bed.health.borrow().devices[0].message.contains("bus"), "{:?}", bed.health.borrow());

    // The operator excluded it: the health is unknown.
    let excluded = inventory(&[GPU, OTHER]).excluding(&BTreeSet::from([uuid(GPU)]));
    bed.watcher.found(excluded);
    assert_eq!(healths(&bed), [(GPU.to_lowercase(), None), (OTHER.to_lowercase(), Some(true))]);
}

#[test]
fn gpus_are_withdrawn_without_library() {
    let mut bed = test_bed();
    assert_eq!(**bed.hardware.borrow(), HardwareState::default());
    in_use(&bed);
    bed.watcher.unknown("no NVML");
    let expected = HardwareState::Unknown { reason: "no NVML".into(), is_queried: true };
    assert_eq!(**bed.hardware.borrow(), expected);
    assert_eq!(healths(&bed), [(GPU.to_lowercase(), None)]);
}

#[test]
fn gpus_stay_published_while_library_fails_for_a_short_time() {
    let mut bed = test_bed();
    bed.watcher.found(inventory(&[GPU]));
    let known = Arc::clone(&bed.hardware.borrow());
    let (begin, almost) = (Instant::now(), WITHDRAW_AFTER - Duration::from_secs(1));
    bed.watcher.failed("no NVML", begin);
    bed.watcher.failed("no NVML", begin + almost);
    assert_eq!(*bed.hardware.borrow(), known);
    bed.watcher.found(inventory(&[GPU]));
    bed.watcher.failed("no NVML", begin + almost + WITHDRAW_AFTER);
    assert_eq!(*bed.hardware.borrow(), known, "one answer in between starts the time again");
    bed.watcher.failed("no NVML", begin + almost + 2 * WITHDRAW_AFTER);
    assert!(matches!(**bed.hardware.borrow(), HardwareState::Unknown { is_queried: true, .. }));
}

#[test]
fn first_failure_of_library_is_published_immediately() {
    let mut bed = test_bed();
    bed.watcher.failed("no NVML", Instant::now());
    assert!(matches!(**bed.hardware.borrow(), HardwareState::Unknown { is_queried: true, .. }));
}

#[test]
fn hanging_library_taints_gpus_until_it_answers() {
    let mut bed = test_bed();
    let stall_watch = bed.watcher.stall_watch();
    bed.watcher.found(inventory(&[GPU, OTHER]));
    let now = Instant::now();
    bed.watcher.progress.record(now);
    stall_watch.check(now + STALLED_AFTER);
    assert!(bed.node_events.try_recv().is_err());
    for _ in 0..2 {
        stall_watch.check(now + STALLED_AFTER + Duration::from_secs(1));
    }
    let codes = |bed: &TestBed| {
        let HardwareState::Known(found) = &**bed.hardware.borrow() else { panic!("unknown") };
        let code = |gpu: &Gpu| match &gpu.health {
            Health::Healthy => String::new(),
            Health::Unhealthy { code, .. } => code.clone(),
        };
        found.gpus.iter().map(code).collect::<Vec<_>>()
    };
    assert_eq!(codes(&bed), ["NVMLTimeout", "NVMLTimeout"]);
    let NodeEvent { reason, note } = bed.node_events.try_recv().expect("an event");
    assert_eq!(reason.name(), "GpuUnhealthy");
    assert!(note.contains("has not answered for 60 s"), "{note}");
    assert!(bed.node_events.try_recv().is_err(), "reported once");

    assert!(bed.watcher.progress.record(now), "the next inventory is due");
    bed.watcher.found(inventory(&[GPU, OTHER]));
    assert_eq!(codes(&bed), ["", ""]);
}

#[test]
fn first_call_that_hangs_withdraws_what_was_published_before() {
    let mut bed = test_bed();
    let stall_watch = bed.watcher.stall_watch();
    let now = Instant::now();
    bed.watcher.progress.record(now);
    stall_watch.check(now + STALLED_AFTER + Duration::from_secs(1));
    let state = Arc::clone(&bed.hardware.borrow());
    let HardwareState::Unknown { reason, is_queried } = &*state else { panic!("known") };
    assert!(*is_queried && reason.contains("has not answered"), "{reason}");
    assert_eq!(bed.node_events.try_recv().expect("an event").reason.name(), "GpuUnhealthy");
}

#[test]
fn unchanged_inventory_refreshes_time_only() {
    let mut bed = test_bed();
    bed.watcher.found(inventory(&[GPU]));
    bed.hardware.mark_unchanged();
    bed.health.mark_unchanged();
    bed.watcher.found(inventory(&[GPU]));
    assert!(!bed.hardware.has_changed().expect("open"));
    assert!(!bed.health.has_changed().expect("open"));
    assert!(bed.health.borrow().checked_at > 0);
}

#[tokio::test]
async fn event_triggers_inventory() {
    let TestBed {
        watcher,
        mut hardware,
        machine,
        events,
        others: _others,
        directory: _directory,
        ..
    } = test_bed();
    *machine.inventory.lock().expect("no panic") = Ok(inventory(&[GPU, OTHER]));
    let mut tasks = Supervisor::new(CancellationToken::new());
    let handle = watcher.spawn(&mut tasks).expect("a thread");
    let both = HardwareState::Known(inventory(&[GPU, OTHER]));
    hardware.wait_for(|state| **state == both).await.expect("the thread lives");

    *machine.inventory.lock().expect("no panic") = Ok(inventory(&[OTHER]));
    events.send(HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Lost }).expect("it listens");
    let one = HardwareState::Known(inventory(&[OTHER]));
    hardware.wait_for(|state| **state == one).await.expect("the thread lives");
    drop(handle);
}

#[tokio::test]
async fn publishes_nothing_before_other_allocators_are_known() {
    let TestBed { watcher, mut hardware, machine, others, directory: _directory, .. } = test_bed();
    *machine.inventory.lock().expect("no panic") = Ok(inventory(&[GPU]));
    others.send_replace(None);
    let mut tasks = Supervisor::new(CancellationToken::new());
    let handle = watcher.spawn(&mut tasks).expect("a thread");
    let early = tokio::time::timeout(Duration::from_millis(100), hardware.changed()).await;
    assert!(early.is_err(), "{:?}", hardware.borrow());
    others.send_replace(Some(Arc::default()));
    let one = HardwareState::Known(inventory(&[GPU]));
    hardware.wait_for(|state| **state == one).await.expect("the thread lives");
    drop(handle);
}

#[test]
fn gpus_without_libcuda_are_not_published_and_reported_once() {
    let mut bed = test_bed();
    std::fs::remove_file(bed.directory.path().join("root/usr/lib64/libcuda.so.1"))
        .expect("removed");
    for _ in 0..2 {
        let sharable = bed.watcher.sharable(inventory(&[GPU, OTHER]), &OtherAllocators::default());
        assert!(bed.watcher.found(sharable).is_empty());
    }
    let NodeEvent { reason, note } = bed.node_events.try_recv().expect("an event");
    assert_eq!(reason.name(), "GpuNotPublished");
    assert!(note.contains("libcuda.so.1 below /on/the/host") && note.contains(OTHER), "{note}");
    assert!(bed.node_events.try_recv().is_err(), "reported once");
    assert!(bed.watcher.in_trouble, "the next inventory is soon");
}
