//! Metrics of shares, and the audit of processes that hold more than their ledgers say.

mod fakes;

use std::fs;
use std::mem::offset_of;
use std::os::unix::fs::symlink;

use fakes::{
    kubelet::Kubelet,
    ledger::{Ledger, MIB, POD, holds, of_pod, path, show},
    node::{Node, claim},
};
use serde_json::json;
use tessera_driver::driver::Driver;
use tessera_intercept_abi::{
    LedgerPage, SlotPage,
    ledger::{HEADER_LEN, SLOT_LEN, SLOTS, Total},
};
use tessera_mps_protocol::{MpsPaths, lock::SupervisorLock};

/// A little more than the interval of the audit.
const AUDITED_EVERY: std::time::Duration = std::time::Duration::from_secs(31);

fn lines<'t>(metrics: &'t str, name: &str) -> Vec<&'t str> {
    let of_family = |line: &&str| {
        line.starts_with(&format!("{name}{{")) || line.starts_with(&format!("{name} "))
    };
    metrics.lines().filter(of_family).collect()
}

/// Returns the values of a metric.
fn value(driver: &Driver, name: &str) -> Vec<String> {
    let metrics = driver.metrics().render();
    lines(&metrics, name)
        .iter()
        .map(|line| line.rsplit(' ').next().expect("a value").to_owned())
        .collect()
}

async fn with_share(node: &Node) -> Driver {
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 2, 30)])).await.expect("prepared");
    driver
}

#[tokio::test]
async fn reports_limits_and_usage_of_shares() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    let ledger = Ledger::of(&node, "a");
    ledger.process(0, 100, 300 * MIB);
    ledger.process(5, 101, 700 * MIB);
    ledger.word(offset_of!(LedgerPage, peak_bytes), 1200 * MIB);
    ledger.word(offset_of!(LedgerPage, refused), 3);
    ledger.word(offset_of!(LedgerPage, past_launches), 10);
    ledger.word(offset_of!(LedgerPage, unknown_functions), 7);
    ledger.word(offset_of!(LedgerPage, compute.waited_ns), 1_500_000_000);
    ledger.word(offset_of!(LedgerPage, compute.waits), 12);
    ledger.word(offset_of!(LedgerPage, past_gpu_ns), 2_250_000_000);
    let total = Total { used_bytes: 1000 * MIB, slot: 5, change: 1 };
    ledger.word(offset_of!(LedgerPage, total), total.pack());
    let alive = Ledger::lives(&node, "a", 0);

    assert_eq!(value(&driver, "tessera_share_memory_limit_bytes"), [(2048 * MIB).to_string()]);
    assert_eq!(value(&driver, "tessera_share_cores_percent"), ["30"]);
    assert_eq!(value(&driver, "tessera_share_memory_used_bytes"), [(300 * MIB).to_string()]);
    assert_eq!(value(&driver, "tessera_share_memory_peak_bytes"), [(1200 * MIB).to_string()]);
    assert_eq!(value(&driver, "tessera_share_processes"), ["1"]);
    assert_eq!(value(&driver, "tessera_share_memory_refusals_total"), ["3"]);
    assert_eq!(value(&driver, "tessera_share_kernel_launches_total"), ["24"]);
    assert_eq!(value(&driver, "tessera_share_unknown_functions_total"), ["7"]);
    assert_eq!(value(&driver, "tessera_share_throttled_launches_total"), ["12"]);
    assert_eq!(value(&driver, "tessera_share_throttled_seconds_total"), ["1.5"]);
    assert_eq!(value(&driver, "tessera_share_gpu_seconds_total"), ["2.25"]);
    let metrics = driver.metrics().render();
    let limit = lines(&metrics, "tessera_share_memory_limit_bytes");
    for label in [
        r#"namespace="ns""#,
        r#"resourceclaim="a""#,
        r#"uuid="GPU-00000000-0000-0000-0000-000000000000""#,
    ] {
        assert!(limit[0].contains(label), "{label} is not in {limit:?}");
    }
    drop(alive);
    assert_eq!(value(&driver, "tessera_share_memory_used_bytes"), ["0"]);
    driver.stop().await;
}

/// Returns the label `pod` of each series of a share.
fn pods(driver: &Driver) -> Vec<String> {
    let metrics = driver.metrics().render();
    let pod = |line: &&str| {
        let (_, rest) = line.split_once("pod=\"").expect("a label");
        rest.split_once('"').expect("its end").0.to_owned()
    };
    lines(&metrics, "tessera_share_info").iter().map(pod).collect()
}

#[tokio::test]
async fn names_the_pods_of_shares_also_after_a_restart() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    assert_eq!(pods(&driver), ["pod-a"]);
    let metrics = driver.metrics().render();
    assert!(lines(&metrics, "tessera_share_info")[0].contains(r#"node="node-a""#));
    driver.stop().await;
    let mut shared = claim("a", &[(0, 2, 30)]);
    let reserved = shared["status"]["reservedFor"].as_array_mut().expect("a list");
    reserved.push(json!({"resource": "pods", "name": "second", "uid": "uid-of-second"}));
    node.api.put_claim(shared);
    let driver = node.start().await;
    node.api.wait_for("the audit", |_| (pods(&driver) == ["pod-a", "second"]).then_some(())).await;
    driver.stop().await;
}

#[tokio::test]
async fn reports_the_published_gpus() {
    let node = Node::with_gpus(2);
    let driver = with_share(&node).await;
    assert_eq!(value(&driver, "tessera_gpu_info"), ["1", "1"]);
    assert_eq!(value(&driver, "tessera_gpu_memory_bytes").len(), 2);
    let metrics = driver.metrics().render();
    let of_second = lines(&metrics, "tessera_gpu_info");
    assert!(of_second.iter().any(|line| line.contains(r#"index="1""#)), "{of_second:?}");
    driver.stop().await;
}

#[tokio::test]
async fn corrupt_ledger_is_reported_as_unreadable() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    assert_eq!(value(&driver, "tessera_share_ledger_readable"), ["1"]);
    let ledger = path(&node, "a");
    let corruptions: [&dyn Fn(); 4] = [
        &|| fs::write(&ledger, "").expect("written"),
        &|| fs::write(&ledger, vec![0xff; 1 << 20]).expect("written"),
        &|| {
            fs::remove_file(&ledger).expect("removed");
            symlink("/dev/zero", &ledger).expect("linked");
        },
        &|| fs::remove_file(&ledger).expect("removed"),
    ];
    for corrupt in corruptions {
        corrupt();
        assert_eq!(value(&driver, "tessera_share_ledger_readable"), ["0"]);
        assert!(value(&driver, "tessera_share_memory_used_bytes").is_empty());
        assert_eq!(value(&driver, "tessera_share_memory_limit_bytes"), [(2048 * MIB).to_string()]);
    }
    driver.stop().await;
}

#[tokio::test]
async fn unprepared_share_has_no_metrics() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 2, 30)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(value(&driver, "tessera_share_memory_limit_bytes").is_empty());
    driver.stop().await;
}

/// Lets the driver make one audit.
async fn audit() {
    tokio::time::pause();
    tokio::time::advance(AUDITED_EVERY).await;
    tokio::time::resume();
}

/// Returns the notes of events about unaccounted memory.
fn event_notes(node: &Node) -> Vec<String> {
    let of_memory = |event: &serde_json::Value| event["reason"] == "GpuMemoryUnaccounted";
    let events = node.api.events();
    let notes =
        events.iter().filter(|event| of_memory(event)).map(|event| event["note"].to_string());
    notes.collect()
}

#[tokio::test]
async fn slot_accounts_for_no_more_than_the_grant() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    Ledger::of(&node, "a").process(0, 100, 15 << 30);
    let _alive = Ledger::lives(&node, "a", 0);
    show(&node, 100, &of_pod());
    node.gpus.hold(0, &[holds(100, 15 << 10)]);
    while value(&driver, "tessera_gpu_unaccounted_memory_bytes") != [(13u64 << 30).to_string()] {
        audit().await;
        tokio::task::yield_now().await;
    }
    driver.stop().await;
}

/// Adds a mapping of the ledger of a claim to a process.
fn maps(node: &Node, pid: u32, claim: &str) {
    use std::os::unix::fs::MetadataExt;
    let ledger = fs::metadata(path(node, claim)).expect("a ledger");
    let (major, minor) = (rustix::fs::major(ledger.dev()), rustix::fs::minor(ledger.dev()));
    let line = format!(
        "7f00-7f10 rw-s 00000000 {major:02x}:{minor:02x} {} /dev/tessera/x/ledger\n",
        ledger.ino()
    );
    fs::write(node.path("proc").join(pid.to_string()).join("maps"), line).expect("written");
}

#[tokio::test]
async fn host_pid_matches_slot_if_ledger_is_mapped() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    let ledger = Ledger::of(&node, "a");
    // Neither slot matches /proc, and the second names the process of another pod.
    for (slot, pid) in [(0, 100), (1, 101)] {
        ledger.process(slot, pid, 1500 * MIB);
        let at = HEADER_LEN + slot * SLOT_LEN;
        ledger.word(at + offset_of!(SlotPage, start_ticks), 0);
        ledger.word(at + offset_of!(SlotPage, host_pid), pid.into());
        show(&node, pid, &of_pod());
    }
    maps(&node, 100, "a");
    let _alive = [0, 1].map(|slot| Ledger::lives(&node, "a", slot));
    node.gpus.hold(0, &[holds(100, 1600), holds(101, 1600)]);
    while value(&driver, "tessera_gpu_unaccounted_memory_bytes") != [(1600 * MIB).to_string()] {
        assert_ne!(
            value(&driver, "tessera_gpu_unaccounted_memory_bytes"),
            [(3200 * MIB).to_string()]
        );
        audit().await;
        tokio::task::yield_now().await;
    }
    node.api.wait_for("an event", |_| (event_notes(&node).len() == 1).then_some(())).await;
    assert!(event_notes(&node)[0].contains("process 101"), "{:?}", event_notes(&node));
    driver.stop().await;
}

#[tokio::test]
async fn audit_without_visible_processes_is_not_done() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    node.gpus.hold(0, &[holds(100, 15 << 10)]);
    while value(&driver, "tessera_gpu_audited") != ["0"] {
        audit().await;
        tokio::task::yield_now().await;
    }
    driver.stop().await;
}

#[tokio::test]
async fn unaccounted_process_is_reported_once() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    let ledger = Ledger::of(&node, "a");
    ledger.process(0, 100, 300 * MIB);
    ledger.process(1, 101, 300 * MIB);
    let _alive = [0, 1].map(|slot| Ledger::lives(&node, "a", slot));
    for pid in [100, 101, 102, 105] {
        show(&node, pid, &of_pod());
    }
    show(&node, 103, "/system.slice/dcgm.service");
    // Together more than their share; in no ledger; not in a pod; not visible; little.
    let holding = [
        holds(100, 324),
        holds(101, 1800),
        holds(102, 1064),
        holds(103, 1700),
        holds(104, 1700),
        holds(105, 64),
    ];
    node.gpus.hold(0, &holding);

    let metric = "tessera_gpu_unaccounted_processes";
    audit().await;
    while value(&driver, metric) != ["2"] {
        audit().await;
        tokio::task::yield_now().await;
    }
    assert_eq!(
        value(&driver, "tessera_gpu_unaccounted_memory_bytes"),
        [((1500 + 1064) * MIB).to_string()]
    );
    node.api.wait_for("two events", |_| (event_notes(&node).len() == 2).then_some(())).await;
    let notes = event_notes(&node).join("\n");
    for part in
        ["process 101", "process 102", "1064 MiB", "in no ledger", "300 MiB in its ledgers", POD]
    {
        assert!(notes.contains(part), "{part} is not in {notes}");
    }

    // Values of a GPU without a report stay.
    assert_eq!(value(&driver, "tessera_gpu_audited"), ["1"]);
    node.gpus.hide_processes(0);
    while value(&driver, "tessera_gpu_audited") != ["0"] {
        audit().await;
        tokio::task::yield_now().await;
    }
    assert_eq!(value(&driver, metric), ["2"]);
    // Reported once as long as it exists.
    node.gpus.hold(0, &holding[..1]);
    while !value(&driver, metric).is_empty() {
        audit().await;
        tokio::task::yield_now().await;
    }
    assert_eq!(event_notes(&node).len(), 2);
    driver.stop().await;
}

#[tokio::test]
async fn a_process_on_a_gpu_without_shares_is_reported() {
    let node = Node::with_gpus(2);
    let driver = with_share(&node).await;
    show(&node, 101, &of_pod());
    node.gpus.hold(1, &[holds(101, 65)]);
    let metric = "tessera_gpu_unaccounted_memory_bytes";
    while !value(&driver, metric).contains(&(65 * MIB).to_string()) {
        audit().await;
        tokio::task::yield_now().await;
    }
    node.api.wait_for("an event", |_| (event_notes(&node).len() == 1).then_some(())).await;
    assert!(event_notes(&node)[0].contains("process 101"), "{:?}", event_notes(&node));
    driver.stop().await;
}

#[tokio::test]
async fn processes_on_gpus_in_mig_mode_are_not_audited() {
    let node = Node::with_gpus(3);
    node.gpus.enable_mig(1);
    let driver = with_share(&node).await;
    show(&node, 101, &of_pod());
    show(&node, 102, &of_pod());
    node.gpus.hold(1, &[holds(101, 65)]);
    // It shows that two rounds are over.
    node.gpus.hold(2, &[holds(102, 66)]);
    let metric = "tessera_gpu_unaccounted_memory_bytes";
    while value(&driver, metric).is_empty() {
        audit().await;
        tokio::task::yield_now().await;
    }
    assert_eq!(value(&driver, metric), [(66 * MIB).to_string()]);
    assert_eq!(value(&driver, "tessera_gpu_audited"), ["1", "1"], "the share's GPU and the third");
    driver.stop().await;
}

#[tokio::test]
async fn memory_within_the_limit_is_not_reported() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    let ledger = Ledger::of(&node, "a");
    ledger.process(0, 100, 300 * MIB);
    let _alive = Ledger::lives(&node, "a", 0);
    show(&node, 100, &of_pod());
    show(&node, 101, &of_pod());
    // A context and kernel code; a process without a share, which shows that a round is over.
    node.gpus.hold(0, &[holds(100, 2048), holds(101, 65)]);
    audit().await;
    while value(&driver, "tessera_gpu_unaccounted_memory_bytes").is_empty() {
        audit().await;
        tokio::task::yield_now().await;
    }
    assert_eq!(value(&driver, "tessera_gpu_unaccounted_memory_bytes"), [(65 * MIB).to_string()]);
    driver.stop().await;
}

#[tokio::test]
async fn processes_of_mps_pod_are_not_audited() {
    const MPS_POD: &str = "2e1d3c4f-0b52-4d4c-9f66-1e7a3c2b5d88";
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    let _lock = SupervisorLock::acquire(&MpsPaths::new(node.paths().root()))
        .expect("a lock")
        .expect("the lock is free");
    let of_mps = format!("/kubepods/besteffort/pod{MPS_POD}/77aa");
    for (pid, cgroup) in [(std::process::id(), &of_mps), (101, &of_mps), (102, &of_pod())] {
        show(&node, pid, cgroup);
    }
    node.gpus.hold(0, &[holds(101, 5000), holds(102, 5000)]);
    audit().await;
    while value(&driver, "tessera_gpu_unaccounted_processes") != ["1"] {
        audit().await;
        tokio::task::yield_now().await;
    }
    node.api.wait_for("an event", |_| (event_notes(&node).len() == 1).then_some(())).await;
    assert!(event_notes(&node)[0].contains("process 102"), "{:?}", event_notes(&node));
    driver.stop().await;
}

#[tokio::test]
async fn corrupt_ledger_hides_only_processes_that_map_it() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    for pid in [100, 101] {
        show(&node, pid, &of_pod());
    }
    maps(&node, 100, "a");
    fs::write(path(&node, "a"), "").expect("truncated");
    node.gpus.hold(0, &[holds(100, 1600), holds(101, 1700)]);
    while value(&driver, "tessera_gpu_unaccounted_processes") != ["1"] {
        audit().await;
        tokio::task::yield_now().await;
    }
    node.api.wait_for("an event", |_| (event_notes(&node).len() == 1).then_some(())).await;
    assert!(event_notes(&node)[0].contains("process 101"), "{:?}", event_notes(&node));
    assert_eq!(value(&driver, "tessera_gpu_audited"), ["0"]);
    driver.stop().await;
}

#[tokio::test]
async fn corrupt_ledger_is_reported_once_on_its_pod() {
    let node = Node::with_gpus(1);
    let driver = with_share(&node).await;
    fs::write(path(&node, "a"), "").expect("truncated");
    let of_ledger = |node: &Node| {
        let mut events = node.api.events();
        events.retain(|event| event["reason"] == "GpuLedgerUnreadable");
        events
    };
    let mut rounds = 0;
    while of_ledger(&node).is_empty() {
        audit().await;
        tokio::task::yield_now().await;
        rounds += 1;
    }
    assert!(rounds > 1, "one round may be in the middle of an Unprepare");
    let event = of_ledger(&node).remove(0);
    assert_eq!(event["regarding"]["kind"], "Pod");
    assert_eq!(event["regarding"]["namespace"], "ns");
    let note = event["note"].as_str().expect("a note");
    assert!(note.starts_with("ledger of ResourceClaim a for GPU-"), "{note}");
    for _ in 0..20 {
        audit().await;
        tokio::task::yield_now().await;
    }
    assert_eq!(of_ledger(&node).len(), 1);
    driver.stop().await;
}

#[tokio::test]
async fn ledger_with_many_locks_is_unreadable_and_others_are_not() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    for name in ["a", "b"] {
        kubelet.prepare(node.allocate(name, &[(0, 2, 30)])).await.expect("prepared");
    }
    let ledger = Ledger::of(&node, "a");
    for slot in 0..SLOTS {
        ledger.process(slot, 100, 1);
    }
    let held = Ledger::of(&node, "a");
    // Those of the slots are last in the kernel's list.
    let bytes = (0..SLOTS).step_by(2).chain((SLOTS..SLOTS + 20_000).step_by(2));
    bytes.for_each(|byte| held.lock(byte));

    let readable = value(&driver, "tessera_share_ledger_readable");
    assert_eq!(readable.iter().filter(|value| *value == "1").count(), 1, "{readable:?}");
    assert_eq!(value(&driver, "tessera_share_processes"), ["0"], "that of the other share");
    driver.stop().await;
}
