//! `TESSERA_TRACE=1` reports refused memory and held launches on stderr.

mod container;

use std::process::Output;

use container::{Container, GIB, Node, probe, program, set_up};
use tessera_intercept_abi::ComputePolicy;
use tessera_test_support::test_name;

/// Returns the lines of the interceptor.
fn traced(output: &Output) -> Vec<String> {
    let errors = String::from_utf8_lossy(&output.stderr);
    errors.lines().filter(|line| line.starts_with("tessera: ")).map(str::to_owned).collect()
}

/// Runs the probe that allocates all it can get.
fn fill(container: &Container<'_>, variable: &str) -> Vec<String> {
    traced(&container.run("env", &[variable, probe().to_str().expect("text"), "fill"]))
}

#[test]
fn refused_allocations_are_reported_with_their_reason() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let lines = fill(&node.container(&[&share]), "TESSERA_TRACE=1");
    let gpu = share.grant.gpu_uuid;
    let (begin, end) = (
        format!("tessera: {gpu}: "),
        format!(" bytes refused: {GIB} of {GIB} bytes of the container's memory are used"),
    );
    assert!(!lines.is_empty());
    let last = lines.last().expect("not empty");
    assert!(last.starts_with(&begin) && last.ends_with(&end), "{last}");
}

#[test]
fn memory_of_a_gpu_without_share_is_reported() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = fill(&node.container(&[]), "TESSERA_TRACE=1");
    let end = " bytes refused: the container has no share of this GPU";
    assert!(!lines.is_empty() && lines.iter().all(|line| line.ends_with(end)), "{lines:?}");
}

/// A directory of the tenant's own, with a copy of the grant.
#[test]
fn ignored_grants_are_reported_with_their_reason() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (real, forged) = (node.share("claim-0", 0, GIB), node.share("forged", 0, 8 * GIB));
    let [grant, ledger] = forged.paths().each_ref().map(|path| path.display());
    let script = format!(
        "d=/dev/tessera/forged; mkdir $d && cp {grant} {ledger} $d/ && TESSERA_TRACE=1 exec {} fill",
        probe().display()
    );
    let lines = traced(&node.container(&[&real]).run("sh", &["-c", &script]));
    let expected =
        "tessera: the grant /dev/tessera/forged is ignored: it was not mounted by the driver";
    assert!(lines.iter().any(|line| line == expected), "{lines:?}");
}

#[test]
fn nothing_is_printed_without_the_variable() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let container = node.container(&[&node.share("claim-0", 0, GIB)]);
    for variable in ["TESSERA_TRACE=0", "TESSERA_TRACE=", "TESSERA_TRACES=1", "A_TESSERA_TRACE=1"] {
        assert_eq!(fill(&container, variable), Vec::<String>::new(), "{variable}");
    }
}

/// One line a second, with the cap.
#[test]
fn held_launches_are_reported_once_a_second() {
    let Some(node) = set_up(test_name!(), Node::with_paused_clock) else { return };
    let share = node.share_of_time("claim-0", ComputePolicy::Fixed, 25);
    let compute = program("compute", false, node.path());
    let compute = compute.to_str().expect("text");
    let arguments = ["TESSERA_TRACE=1", compute, "plain", "spin_for_1ms", "1000", "1000", "3"];
    let lines = traced(&node.container(&[&share]).run("env", &arguments));
    assert!((2..=4).contains(&lines.len()), "{lines:?}");
    for line in &lines {
        assert!(line.ends_with(" us: the container has 25.00 % of the GPU's time"), "{line}");
    }
}
