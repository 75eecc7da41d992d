//! A container may have more memory than the GPU, where its grant says so.

mod container;

use container::{Container, GIB, MIB, Mode, Node, NodeShare, can_contain};
use serde_json::{Value, json};
use tessera_intercept_abi::Grant;

/// Twice what the GPU has, nearly.
const LIMIT: u64 = 160 * GIB;

/// What the GPU has: 81559 MiB as NVML says, of which the firmware keeps some.
const PHYSICAL: u64 = 81_559 * MIB;

/// Bytes that the probe got, after it has seen so many in total by CUDA and by NVML.
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

/// What the GPU has left, by the driver itself.
fn left_on_the_gpu(node: &Node) -> u64 {
    let lines = node.without_the_library().probe(&["see"]);
    lines[0]["devices"][0]["cudaFreeBytes"].as_u64().expect("a number")
}

/// Runs a part of the program `spilling`.
fn run(node: &Node, share: &NodeShare, what: &str) -> Vec<Value> {
    let to_compare = node.to_compare();
    let arguments: Vec<&str> = to_compare.iter().map(String::as_str).chain([what]).collect();
    node.contain(&[share]).run_c("spilling", false, &arguments)
}

/// Result and ledger after each call.
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
fn a_container_that_may_spill_gets_all_of_its_grant_though_the_gpu_has_less() {
    if !can_contain("a_container_that_may_spill_gets_all_of_its_grant_though_the_gpu_has_less") {
        return;
    }
    for mode in Mode::HELD {
        let node = Node::new();
        let share = node.spilling_share("claim-0", LIMIT);
        assert_eq!(filled(&node.contain_in(mode, &[&share])), (LIMIT, [LIMIT; 2]), "{mode:?}");
        assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), LIMIT, "{mode:?}");
        assert!(share.ledger(|ledger| ledger.refused()) > 0, "{mode:?}");
    }
}

#[test]
fn a_container_that_may_not_spill_gets_what_the_gpu_has_whatever_its_grant_says() {
    if !can_contain("a_container_that_may_not_spill_gets_what_the_gpu_has_whatever_its_grant_says")
    {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, LIMIT);
    let (taken, [cuda, nvml]) = filled(&node.contain(&[&share]));
    assert!(taken < PHYSICAL && cuda < PHYSICAL, "{taken} of {cuda}");
    assert_eq!(nvml, PHYSICAL);
}

#[test]
fn plain_memory_that_may_spill_takes_nothing_from_those_who_may_not() {
    if !can_contain("plain_memory_that_may_spill_takes_nothing_from_those_who_may_not") {
        return;
    }
    let node = Node::new();
    let before = left_on_the_gpu(&node);
    // It fits, and comes first.
    let small = node.spilling_share("claim-0", 60 * GIB);
    let mut spiller = node.contain(&[&small]).start(container::probe(), &["fill", "--hold"]);
    assert_eq!(spiller.event("filled")["takenBytes"], 60 * GIB);
    spiller.event("holding");
    // But for its context.
    assert_eq!(left_on_the_gpu(&node), before - node.context_bytes());
    let (taken, _) = filled(&node.contain(&[&node.share("claim-1", 0, 70 * GIB)]));
    assert_eq!(taken, 70 * GIB);
}

#[test]
fn one_grant_of_two_that_may_spill_lets_all_of_the_gpus_memory_spill() {
    if !can_contain("one_grant_of_two_that_may_spill_lets_all_of_the_gpus_memory_spill") {
        return;
    }
    let node = Node::new();
    let (plain, spilling) =
        (node.share("claim-0", 0, 40 * GIB), node.spilling_share("claim-1", 80 * GIB));
    assert_eq!(filled(&node.contain(&[&plain, &spilling])), (120 * GIB, [120 * GIB; 2]));
}

#[test]
fn memory_may_spill_from_when_the_host_says_so() {
    if !can_contain("memory_may_spill_from_when_the_host_says_so") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, LIMIT);
    let container = node.contain(&[&share]);
    let mut before = container.start(container::probe(), &["hold", "--take", "1Gi"]);
    before.event("holding");
    share.change(Grant { oversubscribe: true, ..share.grant });
    assert_eq!(filled(&container), (LIMIT - GIB, [LIMIT; 2]));
}

#[test]
fn a_gpu_of_before_pascal_does_not_spill() {
    if !can_contain("a_gpu_of_before_pascal_does_not_spill") {
        return;
    }
    let node = Node::before_pascal();
    let (taken, [cuda, nvml]) = filled(&node.contain(&[&node.spilling_share("claim-0", LIMIT)]));
    assert!(taken < PHYSICAL && cuda < PHYSICAL, "{taken} of {cuda}");
    assert_eq!(nvml, PHYSICAL);
}

#[test]
fn the_ledger_is_exact_however_memory_that_may_spill_is_given_back() {
    if !can_contain("the_ledger_is_exact_however_memory_that_may_spill_is_given_back") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.spilling_share("claim-0", LIMIT), "frees");
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
    // None of it has been taken from the GPU, which has a context more while there are two.
    let driver: Vec<_> =
        lines.iter().map(|line| line["driver"].as_u64().expect("a number")).collect();
    let least = driver[0];
    assert!(
        driver.iter().all(|held| *held == least || *held == least + node.context_bytes()),
        "{driver:?}"
    );
}

#[test]
fn memory_that_the_driver_refuses_is_charged_no_more() {
    if !can_contain("memory_that_the_driver_refuses_is_charged_no_more") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.spilling_share("claim-0", LIMIT), "fails");
    let calls = calls(&lines);
    assert!(
        calls[..2].iter().all(|(_, result, charged)| *result != 0 && *charged == 0),
        "{calls:?}"
    );
    assert_eq!(calls[2].1, 0, "memory of pools is none of it");
}

#[test]
fn rows_that_may_spill_lie_as_the_driver_lays_them() {
    if !can_contain("rows_that_may_spill_lie_as_the_driver_lays_them") {
        return;
    }
    let (node, other) = (Node::new(), Node::new());
    let lines = run(&node, &node.spilling_share("claim-0", LIMIT), "rows");
    assert!(lines.len() > 6 && lines[1..].iter().all(|line| line["result"] == 0), "{lines:?}");
    assert_eq!(lines[1..], run(&other, &other.share("claim-0", 0, 64 * GIB), "rows")[1..]);
}

#[test]
fn memory_that_is_not_plain_stays_on_the_gpu() {
    if !can_contain("memory_that_is_not_plain_stays_on_the_gpu") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.spilling_share("claim-0", LIMIT), "others");
    let calls = calls(&lines);
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|(_, result, charged)| *result == 2 && *charged == 0), "{calls:?}");
}

#[test]
fn memory_that_may_spill_says_that_it_is_managed_and_goes_to_no_other_process() {
    if !can_contain("memory_that_may_spill_says_that_it_is_managed_and_goes_to_no_other_process") {
        return;
    }
    let node = Node::new();
    let lines = run(&node, &node.spilling_share("claim-0", LIMIT), "asks");
    let told: Vec<_> = lines.iter().filter(|line| line.get("of").is_some()).collect();
    let about = |of: &str, managed: i32| json!({"of": of, "managed": managed, "device": 0});
    assert_eq!(told, [&about("plain", 1), &about("pitched", 1), &about("of a pool", 0)]);
    assert_eq!(calls(&lines)[0].1, 1, "the driver hands out nothing to be opened elsewhere");
}
