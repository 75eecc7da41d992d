//! Whatever a program gives a function, and whatever the driver answers, it is as without the
//! library, and the ledger stays exact.

mod container;

use container::{GIB, Node, can_contain, exported};
use serde_json::Value;
use tessera_intercept_symbols::{Library, TABLE};

/// The functions of CUDA that have a hook.
fn hooked() -> Vec<&'static str> {
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    cuda.map(|symbol| symbol.symbol.text).filter(|name| exported().contains(*name)).collect()
}

/// The calls that end in another way with the library. What asks for more than is granted and is
/// wrong besides may be refused for the first of the two.
fn apart<'a>(with: &'a [Value], without: &'a [Value]) -> Vec<(&'a Value, &'a Value)> {
    const OUT_OF_MEMORY: i64 = 2;
    let refused = |with: &Value, without: &Value| {
        with["result"] == OUT_OF_MEMORY
            && without["result"].as_i64().is_some_and(|result| result != 0)
    };
    let differ = |(with, without): &(&Value, &Value)| with != without && !refused(with, without);
    with.iter().zip(without).filter(differ).collect()
}

#[test]
fn calls_with_nothing_or_with_anything_answer_as_without_the_library() {
    if !can_contain("calls_with_nothing_or_with_anything_answer_as_without_the_library") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, 64 * GIB);
    let names = hooked();
    let with = node.contain(&[&share]).run_c("nulls", false, &names);
    let without = node.without_the_library().run_c("nulls", false, &names);
    assert_eq!(with.len(), names.len() * 4);
    assert_eq!(apart(&with, &without), []);
    // What a caller passes by value it passes by reference there when it is long: a null one is the
    // caller's fault, and fatal without the library too.
    let is_callers =
        |name: &str| cfg!(target_arch = "aarch64") && name.starts_with("cuIpcOpenMemHandle");
    let is_fatal = |line: &&Value| {
        line.get("fatal").is_some() && !is_callers(line["name"].as_str().unwrap_or_default())
    };
    let fatal: Vec<_> = with.iter().filter(is_fatal).collect();
    assert!(fatal.is_empty(), "{fatal:?}");
}

#[test]
fn calls_with_nothing_or_with_anything_answer_as_without_the_library_also_where_memory_may_spill() {
    if !can_contain(
        "calls_with_nothing_or_with_anything_answer_as_without_the_library_also_where_memory_may_spill",
    ) {
        return;
    }
    let node = Node::new();
    let share = node.spilling_share("claim-0", 64 * GIB);
    let with = node.contain(&[&share]).run_c("nulls", false, &hooked());
    let without = node.without_the_library().run_c("nulls", false, &hooked());
    assert_eq!(apart(&with, &without), []);
}

#[test]
fn a_driver_that_fails_at_any_call_leaves_the_ledger_exact() {
    if !can_contain("a_driver_that_fails_at_any_call_leaves_the_ledger_exact") {
        return;
    }
    let node = Node::new();
    let (share, to_compare) = (node.share_with_contexts(64 * GIB), node.to_compare());
    // What the driver holds is asked by this one.
    let names: Vec<_> = hooked().into_iter().filter(|name| *name != "cuMemGetInfo_v2").collect();
    let mut arguments: Vec<_> = to_compare.iter().map(String::as_str).collect();
    arguments.extend(&names);
    let with = node.contain(&[&share]).run_c("failing", false, &arguments);
    let mut arguments = vec!["-"];
    arguments.extend(&names);
    let without = node.without_the_library().run_c("failing", false, &arguments);
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
