//! What NVML tells a container: of its own processes and its own memory, and of nobody else's.

mod container;

use container::{GIB, MIB, Node, can_contain, probe};
use serde_json::Value;

/// The program's lines, and the id of a process of another container on the same GPU, as the host
/// has it.
fn told(node: &Node) -> Vec<Value> {
    let (mine, theirs) = (node.share("claim-0", 0, 4 * GIB), node.share("claim-1", 0, 8 * GIB));
    let others = node.contain(&[&theirs]);
    let mut other = others.start(probe(), &["hold", "--take", "2Gi"]);
    other.event("holding");
    node.contain(&[&mine]).run_c("processes", false, &["1"])
}

#[test]
fn lists_of_processes_show_the_containers_own() {
    if !can_contain("lists_of_processes_show_the_containers_own") {
        return;
    }
    let node = Node::new();
    let lines = told(&node);
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

#[test]
fn nobody_is_told_what_others_do() {
    if !can_contain("nobody_is_told_what_others_do") {
        return;
    }
    let node = Node::new();
    let lines = told(&node);
    let none: Vec<_> = lines.iter().filter(|line| line.get("none").is_some()).collect();
    assert_eq!(none.len(), 11);
    for line in none {
        let of_samples = line["none"].as_str().is_some_and(|name| name.contains("Utilization"));
        let result = if of_samples { 6 } else { 0 };
        assert_eq!((&line["result"], &line["count"]), (&result.into(), &0.into()), "{line}");
    }
    let field = |name: &str| {
        lines.iter().find_map(|line| line.get(name)).unwrap_or_else(|| panic!("no {name}"))
    };
    assert_eq!(field("stats"), 6);
    assert_eq!(field("own name"), field("is"));
    assert_eq!((field("tiny"), field("NULL")), (&7.into(), &2.into()));
}

#[test]
fn every_size_agrees_with_the_grant() {
    if !can_contain("every_size_agrees_with_the_grant") {
        return;
    }
    let node = Node::new();
    let lines = told(&node);
    let sizes = lines.iter().find(|line| line.get("bar1").is_some()).expect("sizes");
    assert_eq!((&sizes["bar1"], &sizes["total"]), (&(4 * GIB).into(), &(4 * GIB).into()));
    assert_eq!((&sizes["bar1 used"], &sizes["used"]), (&(1536 * MIB).into(), &(1536 * MIB).into()));
    assert_eq!(
        (&sizes["attributes MiB"], &sizes["protected KiB"]),
        (&4096.into(), &(4 << 20).into())
    );
}
