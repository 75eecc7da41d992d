//! Call sequences of frameworks have the same results with the library, within the grant.
//!
//! The sequences are synthetic: they follow the sources of PyTorch's allocators, vLLM and NCCL.
//! None was recorded on a GPU yet.

mod container;

use container::{GIB, Node, NodeShare, set_up};
use serde_json::Value;
use tessera_test_support::test_name;

/// More than any sequence allocates, except `fill`, which allocates until it is refused.
const AMPLE: u64 = 40 * GIB;

/// Returns the results of a sequence with and without the library.
fn answers(node: &Node, sequence: &str, share: &NodeShare) -> [Vec<Value>; 2] {
    let with = node.container(&[share]).run_c("sequence", false, &[sequence]);
    let without = node.container_without_library().run_c("sequence", false, &[sequence]);
    [with, without]
}

/// Returns the calls that failed.
fn failed(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| line.get("result").is_some_and(|result| *result != 0)).collect()
}

/// Checks that a sequence has the same results with the library; `errors` are the calls that fail
/// on a driver.
fn is_unharmed(test: &str, sequence: &str, errors: &[&str]) {
    let Some(node) = set_up(test, Node::new) else { return };
    let share = node.share("claim-0", 0, AMPLE);
    let [with, without] = answers(&node, sequence, &share);
    assert_eq!(failed(&with), failed(&without));
    assert_eq!(with, without);
    assert_eq!(failed(&with).iter().map(|line| &line["call"]).collect::<Vec<_>>(), errors);
    assert!(
        with.iter().any(|line| line.get("done").is_some()),
        "it came to its end: {:?}",
        with.last()
    );
    let (peak, used) = share.ledger(|ledger| (ledger.peak_bytes(), ledger.used_bytes()));
    assert!((GIB..=AMPLE).contains(&peak), "{peak}");
    // The process has exited; the next one reclaims its memory.
    let held = node.container(&[&share]).probe(&["fill"]);
    assert_eq!(held[1]["takenBytes"], AMPLE, "{used} were in the books");
}

#[test]
fn pytorch_calls_return_the_same_as_container_without_library() {
    is_unharmed("pytorch_calls_return_the_same_as_without_the_library", "pytorch", &["cuMemFree"]);
}

#[test]
fn vllm_calls_return_the_same_as_container_without_library() {
    is_unharmed("vllm_calls_return_the_same_as_without_the_library", "vllm", &[]);
}

#[test]
fn framework_that_fills_memory_gets_the_grant_and_continues() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let limit = 10 * GIB;
    let share = node.share("claim-0", 0, limit);
    let mut running = node
        .container(&[&share])
        .start(container::program("sequence", false, node.path()), &["fill", "hold"]);
    let lines: Vec<Value> = std::iter::from_fn(|| Some(running.next()))
        .take_while(|line| line.get("done").is_none())
        .collect();
    let refused: Vec<_> = failed(&lines).into_iter().filter(|line| line["result"] == 2).collect();
    assert_eq!(
        refused.len(),
        1,
        "after half of it was given back, all of it went well: {refused:?}"
    );
    let taken =
        lines.iter().find_map(|line| line.get("taken")?.as_u64()).expect("it says how much");
    let (peak, used) = share.ledger(|ledger| (ledger.peak_bytes(), ledger.used_bytes()));
    assert!(taken >= 9 && taken * GIB <= peak && peak <= limit, "{taken} GiB of {limit}, {peak}");
    assert!(used < GIB / 2, "what is left are context and module: {used}");
}
