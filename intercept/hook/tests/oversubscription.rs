//! Oversubscribed grants exceed the memory of the GPU.

mod container;

use container::{Container, GIB, MIB, Mode, Node, NodeShare, containers_available, set_up};
use serde_json::{Value, json};
use tessera_intercept_abi::Grant;
use tessera_test_support::test_name;

/// Nearly twice the GPU's memory.
const LIMIT: u64 = 160 * GIB;

/// The GPU's memory as NVML reports it: 81559 MiB, of which the firmware reserves some.
const PHYSICAL: u64 = 81_559 * MIB;

/// Returns the bytes that the probe allocated, and the total memory by CUDA and by NVML.
fn filled(container: &Container<'_>) -> (u64, [u64; 2]) {
    let lines = container.probe(&["fill"]);
    let gpu = &lines[0]["devices"][0];
    let number = |value: &Value| value.as_u64().expect("a number");
    assert_eq!(lines[1]["refusedWith"], "CUDA_ERROR_OUT_OF_MEMORY", "{}", lines[1]);
    (
        number(&lines[1]["takenBytes"]),
        [number(&gpu["cudaTotalBytes"]), number(&gpu["nvmlTotalBytes"])],
    )
}

/// Returns the free memory of the GPU, as the driver itself reports it.
fn left_on_the_gpu(node: &Node) -> u64 {
    let lines = node.container_without_library().probe(&["see"]);
    lines[0]["devices"][0]["cudaFreeBytes"].as_u64().expect("a number")
}

/// Runs a part of the program `spilling`.
fn run(node: &Node, share: &NodeShare, what: &str) -> Vec<Value> {
    let to_compare = node.comparison_arguments();
    let arguments: Vec<&str> = to_compare.iter().map(String::as_str).chain([what]).collect();
    node.container(&[share]).run_c("spilling", false, &arguments)
}

/// Returns name, result and ledger of each call.
fn calls(lines: &[Value]) -> Vec<(&str, i64, u64)> {
    let calls = lines.iter().filter(|line| line.get("call").is_some());
    calls
        .map(|line| {
            let number = |field: &str| line[field].as_i64().expect("a number");
            (
                line["call"].as_str().expect("text"),
                number("result"),
                number("ledger").cast_unsigned(),
            )
        })
        .collect()
}

#[test]
fn oversubscribed_grant_exceeds_gpu_memory() {
    if !containers_available(test_name!()) {
        return;
    }
    for mode in Mode::INTERCEPTED {
        let node = Node::new();
        let share = node.oversubscribed_share("claim-0", LIMIT);
        assert_eq!(filled(&node.container_in(mode, &[&share])), (LIMIT, [LIMIT; 2]), "{mode:?}");
        assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), LIMIT, "{mode:?}");
        assert!(share.ledger(|ledger| ledger.refused()) > 0, "{mode:?}");
    }
}

#[test]
fn plain_grant_is_bounded_by_gpu_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, LIMIT);
    let (taken, [cuda, nvml]) = filled(&node.container(&[&share]));
    assert!(taken < PHYSICAL && cuda < PHYSICAL, "{taken} of {cuda}");
    assert_eq!(nvml, PHYSICAL);
}

#[test]
fn managed_memory_takes_none_of_the_gpu_from_plain_grants() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let before = left_on_the_gpu(&node);
    // It fits, and is allocated first.
    let small = node.oversubscribed_share("claim-0", 60 * GIB);
    let mut spiller = node.container(&[&small]).start(container::probe(), &["fill", "--hold"]);
    assert_eq!(spiller.wait_for_event("filled")["takenBytes"], 60 * GIB);
    spiller.wait_for_event("holding");
    // Except for its context.
    assert_eq!(left_on_the_gpu(&node), before - node.context_bytes());
    let (taken, _) = filled(&node.container(&[&node.share("claim-1", 0, 70 * GIB)]));
    assert_eq!(taken, 70 * GIB);
}

#[test]
fn one_oversubscribed_grant_of_two_applies_to_the_whole_gpu() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (plain, spilling) =
        (node.share("claim-0", 0, 40 * GIB), node.oversubscribed_share("claim-1", 80 * GIB));
    assert_eq!(filled(&node.container(&[&plain, &spilling])), (120 * GIB, [120 * GIB; 2]));
}

#[test]
fn oversubscription_can_be_enabled_later() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, LIMIT);
    let container = node.container(&[&share]);
    let _before = container.hold("1Gi");
    share.change(Grant { oversubscribe: true, ..share.grant });
    assert_eq!(filled(&container), (LIMIT - GIB, [LIMIT; 2]));
}

#[test]
fn gpu_older_than_pascal_is_not_oversubscribed() {
    let Some(node) = set_up(test_name!(), Node::before_pascal) else { return };
    let (taken, [cuda, nvml]) =
        filled(&node.container(&[&node.oversubscribed_share("claim-0", LIMIT)]));
    assert!(taken < PHYSICAL && cuda < PHYSICAL, "{taken} of {cuda}");
    assert_eq!(nvml, PHYSICAL);
}

#[test]
fn ledger_is_exact_for_every_way_to_free_managed_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.oversubscribed_share("claim-0", LIMIT), "frees");
    let (success, invalid, out_of_memory) = (0, 1, 2);
    let rows = 1024 * 1024;
    assert_eq!(
        calls(&lines),
        [
            ("cuMemAlloc_v2", success, 100 * GIB),
            ("cuMemAlloc_v2", success, 100 * GIB + 3 * MIB),
            ("cuMemAllocPitch_v2", success, 100 * GIB + 3 * MIB + rows),
            ("cuMemAlloc_v2", out_of_memory, 100 * GIB + 3 * MIB + rows),
            ("cuMemFree_v2", success, 3 * MIB + rows),
            ("cuMemFree_v2", invalid, 3 * MIB + rows),
            ("cuMemFree_v2", success, rows),
            ("cuMemFreeAsync", success, 0),
            ("cuCtxCreate_v2", success, 0),
            ("cuMemAlloc_v2", success, 90 * GIB),
            ("cuCtxDestroy_v2", success, 0),
        ]
    );
    // All of it is managed memory; the GPU has one more context while there are two.
    let driver: Vec<_> =
        lines.iter().map(|line| line["driver"].as_u64().expect("a number")).collect();
    let least = driver[0];
    assert!(
        driver.iter().all(|held| *held == least || *held == least + node.context_bytes()),
        "{driver:?}"
    );
}

#[test]
fn memory_refused_by_the_driver_is_not_charged() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.oversubscribed_share("claim-0", LIMIT), "fails");
    let calls = calls(&lines);
    assert!(
        calls[..2].iter().all(|(_, result, charged)| *result != 0 && *charged == 0),
        "{calls:?}"
    );
    assert_eq!(calls[2].1, 0, "memory of pools is none of it");
}

#[test]
fn pitch_of_managed_memory_equals_the_drivers() {
    if !containers_available(test_name!()) {
        return;
    }
    let (node, other) = (Node::new(), Node::new());
    let lines = run(&node, &node.oversubscribed_share("claim-0", LIMIT), "rows");
    assert!(lines.len() > 6 && lines[1..].iter().all(|line| line["result"] == 0), "{lines:?}");
    assert_eq!(lines[1..], run(&other, &other.share("claim-0", 0, 64 * GIB), "rows")[1..]);
}

#[test]
fn other_kinds_of_memory_stay_on_the_gpu() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.oversubscribed_share("claim-0", LIMIT), "others");
    let calls = calls(&lines);
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|(_, result, charged)| *result == 2 && *charged == 0), "{calls:?}");
}

#[test]
fn managed_memory_is_reported_as_such_and_not_exported() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run(&node, &node.oversubscribed_share("claim-0", LIMIT), "asks");
    let told: Vec<_> = lines.iter().filter(|line| line.get("of").is_some()).collect();
    let about = |of: &str, managed: i32| json!({"of": of, "managed": managed, "device": 0});
    assert_eq!(told, [&about("plain", 1), &about("pitched", 1), &about("of a pool", 0)]);
    assert_eq!(calls(&lines)[0].1, 1, "the driver hands out nothing to be opened elsewhere");
}
