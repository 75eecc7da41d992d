//! The ledger says to the byte what the driver says, after every call: also of memory that the
//! program does not hold but the driver keeps for it.

mod container;

use container::{GIB, MIB, Node, NodeShare, can_contain};
use serde_json::Value;
use tessera_intercept_symbols::Version;

fn run(node: &Node, share: &NodeShare, program: &str, arguments: &[&str]) -> Vec<Value> {
    let to_compare = node.to_compare();
    let all: Vec<_> =
        to_compare.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
    node.contain(&[share]).run_c(program, false, &all)
}

fn assert_agreed(lines: &[Value], least: usize) {
    let apart: Vec<_> = lines.iter().filter(|line| line["ledger"] != line["driver"]).collect();
    assert!(apart.is_empty(), "{apart:#?}");
    assert!(lines.len() >= least, "only {} steps, the last {:?}", lines.len(), lines.last());
}

#[test]
fn what_pools_contexts_and_limits_keep_is_charged() {
    if !can_contain("what_pools_contexts_and_limits_keep_is_charged") {
        return;
    }
    // A stream comes to what is on it when its kernels are done.
    let node = Node::with_paused_clock();
    let lines = run(&node, &node.share_with_contexts(64 * GIB), "kept", &[]);
    assert_agreed(&lines, 70);
    assert_eq!(lines.last().map(|line| &line["step"]), Some(&"end".into()));
}

#[test]
fn what_pools_keep_is_never_more_than_granted_and_never_in_the_way() {
    if !can_contain("what_pools_keep_is_never_more_than_granted_and_never_in_the_way") {
        return;
    }
    let node = Node::new();
    let share = node.share_with_contexts(256 * MIB + node.context_bytes());
    let lines = run(&node, &share, "tight", &[]);
    let (refusals, steps): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| line.get("refused").is_some());
    assert_agreed(&steps, 22);
    assert!(refusals.iter().all(|line| line["refused"] == 2), "{refusals:?}");
    assert_eq!(refusals.len(), 11);
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), 256 * MIB + node.context_bytes());
}

#[test]
fn what_is_bound_to_something_is_charged_until_that_lets_go() {
    if !can_contain("what_is_bound_to_something_is_charged_until_that_lets_go") {
        return;
    }
    let node = Node::with_cuda(Version(13050));
    let lines = run(&node, &node.share_with_contexts(64 * GIB), "bound", &[]);
    let (refusals, steps): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| line.get("refused").is_some());
    assert_agreed(&steps, 33);
    assert!(
        refusals.len() == 4 && refusals.iter().all(|line| line["refused"] == 1),
        "{refusals:?}"
    );
}

/// Who took the memory may be gone, or have given it back: whoever has it open pays.
#[test]
fn imported_memory_is_charged_while_it_is_open() {
    if !can_contain("imported_memory_is_charged_while_it_is_open") {
        return;
    }
    let node = Node::new();
    // Contexts of two processes, one more, what the other holds, and a little.
    let least = 3 * node.context_bytes() + (3 + 4 + 32) * MIB;
    let lines = run(&node, &node.share_with_contexts(least + 16 * MIB), "imports", &[]);
    let imports: Vec<_> = lines
        .iter()
        .filter(|line| line.get("import").is_some())
        .map(|line| (line["import"].as_str().unwrap_or_default(), &line["charged"], &line["left"]))
        .collect();
    let expected = [
        ("cuIpcOpenMemHandle", 3 * MIB),
        ("cuMemImportFromShareableHandle", 4 * MIB),
        ("cuMemPoolImportPointer", 5 * MIB),
        ("in a context that ended", 5 * MIB),
        ("cuImportExternalMemory", 7 * MIB),
        ("refused", 0),
    ];
    let expected = expected.map(|(call, bytes)| (call, serde_json::Value::from(bytes)));
    let none = 0.into();
    assert_eq!(
        imports,
        expected.iter().map(|(call, bytes)| (*call, bytes, &none)).collect::<Vec<_>>()
    );
    let refused = |line: &&Value| line.get("refused").is_some();
    assert_eq!(lines.iter().filter(refused).count(), 4);
    assert!(lines.iter().filter(refused).all(|line| line["refused"] == 2), "{lines:?}");
    assert!(
        lines.iter().filter_map(|line| line.get("closed")).all(|result| *result == 1),
        "the driver's errors"
    );
}

#[test]
fn what_graphs_keep_is_charged_when_they_run() {
    if !can_contain("what_graphs_keep_is_charged_when_they_run") {
        return;
    }
    let node = Node::new();
    let share = node.share_with_contexts(256 * MIB + node.context_bytes());
    let lines = run(&node, &share, "graphs", &[]);
    let (refusals, steps): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| line.get("refused").is_some());
    assert_agreed(&steps, 40);
    assert!(
        refusals.len() == 4 && refusals.iter().all(|line| line["refused"] == 2),
        "{refusals:?}"
    );
    assert!(share.ledger(|ledger| ledger.peak_bytes()) <= 256 * MIB + node.context_bytes());
}

#[test]
fn what_an_image_puts_into_memory_is_charged() {
    if !can_contain("what_an_image_puts_into_memory_is_charged") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.share_with_contexts(64 * GIB), "modules", &[]);
    let (steps, others): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| line.get("step").is_some());
    assert_agreed(&steps, 13);
    let others = serde_json::Value::from(others);
    let expected = serde_json::json!([
        {"wrapped": 65 * MIB}, {"text": 12}, {"NULL": 1, "no module": 400}, {"refused": 2},
    ]);
    assert_eq!(others, expected);
}

/// Only pinned memory of the host costs nothing: what lies on a part of a device costs what it
/// costs there, managed memory what it costs elsewhere, and what nobody can tell is not to be had.
#[test]
fn memory_costs_nothing_only_where_it_stays_on_the_host() {
    if !can_contain("memory_costs_nothing_only_where_it_stays_on_the_host") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.share_with_contexts(GIB), "places", &[]);
    let of = |key: &str| {
        lines.iter().filter(|line| line.get(key).is_some()).cloned().collect::<Vec<_>>()
    };
    assert_agreed(&of("step"), 9);
    let refused: Vec<_> = of("refused").iter().map(|line| line["refused"].clone()).collect();
    assert_eq!(refused, [2, 2]);
    let places: Vec<_> = of("place")
        .iter()
        .map(|line| (line["place"].to_string(), line["charged"].clone()))
        .collect();
    // A pool takes chunks of 32 MiB.
    let expected = [
        ("managed", 64 * MIB),
        ("destroyed", 0),
        ("managed, on the host", 64 * MIB),
        ("destroyed", 0),
        ("imported", 4 * MIB),
    ];
    assert_eq!(places, expected.map(|(place, bytes)| (format!("{place:?}"), Value::from(bytes))));
}

fn values(lines: &[Value], key: &str) -> Vec<Value> {
    lines.iter().filter_map(|line| line.get(key)).cloned().collect()
}

/// What one thread has taken and not settled yet is charged, and counted by the other's reading:
/// that is paid once.
#[test]
fn two_threads_do_not_refuse_each_other_what_the_grant_has_for_both() {
    if !can_contain("two_threads_do_not_refuse_each_other_what_the_grant_has_for_both") {
        return;
    }
    let node = Node::new();
    let share = node.share_with_contexts(256 * MIB + node.context_bytes());
    let bytes = (256 * MIB / 100 * 45).to_string();
    let lines = run(&node, &share, "rivals", &["take", &bytes]);
    assert_eq!(values(&lines, "refusals"), [0, 0]);
    let steps: Vec<_> = lines.into_iter().filter(|line| line.get("step").is_some()).collect();
    assert_agreed(&steps, 1);
    assert!(share.ledger(|ledger| ledger.peak_bytes()) <= 256 * MIB + node.context_bytes());
}

#[test]
fn a_pool_that_cannot_be_destroyed_stays_charged() {
    if !can_contain("a_pool_that_cannot_be_destroyed_stays_charged") {
        return;
    }
    let node = Node::new();
    let lines =
        run(&node, &node.share_with_contexts(GIB), "rivals", &["destroy", &(40 * MIB).to_string()]);
    assert_eq!(values(&lines, "destroyed"), [0, 0]);
    assert_eq!(values(&lines, "refusals"), [0]);
    let steps: Vec<_> = lines.into_iter().filter(|line| line.get("step").is_some()).collect();
    assert_agreed(&steps, 5);
}

#[test]
fn memory_that_two_threads_open_and_close_is_paid_while_one_has_it_open() {
    if !can_contain("memory_that_two_threads_open_and_close_is_paid_while_one_has_it_open") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.share_with_contexts(4 * GIB), "rivals", &["open"]);
    assert_eq!(values(&lines, "unpaid"), [0; 4]);
    assert_eq!(values(&lines, "left"), [0]);
}
