//! NVML reports only processes and memory of the container.

mod container;

use container::{GIB, MIB, Node, monotonic_ns, set_up};
use serde_json::{Value, json};
use tessera_intercept_abi::ComputePolicy;
use tessera_test_support::test_name;

/// Returns the output of a program that calls NVML while another container uses the same GPU.
fn run_processes(node: &Node) -> Vec<Value> {
    let (mine, theirs) = (node.share("claim-0", 0, 4 * GIB), node.share("claim-1", 0, 8 * GIB));
    let others = node.container(&[&theirs]);
    let _other = others.hold("2Gi");
    node.container(&[&mine]).run_c("processes", false, &["1"])
}

#[test]
fn process_lists_show_only_the_container() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run_processes(&node);
    let (parent, child) = (&lines[0]["parent"], &lines[0]["child"]);
    for name in [
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetRunningProcessDetailList",
    ] {
        let mut listed: Vec<_> = lines
            .iter()
            .filter(|line| line["of"] == name)
            .map(|line| (&line["pid"], &line["bytes"]))
            .collect();
        listed.sort_by_key(|(_, bytes)| bytes.as_u64());
        assert_eq!(listed, [(child, &(512 * MIB).into()), (parent, &GIB.into())], "{name}");
    }
    let rooms: Vec<_> = lines.iter().filter(|line| line.get("list").is_some()).collect();
    assert_eq!(rooms.len(), 3);
    for line in rooms {
        assert_eq!(
            (&line["needed"], &line["without room"], &line["with little"]),
            (&2.into(), &7.into(), &7.into())
        );
    }
    assert_eq!(
        lines.iter().find_map(|line| line.get("no device")),
        Some(&2.into()),
        "NVML's own error"
    );
}

/// An idle server has a context and no allocation, and contexts are not charged.
#[test]
fn process_with_only_a_context_is_listed() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = node.container(&[&node.share("claim-0", 0, GIB)]).run_c("idle", false, &[]);
    assert_eq!(lines[0], json!({"count": 1, "own": 1, "bytes": 0}));
}

#[test]
fn utilization_is_that_of_the_containers_own_processes() {
    let Some(node) = set_up(test_name!(), Node::with_paused_clock) else { return };
    let share = node.share_of_time("claim-0", ComputePolicy::Fixed, 25);
    let lines = node.container(&[&share]).run_c("using", false, &[]);
    let percent = |line: &Value, field: &str| line[field].as_u64().expect("a number");
    assert_eq!(lines[0]["idle"], 0);
    let busy = percent(&lines[0], "busy");
    assert!((23..=27).contains(&busy), "{lines:?}");
    assert_eq!(lines[0]["at once"], busy);
    let expected = [
        json!({"without room": 7, "needed": 1, "count": 1, "own": 1, "percent": busy}),
        json!({"count": 1, "own": 1, "percent": busy}),
    ];
    assert_eq!(lines[1..], expected);
}

#[test]
fn utilization_is_the_hosts_while_launches_are_not_metered() {
    let Some(node) = set_up(test_name!(), Node::with_paused_clock) else { return };
    let share = node.share_of_time("claim-0", ComputePolicy::None, 0);
    share.publish_unmetered(63, monotonic_ns() + 50_000_000_000);
    let lines = node.container(&[&share]).run_c("using", false, &[]);
    assert_eq!((&lines[0]["idle"], &lines[0]["busy"]), (&63.into(), &63.into()));
    assert_eq!(lines[2], json!({"count": 1, "own": 1, "percent": 63}));
    // Expired: that of the whole GPU, which is idle in the fake driver.
    share.publish_unmetered(63, monotonic_ns() - 60_000_000_000);
    let lines = node.container(&[&share]).run_c("using", false, &[]);
    assert_eq!((&lines[0]["idle"], &lines[0]["busy"]), (&0.into(), &0.into()));
}

#[test]
fn usage_of_other_containers_is_hidden() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run_processes(&node);
    let none: Vec<_> = lines.iter().filter(|line| line.get("none").is_some()).collect();
    assert_eq!(none.len(), 11);
    for line in none {
        let of_samples = line["none"].as_str().is_some_and(|name| name.contains("Utilization"));
        // Samples are of the container's two processes, for which there is no room.
        let (result, count) = if of_samples { (7, 2) } else { (0, 0) };
        assert_eq!((&line["result"], &line["count"]), (&result.into(), &count.into()), "{line}");
    }
    let field = |name: &str| {
        lines.iter().find_map(|line| line.get(name)).unwrap_or_else(|| panic!("no {name}"))
    };
    assert_eq!(field("stats"), 6);
    assert_eq!(field("own name"), field("is"));
    assert_eq!((field("tiny"), field("NULL")), (&7.into(), &2.into()));
}

#[test]
fn every_reported_size_agrees_with_the_grant() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = run_processes(&node);
    let sizes = lines.iter().find(|line| line.get("bar1").is_some()).expect("sizes");
    assert_eq!((&sizes["bar1"], &sizes["total"]), (&(4 * GIB).into(), &(4 * GIB).into()));
    assert_eq!((&sizes["bar1 used"], &sizes["used"]), (&(1536 * MIB).into(), &(1536 * MIB).into()));
    assert_eq!(
        (&sizes["attributes MiB"], &sizes["protected KiB"]),
        (&4096.into(), &(4 << 20).into())
    );
}
