//! What `kubectl tessera tree` shows.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stage;

use serde_json::json;
use stage::{Stage, device, golden};
use tessera_api::names::Namespace;
use tessera_cli::output::{Format, render};
use tessera_cli::tree::{self, Filter, Tree};

/// Shares of several pods, a whole GPU, a cordoned node.
fn stage() -> Stage {
    let mut stage = Stage::new();
    stage.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    stage.tenant("server", "node-a", &device("aa"), "40Gi", "0");
    stage.tenant("batch", "node-b", &device("ba"), "81920Mi", "100");
    stage.node_is("node-b", |node| node.spec.get_or_insert_default().unschedulable = Some(true));
    stage
}

fn look(stage: &Stage, filter: &Filter) -> Tree {
    tree::look(&stage.snapshot.picture().index, filter)
}

#[test]
fn nodes_gpus_and_shares_are_shown_with_what_is_left_and_what_is_wrong() {
    golden("tree.txt", &tree::tree(&look(&stage(), &Filter::default()), true));
}

#[test]
fn each_share_has_a_line_where_claims_are_asked_for() {
    golden("tree-claims.txt", &tree::claims(&look(&stage(), &Filter::default()), true));
}

#[test]
fn programs_get_the_same_as_json_and_yaml() {
    let one = Filter { nodes: ["node-a".to_owned()].into(), ..Filter::default() };
    let seen = look(&stage(), &one);
    golden("tree.json", &render(&seen, Format::Json, |_| String::new()).unwrap());
    let yaml = render(&seen, Format::Yaml, |_| String::new()).unwrap();
    let read_back: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(read_back, serde_json::to_value(&seen).unwrap());
}

#[test]
fn of_a_namespace_only_its_shares_are_shown_and_the_gpus_they_are_on() {
    let mut stage = stage();
    stage.tenant("other", "node-b", &device("bb"), "1Gi", "1");
    stage.snapshot.resource_claims.last_mut().unwrap().metadata.namespace =
        Some("team-b".to_owned());
    stage.snapshot.pods.last_mut().unwrap().metadata.namespace = Some("team-b".to_owned());
    let team_b = Filter { namespace: Some(Namespace::new("team-b").unwrap()), ..Filter::default() };
    let seen = look(&stage, &team_b);
    let devices: Vec<&str> =
        seen.nodes.iter().flat_map(|n| &n.gpus).map(|gpu| gpu.device.as_str()).collect();
    assert_eq!(devices, [device("bb")]);
    let claims: Vec<&str> =
        seen.nodes[0].gpus[0].shares.iter().map(|share| share.claim.as_str()).collect();
    assert_eq!(claims, ["other-gpu"]);
}

#[test]
fn a_gpu_that_is_held_and_not_published_any_more_stays_visible() {
    let mut stage = Stage::new();
    stage.tenant("trainer", "node-a", "gpu-that-was", "19Gi", "25");
    let seen = look(&stage, &Filter::default());
    let gone = seen.nodes[0].gpus.iter().find(|gpu| gpu.device == "gpu-that-was").unwrap();
    assert_eq!(gone.state, ["NotPublished"]);
    assert_eq!(gone.shares[0].pods, ["trainer"]);
}

#[test]
fn a_gpu_of_which_too_much_is_given_out_is_called_so_and_has_nothing_left() {
    let mut stage = Stage::new();
    stage.tenant("a", "node-a", &device("aa"), "50Gi", "0");
    stage.tenant("b", "node-a", &device("aa"), "50Gi", "0");
    let seen = look(&stage, &Filter::default());
    let gpu = &seen.nodes[0].gpus[0];
    assert_eq!(
        (gpu.state.as_slice(), gpu.memory.free.is_zero()),
        (&["Overcommitted".to_owned()][..], true)
    );
}

#[test]
fn a_gpu_that_publishes_more_memory_than_it_has_is_called_so() {
    let mut stage = Stage::empty();
    stage.node("node-a", serde_json::json!([stage::oversubscribed("aa")]));
    assert_eq!(look(&stage, &Filter::default()).nodes[0].gpus[0].state, ["Oversubscribed"]);
}

#[test]
fn a_share_by_mps_is_called_so() {
    let mut stage = Stage::new();
    stage.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    stage.shared_by("trainer-gpu", "MPS");
    stage.tenant("server", "node-a", &device("ab"), "40Gi", "0");
    let seen = look(&stage, &Filter::default());
    let sharing = seen.nodes[0].gpus.iter().flat_map(|gpu| &gpu.shares).map(|share| share.sharing);
    assert_eq!(sharing.collect::<Vec<_>>(), [Some("MPS"), None]);
    let claims = tree::claims(&seen, true);
    let states: Vec<&str> =
        claims.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(states, ["0", "MPS"], "{claims}");
}

#[test]
fn a_slice_that_is_missing_a_node_that_is_gone_and_a_gpu_without_a_fence_are_told() {
    let mut stage = Stage::new();
    stage.snapshot.resource_slices[0].spec.pool.resource_slice_count = 2;
    stage.snapshot.nodes.retain(|node| node.metadata.name.as_deref() != Some("node-b"));
    stage.snapshot.resource_slices[1].spec.devices.as_mut().unwrap()[0].taints = None;
    let seen = look(&stage, &Filter::default());
    assert_eq!(seen.nodes[0].state, ["PoolIncomplete"]);
    assert_eq!(seen.nodes[1].state, ["Missing"]);
    assert_eq!(seen.nodes[1].gpus[0].state, ["NotManaged"]);
}

#[test]
fn without_gpus_it_says_so() {
    let stage = Stage::empty();
    assert_eq!(tree::tree(&look(&stage, &Filter::default()), true), "No GPUs found.\n");
    let mut nothing = Stage::empty();
    nothing.node("node-a", json!([]));
    assert_eq!(tree::claims(&look(&nothing, &Filter::default()), true), "No claims hold GPUs.\n");
}
