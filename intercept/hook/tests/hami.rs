//! The build for HAMi's variables limits containers without grants. In the shipped build variables
//! have no effect.

mod container;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use container::{Container, GIB, MIB, Mode, Node, lines_of, probe, set_up};
use serde_json::Value;
use tessera_test_support::test_name;

/// Runs the probe with environment variables.
fn probe_with(container: &Container<'_>, variables: &[&str], arguments: &[&str]) -> Vec<Value> {
    let program = probe().to_str().expect("text");
    lines_of(&container.run("env", &[variables, &[program], arguments].concat()))
}

fn cache(node: &Node) -> String {
    format!("CUDA_DEVICE_MEMORY_SHARED_CACHE={}", node.path().join("shared.cache").display())
}

#[test]
fn variables_limit_a_container_without_grants() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (container, cache) = (node.container_in(Mode::Hami, &[]), cache(&node));
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
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (container, cache) = (node.container_in(Mode::Hami, &[]), cache(&node));
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=1g"];
    let hold =
        [&variables[..], &[probe().to_str().expect("text"), "hold", "--take", "768Mi"]].concat();
    let mut first = container.start("env", &hold);
    first.wait_for_event("holding");
    let lines = probe_with(&container, &variables, &["fill"]);
    assert_eq!(lines[1]["takenBytes"], 256 * MIB);
    first.kill();
    let lines = probe_with(&container, &variables, &["fill"]);
    assert_eq!(lines[1]["takenBytes"], GIB, "what a killed process held is free");
}

#[test]
fn cache_file_is_writable_by_all_and_created_atomically() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let container = node.container_in(Mode::Hami, &[]);
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
    assert_eq!(made.len(), 9, "one for each GPU, the monitor's, and nothing that was left over");
    for file in made {
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o666);
        if file.file_name() == "shared.cache" {
            continue;
        }
        let bytes = fs::read(file.path()).expect("readable");
        assert!(tessera_intercept_abi::LedgerReport::parse(&bytes).is_ok(), "{file:?}");
    }
}

#[test]
fn invalid_limit_or_cache_path_gives_no_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (container, cache) = (node.container_in(Mode::Hami, &[]), cache(&node));
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
fn gpu_is_unlimited_without_a_limit() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let seen =
        |mode| probe_with(&node.container_in(mode, &[]), &[&cache(&node)], &["see"])[0].clone();
    assert_eq!(seen(Mode::Hami), seen(Mode::Bare));
}

#[test]
fn grants_override_variables() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let cache = cache(&node);
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=8g"];
    let container = node.container_in(Mode::Hami, &[&node.share("claim-0", 0, GIB)]);
    assert_eq!(probe_with(&container, &variables, &["fill"])[1]["takenBytes"], GIB);
    let other = probe_with(&container, &variables, &["fill", "--device", "1"]);
    assert_eq!(other[1]["takenBytes"], 0, "a GPU without a grant");
    let unreadable = node.share("claim-1", 0, GIB);
    unreadable.overwrite_grant(0, &[0]);
    let container = node.container_in(Mode::Hami, &[&unreadable]);
    assert_eq!(
        probe_with(&container, &variables, &["fill"])[1]["takenBytes"],
        0,
        "a grant that is none"
    );
}

#[test]
fn shipped_build_ignores_variables() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let cache = cache(&node);
    let variables = [&*cache, "CUDA_DEVICE_MEMORY_LIMIT=8g"];
    for mode in Mode::INTERCEPTED {
        let lines = probe_with(&node.container_in(mode, &[]), &variables, &["fill"]);
        assert_eq!(lines[1]["takenBytes"], 0, "{mode:?}");
    }
}
