//! The tree of nodes, GPUs and allocations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden};
use serde_json::json;
use tessera_api::names::Namespace;
use tessera_cli::maintenance::resolve;
use tessera_cli::output::{OutputFormat, render};
use tessera_cli::tree::{self, GpuTree, TreeFilter};

/// A cluster with a shared GPU, a full GPU and a cordoned node.
fn fixture() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    fixture.tenant("server", "node-a", &device("aa"), "40Gi", "0");
    fixture.tenant("batch", "node-b", &device("ba"), "81920Mi", "100");
    fixture
        .change_node("node-b", |node| node.spec.get_or_insert_default().unschedulable = Some(true));
    fixture
}

fn read(fixture: &Fixture, filter: &TreeFilter) -> GpuTree {
    GpuTree::read(&fixture.snapshot.indexed().index, filter)
}

#[test]
fn tree_shows_nodes_gpus_and_pods() {
    golden("tree.txt", &tree::tree_text(&read(&fixture(), &TreeFilter::default()), true));
}

#[test]
fn claims_have_one_line_per_allocation() {
    golden("tree-claims.txt", &tree::claims_text(&read(&fixture(), &TreeFilter::default()), true));
}

#[test]
fn json_and_yaml_agree() {
    let one = TreeFilter { nodes: ["node-a".to_owned()].into(), ..TreeFilter::default() };
    let tree = read(&fixture(), &one);
    golden("tree.json", &render(&tree, OutputFormat::Json, |_| String::new()).unwrap());
    let yaml = render(&tree, OutputFormat::Yaml, |_| String::new()).unwrap();
    let read_back: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(read_back, serde_json::to_value(&tree).unwrap());
}

#[test]
fn namespace_filters_allocations_and_gpus() {
    let mut fixture = fixture();
    fixture.tenant("other", "node-b", &device("bb"), "1Gi", "1");
    fixture.snapshot.resource_claims.last_mut().unwrap().metadata.namespace =
        Some("team-b".to_owned());
    fixture.snapshot.pods.last_mut().unwrap().metadata.namespace = Some("team-b".to_owned());
    let team_b =
        TreeFilter { namespace: Some(Namespace::new("team-b").unwrap()), ..TreeFilter::default() };
    let tree = read(&fixture, &team_b);
    let devices: Vec<&str> =
        tree.nodes.iter().flat_map(|n| &n.gpus).map(|gpu| gpu.device.as_str()).collect();
    assert_eq!(devices, [device("bb")]);
    let claims: Vec<&str> =
        tree.nodes[0].gpus[0].shares.iter().map(|share| share.claim.as_str()).collect();
    assert_eq!(claims, ["other-gpu"]);
}

#[test]
fn allocated_gpu_stays_visible_when_unpublished() {
    let mut fixture = Fixture::new();
    fixture.tenant("trainer", "node-a", "gpu-that-was", "19Gi", "25");
    let tree = read(&fixture, &TreeFilter::default());
    let gone = tree.nodes[0].gpus.iter().find(|gpu| gpu.device == "gpu-that-was").unwrap();
    assert_eq!(gone.state, ["NotPublished"]);
    assert_eq!(gone.shares[0].pods, ["trainer"]);
}

#[test]
fn overcommitted_gpu_has_nothing_free() {
    let mut fixture = Fixture::new();
    fixture.tenant("a", "node-a", &device("aa"), "50Gi", "0");
    fixture.tenant("b", "node-a", &device("aa"), "50Gi", "0");
    let tree = read(&fixture, &TreeFilter::default());
    let gpu = &tree.nodes[0].gpus[0];
    assert_eq!(
        (gpu.state.as_slice(), gpu.memory.free.is_zero()),
        (&["Overcommitted".to_owned()][..], true)
    );
}

#[test]
fn oversubscribed_gpu_is_marked() {
    let mut fixture = Fixture::empty();
    fixture.node("node-a", serde_json::json!([fixture::oversubscribed("aa")]));
    assert_eq!(read(&fixture, &TreeFilter::default()).nodes[0].gpus[0].state, ["Oversubscribed"]);
}

#[test]
fn share_by_mps_is_marked() {
    let mut fixture = Fixture::new();
    fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    fixture.set_sharing("trainer-gpu", "MPS");
    fixture.tenant("server", "node-a", &device("ab"), "40Gi", "0");
    let tree = read(&fixture, &TreeFilter::default());
    let sharing = tree.nodes[0].gpus.iter().flat_map(|gpu| &gpu.shares).map(|share| share.sharing);
    assert_eq!(sharing.collect::<Vec<_>>(), [Some("MPS"), None]);
    let claims = tree::claims_text(&tree, true);
    let states: Vec<&str> =
        claims.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(states, ["0%", "MPS"], "{claims}");
}

#[test]
fn incomplete_pool_missing_node_and_unmanaged_gpu_are_marked() {
    let mut fixture = Fixture::new();
    fixture.snapshot.resource_slices[0].spec.pool.resource_slice_count = 2;
    fixture.snapshot.nodes.retain(|node| node.metadata.name.as_deref() != Some("node-b"));
    fixture.snapshot.resource_slices[1].spec.devices.as_mut().unwrap()[0].taints = None;
    let tree = read(&fixture, &TreeFilter::default());
    assert_eq!(tree.nodes[0].state, ["PoolIncomplete"]);
    assert_eq!(tree.nodes[1].state, ["Missing"]);
    assert_eq!(tree.nodes[1].gpus[0].state, ["NotManaged"]);
}

#[test]
fn empty_cluster_has_no_gpus() {
    let fixture = Fixture::empty();
    assert_eq!(tree::tree_text(&read(&fixture, &TreeFilter::default()), true), "No GPUs found.\n");
    let mut nothing = Fixture::empty();
    nothing.node("node-a", json!([]));
    assert_eq!(
        tree::claims_text(&read(&nothing, &TreeFilter::default()), true),
        "No claims with GPUs found.\n"
    );
}

#[test]
fn equal_free_gpus_share_one_line() {
    let mut fixture = Fixture::empty();
    fixture.node("node-a", fixture::h100s(8));
    fixture.tenant("trainer", "node-a", &device("02"), "19Gi", "25");
    fixture.exclusive("server", "node-a", &device("05"));
    fixture.node("node-b", fixture::h100s(4));
    golden("tree-groups.txt", &tree::tree_text(&read(&fixture, &TreeFilter::default()), true));
}

#[test]
fn gpu_in_mig_mode_is_one_line_with_its_mig_devices() {
    let mut fixture = Fixture::empty();
    let mut devices = fixture::h100s(1);
    let mig = [("1g10gb-19-6", "1g.10gb", "9984Mi"), ("3g40gb-9-0", "3g.40gb", "40448Mi")]
        .map(|(part, profile, memory)| fixture::mig_device(1, "aa", part, profile, memory));
    devices.as_array_mut().unwrap().extend(mig);
    fixture.node("node-a", devices);
    let used = format!("{}-mig-1g10gb-19-6", device("aa"));
    fixture.exclusive("trainer", "node-a", &used);
    let tree = read(&fixture, &TreeFilter::default());
    golden("tree-mig.txt", &tree::tree_text(&tree, true));
    golden("tree-mig-claims.txt", &tree::claims_text(&tree, true));
    let refused = resolve(&tree, &"node-a/1".parse().unwrap()).unwrap_err().to_string();
    assert!(refused.contains("is in MIG mode") && refused.contains("kubectl cordon"), "{refused}");
    assert!(resolve(&tree, &"node-a/0".parse().unwrap()).is_ok());
    let gpu = &tree.nodes[0].gpus[1];
    assert_eq!((gpu.mig, gpu.is_free(), gpu.shares.len()), (true, false, 1));
    assert_eq!(gpu.shares[0].profile.as_deref(), Some("1g.10gb"));
}
