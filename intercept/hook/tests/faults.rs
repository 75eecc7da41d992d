//! Invalid arguments and failing driver calls: results are as without the library, and the ledger
//! stays exact.

mod container;

use container::{GIB, Node, exported, set_up};
use serde_json::Value;
use tessera_intercept_symbols::{Library, TABLE};
use tessera_test_support::test_name;

/// Returns the functions of CUDA that have a hook.
fn hooked() -> Vec<&'static str> {
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    cuda.map(|symbol| symbol.symbol.text).filter(|name| exported().contains(*name)).collect()
}

/// Returns the calls whose results differ with the library. A call that exceeds the grant and is
/// invalid may be refused for either reason.
fn differences<'a>(with: &'a [Value], without: &'a [Value]) -> Vec<(&'a Value, &'a Value)> {
    const OUT_OF_MEMORY: i64 = 2;
    let refused = |with: &Value, without: &Value| {
        with["result"] == OUT_OF_MEMORY
            && without["result"].as_i64().is_some_and(|result| result != 0)
    };
    let differ = |(with, without): &(&Value, &Value)| with != without && !refused(with, without);
    with.iter().zip(without).filter(differ).collect()
}

#[test]
fn invalid_arguments_give_the_drivers_errors() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, 64 * GIB);
    let names = hooked();
    let with = node.container(&[&share]).run_c("nulls", false, &names);
    let without = node.container_without_library().run_c("nulls", false, &names);
    assert_eq!(with.len(), names.len() * 4);
    assert_eq!(differences(&with, &without), []);
    // On aarch64 a long argument is passed by reference: a null reference is fatal without the
    // library too.
    let is_callers =
        |name: &str| cfg!(target_arch = "aarch64") && name.starts_with("cuIpcOpenMemHandle");
    let is_fatal = |line: &&Value| {
        line.get("fatal").is_some() && !is_callers(line["name"].as_str().unwrap_or_default())
    };
    let fatal: Vec<_> = with.iter().filter(is_fatal).collect();
    assert!(fatal.is_empty(), "{fatal:?}");
}

#[test]
fn invalid_arguments_give_the_drivers_errors_if_oversubscribed() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.oversubscribed_share("claim-0", 64 * GIB);
    let with = node.container(&[&share]).run_c("nulls", false, &hooked());
    let without = node.container_without_library().run_c("nulls", false, &hooked());
    assert_eq!(differences(&with, &without), []);
}

#[test]
fn ledger_stays_exact_after_a_failure_of_any_driver_call() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (share, to_compare) = (node.share_with_contexts(64 * GIB), node.comparison_arguments());
    // The program uses this function to read the driver's usage.
    let names: Vec<_> = hooked().into_iter().filter(|name| *name != "cuMemGetInfo_v2").collect();
    let mut arguments: Vec<_> = to_compare.iter().map(String::as_str).collect();
    arguments.extend(&names);
    let with = node.container(&[&share]).run_c("failing", false, &arguments);
    let mut arguments = vec!["-"];
    arguments.extend(&names);
    let without = node.container_without_library().run_c("failing", false, &arguments);
    let calls = |lines: &[Value]| -> Vec<_> {
        lines
            .iter()
            .map(|line| format!("{} {} {}", line["fails"], line["call"], line["result"]))
            .collect()
    };
    let (with_calls, without_calls) = (calls(&with), calls(&without));
    let first = with_calls.iter().zip(&without_calls).find(|(with, without)| with != without);
    assert_eq!(first, None);
    assert_eq!(with_calls.len(), without_calls.len());
    let inexact: Vec<_> = with.iter().filter(|line| line["ledger"] != line["driver"]).collect();
    assert!(
        inexact.is_empty(),
        "{} of {}: {:?}",
        inexact.len(),
        with.len(),
        &inexact[..inexact.len().min(12)]
    );
}
