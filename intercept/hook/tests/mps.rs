//! An MPS client as its grant requires is limited by MPS and not by the library; other processes
//! are limited by the library. The control daemon and the driver's client are fakes.

mod container;

use std::fs;
use std::path::Path;

use container::{GIB, MpsDaemon, Node, NodeShare, control_daemon, program, set_up};
use serde_json::Value;
use tessera_intercept_abi::mps::{
    ACTIVE_THREAD_PERCENTAGE, DIR, PARTITION_BY_CONTEXT, PIPE_DIRECTORY,
};
use tessera_intercept_abi::{ComputePolicy, Grant};
use tessera_intercept_symbols::SymbolVersion;
use tessera_test_support::test_name;

/// Starts the fake daemon of the node's first GPU.
fn daemon(node: &Node) -> MpsDaemon<'_> {
    MpsDaemon::start(node, control_daemon(), node.first_uuid())
}

/// Creates a share of 25 % of the first GPU's compute, by MPS.
fn share(node: &Node, id: &str) -> NodeShare {
    let plain = node.share(&format!("{id}-plain"), 0, GIB).grant;
    let id = tessera_intercept_abi::Text::new(id).expect("short");
    let (policy, cores_percent) = (ComputePolicy::Fixed, 25);
    node.share_of(Grant { mps: true, policy, cores_percent, id, ..plain })
}

/// Returns the fraction of GPU time of 1 ms kernels in each of two windows of a second.
fn parts(node: &Node, pipes: &Path, id: &str, variables: &[(&str, &str)]) -> Vec<f64> {
    let program = program("compute", false, node.path());
    let share = share(node, id);
    let container = node.container(&[&share]).with_mps(pipes, variables);
    let lines = container
        .start(&program, &["plain", "spin_for_1ms", "1000", "1000", "2"])
        .lines_with("gpu");
    lines
        .iter()
        .map(|line| line["gpu"].as_f64().unwrap_or_else(|| panic!("gpu in {line}")))
        .collect()
}

#[test]
fn mps_client_is_not_limited_twice() {
    let Some(node) = set_up(test_name!(), Node::with_paused_clock) else { return };
    let daemon = daemon(&node);
    for (id, percentage) in [("as-granted", "25"), ("less", "10")] {
        let variables = [(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, percentage)];
        let parts = parts(&node, &daemon.pipes, id, &variables);
        assert!(parts.iter().all(|part| *part > 0.9), "{id}: {parts:?}");
    }
}

#[test]
fn process_that_evades_mps_is_limited_by_the_library() {
    let Some(node) = set_up(test_name!(), Node::with_paused_clock) else { return };
    let daemon = daemon(&node);
    let quarter = (ACTIVE_THREAD_PERCENTAGE, "25");
    for (id, variables) in [
        ("emptied-environment", [].as_slice()),
        ("no-percentage", &[(PIPE_DIRECTORY, DIR)]),
        ("more", &[(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, "26")]),
        ("elsewhere", &[(PIPE_DIRECTORY, "/tmp/nvidia-mps"), quarter]),
        ("by-context", &[(PIPE_DIRECTORY, DIR), quarter, (PARTITION_BY_CONTEXT, "1")]),
    ] {
        let parts = parts(&node, &daemon.pipes, id, variables);
        assert!((0.24..0.26).contains(&parts[1]), "{id}: {parts:?}");
    }
    // The driver reports that the process is not a client, whatever the variables are.
    drop(daemon);
    let empty = node.path().join("no-daemon");
    fs::create_dir(&empty).expect("made");
    let parts = parts(&node, &empty, "no-daemon", &[(PIPE_DIRECTORY, DIR), quarter]);
    assert!((0.24..0.26).contains(&parts[1]), "{parts:?}");
}

#[test]
fn driver_without_client_query_is_limited_by_the_library() {
    let Some(node) =
        set_up(test_name!(), || Node::with_paused_clock_and_cuda(SymbolVersion(12020)))
    else {
        return;
    };
    let daemon = daemon(&node);
    let variables = [(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, "25")];
    let parts = parts(&node, &daemon.pipes, "claim-0", &variables);
    assert!((0.24..0.26).contains(&parts[1]), "{parts:?}");
}

#[test]
fn clients_of_one_share_are_limited_together() {
    let Some(node) = set_up(test_name!(), Node::in_real_time) else { return };
    let daemon = daemon(&node);
    let program = program("compute", false, node.path());
    let variables = [(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, "25")];
    let sum = |id: &str, policy: ComputePolicy| {
        let granted = Grant { policy, ..share(&node, &format!("{id}-fixed")).grant };
        let id = tessera_intercept_abi::Text::new(id).expect("short");
        let share = node.share_of(Grant { id, ..granted });
        let container = node.container(&[&share]).with_mps(&daemon.pipes, &variables);
        let arguments = ["plain", "spin_for_1ms", "1000", "1000", "4"];
        let mut running = [0; 3].map(|_| container.start(&program, &arguments));
        let lines: Vec<_> =
            running.iter_mut().flat_map(|running| running.lines_with("gpu")).collect();
        // They start at different times, so the sum is compared with the time from the first start
        // to the last end.
        let numbers = |name| lines.iter().map(move |line| line[name].as_f64().expect("a number"));
        let begin = numbers("beganNs").fold(f64::MAX, f64::min);
        let end = numbers("endNs").fold(0.0, f64::max);
        numbers("gpuNs").sum::<f64>() / (end - begin)
    };
    // Load on the machine makes it less, never more.
    let held = sum("held", ComputePolicy::Fixed);
    assert!(held < 1.1, "{held} of the time that one process could have");
    let free = sum("free", ComputePolicy::None);
    assert!(free > 1.3 * held, "{free} where nothing is held, {held} where it is");
}

#[test]
fn memory_limits_of_library_and_mps_both_apply() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let daemon = daemon(&node);
    let share = share(&node, "claim-0");
    let filled = |limit: &str| {
        let variables = [
            (PIPE_DIRECTORY, DIR),
            (ACTIVE_THREAD_PERCENTAGE, "25"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit),
        ];
        let lines = node.container(&[&share]).with_mps(&daemon.pipes, &variables).probe(&["fill"]);
        let taken = lines[1]["takenBytes"].as_u64().expect("a number");
        (taken, lines[0]["devices"][0]["multiprocessors"].clone(), lines[1]["refusedWith"].clone())
    };
    let refused = Value::from("CUDA_ERROR_OUT_OF_MEMORY");
    // An H100 has 132 multiprocessors, of which a quarter is 33.
    assert_eq!(filled("0=2048M"), (GIB, Value::from(33), refused.clone()));
    // MPS charges the process's context, too.
    assert_eq!(filled("0=1024M"), (GIB - node.context_bytes(), Value::from(33), refused));
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), GIB);
}
