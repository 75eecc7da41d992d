//! Pods that ask for much are not starved by pods that ask for little.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use builders::*;
use tessera_allocator::model::{DeviceResult, PendingPod};
use tessera_allocator::{Cause, Decision, Planner, Settings};
use tessera_api::reason::{NodeReason, Reason};

const PATIENCE: i64 = 300;

/// A pod that wants so many whole GPUs, created so many seconds after the epoch.
fn wants(name: &str, count: u64, created: i64) -> PendingPod {
    let whole = request("gpu", count, &[("memory", "80Gi"), ("cores", "100")]);
    PendingPod { created, ..pod(name, vec![claim(name, vec![whole])]) }
}

fn two_nodes() -> Cluster {
    let gpus = || (0..4).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    let mut cluster = Cluster::new().node("node-a", gpus()).node("node-b", gpus());
    cluster.use_share("node-a", "gpu-0", "80Gi", "100");
    for taken in 0..2 {
        cluster.use_share("node-b", &format!("gpu-{taken}"), "80Gi", "100");
    }
    cluster
}

fn settings() -> Settings {
    Settings { patience: Some(u32::try_from(PATIENCE).unwrap()), ..Settings::default() }
}

fn decisions(cluster: &Cluster, pods: &[PendingPod], settings: Settings) -> Vec<String> {
    let plan = tessera_allocator::plan(&cluster.0, pods, settings);
    plan.decisions.iter().map(|d| format!("{} on {}", d.pod, d.node)).collect()
}

#[test]
fn whoever_comes_too_late_to_overtake_keeps_off_the_node_on_which_the_least_is_taken() {
    let large = wants("large", 4, 0);
    let small = |created| [large.clone(), wants("small", 2, created)];
    let at = |created| decisions(&two_nodes(), &small(created), settings());
    let early = decisions(&two_nodes(), &[wants("small", 2, PATIENCE)], settings());
    assert_eq!(at(PATIENCE), early, "so soon after it, any node will do");
    assert_eq!(at(PATIENCE + 1), ["small on node-b"]);
    let three = decisions(&two_nodes(), &[large, wants("three", 3, PATIENCE + 1)], settings());
    assert!(three.is_empty(), "only node-a has three");
}

#[test]
fn who_is_kept_off_is_told_for_whom() {
    let pods = [wants("large", 4, 0), wants("three", 3, PATIENCE + 1)];
    let plan = tessera_allocator::plan(&two_nodes().0, &pods, settings());
    let refusal = plan.refusals.iter().find(|r| r.pod.as_str() == "three").unwrap();
    let Cause::NoFit(explanation) = &refusal.cause else { panic!("{refusal:?}") };
    let kept = Reason::Node(NodeReason::KeptFree { pod: "default/large".to_owned() });
    assert!(
        explanation.tallies().any(|(reason, tally)| *reason == kept && tally.devices() == 4),
        "{explanation:?}"
    );
}

#[test]
fn nothing_is_kept_for_a_pod_that_fits_nowhere_even_when_all_is_free() {
    let pods = [wants("too-large", 5, 0), wants("three", 3, PATIENCE + 1)];
    assert_eq!(decisions(&two_nodes(), &pods, settings()), ["three on node-a"]);
    let mut cordoned = two_nodes();
    cordoned.put_node("node-a", |node| node.cordoned = true);
    let pods = [wants("large", 4, 0), wants("two", 2, PATIENCE + 1)];
    assert!(decisions(&cordoned, &pods, settings()).is_empty(), "node-b is kept, and node-a is cordoned");
}

#[test]
fn a_pod_of_higher_priority_takes_what_is_kept() {
    let urgent = PendingPod { priority: 1, ..wants("urgent", 3, PATIENCE + 1) };
    assert_eq!(decisions(&two_nodes(), &[wants("large", 4, 0), urgent], settings()), ["urgent on node-a"]);
}

/// Two small pods come at each tick and stay for five; a large one came first. When it is served.
fn served_at(patience: Option<u32>) -> Option<i64> {
    let gpus = || (0..4).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    let cluster = Cluster::new().node("node-a", gpus()).node("node-b", gpus());
    let mut planner = Planner::of(&cluster.0, Default::default());
    let mut usage = cluster.0.usage.clone();
    let mut running: Vec<(i64, Vec<DeviceResult>)> = Vec::new();
    let mut waiting: Vec<PendingPod> = Vec::new();
    for tick in 0..40 {
        let created = tick * 100;
        let (ended, still) = running.into_iter().partition::<Vec<_>, _>(|(end, _)| *end <= tick);
        running = still;
        let mut change = |results: &[DeviceResult], planner: &mut Planner, is_taken: bool| {
            if is_taken {
                usage.add(results)
            } else {
                usage.remove(results)
            }
            results.iter().for_each(|r| planner.set_use(&r.device, usage.of(&r.device)));
        };
        ended.iter().for_each(|(_, results)| change(results, &mut planner, false));
        waiting.extend((0..2).map(|i| wants(&format!("small-{tick}-{i}"), 1, created)));
        if tick == 5 {
            waiting.push(wants("large", 4, created));
        }
        let plan = planner.plan(&waiting, Settings { patience, ..Settings::default() });
        for Decision { pod, claims, .. } in plan.decisions {
            if pod.as_str() == "large" {
                return Some(tick);
            }
            waiting.retain(|waiting| waiting.uid != pod);
            let results: Vec<DeviceResult> = claims.into_iter().flat_map(|claim| claim.results).collect();
            change(&results, &mut planner, true);
            running.push((tick + 5, results));
        }
    }
    None
}

#[test]
fn a_large_pod_is_served_in_the_end_where_small_ones_keep_coming() {
    assert_eq!(served_at(None), None);
    assert!(served_at(Some(300)).is_some_and(|tick| tick < 20), "{:?}", served_at(Some(300)));
}
