//! Another client writes the node's ResourceSlices at the same time as the driver. The clock is
//! simulated.

mod fakes;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use fakes::{api::Api, gpus::gpu};
use k8s_openapi::api::resource::v1::ResourceSlice;
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use serde_json::Value;
use tessera_api::{
    Inventory,
    gpu::Health,
    names::MANAGED_TAINT_KEY,
    slice::{DeviceOrder, same_pool},
};
use tessera_driver::{
    audit::{AuditFindings, OrphanedGpus},
    inventory::HardwareState,
    metrics::DriverMetrics,
    mode::DriverMode,
    publisher::Publisher,
    slices::SliceSource,
};
use tokio::{
    sync::{broadcast, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// More than fit into one slice with taints, by so few that the number of slices changes.
const GPUS: u32 = 66;

const STORM: Duration = Duration::from_secs(60);

/// With pauses of 0.5 s, 1 s, and so on up to 30 s there are eight attempts in a storm of this
/// length, each with up to three writes. Without pauses there are hundreds of writes.
const MOST_WRITES: usize = 30;

/// A little more than the longest pause.
const RECOVERY_BOUND: Duration = Duration::from_secs(31);

/// A disturbance of the driver.
#[derive(Clone, Copy, Debug)]
enum Disturbance {
    Fails(u32),
    Recovers(u32),
    Vanishes(u32),
    Returns(u32),
    /// A kubelet that starts deletes all slices of its node.
    Wiped,
    /// A client removes a device.
    Edited,
}

fn disturbance() -> impl Strategy<Value = Disturbance> {
    let few = 0..4_u32;
    prop_oneof![
        few.clone().prop_map(Disturbance::Fails),
        few.clone().prop_map(Disturbance::Recovers),
        few.clone().prop_map(Disturbance::Vanishes),
        few.prop_map(Disturbance::Returns),
        Just(Disturbance::Wiped),
        Just(Disturbance::Edited),
    ]
}

/// Disturbances, each with the milliseconds before it, and the cyclic pattern of overtaken writes.
#[derive(Clone, Debug)]
struct Storm {
    happenings: Vec<(u64, Disturbance)>,
    overtaken: Vec<bool>,
}

fn storm() -> impl Strategy<Value = Storm> {
    let happenings = prop::collection::vec((0..3000_u64, disturbance()), 5..20);
    let overtaken = prop::collection::vec(prop::bool::weighted(0.7), 16);
    (happenings, overtaken).prop_map(|(happenings, overtaken)| Storm { happenings, overtaken })
}

/// A publisher with GPUs that the test sets.
struct TestBed {
    api: Api,
    hardware: watch::Sender<Arc<HardwareState>>,
    source: SliceSource,
    failing: BTreeSet<u32>,
    gone: BTreeSet<u32>,
    /// Keeps the channels open.
    _senders: (watch::Sender<AuditFindings>, CancellationToken),
}

impl TestBed {
    fn begin() -> Self {
        let (api, stop) = (Api::new(), CancellationToken::new());
        let source = SliceSource::new(
            "node-a".parse().expect("a name"),
            DeviceOrder::Index,
            DriverMode::Managed,
        );
        let (hardware, of_hardware) = watch::channel(Arc::default());
        let (_, journal) = watch::channel(Arc::default());
        let (orphaned, of_orphaned) = watch::channel(AuditFindings::default());
        let publisher = Publisher::new(
            api.client(),
            source.clone(),
            of_hardware,
            journal,
            of_orphaned,
            Arc::new(DriverMetrics::default()),
        );
        tokio::spawn(publisher.run(stop.clone()));
        let (failing, gone) = (BTreeSet::new(), BTreeSet::new());
        let site = Self { api, hardware, source, failing, gone, _senders: (orphaned, stop) };
        site.look();
        site
    }

    fn state(&self) -> HardwareState {
        let there = (0..GPUS).filter(|number| !self.gone.contains(number)).map(|number| {
            let mut gpu = gpu(number);
            if self.failing.contains(&number) {
                gpu.health =
                    Health::Unhealthy { code: "Xid79".into(), message: "it fell off".into() };
            }
            gpu
        });
        HardwareState::Known(Inventory::new(there.collect(), vec![], vec![]))
    }

    fn look(&self) {
        self.hardware.send_replace(Arc::new(self.state()));
    }

    fn disturb(&mut self, disturbance: Disturbance) {
        match disturbance {
            Disturbance::Fails(number) => drop(self.failing.insert(number)),
            Disturbance::Recovers(number) => drop(self.failing.remove(&number)),
            Disturbance::Vanishes(number) => drop(self.gone.insert(number)),
            Disturbance::Returns(number) => drop(self.gone.remove(&number)),
            Disturbance::Wiped => return self.api.wipe_slices(),
            Disturbance::Edited => return self.edit(),
        }
        self.look();
    }

    fn edit(&self) {
        let slices = self.api.slices();
        let Some(name) = slices.first().and_then(|slice| slice["metadata"]["name"].as_str()) else {
            return;
        };
        self.api.edit_slice(name, |slice| {
            slice["spec"]["devices"]
                .as_array_mut()
                .into_iter()
                .for_each(|devices| drop(devices.pop()));
        });
    }

    /// Returns true if the slices match the hardware.
    fn is_current(&self, api: &Api) -> bool {
        let desired =
            self.source.slices(&self.state(), None, &OrphanedGpus::new(), BTreeSet::new());
        let published: Vec<ResourceSlice> = api.slices().into_iter().map(typed).collect();
        same_pool(&desired.expect("the hardware is known"), &published)
    }

    async fn wait_until_current(&self) {
        self.api
            .wait_for("the pool of the hardware", |api| self.is_current(api).then_some(()))
            .await;
    }
}

fn typed(slice: Value) -> ResourceSlice {
    serde_json::from_value(slice).expect("a ResourceSlice")
}

/// Checks the slices after each event: a complete pool has every device once, each with the managed
/// taint, and generations never decrease.
fn read_along(mut events: broadcast::Receiver<Value>) {
    let (mut there, mut newest) = (BTreeMap::<String, ResourceSlice>::new(), 0);
    while let Ok(event) = events.try_recv() {
        let slice = typed(event["object"].clone());
        let name = slice.metadata.name.clone().expect("a name");
        if event["type"] == "DELETED" {
            drop(there.remove(&name))
        } else {
            drop(there.insert(name, slice))
        }
        let generation = there.values().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
        let pool: Vec<_> =
            there.values().filter(|slice| slice.spec.pool.generation == generation).collect();
        let complete =
            pool.iter().all(|slice| slice.spec.pool.resource_slice_count == pool.len() as i64);
        if pool.is_empty() || !complete {
            continue;
        }
        assert!(generation >= newest, "generation {generation} after {newest}");
        newest = generation;
        let devices: Vec<_> =
            pool.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
        let names: BTreeSet<_> = devices.iter().map(|device| &device.name).collect();
        assert_eq!(names.len(), devices.len(), "a device twice in generation {generation}");
        for device in devices {
            let fenced = device.taints.iter().flatten().any(|taint| taint.key == MANAGED_TAINT_KEY);
            assert!(fenced, "{} without the managed taint", device.name);
        }
    }
}

async fn survives(storm: Storm) {
    let mut site = TestBed::begin();
    site.wait_until_current().await;
    let events = site.api.slice_events();
    let stormy = Arc::new(AtomicBool::new(true));
    let (blows, mut lots) = (stormy.clone(), storm.overtaken.into_iter().cycle());
    site.api.overtake_slice_writes(move || {
        blows.load(Ordering::Relaxed) && lots.next().unwrap_or_default()
    });
    let (begun, before) = (Instant::now(), site.api.slice_writes());
    for (pause, disturbance) in storm.happenings {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        site.disturb(disturbance);
    }
    tokio::time::sleep_until(begun + STORM).await;
    let writes = site.api.slice_writes() - before;
    assert!(writes <= MOST_WRITES, "{writes} writes");

    stormy.store(false, Ordering::Relaxed);
    let calm = Instant::now();
    site.wait_until_current().await;
    assert!(calm.elapsed() <= RECOVERY_BOUND, "{:?} after the storm", calm.elapsed());
    read_along(events);
}

#[test]
fn publishes_current_slices_after_storm_of_conflicts() {
    // Deterministic storms.
    let mut runner = TestRunner::deterministic();
    for number in 0..16 {
        let storm = storm().new_tree(&mut runner).expect("a storm").current();
        println!("storm {number}: {storm:?}");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(survives(storm));
    }
}
