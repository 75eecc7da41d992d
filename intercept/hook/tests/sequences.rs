//! What frameworks ask of the driver goes as it goes without the library, and within the grant.
//!
//! The sequences are synthetic: written after what the sources of PyTorch's allocators, vLLM and
//! NCCL call, and in which order. None was recorded on a GPU yet.

mod container;

use container::{GIB, Node, NodeShare, can_contain};
use serde_json::Value;

/// More than any sequence takes but `fill`, whose appetite the grant ends.
const AMPLE: u64 = 40 * GIB;

/// What a sequence is answered with the library and without, and the share it had.
fn answers(node: &Node, sequence: &str, share: &NodeShare) -> [Vec<Value>; 2] {
    let with = node.contain(&[share]).run_c("sequence", false, &[sequence]);
    let without = node.without_the_library().run_c("sequence", false, &[sequence]);
    [with, without]
}

/// The calls that failed, for the message of a test.
fn failed(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| line.get("result").is_some_and(|result| *result != 0)).collect()
}

/// Runs a sequence both ways; `errors` are the calls that fail, as they do on a driver.
fn is_unharmed(test: &str, sequence: &str, errors: &[&str]) {
    if !can_contain(test) {
        return;
    }
    let node = Node::new();
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
    // The process is gone; what it still had is found by whoever comes next.
    let held = node.contain(&[&share]).probe(&["fill"]);
    assert_eq!(held[1]["takenBytes"], AMPLE, "{used} were in the books");
}

#[test]
fn a_pytorch_like_sequence_is_answered_as_without_the_library() {
    is_unharmed(
        "a_pytorch_like_sequence_is_answered_as_without_the_library",
        "pytorch",
        &["cuMemFree"],
    );
}

#[test]
fn a_vllm_like_sequence_is_answered_as_without_the_library() {
    is_unharmed("a_vllm_like_sequence_is_answered_as_without_the_library", "vllm", &[]);
}

#[test]
fn a_framework_that_takes_all_there_is_gets_the_grant_and_works_on() {
    if !can_contain("a_framework_that_takes_all_there_is_gets_the_grant_and_works_on") {
        return;
    }
    let node = Node::new();
    let limit = 10 * GIB;
    let share = node.share("claim-0", 0, limit);
    let mut running = node
        .contain(&[&share])
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
