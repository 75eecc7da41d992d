//! In modes proxy and both, limits are as in mode preload, and memory is charged once.

mod container;

use container::{GIB, Mode, Node, set_up};
use serde_json::{Value, json};
use tessera_intercept_symbols::SymbolVersion;
use tessera_test_support::test_name;

#[test]
fn memory_is_charged_once_in_every_mode() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let charged = |mode| {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        let lines = node.container_in(mode, &[&share]).run_c("calls", false, &[]);
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
fn process_has_one_slot_in_every_mode() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    for mode in Mode::INTERCEPTED {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        let _running = node.container_in(mode, &[&share]).hold("512Mi");
        assert_eq!(share.ledger(|ledger| ledger.processes().count()), 1, "{mode:?}");
        assert_eq!(share.ledger(|ledger| ledger.used_bytes()), GIB / 2, "{mode:?}");
    }
}

#[test]
fn cuda_and_nvml_report_the_grant_in_every_mode() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    for mode in Mode::INTERCEPTED {
        let lines = node
            .container_in(mode, &[&node.share(&format!("{mode:?}"), 0, 3 * GIB)])
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
        let nothing = node.container_in(mode, &[]).probe(&["fill"]);
        assert_eq!(nothing[1]["takenBytes"], 0, "{mode:?}: no grant, no memory");
    }
}

/// The driver is newer than the symbol table. In mode proxy, `dlsym` is the loader's own and finds
/// unknown functions in the real driver.
#[test]
fn only_unknown_forms_that_take_memory_are_refused() {
    /// `CUDA_ERROR_NOT_FOUND`
    const NOT_FOUND: i32 = 500;
    let future = || Node::with_cuda(SymbolVersion(99_000));
    let Some(node) = set_up(test_name!(), future) else { return };
    for (mode, counted) in [(Mode::Preload, 3), (Mode::Proxy, 2), (Mode::Both, 3)] {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        let lines = node.container_in(mode, &[&share]).run_c("unknown", false, &[]);
        assert_eq!(lines[0], json!({"launch": 0, "memory": NOT_FOUND, "found": 0}), "{mode:?}");
        assert_eq!(lines[1]["none"], 1, "{mode:?}");
        assert_eq!(share.ledger(|ledger| ledger.unknown_functions()), counted, "{mode:?}");
    }
}
