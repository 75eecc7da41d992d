//! After every call the ledger is equal to the driver's usage, to the byte. This includes memory
//! that the driver retains for the program.

mod container;

use container::{GIB, MIB, Node, NodeShare, set_up};
use serde_json::{Value, json};
use tessera_intercept_symbols::SymbolVersion;
use tessera_test_support::test_name;

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i64 = 1;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i64 = 2;

fn run(node: &Node, share: &NodeShare, program: &str, arguments: &[&str]) -> Vec<Value> {
    let to_compare = node.comparison_arguments();
    let all: Vec<_> =
        to_compare.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
    node.container(&[share]).run_c(program, false, &all)
}

/// Returns the values of this field in the lines that have it.
fn values(lines: &[Value], field: &str) -> Vec<Value> {
    lines.iter().filter_map(|line| line.get(field)).cloned().collect()
}

/// Asserts that the ledger was equal to the driver's usage in at least that many steps.
fn assert_exact(lines: &[Value], least: usize) {
    let steps: Vec<_> = lines.iter().filter(|line| line.get("step").is_some()).collect();
    let inexact: Vec<_> = steps.iter().filter(|line| line["ledger"] != line["driver"]).collect();
    assert!(inexact.is_empty(), "{inexact:#?}");
    assert!(steps.len() >= least, "only {} steps, the last {:?}", steps.len(), steps.last());
}

/// Asserts that that many calls were refused, all with this error.
fn assert_refused(lines: &[Value], count: usize, error: i64) {
    assert_eq!(values(lines, "refused"), vec![Value::from(error); count]);
}

#[test]
fn memory_retained_by_pools_and_contexts_is_charged() {
    let Some(node) = set_up(test_name!(), Node::with_paused_clock) else { return };
    // Work on a stream runs when its kernels have ended.
    let lines = run(&node, &node.share_with_contexts(64 * GIB), "kept", &[]);
    assert_exact(&lines, 70);
    assert_eq!(lines.last().map(|line| &line["step"]), Some(&"end".into()));
}

#[test]
fn pools_retain_no_more_than_granted_and_yield_when_needed() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share_with_contexts(256 * MIB + node.context_bytes());
    let lines = run(&node, &share, "tight", &[]);
    assert_refused(&lines, 11, OUT_OF_MEMORY);
    assert_exact(&lines, 20);
    assert_eq!(values(&lines, "pieces"), [4, 4]);
    assert_eq!(values(&lines, "beyond"), [24 * MIB; 2]);
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), 256 * MIB + node.context_bytes());
}

#[test]
fn bound_memory_is_charged_until_unbound() {
    let Some(node) = set_up(test_name!(), || Node::with_cuda(SymbolVersion(13050))) else { return };
    let lines = run(&node, &node.share_with_contexts(64 * GIB), "bound", &[]);
    assert_refused(&lines, 4, INVALID_VALUE);
    assert_exact(&lines, 33);
}

/// Every process that has the memory open is charged, even if the exporter has exited or freed it.
#[test]
fn imported_memory_is_charged_while_it_is_open() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    // Contexts of two processes, a third one, the memory of the other process, and a margin.
    let least = 3 * node.context_bytes() + (3 + 4 + 32) * MIB;
    let lines = run(&node, &node.share_with_contexts(least + 16 * MIB), "imports", &[]);
    let imports: Vec<_> = lines
        .iter()
        .filter(|line| line.get("import").is_some())
        .map(|line| (line["import"].as_str().unwrap_or_default(), &line["charged"], &line["left"]))
        .collect();
    let expected = [
        ("within the claim", 0),
        ("cuIpcOpenMemHandle", 3 * MIB),
        ("cuMemImportFromShareableHandle", 4 * MIB),
        ("within the claim", 0),
        ("cuMemPoolImportPointer", 5 * MIB),
        ("in a context that ended", 5 * MIB),
        ("cuImportExternalMemory", 7 * MIB),
        ("refused", 0),
        ("within a full claim", 0),
    ];
    let expected = expected.map(|(call, bytes)| (call, serde_json::Value::from(bytes)));
    let none = 0.into();
    assert_eq!(
        imports,
        expected.iter().map(|(call, bytes)| (*call, bytes, &none)).collect::<Vec<_>>()
    );
    assert_refused(&lines, 4, OUT_OF_MEMORY);
    assert!(values(&lines, "closed").iter().all(|result| *result == INVALID_VALUE));
    assert_eq!(values(&lines, "lived"), [3 * MIB]);
}

#[test]
fn memory_retained_by_graphs_is_charged_when_they_run() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share_with_contexts(256 * MIB + node.context_bytes());
    let lines = run(&node, &share, "graphs", &[]);
    assert_refused(&lines, 4, OUT_OF_MEMORY);
    assert_exact(&lines, 40);
    assert!(share.ledger(|ledger| ledger.peak_bytes()) <= 256 * MIB + node.context_bytes());
}

/// The CUDA runtime loads a library once, at the first use of a kernel in it, and remembers a
/// failure for the life of the process.
#[test]
fn libraries_load_when_all_memory_is_in_use() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.share("claim-0", 0, 64 * MIB), "libraries", &[]);
    let expected = json!({"loaded": 0, "found": 0, "launched": 0, "module": 0, "charged": 0});
    assert_eq!(lines, [expected]);
}

/// Only pinned host memory is not charged. Managed memory is charged even if it prefers the host,
/// and memory of unknown location is refused.
#[test]
fn only_pinned_host_memory_is_free_of_charge() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.share_with_contexts(GIB), "places", &[]);
    assert_exact(&lines, 9);
    assert_refused(&lines, 2, OUT_OF_MEMORY);
    let places: Vec<_> = lines
        .iter()
        .filter(|line| line.get("place").is_some())
        .map(|line| (line["place"].to_string(), line["charged"].clone()))
        .collect();
    // A pool takes chunks of 32 MiB.
    let expected = [
        ("managed", 64 * MIB),
        ("destroyed", 0),
        ("managed, on the host", 64 * MIB),
        ("destroyed", 0),
        ("imported", 4 * MIB),
        ("mixed", 8 * MIB),
        ("unmapped", 0),
    ];
    assert_eq!(places, expected.map(|(place, bytes)| (format!("{place:?}"), Value::from(bytes))));
}

/// The driver gives the address of a destroyed context to the context of another thread.
#[test]
fn contexts_of_several_threads_are_charged_exactly() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.share_with_contexts(64 * GIB), "contexts", &["100"]);
    assert_exact(&lines, 2);
}

/// A charge that one thread has not committed yet is counted once by the other.
#[test]
fn concurrent_allocations_within_the_grant_both_succeed() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share_with_contexts(256 * MIB + node.context_bytes());
    let bytes = (256 * MIB / 100 * 45).to_string();
    let lines = run(&node, &share, "rivals", &["take", &bytes]);
    assert_eq!(values(&lines, "refusals"), [0, 0]);
    assert_exact(&lines, 1);
    assert!(share.ledger(|ledger| ledger.peak_bytes()) <= 256 * MIB + node.context_bytes());
}

#[test]
fn pool_that_cannot_be_destroyed_stays_charged() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines =
        run(&node, &node.share_with_contexts(GIB), "rivals", &["destroy", &(40 * MIB).to_string()]);
    assert_eq!(values(&lines, "destroyed"), [0, 0]);
    assert_eq!(values(&lines, "refusals"), [0]);
    assert_exact(&lines, 5);
}

#[test]
fn shared_import_is_charged_until_last_thread_closes_it() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.share_with_contexts(4 * GIB), "rivals", &["open"]);
    assert_eq!(values(&lines, "unpaid"), [0; 4]);
    assert_eq!(values(&lines, "left"), [0]);
}
