//! A container is held to its part of the GPU's time, through the library as it ships. How well the
//! machine holds caps in general is judged in `testing/limiter-simulation`.
//!
//! What one process does is tested by a clock that goes only while it waits, and to the point. What
//! several do together is tested in real time; there a busy machine makes shares smaller, never
//! larger, so that only "never more" is tight.

mod container;

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use container::{GIB, Node, NodeShare, Running, arbitrate, can_contain, monotonic_ns, program};
use serde_json::Value;
use tessera_intercept_abi::{ComputePolicy, Grant};
use tessera_intercept_limiter::compute::{Crowd, Published, Rate};

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

/// GPU time that was launched, of kernels whose length is known.
fn had_ns(lines: &[Value]) -> u64 {
    lines
        .iter()
        .map(|line| line["gpuNs"].as_u64().unwrap_or_else(|| panic!("gpuNs in {line}")))
        .sum()
}

/// That the ledger has all of it: event times are floats of milliseconds.
fn assert_accounted(share: &NodeShare, had_ns: u64, what: &str) {
    let believed_ns = share.ledger(|ledger| ledger.gpu_ns());
    assert!(
        believed_ns.abs_diff(had_ns) < had_ns / 1_000,
        "{what}: {believed_ns} in the ledger, {had_ns} launched"
    );
}

fn ended(running: &mut Running) -> Value {
    running.with("gpu")
}

#[test]
fn a_quarter_of_the_gpu_is_a_quarter_of_its_time_however_it_is_launched() {
    if !can_contain("a_quarter_of_the_gpu_is_a_quarter_of_its_time_however_it_is_launched") {
        return;
    }
    let node = Node::with_paused_clock();
    let program = compute(&node);
    for how in ["plain", "cooperative", "described", "graph"] {
        let share = share(&node, how, ComputePolicy::Fixed, 25);
        let container = node.contain(&[&share]);
        let lines = container.start(&program, &of_a_millisecond(how, "1000", "3")).all("gpu");
        assert_eq!(lines.len(), 3);
        // The first has the tokens that there are in the beginning.
        for (line, most) in lines.iter().zip([0.262, 0.251, 0.251]) {
            assert!((0.249..most).contains(&number(line, "gpu")), "{how}: {lines:?}");
        }
        // It slept for the rest: who looks at the clock in place of that takes the CPU for as long
        // as passes.
        assert!(lines.iter().all(|line| number(line, "cpu") < 0.25), "{how}: {lines:?}");
        assert_accounted(&share, had_ns(&lines), how);
        share.ledger(|ledger| {
            assert!(ledger.waits() > 100 && ledger.waited_ns() > 2_000_000_000, "{how}")
        });
    }
}

#[test]
fn caps_hold_within_a_point_for_short_and_long_kernels() {
    if !can_contain("caps_hold_within_a_point_for_short_and_long_kernels") {
        return;
    }
    let node = Node::with_paused_clock();
    let program = compute(&node);
    for percent in [10, 50, 90] {
        for (kernel, us) in
            [("spin_for_20us", "20"), ("spin_for_700us", "700"), ("spin_for_30ms", "30000")]
        {
            let what = format!("{kernel}-at-{percent}");
            let share = share(&node, &what, ComputePolicy::Fixed, percent);
            let arguments = ["plain", kernel, us, "5000", "2"];
            let lines = node.contain(&[&share]).start(&program, &arguments).all("gpu");
            let part = number(&lines[1], "gpu");
            assert!((part - f64::from(percent) / 100.0).abs() < 0.01, "{what}: {lines:?}");
            assert_accounted(&share, had_ns(&lines), &what);
        }
    }
}

#[test]
fn who_may_borrow_goes_as_fast_as_the_host_says_and_by_its_share_when_that_is_old() {
    if !can_contain(
        "who_may_borrow_goes_as_fast_as_the_host_says_and_by_its_share_when_that_is_old",
    ) {
        return;
    }
    let node = Node::with_paused_clock();
    let (program, share) = (compute(&node), share(&node, "claim-0", ComputePolicy::Balance, 25));
    let container = node.contain(&[&share]);
    // What the host says holds for ten seconds from now, and one more; the program's clock begins
    // at the machine's.
    let stamp_ms = (monotonic_ns() / 1_000_000 + 10_000) as u32;
    let others = Crowd::new(0);
    share.publish(&Published { rate: Rate::from_percent(75), others, others_busy_ns: 0, stamp_ms });
    let lines = container.start(&program, &of_a_millisecond("plain", "1000", "14")).all("gpu");
    let parts: Vec<_> = lines.iter().map(|line| number(line, "gpu")).collect();
    assert!(parts[1..3].iter().all(|part| (0.74..0.76).contains(part)), "{parts:?}");
    assert!(parts[12..].iter().all(|part| (0.24..0.26).contains(part)), "{parts:?}");
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
    // They do not begin at once: all they had, of the time from the first one's beginning to the
    // last one's end.
    let had: f64 = lines
        .iter()
        .map(|line| number(line, "gpu") * (number(line, "endNs") - number(line, "beganNs")))
        .sum();
    let begin = lines.iter().map(|line| number(line, "beganNs")).fold(f64::MAX, f64::min);
    let end = lines.iter().map(|line| number(line, "endNs")).fold(0.0, f64::max);
    let part = had / (end - begin);
    assert!((0.01..=0.30).contains(&part), "{part} of the GPU: {lines:?}");
}

#[test]
fn who_has_no_cap_never_waits_and_is_measured() {
    if !can_contain("who_has_no_cap_never_waits_and_is_measured") {
        return;
    }
    let node = Node::with_paused_clock();
    let program = compute(&node);
    for (id, policy, percent) in [
        ("none", ComputePolicy::None, 25),
        ("whole", ComputePolicy::Fixed, 100),
        ("nothing-asked-for", ComputePolicy::Fixed, 0),
    ] {
        let share = share(&node, id, policy, percent);
        let container = node.contain(&[&share]);
        let lines = container.start(&program, &of_a_millisecond("plain", "1000", "1")).all("gpu");
        let had = had_ns(&lines);
        assert!(number(&lines[0], "gpu") > 0.99, "{id}: {lines:?}");
        share.ledger(|ledger| {
            assert_eq!(ledger.waits(), 0, "{id}");
            let busy = ledger.busy_ns(u64::MAX);
            assert!(busy > had / 100 * 98, "{id}: busy for {busy} ns, had {had}");
        });
        assert_accounted(&share, had, id);
    }
}

#[test]
fn a_context_that_stays_keeps_its_measurements() {
    if !can_contain("a_context_that_stays_keeps_its_measurements") {
        return;
    }
    let node = Node::with_paused_clock();
    let share = share(&node, "claim-0", ComputePolicy::Fixed, 90);
    node.contain(&[&share]).run_c("leaving", false, &["10"]);
    assert_accounted(&share, 10 * 20_000_000, "ten kernels of 20 ms");
}

#[test]
fn a_capture_is_not_disturbed_and_what_it_records_is_not_charged() {
    if !can_contain("a_capture_is_not_disturbed_and_what_it_records_is_not_charged") {
        return;
    }
    let node = Node::with_paused_clock();
    let share = share(&node, "claim-0", ComputePolicy::Fixed, 90);
    let lines = node.contain(&[&share]).run_c("captures", false, &[]);
    assert_eq!(lines.len(), 6);
    for line in &lines {
        assert_eq!(line["captured"], 0, "{line}");
    }
    assert_eq!(share.ledger(|ledger| ledger.launches()), 6 * 6);
    assert_accounted(&share, 6 * (5 + 10) * 600_000, "six times five launches and a graph of ten");
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
    // A busy machine may take its time to tell.
    fn sees(running: &mut Running, mut this: impl FnMut(&Value) -> bool) -> bool {
        (0..600).any(|_| this(&ended(running)))
    }
    assert!(
        sees(&mut first, |line| number(line, "gpu") > 0.4),
        "what the second leaves is the first's"
    );
    let mut second = containers[1].start(&program, &windows);
    let began = number(&ended(&mut second), "beganNs");
    // Both want all of it: half of it is each one's, window after window; a single one may be of a
    // machine that was busy.
    let mut in_a_row = 0;
    let within = |line: &Value| {
        let is_within = number(line, "endNs") > began + 700e6 && number(line, "gpu") < 0.6;
        in_a_row = if is_within { in_a_row + 1 } else { 0 };
        in_a_row == 6
    };
    assert!(sees(&mut first, within), "the second wants its part");
    second.kill();
    // Also where it was killed while it waited.
    assert!(
        sees(&mut first, |line| number(line, "gpu") > 0.65),
        "what the second had is the first's again"
    );
    drop(stop);
    host.join().expect("no panic");
}
