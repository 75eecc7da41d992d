//! A container is held to its part of the GPU's time: at some points, in real time. How well the machine holds caps in general is
//! judged in `intercept/simulation`.
//!
//! Shares of time are of the program's own clock and of kernels whose length is known, so a busy machine makes them smaller, never
//! larger.

mod container;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use container::{GIB, Node, NodeShare, Running, can_contain, program};
use serde_json::Value;
use tessera_intercept_abi::{ComputePolicy, Grant};
use tessera_intercept_limiter::compute::{Arbiter, Observation, Rate, Tenant};

/// What a quarter of the GPU may look like on a busy machine.
const A_QUARTER: RangeInclusive<f64> = 0.15..=0.285;

fn share(node: &Node, id: &str, policy: ComputePolicy, percent: u32) -> NodeShare {
    let grant = node.share(&format!("{id}-as-usual"), 0, GIB).grant;
    let id = tessera_intercept_abi::Text::new(id).expect("short");
    node.share_of(Grant { policy, cores_percent: percent, id, ..grant })
}

/// Kernels of a millisecond: how, for so many windows of so many milliseconds.
fn of_a_millisecond<'a>(how: &'a str, milliseconds: &'a str, windows: &'a str) -> [&'a str; 5] {
    [how, "spin_for_1ms", "1000", milliseconds, windows]
}

fn compute(node: &Node) -> PathBuf {
    program("compute", false, node.path())
}

fn number(line: &Value, field: &str) -> f64 {
    line[field].as_f64().unwrap_or_else(|| panic!("{field} in {line}"))
}

fn ended(running: &mut Running) -> Value {
    running.with("gpu")
}

#[test]
fn a_quarter_of_the_gpu_is_a_quarter_of_its_time_however_it_is_launched() {
    if !can_contain("a_quarter_of_the_gpu_is_a_quarter_of_its_time_however_it_is_launched") {
        return;
    }
    let node = Node::in_real_time();
    let program = compute(&node);
    for how in ["plain", "cooperative", "described", "graph"] {
        let share = share(&node, how, ComputePolicy::Fixed, 25);
        let container = node.contain(&[&share]);
        let lines = container.start(&program, &of_a_millisecond(how, "1000", "3")).all("gpu");
        let parts: Vec<_> = lines.iter().map(|line| number(line, "gpu")).collect();
        assert!(parts.iter().all(|part| part <= A_QUARTER.end()), "{how}: {lines:?}");
        assert!(parts.iter().any(|part| A_QUARTER.contains(part)), "{how}: {lines:?}");
        // It slept for the rest.
        assert!(lines.iter().all(|line| number(line, "cpu") < 0.25), "{how}: {lines:?}");
        share.ledger(|ledger| {
            assert!(ledger.waits() > 10 && ledger.waited_ns() > 200_000_000, "{how}: {}", ledger.waited_ns());
            let (believed, had) = (ledger.gpu_ns() as f64 / 1e9, parts.iter().sum::<f64>());
            assert!(
                (had - 0.1..=had + 0.1).contains(&believed),
                "{how}: {believed} s in the ledger, {lines:?}"
            );
        });
    }
}

#[test]
fn processes_of_one_container_have_its_part_together() {
    if !can_contain("processes_of_one_container_have_its_part_together") {
        return;
    }
    let node = Node::in_real_time();
    let (program, share) = (compute(&node), share(&node, "claim-0", ComputePolicy::Fixed, 25));
    let container = node.contain(&[&share]);
    let arguments = of_a_millisecond("plain", "2000", "1");
    let mut running: Vec<_> = (0..4).map(|_| container.start(&program, &arguments)).collect();
    let lines: Vec<_> = running.iter_mut().map(ended).collect();
    // They do not begin at once: all they had, of the time from the first one's beginning to the last one's end.
    let had: f64 = lines
        .iter()
        .map(|line| number(line, "gpu") * (number(line, "endNs") - number(line, "beganNs")))
        .sum();
    let begin = lines.iter().map(|line| number(line, "beganNs")).fold(f64::MAX, f64::min);
    let end = lines.iter().map(|line| number(line, "endNs")).fold(0.0, f64::max);
    let part = had / (end - begin);
    assert!((0.1..=0.30).contains(&part), "{part} of the GPU: {lines:?}");
}

#[test]
fn who_has_no_cap_never_waits_and_is_measured() {
    if !can_contain("who_has_no_cap_never_waits_and_is_measured") {
        return;
    }
    let node = Node::in_real_time();
    let program = compute(&node);
    for (id, policy, percent) in [
        ("none", ComputePolicy::None, 25),
        ("whole", ComputePolicy::Fixed, 100),
        ("nothing-asked-for", ComputePolicy::Fixed, 0),
    ] {
        let share = share(&node, id, policy, percent);
        let container = node.contain(&[&share]);
        let line = ended(&mut container.start(&program, &of_a_millisecond("plain", "1000", "1")));
        share.ledger(|ledger| {
            assert_eq!(ledger.waits(), 0, "{id}");
            let (gpu, busy) = (ledger.gpu_ns() as f64 / 1e9, ledger.busy_ns(u64::MAX) as f64 / 1e9);
            let had = number(&line, "gpu");
            assert!((had - 0.05..had + 0.05).contains(&gpu), "{id}: {gpu} in the ledger, {line}");
            assert!(busy >= had - 0.05, "{id}: busy for {busy} s, {line}");
        });
    }
}

#[test]
fn a_context_that_stays_keeps_its_measurements() {
    if !can_contain("a_context_that_stays_keeps_its_measurements") {
        return;
    }
    let node = Node::in_real_time();
    let share = share(&node, "claim-0", ComputePolicy::Fixed, 90);
    node.contain(&[&share]).run_c("leaving", false, &["10"]);
    let gpu_ms = share.ledger(|ledger| ledger.gpu_ns()) as f64 / 1e6;
    assert!((195.0..=400.0).contains(&gpu_ms), "{gpu_ms} ms, not ten times 20");
}

#[test]
fn a_capture_is_not_disturbed_and_what_it_records_is_not_charged() {
    if !can_contain("a_capture_is_not_disturbed_and_what_it_records_is_not_charged") {
        return;
    }
    let node = Node::in_real_time();
    let share = share(&node, "claim-0", ComputePolicy::Fixed, 90);
    let lines = node.contain(&[&share]).run_c("captures", false, &[]);
    assert_eq!(lines.len(), 6);
    for line in &lines {
        assert_eq!(line["captured"], 0, "{line}");
    }
    // Six times five launches beside a capture, and a graph of ten.
    share.ledger(|ledger| {
        assert_eq!(ledger.launches(), 6 * 6);
        let gpu_ms = ledger.gpu_ns() as f64 / 1e6;
        assert!((40.0..=70.0).contains(&gpu_ms), "{gpu_ms} ms, not 6 times 5 times 0.6 and 6");
    });
}

#[test]
fn who_is_killed_in_the_middle_of_a_long_kernel_has_its_container_pay_for_it() {
    if !can_contain("who_is_killed_in_the_middle_of_a_long_kernel_has_its_container_pay_for_it") {
        return;
    }
    let node = Node::in_real_time();
    let (program, share) = (compute(&node), share(&node, "claim-0", ComputePolicy::Fixed, 25));
    let container = node.contain(&[&share]);
    let mut killed = container.start(&program, &["one", "spin_for_20s", "700"]);
    let launched = number(&killed.with("launchedNs"), "launchedNs");
    let ran = number(&killed.with("ranNs"), "ranNs");
    killed.kill();
    let mut next = container.start(&program, &["one", "spin_for_1ms", "1"]);
    let next = number(&next.with("launchedNs"), "launchedNs");
    // Four times as long as it ran, less the tokens that there were.
    assert!(next - launched > (ran - launched) * 4.0 - 50e6, "{launched} {ran} {next}");
}

/// The driver's part, for two shares, until told to stop.
fn arbitrate(shares: &[NodeShare; 2], stop: &Receiver<()>) {
    let mut arbiter = Arbiter::<2>::default();
    let mut waits = [0; 2];
    while stop.recv_timeout(Duration::from_millis(50)) == Err(RecvTimeoutError::Timeout) {
        let now = monotonic_ns();
        let seen = [0, 1].map(|at| {
            let grant = shares[at].grant;
            let tenant =
                Tenant { policy: grant.policy, share: Rate::from_percent(grant.cores_percent), priority: 0 };
            Some(shares[at].ledger(|ledger| {
                let still =
                    || ledger.processes().any(|process| process.waits && shares[at].is_alive(process.slot));
                let waited = ledger.waits() != waits[at] || still();
                waits[at] = ledger.waits();
                Observation { tenant, busy_ns: ledger.busy_ns(now), gpu_ns: ledger.gpu_ns(), waited }
            }))
        });
        for (share, published) in shares.iter().zip(arbiter.step(now, &seen)) {
            share.publish(&published.expect("seen"));
        }
    }
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[test]
fn balance_gives_what_others_leave_and_takes_it_back() {
    if !can_contain("balance_gives_what_others_leave_and_takes_it_back") {
        return;
    }
    let node = Node::in_real_time();
    let program = compute(&node);
    let shares = ["claim-a", "claim-b"].map(|id| share(&node, id, ComputePolicy::Balance, 25));
    let hosted = shares.clone();
    let (stop, stopped): (Sender<()>, _) = channel();
    let host = thread::spawn(move || arbitrate(&hosted, &stopped));
    let containers = shares.each_ref().map(|share| node.contain(&[share]));
    let windows = of_a_millisecond("plain", "500", "1000");
    let mut first = containers[0].start(&program, &windows);
    let more = |first: &mut Running| (0..20).map(|_| ended(first)).find(|line| number(line, "gpu") > 0.4);
    assert!(more(&mut first).is_some(), "what the second leaves is the first's");
    let mut second = containers[1].start(&program, &windows);
    let began = number(&ended(&mut second), "beganNs");
    // Both want all of it: half of it is each one's. A window that begins 200 ms after the second did is within that.
    let crowded = loop {
        let line = ended(&mut first);
        if number(&line, "endNs") > began + 700e6 {
            break line;
        }
    };
    assert!(number(&crowded, "gpu") < 0.6, "{crowded}");
    second.kill();
    // Also where it was killed while it waited.
    let after = (0..20).map(|_| ended(&mut first)).find(|line| number(line, "gpu") > 0.65);
    assert!(after.is_some(), "what the second had is the first's again");
    drop(stop);
    host.join().expect("no panic");
}
