//! That `make bench-gpu` has a figure for each of its rows, on a node with the fake driver: a machine with a GPU may be at hand once.

mod container;
#[path = "../benches/gpu/rows.rs"]
mod rows;
#[path = "../benches/gpu/torch.rs"]
mod torch;

use container::{Node, can_contain};
use rows::{Effort, NO_GPU, find, look, waiting};

/// Enough to see whether there are figures.
const EFFORT: Effort = Effort { window_ms: 200, windows: 1, batch: 20, turns: 1 };

#[test]
fn every_row_of_the_gpu_bench_has_a_figure() {
    if !can_contain("every_row_of_the_gpu_bench_has_a_figure") {
        return;
    }
    let node = Node::in_real_time();
    let gpu = look(&node).expect("the fake one");
    assert!(gpu.name.contains("H100") && !gpu.driver.is_empty() && !gpu.cuda.is_empty());
    let found = find(&node, &gpu, EFFORT);
    let waiting = waiting();
    assert!(waiting.iter().all(|row| row.found == NO_GPU));
    assert!(
        found
            .iter()
            .zip(&waiting)
            .all(|(found, waits)| (&found.what, found.goal) == (&waits.what, waits.goal))
    );
    for row in &found {
        let has_figure = row.found.starts_with(|first: char| first.is_ascii_digit() || first == '-');
        assert!(has_figure || row.what.starts_with("PyTorch"), "{}: {}", row.what, row.found);
    }
    // What does not depend on how busy the machine is.
    for what in ["filled to the cap", "the same, as the program sees it", "what the ledger has"] {
        let row = found.iter().find(|row| row.what.starts_with(what)).expect("a row");
        assert!(row.found.ends_with(": met"), "{}: {}", row.what, row.found);
    }
}

#[test]
fn a_machine_without_a_gpu_is_told_apart() {
    if !can_contain("a_machine_without_a_gpu_is_told_apart") {
        return;
    }
    let node = Node::of_this_machine();
    // Where the machine that tests run on has one, it is found.
    match look(&node) {
        Err(reason) => assert!(!reason.is_empty()),
        Ok(gpu) => assert!(!gpu.driver.is_empty()),
    }
}
