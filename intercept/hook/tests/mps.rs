//! Who shares its GPU by MPS, as its grant says, is held by that and not by the library; who only
//! seems to is held as ever. Against the stand-in for NVIDIA's control daemon, and the fake
//! driver's part of it.

mod container;

use std::fs;
use std::path::Path;

use container::{GIB, MpsDaemon, Node, NodeShare, can_contain, control_daemon, program};
use serde_json::Value;
use tessera_intercept_abi::mps::{
    ACTIVE_THREAD_PERCENTAGE, DIR, PARTITION_BY_CONTEXT, PIPE_DIRECTORY,
};
use tessera_intercept_abi::{ComputePolicy, Grant};
use tessera_intercept_symbols::Version;

/// The stand-in for a daemon of the node's first GPU.
fn daemon(node: &Node) -> MpsDaemon<'_> {
    MpsDaemon::start(node, control_daemon(), node.first_uuid())
}

/// A share of a quarter of the first GPU's time, by MPS.
fn share(node: &Node, id: &str) -> NodeShare {
    let plain = node.share(&format!("{id}-plain"), 0, GIB).grant;
    let id = tessera_intercept_abi::Text::new(id).expect("short");
    let (policy, cores_percent) = (ComputePolicy::Fixed, 25);
    node.share_of(Grant { mps: true, policy, cores_percent, id, ..plain })
}

/// The part of the GPU's time that kernels of a millisecond get in each of two windows of a second.
fn parts(node: &Node, pipes: &Path, id: &str, variables: &[(&str, &str)]) -> Vec<f64> {
    let program = program("compute", false, node.path());
    let share = share(node, id);
    let container = node.contain(&[&share]).by_mps(pipes, variables);
    let lines =
        container.start(&program, &["plain", "spin_for_1ms", "1000", "1000", "2"]).all("gpu");
    lines
        .iter()
        .map(|line| line["gpu"].as_f64().unwrap_or_else(|| panic!("gpu in {line}")))
        .collect()
}

#[test]
fn a_client_of_mps_is_not_held_by_the_library_as_well() {
    if !can_contain("a_client_of_mps_is_not_held_by_the_library_as_well") {
        return;
    }
    let node = Node::with_paused_clock();
    let daemon = daemon(&node);
    for (id, percentage) in [("as-granted", "25"), ("less", "10")] {
        let variables = [(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, percentage)];
        let parts = parts(&node, &daemon.pipes, id, &variables);
        assert!(parts.iter().all(|part| *part > 0.9), "{id}: {parts:?}");
    }
}

#[test]
fn who_is_no_client_or_gave_itself_more_is_held_by_the_library() {
    if !can_contain("who_is_no_client_or_gave_itself_more_is_held_by_the_library") {
        return;
    }
    let node = Node::with_paused_clock();
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
    // The driver says that it goes by itself, whatever the variables are.
    drop(daemon);
    let nobody = node.path().join("nobody");
    fs::create_dir(&nobody).expect("made");
    let parts = parts(&node, &nobody, "no-daemon", &[(PIPE_DIRECTORY, DIR), quarter]);
    assert!((0.24..0.26).contains(&parts[1]), "{parts:?}");
}

#[test]
fn a_driver_that_cannot_say_who_is_a_client_has_none() {
    if !can_contain("a_driver_that_cannot_say_who_is_a_client_has_none") {
        return;
    }
    let node = Node::with_paused_clock_and_cuda(Version(12020));
    let daemon = daemon(&node);
    let variables = [(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, "25")];
    let parts = parts(&node, &daemon.pipes, "claim-0", &variables);
    assert!((0.24..0.26).contains(&parts[1]), "{parts:?}");
}

#[test]
fn several_clients_of_one_share_have_together_what_one_would_have() {
    if !can_contain("several_clients_of_one_share_have_together_what_one_would_have") {
        return;
    }
    let node = Node::in_real_time();
    let daemon = daemon(&node);
    let program = program("compute", false, node.path());
    let variables = [(PIPE_DIRECTORY, DIR), (ACTIVE_THREAD_PERCENTAGE, "25")];
    let sum = |id: &str, policy: ComputePolicy| {
        let granted = Grant { policy, ..share(&node, &format!("{id}-fixed")).grant };
        let id = tessera_intercept_abi::Text::new(id).expect("short");
        let share = node.share_of(Grant { id, ..granted });
        let container = node.contain(&[&share]).by_mps(&daemon.pipes, &variables);
        let arguments = ["plain", "spin_for_1ms", "1000", "1000", "4"];
        let mut running = [0; 3].map(|_| container.start(&program, &arguments));
        let lines: Vec<_> = running.iter_mut().flat_map(|running| running.all("gpu")).collect();
        // They do not begin at once: all they had, of the time from the first one's beginning to
        // the last one's end.
        let numbers = |name| lines.iter().map(move |line| line[name].as_f64().expect("a number"));
        let begin = numbers("beganNs").fold(f64::MAX, f64::min);
        let end = numbers("endNs").fold(0.0, f64::max);
        numbers("gpuNs").sum::<f64>() / (end - begin)
    };
    // A busy machine makes it less, never more.
    let held = sum("held", ComputePolicy::Fixed);
    assert!(held < 1.1, "{held} of the time that one process could have");
    let free = sum("free", ComputePolicy::None);
    assert!(free > 1.3 * held, "{free} where nothing is held, {held} where it is");
}

#[test]
fn memory_is_held_by_the_library_across_processes_and_by_mps_for_each() {
    if !can_contain("memory_is_held_by_the_library_across_processes_and_by_mps_for_each") {
        return;
    }
    let node = Node::new();
    let daemon = daemon(&node);
    let share = share(&node, "claim-0");
    let filled = |limit: &str| {
        let variables = [
            (PIPE_DIRECTORY, DIR),
            (ACTIVE_THREAD_PERCENTAGE, "25"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit),
        ];
        let lines = node.contain(&[&share]).by_mps(&daemon.pipes, &variables).probe(&["fill"]);
        let taken = lines[1]["takenBytes"].as_u64().expect("a number");
        (taken, lines[0]["devices"][0]["multiprocessors"].clone(), lines[1]["refusedWith"].clone())
    };
    let refused = Value::from("CUDA_ERROR_OUT_OF_MEMORY");
    // An H100 has 132 multiprocessors, of which a quarter is 33.
    assert_eq!(filled("0=2048M"), (GIB, Value::from(33), refused.clone()));
    // MPS counts the process's context, too.
    assert_eq!(filled("0=1024M"), (GIB - node.context_bytes(), Value::from(33), refused));
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), GIB);
}
