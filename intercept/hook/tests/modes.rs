//! In the place of the driver, or there and in every program: the container is held as by the
//! preload library alone, and what it takes is charged once.

mod container;

use container::{GIB, Mode, Node, can_contain};
use serde_json::Value;

#[test]
fn memory_is_charged_once_wherever_the_interceptor_stands() {
    if !can_contain("memory_is_charged_once_wherever_the_interceptor_stands") {
        return;
    }
    let node = Node::new();
    let charged = |mode| {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        let lines = node.contain_in(mode, &[&share]).run_c("calls", false, &[]);
        assert_eq!(share.ledger(|ledger| ledger.used_bytes()), 0, "{mode:?}: all is given back");
        let calls: Vec<Value> =
            lines.into_iter().filter(|line| line.get("call").is_some()).collect();
        (calls, share.ledger(|ledger| ledger.peak_bytes()))
    };
    let preload = charged(Mode::Preload);
    assert!(preload.0.len() > 10, "{preload:?}");
    for mode in [Mode::Proxy, Mode::Both] {
        assert_eq!(charged(mode), preload, "{mode:?}");
    }
}

#[test]
fn one_process_is_one_slot_wherever_the_interceptor_stands() {
    if !can_contain("one_process_is_one_slot_wherever_the_interceptor_stands") {
        return;
    }
    let node = Node::new();
    for mode in Mode::HELD {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        let mut running = node
            .contain_in(mode, &[&share])
            .start(container::probe(), &["hold", "--take", "512Mi"]);
        running.event("holding");
        assert_eq!(share.ledger(|ledger| ledger.processes().count()), 1, "{mode:?}");
        assert_eq!(share.ledger(|ledger| ledger.used_bytes()), GIB / 2, "{mode:?}");
    }
}

#[test]
fn cuda_and_nvml_say_what_the_grant_says_wherever_the_interceptor_stands() {
    if !can_contain("cuda_and_nvml_say_what_the_grant_says_wherever_the_interceptor_stands") {
        return;
    }
    let node = Node::new();
    for mode in Mode::HELD {
        let lines = node
            .contain_in(mode, &[&node.share(&format!("{mode:?}"), 0, 3 * GIB)])
            .probe(&["fill"]);
        let gpu = &lines[0]["devices"][0];
        assert_eq!(
            [&gpu["cudaTotalBytes"], &gpu["nvmlTotalBytes"]],
            [3 * GIB; 2].map(Value::from).each_ref()
        );
        assert_eq!(
            (&lines[1]["takenBytes"], &lines[1]["nvmlUsedBytes"]),
            (&(3 * GIB).into(), &(3 * GIB).into())
        );
        let nothing = node.contain_in(mode, &[]).probe(&["fill"]);
        assert_eq!(nothing[1]["takenBytes"], 0, "{mode:?}: no grant, no memory");
    }
}

/// `dlsym` is the loader's own where there are only proxies: what no table has, it finds in the
/// real driver without a word.
#[test]
fn functions_that_nobody_knows_pass_and_are_counted() {
    if !can_contain("functions_that_nobody_knows_pass_and_are_counted") {
        return;
    }
    let node = Node::new();
    for (mode, counted) in [(Mode::Preload, 2), (Mode::Proxy, 1), (Mode::Both, 2)] {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        let lines = node.contain_in(mode, &[&share]).run_c("unknown", false, &[]);
        assert_eq!(lines[0]["none"], 1);
        assert_eq!(share.ledger(|ledger| ledger.unknown_functions()), counted, "{mode:?}");
    }
}
