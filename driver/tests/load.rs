//! Load of GPUs: averages of NVML's utilization, and the shares that are in them.

mod fakes;

use std::sync::Arc;

use fakes::{gpus::uuid, kubelet::Kubelet, node::Node};
use tessera_api::load::NodeLoad;
use tessera_driver::{
    inventory::HardwareState,
    metrics::DriverMetrics,
    state::journal::JournalStore,
    usage::load::{LoadMeter, LoadReader},
};
use tessera_gpu::GpuLibrary as _;
use tokio::sync::watch;

const SECOND: u64 = 1_000_000_000;

/// A meter of a node with two GPUs, with its own time.
struct TestBed {
    node: Node,
    meter: LoadMeter,
    reader: LoadReader,
    hardware: watch::Sender<Arc<HardwareState>>,
    metrics: Arc<DriverMetrics>,
    now_ns: u64,
}

impl TestBed {
    /// Returns one with the prepared claims of the node.
    fn of(node: Node) -> Self {
        let store = JournalStore::new(node.paths());
        drop(store.lock().expect("a journal"));
        let inventory = node.gpus.inventory().expect("GPUs");
        let (hardware, known) = watch::channel(Arc::new(HardwareState::Known(inventory)));
        let metrics = Arc::new(DriverMetrics::default());
        let gpus = Arc::new(node.gpus.clone());
        let meter = LoadMeter::new(gpus, known, store.watch(), Arc::clone(&metrics));
        Self { reader: meter.reader(), node, meter, hardware, metrics, now_ns: SECOND }
    }

    /// Makes a round each second for as long, in which both GPUs work this much, in percent.
    fn work(&mut self, seconds: u64, percents: [u32; 2]) {
        for (gpu, percent) in percents.into_iter().enumerate() {
            self.node.gpus.work(gpu as u32, &[(7, percent)]);
        }
        for _ in 0..seconds {
            self.meter.round(self.now_ns);
            self.now_ns += SECOND;
        }
    }

    fn load(&self) -> NodeLoad {
        self.reader.read(self.now_ns)
    }

    fn percents(&self) -> Vec<u8> {
        self.load().gpus.iter().map(|gpu| gpu.busy_percent).collect()
    }
}

#[test]
fn load_is_the_average_of_a_minute() {
    let mut bed = TestBed::of(Node::with_gpus(2));
    bed.work(1, [100, 0]);
    assert_eq!(bed.percents(), [100, 0]);
    bed.work(1, [0, 0]);
    assert_eq!(bed.percents(), [50, 0], "of two readings");
    bed.work(58, [50, 20]);
    assert_eq!(bed.percents(), [50, 19], "of sixty");
    bed.work(60, [100, 20]);
    let [first, second] = bed.percents()[..] else { panic!("two GPUs") };
    assert!((78..=85).contains(&first) && second == 20, "{first} {second}: two thirds are new");
    bed.work(300, [0, 0]);
    assert_eq!(bed.percents(), [1, 0], "an ended job is forgotten");
    let text = bed.metrics.render();
    let line = format!("tessera_gpu_utilization_percent{{uuid=\"{}\"}} 1", uuid(0));
    assert!(text.contains(&line), "{text}");
}

#[tokio::test]
async fn a_share_settles_after_three_minutes() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 2, 30), (1, 2, 10)])).await.expect("prepared");
    driver.stop().await;
    let mut bed = TestBed::of(node);
    let settled = |bed: &TestBed| -> Vec<u32> {
        bed.load().gpus.iter().map(|gpu| gpu.settled_cores_percent).collect()
    };
    bed.work(180, [0, 0]);
    assert_eq!(settled(&bed), [0, 0]);
    bed.work(1, [0, 0]);
    assert_eq!(settled(&bed), [30, 10]);
}

#[test]
fn only_known_loads_of_published_gpus_are_served() {
    let mut bed = TestBed::of(Node::with_gpus(2));
    bed.work(5, [40, 60]);
    assert_eq!(bed.load().gpus.len(), 2);
    bed.now_ns += 30 * SECOND;
    assert_eq!(bed.load(), NodeLoad::default(), "NVML hangs");
    bed.node.gpus.lose(1);
    let left = bed.node.gpus.inventory().expect("GPUs");
    bed.hardware.send_replace(Arc::new(HardwareState::Known(left)));
    bed.work(1, [40, 60]);
    assert_eq!(bed.percents(), [40]);
    let text = bed.metrics.render();
    assert!(!text.contains(uuid(1).as_str()), "{text}");
}
