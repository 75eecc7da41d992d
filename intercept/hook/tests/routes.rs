//! Whatever way a program finds the driver's functions, it finds the hooks.

mod container;

use container::{GIB, Node, can_contain, libraries};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const REFUSED: i64 = 2;

#[test]
fn every_route_to_the_driver_is_held_to_the_grant() {
    if !can_contain("every_route_to_the_driver_is_held_to_the_grant") {
        return;
    }
    let node = Node::new();
    let container = node.contain(&[&node.share("claim-0", 0, GIB)]);
    let path = libraries().join("libcuda.so.1");
    let path = path.to_str().expect("text");
    for linked in [false, true] {
        let lines = container.run_c("routes", linked, &[path]);
        assert_eq!(lines.len(), if linked { 12 } else { 10 });
        for line in lines {
            assert_eq!(line["result"], REFUSED, "{line}, linked: {linked}");
        }
    }
}

#[test]
fn without_the_library_the_same_routes_are_open() {
    if !can_contain("without_the_library_the_same_routes_are_open") {
        return;
    }
    let node = Node::new();
    let path = libraries().join("libcuda.so.1");
    let lines = node.without_the_library().run_c("routes", true, &[path.to_str().expect("text")]);
    assert!(lines.iter().all(|line| line["result"] == 0), "{lines:?}");
}

#[test]
fn an_emptied_environment_changes_nothing() {
    if !can_contain("an_emptied_environment_changes_nothing") {
        return;
    }
    let node = Node::new();
    let container = node.contain(&[&node.share("claim-0", 0, GIB)]);
    let world = format!("TESSERA_FAKE_WORLD={}", node.path().join("world.yaml").display());
    let cuda = libraries().join("libcuda.so.1");
    let nvml = libraries().join("libnvidia-ml.so.1");
    let arguments = [
        "-i",
        &world,
        container::probe().to_str().expect("text"),
        "fill",
        "--cuda",
        cuda.to_str().expect("text"),
        "--nvml",
        nvml.to_str().expect("text"),
    ];
    let lines = container::lines_of(&container.run("env", &arguments));
    assert_eq!(lines[1]["takenBytes"], GIB, "{lines:?}");
}

#[test]
fn the_runtimes_queries_get_the_form_they_asked_for() {
    if !can_contain("the_runtimes_queries_get_the_form_they_asked_for") {
        return;
    }
    let node = Node::new();
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fake/cuda/src/symbols.txt");
    let lines = node.contain(&[&node.share("claim-0", 0, GIB)]).run_c("queries", false, &[table]);
    let (hooked, all) = (&lines[0]["hooked"], &lines[0]["queries"]);
    assert_eq!(lines[0]["wrong"], 0, "{:?}", &lines[1..]);
    assert!(all.as_u64() > Some(600), "{all}");
    let hooks = container::exported().iter().filter(|name| name.starts_with("cu")).count();
    assert_eq!(hooked, hooks, "every hook is handed out, and nothing else");
}
