use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use tessera_api::gpu::{ComputeCapability, CudaVersion, Gpu, Unpublished};
use tessera_cdi::SpecStore;
use tessera_gpu::{GpuMemory, GpuProcess, LibraryError, RecoveryAction, Xid};

use super::*;
use crate::base_spec::DriverRoot;

const GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";
const OTHER: &str = "GPU-00000000-0000-0000-0000-000000000002";

fn uuid(text: &str) -> GpuUuid {
    GpuUuid::new(text).expect("a UUID")
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
        mig_enabled: false,
        health: Health::Healthy,
    }
}

/// A machine whose GPUs and events the test sets.
struct Machine {
    inventory: Mutex<Result<Inventory, ()>>,
    events: Arc<Mutex<mpsc::Receiver<HealthEvent>>>,
    /// How many watches were started.
    watches: AtomicUsize,
    /// What the driver asks for, of every GPU.
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

    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError> {
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

struct Bench {
    watcher: InventoryWatcher,
    hardware: watch::Receiver<Arc<HardwareState>>,
    health: watch::Receiver<Arc<HealthReport>>,
    journal: watch::Sender<Arc<Journal>>,
    others: watch::Sender<other_allocators::KnownAllocators>,
    news: tokio::sync::mpsc::UnboundedReceiver<NodeEvent>,
    machine: Arc<Machine>,
    events: mpsc::Sender<HealthEvent>,
    directory: tempfile::TempDir,
}

fn bench() -> Bench {
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
    let (news_sender, news) = tokio::sync::mpsc::unbounded_channel();
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
        InventoryOutputs { hardware: hardware_sender, health: health_sender, news: news_sender },
    );
    Bench { watcher, hardware, health, journal, others, news, machine, events, directory }
}

fn inventory(gpus: &[&str]) -> Inventory {
    Inventory::new(gpus.iter().map(|uuid| gpu(uuid)).collect(), vec![], vec![])
}

/// Makes the journal say that a claim has a share of `GPU`.
fn in_use(bench: &Bench) {
    let journal: Journal = serde_json::from_value(serde_json::json!({"claims": {"uid": {
        "namespace": "ns", "name": "claim", "state": "Completed", "library": "l",
        "shares": [{"index": 0, "request": "r", "pool": "node-a", "device": GPU.to_lowercase(), "gpu": GPU,
                    "memoryBytes": 1, "coresPercent": 0, "compute": "None"}],
    }}}))
    .expect("a journal");
    bench.journal.send_replace(Arc::new(journal));
}

fn healths(bench: &Bench) -> Vec<(String, Option<bool>)> {
    bench
        .health
        .borrow()
        .devices
        .iter()
        .map(|found| (found.device.clone(), found.healthy))
        .collect()
}

#[test]
fn an_xid_makes_a_gpu_unhealthy_for_slice_and_kubelet_until_it_was_reset() {
    let mut bench = bench();
    let healths_of_slice = |bench: &Bench| {
        let HardwareState::Known(found) = &**bench.hardware.borrow() else { panic!("unknown") };
        [GPU, OTHER].map(|gpu| match &found.gpu(&uuid(gpu)).expect("there").health {
            Health::Healthy => String::new(),
            Health::Unhealthy { code, .. } => code.clone(),
        })
    };
    bench.watcher.found(inventory(&[GPU, OTHER]));
    let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(119)) };
    assert!(bench.watcher.take(&[event]), "another look is due");

    bench.watcher.found(inventory(&[GPU, OTHER]));
    assert_eq!(healths_of_slice(&bench), ["Xid119", ""]);
    assert_eq!(
        healths(&bench),
        [(GPU.to_lowercase(), Some(false)), (OTHER.to_lowercase(), Some(true))]
    );

    let lost = Unpublished {
        uuid: Some(uuid(GPU)),
        index: None,
        pci_bus_id: None,
        reason: UnpublishedReason::Lost,
    };
    bench.watcher.found(Inventory::new(vec![gpu(OTHER)], vec![], vec![lost]));
    bench.watcher.found(inventory(&[GPU, OTHER]));
    assert_eq!(healths_of_slice(&bench), ["", ""]);
    assert_eq!(
        healths(&bench),
        [(GPU.to_lowercase(), Some(true)), (OTHER.to_lowercase(), Some(true))]
    );
}

#[test]
fn a_gpu_is_unhealthy_as_long_as_the_driver_asks_for_something_whoever_brought_it_about() {
    let mut bench = bench();
    *bench.machine.action.lock().expect("no panic") = Some(RecoveryAction::DrainAndReset);
    let of_an_application = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(109)) };
    let changed = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(154)) };
    assert!(!bench.watcher.take(std::slice::from_ref(&of_an_application)));
    assert!(bench.watcher.take(&[of_an_application, changed]), "the driver is to be asked");
    bench.watcher.found(inventory(&[GPU]));
    assert_eq!(healths(&bench), [(GPU.to_lowercase(), Some(false))]);
    *bench.machine.action.lock().expect("no panic") = Some(RecoveryAction::None);
    bench.watcher.found(inventory(&[GPU]));
    assert_eq!(healths(&bench), [(GPU.to_lowercase(), Some(true))]);
}

#[test]
fn an_application_s_own_error_is_not_held_against_the_gpu() {
    let mut bench = bench();
    let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(31)) };
    assert!(!bench.watcher.take(&[event]), "a tenant could keep the driver looking");
    bench.watcher.found(inventory(&[GPU]));
    assert_eq!(healths(&bench), [(GPU.to_lowercase(), Some(true))]);
}

#[test]
fn a_verdict_that_is_known_already_is_no_reason_to_look_again() {
    let mut bench = bench();
    let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(74)) };
    assert!(bench.watcher.take(std::slice::from_ref(&event)));
    assert!(!bench.watcher.take(&[event]));
}

#[test]
fn a_watch_goes_on_over_looks_that_find_the_same_gpus() {
    let mut bench = bench();
    let mut events_of = |gpus: &[&str], xid| {
        let event = HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Xid(Xid(xid)) };
        bench.events.send(event.clone()).expect("the machine listens");
        let gpus: Vec<_> = gpus.iter().map(|gpu| uuid(gpu)).collect();
        assert_eq!(bench.watcher.next_events(&gpus).expect("watched"), [event]);
        bench.machine.watches.load(Ordering::Relaxed)
    };
    assert_eq!(events_of(&[GPU, OTHER], 45), 1);
    assert_eq!(
        events_of(&[GPU, OTHER], 48),
        1,
        "a new watch would have missed what came during the look"
    );
    assert_eq!(events_of(&[OTHER], 79), 2, "what the old watch has collected is delivered");
}

#[test]
fn a_gpu_that_vanished_under_a_claim_is_reported_unhealthy() {
    let mut bench = bench();
    in_use(&bench);
    bench.watcher.found(inventory(&[GPU, OTHER]));
    let lost = Unpublished {
        uuid: Some(uuid(GPU)),
        index: None,
        pci_bus_id: None,
        reason: UnpublishedReason::Lost,
    };
    bench.watcher.found(Inventory::new(vec![gpu(OTHER)], vec![], vec![lost]));
    assert!(bench.watcher.in_trouble, "it is looked for again soon");

    assert_eq!(
        healths(&bench),
        [(OTHER.to_lowercase(), Some(true)), (GPU.to_lowercase(), Some(false))]
    );
    assert!(
        bench.health.borrow().devices[1].message.contains("bus"),
        "{:?}",
        bench.health.borrow()
    );

    // Taken out by the operator: nobody knows.
    let excluded = inventory(&[GPU, OTHER]).excluding(&BTreeSet::from([uuid(GPU)]));
    bench.watcher.found(excluded);
    assert_eq!(healths(&bench), [(OTHER.to_lowercase(), Some(true)), (GPU.to_lowercase(), None)]);
}

#[test]
fn without_a_library_nobody_knows_and_what_was_seen_is_withdrawn() {
    let mut bench = bench();
    assert_eq!(**bench.hardware.borrow(), HardwareState::default());
    in_use(&bench);
    bench.watcher.unknown("no NVML");
    let expected = HardwareState::Unknown { reason: "no NVML".into(), asked: true };
    assert_eq!(**bench.hardware.borrow(), expected);
    assert_eq!(healths(&bench), [(GPU.to_lowercase(), None)]);
}

#[test]
fn a_look_that_finds_nothing_new_wakes_nobody_and_refreshes_the_time() {
    let mut bench = bench();
    bench.watcher.found(inventory(&[GPU]));
    bench.hardware.mark_unchanged();
    bench.health.mark_unchanged();
    bench.watcher.found(inventory(&[GPU]));
    assert!(!bench.hardware.has_changed().expect("open"));
    assert!(!bench.health.has_changed().expect("open"));
    assert!(bench.health.borrow().checked_at > 0);
}

#[tokio::test]
async fn an_event_makes_the_thread_look_again() {
    let Bench {
        watcher,
        mut hardware,
        machine,
        events,
        others: _others,
        directory: _directory,
        ..
    } = bench();
    *machine.inventory.lock().expect("no panic") = Ok(inventory(&[GPU, OTHER]));
    let handle = watcher.spawn().expect("a thread");
    let both = HardwareState::Known(inventory(&[GPU, OTHER]));
    hardware.wait_for(|state| **state == both).await.expect("the thread lives");

    *machine.inventory.lock().expect("no panic") = Ok(inventory(&[OTHER]));
    events.send(HealthEvent { gpu: uuid(GPU), kind: HealthEventKind::Lost }).expect("it listens");
    let one = HardwareState::Known(inventory(&[OTHER]));
    hardware.wait_for(|state| **state == one).await.expect("the thread lives");
    drop(handle);
}

#[tokio::test]
async fn nothing_is_published_before_it_is_known_who_else_hands_out_the_gpus() {
    let Bench { watcher, mut hardware, machine, others, directory: _directory, .. } = bench();
    *machine.inventory.lock().expect("no panic") = Ok(inventory(&[GPU]));
    others.send_replace(None);
    let handle = watcher.spawn().expect("a thread");
    let early = tokio::time::timeout(Duration::from_millis(100), hardware.changed()).await;
    assert!(early.is_err(), "{:?}", hardware.borrow());
    others.send_replace(Some(Arc::default()));
    let one = HardwareState::Known(inventory(&[GPU]));
    hardware.wait_for(|state| **state == one).await.expect("the thread lives");
    drop(handle);
}

#[test]
fn gpus_that_no_container_could_use_are_not_published_and_the_operator_is_told_once() {
    let mut bench = bench();
    std::fs::remove_file(bench.directory.path().join("root/usr/lib64/libcuda.so.1"))
        .expect("removed");
    for _ in 0..2 {
        let sharable =
            bench.watcher.sharable(inventory(&[GPU, OTHER]), &OtherAllocators::default());
        assert!(bench.watcher.found(sharable).is_empty());
    }
    let NodeEvent { reason, note } = bench.news.try_recv().expect("an event");
    assert_eq!(reason, "GpuNotPublished");
    assert!(note.contains("libcuda.so.1 below /on/the/host") && note.contains(OTHER), "{note}");
    assert!(bench.news.try_recv().is_err(), "told once");
    assert!(bench.watcher.in_trouble, "and looked at again soon");
}
