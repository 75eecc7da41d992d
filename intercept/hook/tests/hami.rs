//! Built for HAMi's variables, the library holds containers that no grants come to; built as it
//! ships, variables open nothing.

mod container;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use container::{Container, GIB, MIB, Mode, Node, can_contain, lines_of, probe};
use serde_json::Value;

/// Runs the probe with variables.
fn probe_with(container: &Container<'_>, variables: &[&str], arguments: &[&str]) -> Vec<Value> {
    let program = probe().to_str().expect("text");
    lines_of(&container.run("env", &[variables, &[program], arguments].concat()))
}

fn cache(node: &Node) -> String {
    format!("CUDA_DEVICE_MEMORY_SHARED_CACHE={}", node.path().join("shared.cache").display())
}

#[test]
fn variables_say_what_a_container_without_grants_may_take() {
    if !can_contain("variables_say_what_a_container_without_grants_may_take") {
        return;
    }
    let node = Node::new();
    let (container, cache) = (node.contain_in(Mode::Hami, &[]), cache(&node));
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DEVICE_MEMORY_LIMIT_1=2048m"];
    for (device, limit) in [("0", GIB), ("1", 2 * GIB)] {
        let lines = probe_with(&container, &variables, &["fill", "--device", device]);
        let gpu = &lines[0]["devices"][device.parse::<usize>().expect("a number")];
        assert_eq!(
            (&gpu["cudaTotalBytes"], &gpu["nvmlTotalBytes"]),
            (&limit.into(), &limit.into())
        );
        assert_eq!(lines[1]["takenBytes"], limit, "GPU {device}");
    }
}

#[test]
fn processes_share_a_limit_through_the_cache_file() {
    if !can_contain("processes_share_a_limit_through_the_cache_file") {
        return;
    }
    let node = Node::new();
    let (container, cache) = (node.contain_in(Mode::Hami, &[]), cache(&node));
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=1g"];
    let hold =
        [&variables[..], &[probe().to_str().expect("text"), "hold", "--take", "768Mi"]].concat();
    let mut first = container.start("env", &hold);
    first.event("holding");
    let lines = probe_with(&container, &variables, &["fill"]);
    assert_eq!(lines[1]["takenBytes"], 256 * MIB);
    first.kill();
    let lines = probe_with(&container, &variables, &["fill"]);
    assert_eq!(lines[1]["takenBytes"], GIB, "what a killed process held is free");
}

#[test]
fn the_cache_file_is_for_everybody_and_never_half_made() {
    if !can_contain("the_cache_file_is_for_everybody_and_never_half_made") {
        return;
    }
    let node = Node::new();
    let container = node.contain_in(Mode::Hami, &[]);
    let script = format!(
        "umask 077; for i in 1 2 3 4 5 6 7 8; do {} {} CUDA_DEVICE_MEMORY_LIMIT=1g {} see > /dev/null & done; wait",
        "env",
        cache(&node),
        probe().display()
    );
    assert!(container.run("sh", &["-c", &script]).status.success());
    let files = || fs::read_dir(node.path()).expect("a directory").flatten();
    let made: Vec<_> = files()
        .filter(|file| file.file_name().to_string_lossy().starts_with("shared.cache"))
        .collect();
    assert_eq!(made.len(), 8, "one for each GPU, and nothing that was left over");
    for file in made {
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o666);
        let bytes = fs::read(file.path()).expect("readable");
        assert!(tessera_intercept_abi::LedgerReport::parse(&bytes).is_ok(), "{file:?}");
    }
}

#[test]
fn a_limit_that_is_no_number_and_a_ledger_that_cannot_be_made_give_no_memory() {
    if !can_contain("a_limit_that_is_no_number_and_a_ledger_that_cannot_be_made_give_no_memory") {
        return;
    }
    let node = Node::new();
    let (container, cache) = (node.contain_in(Mode::Hami, &[]), cache(&node));
    for variables in [
        [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=lots"],
        ["CUDA_DEVICE_MEMORY_SHARED_CACHE=/no/such/place", "CUDA_DEVICE_MEMORY_LIMIT=1g"],
    ] {
        assert_eq!(
            probe_with(&container, &variables, &["fill"])[1]["takenBytes"],
            0,
            "{variables:?}"
        );
    }
}

#[test]
fn without_a_limit_the_whole_gpu_is_there() {
    if !can_contain("without_a_limit_the_whole_gpu_is_there") {
        return;
    }
    let node = Node::new();
    let seen =
        |mode| probe_with(&node.contain_in(mode, &[]), &[&cache(&node)], &["see"])[0].clone();
    assert_eq!(seen(Mode::Hami), seen(Mode::Bare));
}

#[test]
fn where_there_are_grants_variables_open_nothing() {
    if !can_contain("where_there_are_grants_variables_open_nothing") {
        return;
    }
    let node = Node::new();
    let cache = cache(&node);
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=8g"];
    let container = node.contain_in(Mode::Hami, &[&node.share("claim-0", 0, GIB)]);
    assert_eq!(probe_with(&container, &variables, &["fill"])[1]["takenBytes"], GIB);
    let other = probe_with(&container, &variables, &["fill", "--device", "1"]);
    assert_eq!(other[1]["takenBytes"], 0, "a GPU without a grant");
    let unreadable = node.share("claim-1", 0, GIB);
    unreadable.scribble_grant(0, &[0]);
    let container = node.contain_in(Mode::Hami, &[&unreadable]);
    assert_eq!(
        probe_with(&container, &variables, &["fill"])[1]["takenBytes"],
        0,
        "a grant that is none"
    );
}

#[test]
fn as_it_ships_variables_open_nothing() {
    if !can_contain("as_it_ships_variables_open_nothing") {
        return;
    }
    let node = Node::new();
    let cache = cache(&node);
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=8g"];
    for mode in Mode::HELD {
        let lines = probe_with(&node.contain_in(mode, &[]), &variables, &["fill"]);
        assert_eq!(lines[1]["takenBytes"], 0, "{mode:?}");
    }
}
