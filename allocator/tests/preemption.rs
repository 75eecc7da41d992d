//! Victims of preemptions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use builders::{Cluster, claim, gpu, pod, quantity, request, share, share_pod};
use proptest::prelude::*;
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::preemption::{
    HeldClaim, Holder, HolderGroup, NodeHolders, Preemption, preempt,
};
use tessera_allocator::{PlanSettings, Quota, QuotaState, plan};
use tessera_api::names::{ClaimUid, NodeName, QuotaName};
use tessera_api::quota::QuotaResource;

/// A cluster whose GPUs of 80 GiB are used by pods.
struct Scene {
    cluster: Cluster,
    holders: BTreeMap<NodeName, NodeHolders>,
}

impl Scene {
    fn new(nodes: &[(&str, usize)]) -> Self {
        let mut cluster = Cluster::new();
        for (name, gpus) in nodes {
            let devices = (0..*gpus).map(|number| gpu(&format!("gpu-{number}"), "80Gi")).collect();
            cluster = cluster.node(name, devices);
        }
        Self { cluster, holders: BTreeMap::new() }
    }

    /// Adds a pod on a node with a share of a GPU.
    fn holder(&mut self, name: &str, priority: i32, node: &str, device: &str, memory: &str) {
        self.pod(name, priority, node);
        self.claim(&[name], node, device, memory);
    }

    fn pod(&mut self, name: &str, priority: i32, node: &str) -> &mut Holder {
        let holders = self.of(node);
        holders.pods.push(Holder {
            pod: PodUid::new(name),
            priority,
            created: 0,
            is_ending: false,
            is_fixed: false,
            requests: Default::default(),
            group: None,
        });
        holders.pods.last_mut().unwrap()
    }

    /// Makes a group of pods, if it is more than one.
    fn group(&mut self, names: &[&str]) {
        let members: BTreeSet<PodUid> = names.iter().map(|name| PodUid::new(name)).collect();
        let all = self.holders.values_mut().flat_map(|holders| &mut holders.pods);
        let mut of_group: Vec<_> = all.filter(|one| members.contains(&one.pod)).collect();
        if members.len() < 2 {
            return;
        }
        let priority = of_group.iter().map(|one| one.priority).max().unwrap();
        let group = Arc::new(HolderGroup { members, priority, created: 0 });
        of_group.iter_mut().for_each(|one| one.group = Some(Arc::clone(&group)));
    }

    fn claim(&mut self, users: &[&str], node: &str, device: &str, memory: &str) {
        self.cluster.use_share(node, device, memory, "0");
        let users = users.iter().map(|user| PodUid::new(user)).collect();
        let results = vec![share(node, device, memory, "0")];
        let number = self.holders.values().map(|holders| holders.claims.len()).sum::<usize>();
        let claim = ClaimUid::new(format!("held-{number}")).unwrap();
        self.of(node).claims.push(HeldClaim { claim, users, is_kept: false, results });
    }

    fn of(&mut self, node: &str) -> &mut NodeHolders {
        self.holders.entry(NodeName::new(node).unwrap()).or_default()
    }

    fn preempt(&self, pod: &PendingPod) -> Option<Preemption> {
        preempt(&self.cluster.0, pod, &self.holders, PlanSettings::default())
    }

    /// Returns the victims, and the nodes of the pods; `None` if they fit nowhere.
    fn victims(&self, pod: &PendingPod) -> Option<(Vec<String>, String)> {
        let Preemption { decisions, victims, .. } = self.preempt(pod)?;
        let nodes: BTreeSet<&str> = decisions.iter().map(|one| one.node.as_str()).collect();
        let nodes: Vec<&str> = nodes.into_iter().collect();
        Some((victims.iter().map(ToString::to_string).collect(), nodes.join(" ")))
    }
}

/// A pod with this priority that asks for a share.
fn asking(priority: i32, memory: &str) -> PendingPod {
    PendingPod { priority, ..share_pod("new", memory, "0") }
}

fn of(names: &[&str], node: &str) -> Option<(Vec<String>, String)> {
    Some((names.iter().map(ToString::to_string).collect(), node.to_owned()))
}

#[test]
fn only_pods_of_strictly_lower_priority_are_victims() {
    let mut scene = Scene::new(&[("a", 1)]);
    scene.holder("equal", 10, "a", "gpu-0", "60Gi");
    assert_eq!(scene.victims(&asking(10, "40Gi")), None);
    assert_eq!(scene.victims(&asking(11, "40Gi")), of(&["equal"], "a"));
    assert_eq!(scene.victims(&asking(11, "81Gi")), None, "larger than the GPU");
}

#[test]
fn no_more_pods_are_evicted_than_necessary() {
    let mut scene = Scene::new(&[("a", 1)]);
    scene.holder("important", 5, "a", "gpu-0", "20Gi");
    scene.holder("small", 1, "a", "gpu-0", "20Gi");
    scene.holder("other", 1, "a", "gpu-0", "40Gi");
    assert_eq!(scene.victims(&asking(9, "20Gi")), of(&["small"], "a"), "the least memory");
    assert_eq!(scene.victims(&asking(9, "40Gi")), of(&["other"], "a"), "the fewest pods");
    let (victims, _) = scene.victims(&asking(9, "60Gi")).unwrap();
    assert_eq!(victims.iter().collect::<BTreeSet<_>>().len(), 2);
    assert!(!victims.contains(&"important".to_owned()), "{victims:?}");
}

#[test]
fn the_node_with_the_least_loss_is_chosen() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1), ("c", 1)]);
    scene.holder("a1", 3, "a", "gpu-0", "80Gi");
    scene.holder("b1", 1, "b", "gpu-0", "40Gi");
    scene.holder("b2", 1, "b", "gpu-0", "40Gi");
    scene.holder("c1", 1, "c", "gpu-0", "80Gi");
    // The lowest priority, then the fewest pods.
    assert_eq!(scene.victims(&asking(9, "80Gi")), of(&["c1"], "c"));
    // The least memory.
    let (victims, node) = scene.victims(&asking(9, "40Gi")).unwrap();
    assert_eq!((victims.len(), node.as_str()), (1, "b"));
    scene.of("b").pods[0].created = 100;
    assert_eq!(scene.victims(&asking(9, "40Gi")), of(&["b1"], "b"), "the younger one");
}

#[test]
fn shared_claim_is_free_once_all_of_its_pods_are_gone() {
    let mut scene = Scene::new(&[("a", 1)]);
    scene.pod("one", 1, "a");
    scene.pod("two", 1, "a");
    scene.claim(&["one", "two"], "a", "gpu-0", "80Gi");
    let (victims, _) = scene.victims(&asking(9, "40Gi")).unwrap();
    assert_eq!(victims.len(), 2);
    scene.of("a").pods[1].priority = 9;
    assert_eq!(scene.victims(&asking(9, "40Gi")), None, "the other one stays");
    scene.of("a").pods.pop();
    assert_eq!(scene.victims(&asking(9, "40Gi")), None, "it waits for the claim elsewhere");
}

#[test]
fn claim_that_outlives_its_pods_frees_nothing() {
    let mut scene = Scene::new(&[("a", 1)]);
    scene.holder("lower", 1, "a", "gpu-0", "80Gi");
    scene.of("a").claims[0].is_kept = true;
    assert_eq!(scene.victims(&asking(9, "40Gi")), None);
}

#[test]
fn pods_that_are_ending_come_first() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1)]);
    scene.holder("lower", 1, "a", "gpu-0", "80Gi");
    scene.holder("ends", 20, "b", "gpu-0", "80Gi");
    scene.of("b").pods[0].is_ending = true;
    assert_eq!(scene.victims(&asking(9, "80Gi")), of(&[], "b"), "no eviction is needed");
    scene.cluster.put_node("b", |node| node.cordoned = true);
    assert_eq!(scene.victims(&asking(9, "80Gi")), of(&["lower"], "a"));
}

#[test]
fn evictions_also_make_room_for_other_resources() {
    let mut scene = Scene::new(&[("a", 2)]);
    scene.cluster.put_node("a", |node| {
        node.allocatable.insert("cpu".into(), quantity("4"));
        node.used.insert("cpu".into(), quantity("4"));
    });
    scene.pod("busy", 1, "a").requests.insert("cpu".into(), quantity("3"));
    scene.claim(&["busy"], "a", "gpu-0", "10Gi");
    scene.holder("idle", 1, "a", "gpu-1", "10Gi");
    let mut asks = asking(9, "20Gi");
    let mut scheduling = (*asks.scheduling).clone();
    scheduling.requests.insert("cpu".into(), quantity("2"));
    asks.scheduling = scheduling.clone().into();
    assert_eq!(scene.victims(&asks), of(&["busy"], "a"));
    scheduling.requests.insert("cpu".into(), quantity("5"));
    asks.scheduling = scheduling.into();
    assert_eq!(scene.victims(&asks), None);
}

#[test]
fn set_of_gpus_is_freed_on_one_node() {
    let mut scene = Scene::new(&[("a", 2), ("b", 2)]);
    scene.holder("a0", 1, "a", "gpu-0", "10Gi");
    scene.holder("b0", 1, "b", "gpu-0", "10Gi");
    scene.holder("b1", 1, "b", "gpu-1", "10Gi");
    let two = request("gpu", 2, &[("memory", "80Gi")]);
    let asks = PendingPod { priority: 9, ..pod("new", vec![claim("set", vec![two])]) };
    assert_eq!(scene.victims(&asks), of(&["a0"], "a"));
}

#[test]
fn pods_of_a_group_are_evicted_together() {
    let mut scene = Scene::new(&[("a", 2), ("b", 1)]);
    scene.holder("train-0", 1, "a", "gpu-0", "80Gi");
    scene.holder("train-1", 1, "a", "gpu-1", "80Gi");
    scene.holder("train-2", 1, "b", "gpu-0", "80Gi");
    scene.group(&["train-0", "train-1", "train-2"]);
    let (victims, _) = scene.victims(&asking(9, "40Gi")).unwrap();
    assert_eq!(victims.iter().collect::<BTreeSet<_>>().len(), 3, "{victims:?}");
}

#[test]
fn one_pod_alone_is_evicted_rather_than_a_group() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1), ("c", 1)]);
    scene.holder("train-0", 1, "a", "gpu-0", "80Gi");
    scene.holder("train-1", 1, "b", "gpu-0", "80Gi");
    scene.group(&["train-0", "train-1"]);
    scene.holder("alone", 1, "c", "gpu-0", "80Gi");
    assert_eq!(scene.victims(&asking(9, "40Gi")), of(&["alone"], "c"));
}

#[test]
fn an_important_or_fixed_pod_protects_its_group() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1)]);
    scene.holder("train-0", 1, "a", "gpu-0", "80Gi");
    scene.holder("train-1", 9, "b", "gpu-0", "80Gi");
    scene.group(&["train-0", "train-1"]);
    assert_eq!(scene.victims(&asking(9, "40Gi")), None);
    assert!(scene.victims(&asking(10, "40Gi")).is_some());
    scene.of("a").pods[0].is_fixed = true;
    scene.of("b").pods[0].is_fixed = true;
    assert_eq!(scene.victims(&asking(10, "40Gi")), None);
}

/// Pods of priority 9 that get their devices together, each with a share.
fn group_asking(memory: &[&str]) -> PendingPod {
    let asking =
        |(n, memory)| PendingPod { priority: 9, ..share_pod(&format!("new-{n}"), memory, "0") };
    let mut pods = memory.iter().copied().enumerate().map(asking);
    let first = pods.next().unwrap();
    PendingPod { together_with: pods.collect(), ..first }
}

#[test]
fn group_takes_free_gpus_before_those_of_others() {
    let mut scene = Scene::new(&[("a", 2), ("b", 2), ("c", 1)]);
    scene.holder("a0", 1, "a", "gpu-0", "80Gi");
    scene.holder("a1", 2, "a", "gpu-1", "80Gi");
    scene.holder("b0", 0, "b", "gpu-0", "80Gi");
    assert_eq!(scene.victims(&group_asking(&["80Gi"; 3])), of(&["b0"], "b c"));
    assert_eq!(scene.victims(&group_asking(&["80Gi"; 5])), of(&["b0", "a0", "a1"], "a b c"));
    assert_eq!(scene.victims(&group_asking(&["80Gi"; 6])), None, "nothing for a part of it");
}

#[test]
fn group_evicts_no_pod_above_its_least_important_one() {
    let mut scene = Scene::new(&[("a", 2)]);
    scene.holder("a0", 5, "a", "gpu-0", "80Gi");
    scene.holder("a1", 5, "a", "gpu-1", "80Gi");
    let mut group = group_asking(&["80Gi"; 2]);
    assert!(scene.victims(&group).is_some());
    group.together_with[0].priority = 5;
    assert_eq!(scene.victims(&group), None);
}

#[test]
fn group_of_victims_makes_room_on_all_of_its_nodes() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1), ("c", 1)]);
    scene.holder("train-0", 1, "a", "gpu-0", "80Gi");
    scene.holder("train-1", 1, "b", "gpu-0", "80Gi");
    scene.group(&["train-0", "train-1"]);
    scene.holder("alone", 2, "c", "gpu-0", "80Gi");
    let victims = scene.victims(&group_asking(&["80Gi"; 2]));
    assert_eq!(victims, of(&["train-0", "train-1"], "a b"), "each once, and `alone` stays");
}

#[test]
fn pods_of_several_kinds_get_places_on_their_nodes() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1)]);
    scene.cluster = scene.cluster.node("large", vec![gpu("gpu-0", "192Gi")]);
    scene.holder("a0", 1, "a", "gpu-0", "80Gi");
    scene.holder("b0", 2, "b", "gpu-0", "80Gi");
    scene.holder("l0", 3, "large", "gpu-0", "192Gi");
    let group = group_asking(&["80Gi", "160Gi", "80Gi"]);
    assert_eq!(scene.victims(&group), of(&["a0", "b0", "l0"], "a b large"));
    let kinds = ["10Gi", "20Gi", "30Gi", "40Gi", "50Gi"];
    assert!(scene.victims(&group_asking(&kinds[..4])).is_some());
    assert_eq!(scene.victims(&group_asking(&kinds)), None, "more than four kinds");
}

#[test]
fn nothing_is_evicted_for_a_group_beyond_its_quota() {
    let mut scene = Scene::new(&[("a", 1), ("b", 1)]);
    scene.holder("a0", 1, "a", "gpu-0", "80Gi");
    scene.holder("b0", 1, "b", "gpu-0", "80Gi");
    let group = group_asking(&["60Gi"; 2]);
    for (hard, fits) in [("120Gi", true), ("119Gi", false)] {
        let amounts = [(QuotaResource::Memory, quantity(hard))].into_iter().collect();
        let name = QuotaName::new("team").unwrap();
        let quota = Arc::new(Quota { name, classes: [].into(), hard: amounts });
        let states = vec![QuotaState { quota, used: Default::default() }];
        scene.cluster.0.quotas = [(group.namespace.clone(), states)].into();
        assert_eq!(scene.preempt(&group).is_some(), fits, "{hard}");
    }
}

/// A pod of a random cluster: priority, node, GPU, GiB and group; the last groups have one pod.
type RandomPod = (i32, usize, usize, u64, usize);

/// Number of groups that have more than one pod.
const GROUPS: usize = 3;

/// Returns a scene of two nodes with two GPUs each; pods that do not fit any more are left out.
fn random_scene(pods: &[RandomPod]) -> Scene {
    let mut scene = Scene::new(&[("a", 2), ("b", 2)]);
    let mut used = [[0; 2]; 2];
    let mut groups = vec![Vec::new(); GROUPS];
    for (number, (priority, node, device, memory, group)) in pods.iter().enumerate() {
        if used[*node][*device] + memory > 80 {
            continue;
        }
        used[*node][*device] += memory;
        let (name, device) = (format!("pod-{number}"), format!("gpu-{device}"));
        scene.holder(&name, *priority, ["a", "b"][*node], &device, &format!("{memory}Gi"));
        groups.get_mut(*group).into_iter().for_each(|group| group.push(name.clone()));
    }
    for group in groups {
        scene.group(&group.iter().map(String::as_str).collect::<Vec<_>>());
    }
    scene
}

/// Returns true if the pod fits on the node without these pods.
fn fits(scene: &Scene, asks: &PendingPod, node: &NodeName, gone: &BTreeSet<PodUid>) -> bool {
    let mut snapshot = scene.cluster.0.clone();
    snapshot.nodes.retain(|name, _| name == node);
    for claim in &scene.holders[node].claims {
        if claim.users.iter().all(|user| gone.contains(user)) {
            snapshot.usage.remove(&claim.results);
        }
    }
    !plan(&snapshot, std::slice::from_ref(asks), PlanSettings::default()).decisions.is_empty()
}

/// Returns true if the group fits without these pods.
fn group_fits(scene: &Scene, group: &PendingPod, gone: &BTreeSet<PodUid>) -> bool {
    let mut snapshot = scene.cluster.0.clone();
    for claim in scene.holders.values().flat_map(|holders| &holders.claims) {
        if claim.users.iter().all(|user| gone.contains(user)) {
            snapshot.usage.remove(&claim.results);
        }
    }
    !plan(&snapshot, std::slice::from_ref(group), PlanSettings::default()).decisions.is_empty()
}

/// Returns the sets of pods of a node that are evicted together and may be evicted for a priority,
/// each with its highest priority.
fn units(scene: &Scene, node: &NodeName, priority: i32) -> Vec<(i32, BTreeSet<PodUid>)> {
    let all = || scene.holders.values().flat_map(|holders| &holders.pods);
    let unit = |holder: &Holder| {
        let alone = || BTreeSet::from([holder.pod.clone()]);
        holder.group.as_ref().map_or_else(alone, |group| group.members.clone())
    };
    let of_node: BTreeSet<_> = scene.holders[node].pods.iter().map(unit).collect();
    let highest = |unit: &BTreeSet<PodUid>| {
        all().filter(|one| unit.contains(&one.pod)).map(|one| one.priority).max().unwrap()
    };
    let units = of_node.into_iter().map(|unit| (highest(&unit), unit));
    units.filter(|(highest, _)| *highest < priority).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn victims_are_enough_and_necessary_and_found_if_any(
        pods in prop::collection::vec(
            (0..4, 0..2_usize, 0..2_usize, 5..80_u64, 0..2 * GROUPS), 0..9,
        ),
        priority in 0..5,
        memory in 10..=80_u64,
    ) {
        let scene = random_scene(&pods);
        let asks = asking(priority, &format!("{memory}Gi"));
        match scene.preempt(&asks) {
            Some(Preemption { decisions, victims, .. }) => {
                let [decision] = decisions.as_slice() else { panic!("{decisions:?}") };
                let gone: BTreeSet<PodUid> = victims.iter().cloned().collect();
                prop_assert_eq!(gone.len(), victims.len(), "each once");
                let units_here = units(&scene, &decision.node, priority);
                let evicted = units_here.iter().filter(|(_, unit)| !unit.is_disjoint(&gone));
                let evicted: Vec<_> = evicted.collect();
                let complete: BTreeSet<_> =
                    evicted.iter().flat_map(|(_, unit)| unit).cloned().collect();
                prop_assert_eq!(&complete, &gone, "groups as a whole, of lower priority");
                prop_assert!(fits(&scene, &asks, &decision.node, &gone));
                for (_, unit) in &evicted {
                    let rest = &gone - unit;
                    prop_assert!(!fits(&scene, &asks, &decision.node, &rest), "{unit:?} may stay");
                }
                // No other node has fewer victims of no higher priority.
                let most = evicted.iter().map(|(highest, _)| *highest).max();
                for node in scene.holders.keys() {
                    for (highest, unit) in units(&scene, node, priority) {
                        if fits(&scene, &asks, node, &unit) {
                            let loss = (Some(highest), unit.len());
                            prop_assert!((most, victims.len()) <= loss, "{unit:?} on {node}");
                        }
                    }
                }
            }
            None => {
                for node in scene.holders.keys() {
                    let all = units(&scene, node, priority);
                    if !all.is_empty() {
                        let all = all.into_iter().flat_map(|(_, unit)| unit).collect();
                        prop_assert!(!fits(&scene, &asks, node, &all), "{all:?} on {node}");
                    }
                }
            }
        }
    }
    #[test]
    fn group_fits_once_its_victims_are_gone_and_they_are_found(
        pods in prop::collection::vec(
            (0..12, 0..2_usize, 0..2_usize, 5..80_u64, 0..2 * GROUPS), 0..9,
        ),
        memory in 10..=80_u64,
        size in 2..6_usize,
    ) {
        let scene = random_scene(&pods);
        let memory = format!("{memory}Gi");
        let group = group_asking(&vec![memory.as_str(); size]);
        let found = scene.preempt(&group).map(|found| found.victims);
        let lower = scene.holders.keys().flat_map(|node| units(&scene, node, 9));
        let lower: BTreeSet<PodUid> = lower.flat_map(|(_, unit)| unit).collect();
        let is_possible = group_fits(&scene, &group, &lower);
        prop_assert_eq!(found.is_some(), is_possible);
        if let Some(victims) = found {
            let gone: BTreeSet<PodUid> = victims.iter().cloned().collect();
            prop_assert_eq!(gone.len(), victims.len(), "each once");
            prop_assert!(gone.is_subset(&lower));
            prop_assert!(group_fits(&scene, &group, &gone));
            let fits_at_once = group_fits(&scene, &group, &BTreeSet::new());
            prop_assert_eq!(gone.is_empty(), fits_at_once);
        }
    }
}
