//! Memory and GPU time of shares that only NVML sees.

mod fakes;

use std::{fs::File, mem::offset_of, os::unix::fs::FileExt, sync::Arc, time::Duration};

use fakes::{
    kubelet::Kubelet,
    ledger::{Ledger, MIB, holds, of_pod, path, share, show},
    node::Node,
};
use tessera_driver::{
    driver::DriverSettings,
    events::ClaimEvent,
    state::{journal::JournalStore, sole_lock},
    usage::{
        Ledgers,
        measurement::{HostMeasurement, Measurement},
        process::ProcFs,
    },
};
use tessera_intercept_abi::{
    LedgerPage, PublishedPage, SlotPage, grant_offset, ledger::HEADER_LEN,
};
use tessera_intercept_limiter::compute::{Contention, Gain, Published, Rate};
use tokio::sync::mpsc;

const SECOND: u64 = 1_000_000_000;

/// A node with a prepared share of 2 GiB and 30 %, and its measurement.
struct TestBed {
    node: Node,
    store: JournalStore,
    measurement: HostMeasurement,
    events: mpsc::Receiver<ClaimEvent>,
    now_ns: u64,
    /// The lock of the driver's compute scheduler.
    _scheduling: Option<File>,
}

impl TestBed {
    async fn new() -> Self {
        Self::with_contexts("0").await
    }

    /// Returns one whose driver charges this amount for each context.
    async fn with_contexts(memory: &str) -> Self {
        let node = Node::with_gpus(1);
        let context_memory = memory.parse().expect("an amount");
        let settings = DriverSettings { context_memory, ..node.settings() };
        let driver = node.start_as(settings).await;
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        kubelet.prepare(node.allocate("a", &[(0, 2, 30)])).await.expect("prepared");
        driver.stop().await;
        let store = JournalStore::new(node.paths());
        drop(store.lock().expect("a journal"));
        let (sender, events) = mpsc::channel(8);
        let mut measurement = Self::measurement(&node, &store, sender);
        // A round of the driver may still run or begin, on a thread that a stop does not wait for:
        // of its measurement, or of its compute scheduler, which would publish that launches are
        // not metered.
        let mut scheduling = None;
        let lock = node.paths().arbitration_lock();
        while !measurement.try_lock() || !sole_lock::hold(&mut scheduling, &lock).expect("locked") {
            tokio::task::yield_now().await;
        }
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now_ns = now.tv_sec as u64 * SECOND;
        let bed = Self { node, store, measurement, events, now_ns, _scheduling: scheduling };
        // The driver has published that launches of the only share are not metered.
        meter(&bed, true);
        bed
    }

    /// Returns one beside another container with work, with samples of the time of each reading.
    async fn beside_another() -> Self {
        let mut bed = Self::new().await;
        bed.node.gpus.sampled(Duration::ZERO);
        bed.node.gpus.hold(0, &[holds(999, 300)]);
        bed.work_of(5, 0, &[(999, 40)]);
        bed
    }

    fn measurement(
        node: &Node,
        store: &JournalStore,
        events: mpsc::Sender<ClaimEvent>,
    ) -> HostMeasurement {
        let ledgers = Ledgers::new(node.paths(), store.watch());
        HostMeasurement::new(
            ledgers,
            Arc::new(node.gpus.clone()),
            ProcFs::new(node.path("proc")),
            events,
        )
    }

    /// Makes one round, a second after the last one.
    fn round(&mut self) {
        self.now_ns += SECOND;
        self.measurement.round(self.now_ns);
    }

    /// Makes rounds in which the process of slot 0 is charged a part of each second, and NVML
    /// reports another part of its PID, in percent.
    fn work(&mut self, rounds: u64, pid: u32, charged: u64, used: u32) {
        self.work_of(rounds, charged, &[(pid, used)]);
    }

    /// [`work`](Self::work) of which NVML reports these uses by PID.
    fn work_of(&mut self, rounds: u64, charged: u64, uses: &[(u32, u32)]) {
        let ledger = Ledger::of(&self.node, "a");
        self.node.gpus.work(0, uses);
        for _ in 0..rounds {
            let at = HEADER_LEN + offset_of!(SlotPage, compute.gpu_ns);
            ledger.word(at, charged_so_far(&self.node) + charged * SECOND / 100);
            self.round();
        }
    }

    fn grant(&self) -> std::path::PathBuf {
        self.node.paths().grant(&share("a"))
    }

    fn published(&self) -> Measurement {
        Measurement::read(&self.grant()).expect("a grant")
    }

    fn overhead_mib(&self) -> i64 {
        self.published().overhead_bytes / MIB as i64
    }
}

fn charged_so_far(node: &Node) -> u64 {
    let mut bytes = [0; 8];
    let at = (HEADER_LEN + offset_of!(SlotPage, compute.gpu_ns)) as u64;
    File::open(path(node, "a")).expect("a ledger").read_exact_at(&mut bytes, at).expect("read");
    u64::from_le_bytes(bytes)
}

/// Returns true if nothing is corrected but the margin beside others, 1/256.
fn is_margin(gain: Gain) -> bool {
    [Gain::of(1_027, 1_024), Gain::of(1_028, 1_024)].contains(&gain)
}

/// Adds a process with a slot.
fn process(node: &Node, slot: usize, pid: u32, charged_mib: u64) -> File {
    Ledger::of(node, "a").process(slot, pid, charged_mib * MIB);
    show(node, pid, &of_pod());
    Ledger::lives(node, "a", slot)
}

#[tokio::test]
async fn memory_beyond_slots_is_published_after_three_readings() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    let _other = process(&bed.node, 1, 101, 100);
    bed.node.gpus.hold(0, &[holds(100, 700), holds(101, 150), holds(102, 900)]);
    bed.round();
    bed.round();
    assert_eq!(bed.overhead_mib(), 0, "the estimate for contexts counts at first");
    bed.round();
    assert_eq!(bed.overhead_mib(), 450);
    // A process exits.
    bed.node.gpus.hold(0, &[holds(101, 150)]);
    bed.round();
    assert_eq!(bed.overhead_mib(), 50);
}

#[tokio::test]
async fn allocation_between_two_reads_does_not_count() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    for held in [700, 700, 1700, 700, 1700] {
        bed.node.gpus.hold(0, &[holds(100, held)]);
        bed.round();
    }
    // The median of 1700, 700 and 1700 would be wrong for one reading.
    bed.node.gpus.hold(0, &[holds(100, 700)]);
    bed.round();
    assert_eq!(bed.overhead_mib(), 400);
}

#[tokio::test]
async fn contexts_that_are_charged_too_much_are_given_back() {
    let mut bed = TestBed::with_contexts("512Mi").await;
    let _alive = process(&bed.node, 0, 100, 612);
    bed.node.gpus.hold(0, &[holds(100, 400)]);
    (0..3).for_each(|_| bed.round());
    assert_eq!(bed.overhead_mib(), -212);
    // Imported memory is charged to both processes. What contexts cost is the bound.
    bed.node.gpus.hold(0, &[holds(100, 0)]);
    (0..3).for_each(|_| bed.round());
    assert_eq!(bed.overhead_mib(), -512);
}

#[tokio::test]
async fn gpu_time_that_events_do_not_show_is_corrected_and_reported() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 300)]);
    bed.work(30, 100, 20, 40);
    let gain = bed.published().gain.as_quotient();
    assert!((1.8..=2.0).contains(&gain), "{gain}");
    let event = bed.events.try_recv().expect("an event");
    assert_eq!(event.reason.name(), "GpuTimeCorrected");
    assert!(event.note.contains("ResourceClaim a") && event.note.contains("factor of 1."));
    assert!(bed.events.try_recv().is_err(), "once");
    bed.work(40, 100, 40, 40);
    let gain = bed.published().gain.as_quotient();
    assert!((0.98..=1.02).contains(&gain), "{gain}");
}

/// Work that ran after NVML's last sample is not in it: the younger it is, the less that can be.
#[tokio::test]
async fn young_samples_correct_gpu_time_within_seconds() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 300)]);
    bed.work(4, 100, 70, 60);
    assert_eq!(bed.published().gain, Gain::ONE, "of an unknown age");
    bed.node.gpus.sampled(Duration::from_millis(100));
    bed.work(3, 100, 70, 60);
    let gain = bed.published().gain.as_quotient();
    assert!((0.85..=0.95).contains(&gain), "{gain}");
}

/// Others pay for what a container is charged too little.
#[tokio::test]
async fn uses_above_the_charge_count_more_beside_others() {
    let mut gains = Vec::new();
    for others in [&[][..], &[(999, 30)]] {
        let mut bed = TestBed::new().await;
        let _alive = process(&bed.node, 0, 100, 300);
        bed.node.gpus.hold(0, &[holds(100, 300)]);
        bed.node.gpus.sampled(Duration::from_millis(100));
        bed.work_of(20, 10, &[&[(100, 11)], others].concat());
        gains.push(bed.published().gain.as_quotient());
    }
    let [alone, beside] = gains[..] else { unreachable!("one for each") };
    assert!((1.02..1.06).contains(&alone) && (1.06..1.1).contains(&beside), "{gains:?}");
}

#[tokio::test]
async fn gain_is_one_without_utilization_of_processes() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 300)]);
    let ledger = Ledger::of(&bed.node, "a");
    for second in 1..20 {
        ledger.word(HEADER_LEN + offset_of!(SlotPage, compute.gpu_ns), second * SECOND / 5);
        bed.round();
    }
    assert_eq!(bed.published().gain, Gain::ONE);
}

#[tokio::test]
async fn gpu_time_is_not_corrected_if_the_operator_forbids_it() {
    let mut bed = TestBed::new().await;
    bed.measurement = bed.measurement.with_correction(false);
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 700)]);
    bed.work(30, 100, 20, 40);
    assert_eq!((bed.published().gain, bed.overhead_mib()), (Gain::ONE, 400));
    assert!(bed.events.try_recv().is_err());
}

/// NVML has no samples of an idle GPU.
#[tokio::test]
async fn hour_without_work_does_not_change_the_gain() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 300)]);
    bed.work(10, 100, 30, 30);
    bed.node.gpus.idle(0);
    (0..3600).for_each(|_| bed.round());
    bed.work(3, 100, 30, 30);
    assert_eq!(bed.published().gain, Gain::ONE);
}

#[tokio::test]
async fn gpu_that_does_not_answer_keeps_its_overhead() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 700)]);
    (0..3).for_each(|_| bed.round());
    bed.node.gpus.hide_processes(0);
    bed.round();
    assert_eq!(bed.overhead_mib(), 400);
}

/// A container could get more GPU time by hiding the process that uses it.
#[tokio::test]
async fn slot_without_a_known_process_does_not_lower_the_gain() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    // Its slot has another start time.
    let at = HEADER_LEN + offset_of!(SlotPage, start_ticks);
    Ledger::of(&bed.node, "a").word(at, 7);
    bed.node.gpus.hold(0, &[holds(100, 300)]);
    bed.work(30, 100, 90, 30);
    assert!(is_margin(bed.published().gain), "{:?}", bed.published().gain);
}

/// NVML has no sample of a process that has just begun, but of others.
#[tokio::test]
async fn process_that_has_just_begun_does_not_lower_the_gain() {
    let mut bed = TestBed::beside_another().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 300), holds(999, 300)]);
    bed.work_of(1, 25, &[(999, 40)]);
    assert!(is_margin(bed.published().gain), "{:?}", bed.published().gain);
    bed.work_of(3, 25, &[(100, 25), (999, 40)]);
    assert!(is_margin(bed.published().gain), "{:?}", bed.published().gain);
}

/// A shell loop of programs: what ran since the last reading and has exited is in the ledger, but
/// NVML reports the process of this moment only.
#[tokio::test]
async fn short_programs_in_a_loop_do_not_lower_the_gain() {
    let mut bed = TestBed::beside_another().await;
    let past = offset_of!(LedgerPage, past_gpu_ns);
    for pid in 100..130 {
        let ledger = Ledger::of(&bed.node, "a");
        ledger.word(past, u64::from(pid - 99) * SECOND / 5);
        ledger.word(HEADER_LEN + offset_of!(SlotPage, compute.gpu_ns), 0);
        let _alive = process(&bed.node, 0, pid, 300);
        bed.node.gpus.hold(0, &[holds(pid, 300), holds(999, 300)]);
        bed.work_of(1, 10, &[(pid, 5), (999, 40)]);
        assert!(is_margin(bed.published().gain), "{:?}", bed.published().gain);
    }
}

/// The other process of the container counts as before.
#[tokio::test]
async fn processes_that_stay_are_corrected_beside_short_ones() {
    let mut bed = TestBed::new().await;
    bed.node.gpus.sampled(Duration::from_millis(100));
    let _alive = process(&bed.node, 0, 100, 300);
    let past = offset_of!(LedgerPage, past_gpu_ns);
    for pid in 101..131 {
        Ledger::of(&bed.node, "a").word(past, u64::from(pid - 100) * SECOND / 10);
        let _short = process(&bed.node, 1, pid, 300);
        bed.node.gpus.hold(0, &[holds(100, 300), holds(pid, 300)]);
        bed.work_of(1, 20, &[(100, 50), (pid, 5)]);
    }
    let gain = bed.published().gain.as_quotient();
    assert!((1.8..=2.05).contains(&gain), "60 of 30 percent: {gain}");
}

#[tokio::test]
async fn corrupt_ledger_is_not_measured() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 700)]);
    Ledger::of(&bed.node, "a").word(offset_of!(LedgerPage, magic), 0);
    (0..4).for_each(|_| bed.round());
    assert_eq!(bed.overhead_mib(), 0);
}

#[tokio::test]
async fn only_one_instance_measures() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 700)]);
    let (sender, _events) = mpsc::channel(8);
    let mut other = TestBed::measurement(&bed.node, &bed.store, sender);
    bed.round();
    (0..4).for_each(|second| other.round(bed.now_ns + second * SECOND));
    assert_eq!(bed.overhead_mib(), 0, "the first instance has read once");
    drop(bed.measurement);
    let mut bed = TestBed { measurement: other, ..bed };
    (0..3).for_each(|_| bed.round());
    assert_eq!(bed.overhead_mib(), 400);
}

#[tokio::test]
async fn driver_measures_prepared_shares_and_shows_metrics() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 2, 30)])).await.expect("prepared");
    let _alive = process(&node, 0, 100, 300);
    node.gpus.hold(0, &[holds(100, 812)]);
    let is_shown = |metrics: &str| {
        let line = |line: &str| {
            line.starts_with("tessera_share_driver_memory_bytes{")
                && line.ends_with(&format!(" {}.0", 512 * MIB))
        };
        metrics.lines().any(line)
    };
    let begun = std::time::Instant::now();
    while !is_shown(&driver.metrics().render()) {
        assert!(begun.elapsed().as_secs() < 120, "{}", driver.metrics().render());
        tokio::time::pause();
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        tokio::time::resume();
        tokio::task::yield_now().await;
    }
    assert!(driver.metrics().render().contains("tessera_share_gpu_time_gain{"));
    driver.stop().await;
}

#[tokio::test]
async fn refused_memory_is_an_event_of_the_pod() {
    let mut bed = TestBed::new().await;
    let ledger = Ledger::of(&bed.node, "a");
    ledger.word(offset_of!(LedgerPage, refused), 3);
    bed.round();
    assert!(bed.events.try_recv().is_err(), "refused before the driver started");
    ledger.word(offset_of!(LedgerPage, refused_bytes), 700 * MIB);
    ledger.word(offset_of!(LedgerPage, refused_used_bytes), 1500 * MIB);
    ledger.word(offset_of!(LedgerPage, refused), 5);
    bed.round();
    let event = bed.events.try_recv().expect("an event");
    assert_eq!(event.reason.name(), "GpuMemoryRefused");
    for part in ["2 allocations", "last of 700 MiB", "1500 of 2048 MiB", "ResourceClaim a"] {
        assert!(event.note.contains(part), "{part} is not in {}", event.note);
    }
    bed.round();
    assert!(bed.events.try_recv().is_err(), "nothing was refused since");
}

/// Publishes that launches of the share are not metered, or are, as the compute scheduler does.
fn meter(bed: &TestBed, is_metered: bool) {
    let published = Published {
        rate: Rate::FULL,
        others: Contention::NONE,
        others_busy_ns: 0,
        stamp_ms: 0,
        is_metered,
        scale: Rate::FULL,
    };
    let at = (grant_offset::PUBLISHED + offset_of!(PublishedPage, word)) as u64;
    let grant = File::options().write(true).open(bed.grant()).expect("a grant");
    grant.write_all_at(&published.words()[0].to_le_bytes(), at).expect("written");
}

#[tokio::test]
async fn gpu_time_of_unmetered_launches_is_that_of_nvml() {
    let mut bed = TestBed::new().await;
    let _alive = process(&bed.node, 0, 100, 300);
    bed.node.gpus.hold(0, &[holds(100, 300)]);
    meter(&bed, false);
    bed.work(2, 100, 0, 0);
    assert_eq!(bed.published().unmetered, Duration::ZERO);
    bed.work(30, 100, 0, 40);
    let unmetered = bed.published().unmetered;
    assert!((11.5..12.5).contains(&unmetered.as_secs_f64()), "40 % of 30 s: {unmetered:?}");
    assert_eq!(bed.published().gain, Gain::ONE, "nothing is corrected");
    // Metered again: charged as NVML reports, and the sum stays.
    meter(&bed, true);
    bed.work(30, 100, 40, 40);
    assert_eq!((bed.published().unmetered, bed.published().gain), (unmetered, Gain::ONE));
    // A driver that restarts continues from the sum.
    meter(&bed, false);
    let (sender, events) = mpsc::channel(8);
    bed.measurement = TestBed::measurement(&bed.node, &bed.store, sender);
    bed.events = events;
    bed.work(12, 100, 0, 50);
    let later = bed.published().unmetered - unmetered;
    assert!((4.0..6.5).contains(&later.as_secs_f64()), "{later:?}");
}
