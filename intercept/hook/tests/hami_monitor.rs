//! File of HAMi's monitor, by the build for HAMi's variables. The tests read and write it as the
//! monitor does (`pkg/monitor/nvidia/v1/spec.go` and `cmd/vGPUmonitor/feedback.go` of HAMi 2.9),
//! with the offsets of HAMi-core's structure on 64-bit machines.

mod container;

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use container::{Container, GIB, MIB, Mode, Node, Running, lines_of, probe, program, set_up};
use serde_json::Value;
use tessera_intercept_abi::LedgerReport;
use tessera_test_support::test_name;

const MAGIC: i32 = 19_920_718;
const FILE_LEN: usize = 2_008_952;
const GPU_COUNT_AT: usize = 56;
const UUIDS_AT: usize = 64;
const UUID_LEN: usize = 96;
const MEMORY_LIMIT_AT: usize = 1600;
const CORES_AT: usize = 1728;
const PROCESSES_AT: usize = 1856;
const PROCESS_LEN: usize = 1960;
/// Within a process: memory of GPU 0, the total in it, utilization of GPU 0, and the status.
const MEMORY_AT: usize = 8;
const MEMORY_LEN: usize = 64;
const TOTAL_AT: usize = 32;
const UTILIZATION_AT: usize = 1160;
const UTILIZATION_LEN: usize = 48;
const COMPUTE_AT: usize = 16;
const STATUS_AT: usize = 1928;
const PROCESS_COUNT_AT: usize = 2_008_896;
const SWITCH_AT: usize = 2_008_900;
const RECENT_KERNEL_AT: usize = 2_008_904;
const PRIORITY_AT: usize = 2_008_908;
const LAST_KERNEL_AT: usize = 2_008_912;

/// The monitor's file of a container.
struct Cache(PathBuf);

impl Cache {
    fn of(node: &Node) -> Self {
        Self(node.path().join("shared.cache"))
    }

    fn variable(&self) -> String {
        format!("CUDA_DEVICE_MEMORY_SHARED_CACHE={}", self.0.display())
    }

    fn i32(&self, at: usize) -> i32 {
        let bytes = fs::read(&self.0).expect("the file");
        assert!(bytes.len() >= FILE_LEN, "the monitor refuses a shorter one");
        i32::from_ne_bytes(*bytes[at..].first_chunk().expect("long enough"))
    }

    fn u64(&self, at: usize) -> u64 {
        let bytes = fs::read(&self.0).expect("the file");
        u64::from_ne_bytes(*bytes[at..].first_chunk().expect("long enough"))
    }

    fn write(&self, at: usize, value: i32) {
        let file = File::options().write(true).open(&self.0).expect("the file");
        file.write_all_at(&value.to_ne_bytes(), at as u64).expect("written");
    }

    fn uuid(&self, gpu: usize) -> String {
        let bytes = fs::read(&self.0).expect("the file");
        let text = &bytes[UUIDS_AT + gpu * UUID_LEN..][..UUID_LEN];
        String::from_utf8(text.split(|byte| *byte == 0).next().expect("one").to_vec())
            .expect("text")
    }

    /// Adds a word of all processes up, as the monitor does.
    fn sum(&self, at: usize) -> u64 {
        let count = usize::try_from(self.i32(PROCESS_COUNT_AT)).expect("a number");
        assert!((1..=1024).contains(&count));
        let places = (0..count).map(|process| PROCESSES_AT + process * PROCESS_LEN);
        let bytes = fs::read(&self.0).expect("the file");
        let is_shown = |place: &usize| bytes[place + STATUS_AT] != 0;
        let word = |place| u64::from_ne_bytes(*bytes[place + at..].first_chunk().expect("there"));
        places.filter(is_shown).map(word).sum()
    }

    fn used(&self, gpu: usize) -> u64 {
        self.sum(MEMORY_AT + gpu * MEMORY_LEN + TOTAL_AT)
    }

    fn utilization(&self, gpu: usize) -> u64 {
        self.sum(UTILIZATION_AT + gpu * UTILIZATION_LEN + COMPUTE_AT)
    }

    /// Returns the GPU time of GPU 0 that the ledger beside the file has.
    fn gpu_ns(&self, node: &Node) -> u64 {
        let ledger = self.0.with_file_name(format!("shared.cache.{}", node.uuids()[0]));
        let bytes = fs::read(ledger).expect("the ledger");
        LedgerReport::parse(&bytes).expect("a ledger").gpu_ns()
    }

    /// Waits until a value of the file is as expected.
    fn wait(&self, what: &str, is_expected: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !is_expected(self) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
            // Stores into a mapped file notify of nothing.
            thread::park_timeout(Duration::from_millis(20));
        }
    }
}

/// A container with the file, and variables.
struct Pod<'a> {
    container: Container<'a>,
    variables: Vec<String>,
}

impl<'a> Pod<'a> {
    fn new(node: &'a Node, variables: &[&str]) -> (Self, Cache) {
        let cache = Cache::of(node);
        let variables =
            [cache.variable()].into_iter().chain(variables.iter().map(|&text| text.to_owned()));
        let variables = variables.collect();
        (Self { container: node.container_in(Mode::Hami, &[]), variables }, cache)
    }

    fn start(&self, program: &str, arguments: &[&str]) -> Running {
        let variables = self.variables.iter().map(String::as_str);
        let all: Vec<_> = variables.chain([program]).chain(arguments.iter().copied()).collect();
        self.container.start("env", &all)
    }

    fn probe(&self, arguments: &[&str]) -> Vec<Value> {
        let program = probe().to_str().expect("text");
        let variables = self.variables.iter().map(String::as_str);
        let all: Vec<_> = variables.chain([program]).chain(arguments.iter().copied()).collect();
        lines_of(&self.container.run("env", &all))
    }

    /// Starts a process that holds memory.
    fn hold(&self, arguments: &[&str]) -> Running {
        let program = probe().to_str().expect("text").to_owned();
        let mut running = self.start(&program, &[&["hold"], arguments].concat());
        running.wait_for_event("holding");
        running
    }
}

#[test]
fn monitor_reads_limits_and_memory_of_all_processes() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (pod, cache) = Pod::new(
        &node,
        &[
            "CUDA_DEVICE_MEMORY_LIMIT_0=1g",
            "CUDA_DEVICE_MEMORY_LIMIT_1=2048m",
            "CUDA_DEVICE_SM_LIMIT=30",
            "CUDA_TASK_PRIORITY=0",
        ],
    );
    let _first = pod.hold(&["--take", "256Mi"]);
    let mut second = pod.hold(&["--take", "128Mi"]);
    let _other_gpu = pod.hold(&["--device", "1", "--take", "512Mi"]);
    assert_eq!((cache.i32(0), cache.i32(4)), (MAGIC, 1), "magic and version");
    assert_eq!(cache.u64(GPU_COUNT_AT), 8, "the probe asks about all GPUs");
    let uuids: Vec<_> = (0..8).map(|gpu| cache.uuid(gpu)).collect();
    assert_eq!(uuids, node.uuids());
    assert_eq!([cache.u64(MEMORY_LIMIT_AT), cache.u64(MEMORY_LIMIT_AT + 8)], [GIB, 2 * GIB]);
    assert_eq!(cache.u64(CORES_AT), 30);
    assert_eq!(cache.i32(PRIORITY_AT), 0);
    assert_eq!([cache.used(0), cache.used(1)], [384 * MIB, 512 * MIB]);
    second.kill();
    pod.probe(&["fill", "--device", "0"]);
    assert_eq!(cache.used(0), 256 * MIB, "of a killed process, and of one that has exited");
}

/// A process's memory is in the file until it exits.
#[test]
fn program_that_exits_is_not_shown_any_more() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (pod, cache) = Pod::new(&node, &["CUDA_DEVICE_MEMORY_LIMIT=1g"]);
    assert_eq!(pod.probe(&["fill"])[1]["takenBytes"], GIB);
    assert_eq!(cache.used(0), 0);
}

#[test]
fn file_that_hami_core_left_behind_is_used_again() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (pod, cache) = Pod::new(&node, &["CUDA_DEVICE_MEMORY_LIMIT=1g"]);
    let mut left = vec![0_u8; FILE_LEN + 1];
    left[..4].copy_from_slice(&MAGIC.to_ne_bytes());
    left[4..8].copy_from_slice(&1_i32.to_ne_bytes());
    left[PROCESS_COUNT_AT..][..4].copy_from_slice(&3_i32.to_ne_bytes());
    left[RECENT_KERNEL_AT..][..4].copy_from_slice(&(-1_i32).to_ne_bytes());
    for place in (0..3).map(|process| PROCESSES_AT + process * PROCESS_LEN) {
        left[place + MEMORY_AT + TOTAL_AT..][..8].copy_from_slice(&GIB.to_ne_bytes());
        left[place + STATUS_AT] = 1;
    }
    fs::write(&cache.0, left).expect("written");
    let _running = pod.hold(&["--take", "256Mi"]);
    assert_eq!(cache.used(0), 256 * MIB);
    assert_eq!(cache.i32(RECENT_KERNEL_AT), 2, "launches are not held by an old word");
}

#[test]
fn monitor_holds_launches_and_lets_them_go() {
    let Some(node) = set_up(test_name!(), Node::in_real_time) else { return };
    let (pod, cache) = Pod::new(&node, &["CUDA_DEVICE_MEMORY_LIMIT=1g"]);
    let compute = program("compute", false, node.path());
    let mut running = pod.start(
        compute.to_str().expect("text"),
        &["sync", "spin_for_1ms", "1000", "100", "1000000"],
    );
    running.wait_for_field("gpu");
    assert_eq!(cache.i32(RECENT_KERNEL_AT), 2);
    // The monitor subtracts 1 every five seconds; a launch makes it 2 again.
    cache.write(RECENT_KERNEL_AT, 1);
    cache.wait("launches are reported", |cache| cache.i32(RECENT_KERNEL_AT) == 2);
    assert!(cache.u64(LAST_KERNEL_AT) > 1_700_000_000, "seconds since 1970");
    cache.write(RECENT_KERNEL_AT, -1);
    cache.wait("launches are held", |cache| cache.utilization(0) == 0);
    let held_at = cache.gpu_ns(&node);
    assert_eq!(cache.i32(RECENT_KERNEL_AT), -1, "only the monitor lets them go");
    cache.write(RECENT_KERNEL_AT, 0);
    cache.wait("launches go on", |cache| cache.gpu_ns(&node) > held_at);
    cache.wait("launches are reported again", |cache| cache.i32(RECENT_KERNEL_AT) == 2);
}

/// Returns the GPU's part of the first window in which it is as expected.
fn wait_for_part(running: &mut Running, is_expected: impl Fn(f64) -> bool, what: &str) {
    let mut seen = Vec::new();
    while seen.len() < 100 {
        let gpu = running.wait_for_field("gpu")["gpu"].as_f64().expect("a number");
        if is_expected(gpu) {
            return;
        }
        seen.push(gpu);
    }
    panic!("{what}: {seen:?}");
}

#[test]
fn monitor_lifts_the_limit_of_compute_unless_forced() {
    let Some(node) = set_up(test_name!(), Node::in_real_time) else { return };
    let compute = program("compute", false, node.path());
    let arguments = ["sync", "spin_for_1ms", "1000", "300", "1000000"];
    let start = |variables: &[&str]| {
        let (pod, cache) = Pod::new(&node, variables);
        let mut running = pod.start(compute.to_str().expect("text"), &arguments);
        wait_for_part(&mut running, |gpu| gpu < 0.22, "the limit of 20 % holds");
        (running, cache)
    };
    let (mut running, cache) = start(&["CUDA_DEVICE_SM_LIMIT=20"]);
    assert_eq!(cache.i32(SWITCH_AT), 1);
    cache.write(SWITCH_AT, 0);
    wait_for_part(&mut running, |gpu| gpu > 0.4, "alone on the GPU, it is lifted");
    cache.write(SWITCH_AT, 1);
    wait_for_part(&mut running, |gpu| gpu < 0.22, "it holds again");
    running.kill();
    cache.write(SWITCH_AT, 0);
    let (mut running, _) = start(&["CUDA_DEVICE_SM_LIMIT=20", "GPU_CORE_UTILIZATION_POLICY=force"]);
    for _ in 0..5 {
        let gpu = running.wait_for_field("gpu")["gpu"].as_f64().expect("a number");
        assert!(gpu < 0.25, "{gpu}");
    }
}

#[test]
fn utilization_is_shown_and_ends_with_the_launches() {
    let Some(node) = set_up(test_name!(), Node::in_real_time) else { return };
    let (pod, cache) = Pod::new(&node, &["CUDA_DEVICE_SM_LIMIT=30"]);
    let compute = program("compute", false, node.path());
    let mut running = pod.start(
        compute.to_str().expect("text"),
        &["sync", "spin_for_1ms", "1000", "100", "1000000"],
    );
    running.wait_for_field("gpu");
    cache.wait("it is shown", |cache| (5..=36).contains(&cache.utilization(0)));
    // Its launches end, and the process lives on.
    cache.write(RECENT_KERNEL_AT, -1);
    cache.wait("an idle process uses nothing", |cache| cache.utilization(0) == 0);
}

#[test]
fn oversubscribed_memory_spills_to_the_host() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let physical = Pod::new(&node, &[]).0.probe(&["see"])[0]["devices"][0]["cudaTotalBytes"]
        .as_u64()
        .expect("a number");
    let limit = format!("CUDA_DEVICE_MEMORY_LIMIT={}m", (physical + GIB) / MIB);
    let (pod, _) = Pod::new(&node, &[&limit]);
    let most = |pod: &Pod<'_>| pod.probe(&["fill"])[1]["takenBytes"].as_u64().expect("a number");
    assert!(most(&pod) <= physical);
    let (pod, _) = Pod::new(&node, &[&limit, "CUDA_OVERSUBSCRIBE=true"]);
    assert!(most(&pod) > physical, "as far as the limit");
}
