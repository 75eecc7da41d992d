//! Groups of pods: all pods of a group are decided in one plan, or none.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{Device, PendingPod, PodUid, Usage};
use tessera_allocator::{
    AllocationPlan, Backlog, FeatureGates, GroupShortfall, PlanSettings, Planner, Refusal,
    RefusalCause, plan,
};
use tessera_api::names::PodName;

const MIN_WAIT: i64 = 300;

fn asking(name: &str, memory: u32) -> PendingPod {
    share_pod(name, &format!("{memory}Gi"), "0")
}

/// Creates a group of pods that ask for these amounts of memory, in GiB.
fn group(name: &str, memory: &[u32]) -> PendingPod {
    let mut pods = memory.iter().enumerate().map(|(n, m)| asking(&format!("{name}-{n}"), *m));
    let first = pods.next().unwrap();
    PendingPod { together_with: pods.collect(), ..first }
}

fn gpus(memory: &[u32]) -> Vec<Device> {
    memory.iter().enumerate().map(|(i, m)| gpu(&format!("gpu-{i}"), &format!("{m}Gi"))).collect()
}

fn decided(plan: &AllocationPlan) -> Vec<&str> {
    plan.decisions.iter().map(|decision| decision.pod.as_str()).collect()
}

fn planned(cluster: &Cluster, pods: &[PendingPod]) -> AllocationPlan {
    plan(&cluster.0, pods, PlanSettings::default())
}

/// The shortfalls of the refused pods; none for a pod with other reasons.
fn shortfalls(plan: &AllocationPlan) -> BTreeMap<&str, Option<&GroupShortfall>> {
    fn of(refusal: &Refusal) -> Option<&GroupShortfall> {
        match &*refusal.cause {
            RefusalCause::GroupDoesNotFit(shortfall) => Some(shortfall),
            _ => None,
        }
    }
    plan.refusals.iter().map(|refusal| (refusal.pod.as_str(), of(refusal))).collect()
}

fn shortfall(pods: usize, placed: usize, first: &str) -> GroupShortfall {
    GroupShortfall { pods, placed, first: PodName::new(first).unwrap(), topology: None }
}

#[test]
fn group_that_fits_is_decided_as_a_whole() {
    let cluster = Cluster::new().node("node-a", gpus(&[80, 80])).node("node-b", gpus(&[80, 80]));
    let plan = planned(&cluster, &[group("train", &[80; 4])]);
    assert_eq!(decided(&plan), ["train-0", "train-1", "train-2", "train-3"]);
    assert!(plan.refusals.is_empty());
}

#[test]
fn group_that_does_not_fit_takes_nothing() {
    let cluster = Cluster::new().node("node-a", gpus(&[80, 80]));
    let pods = [group("train", &[80; 3]), PendingPod { created: 1, ..asking("late", 80) }];
    let plan = planned(&cluster, &pods);
    assert_eq!(decided(&plan), ["late"]);
    let expected = shortfall(3, 2, "train-2");
    let names = ["train-0", "train-1", "train-2"];
    assert_eq!(shortfalls(&plan), names.map(|name| (name, Some(&expected))).into());
}

#[test]
fn of_two_groups_the_older_gets_all_and_the_other_none() {
    let cluster = Cluster::new().node("node-a", gpus(&[80; 8])).node("node-b", gpus(&[80; 4]));
    let younger = PendingPod { created: 5, ..group("b", &[80; 8]) };
    let plan = planned(&cluster, &[younger, group("a", &[80; 8])]);
    assert_eq!(decided(&plan).len(), 8);
    assert!(decided(&plan).iter().all(|pod| pod.starts_with("a-")));
    assert_eq!(shortfalls(&plan).len(), 8);
}

#[test]
fn pod_that_is_hardest_to_place_comes_first() {
    // On its own, the small pod takes the large GPU.
    let spread = |pod: PendingPod| {
        let placement = json!({"placement": {"node": "Spread"}});
        let claims = pod.pending_claims().map(|one| configured((**one).clone(), placement.clone()));
        PendingPod { claims: builders::pod("any", claims.collect()).claims, ..pod }
    };
    let cluster = Cluster::new().node("node-a", gpus(&[80])).node("node-b", gpus(&[40]));
    let small = spread(asking("small", 40));
    let alone = planned(&cluster, std::slice::from_ref(&small));
    assert_eq!(alone.decisions[0].node.as_str(), "node-a");
    let pods = [PendingPod { together_with: vec![spread(asking("large", 80))], ..small }];
    let plan = planned(&cluster, &pods);
    let nodes: BTreeMap<&str, &str> =
        plan.decisions.iter().map(|one| (one.pod.as_str(), one.node.as_str())).collect();
    assert_eq!(nodes, [("small", "node-b"), ("large", "node-a")].into());
}

#[test]
fn pod_that_never_fits_has_the_reasons_of_its_own() {
    let cluster = Cluster::new().node("node-a", gpus(&[80; 4]));
    let plan = planned(&cluster, &[group("train", &[40, 96, 40])]);
    assert!(decided(&plan).is_empty());
    let expected = shortfall(3, 1, "train-1");
    let refusals = shortfalls(&plan);
    assert_eq!(refusals["train-1"], None);
    assert_eq!(refusals["train-0"], Some(&expected));
    assert_eq!(refusals["train-2"], Some(&expected));
    let own = plan.refusals.iter().find(|refusal| refusal.pod.as_str() == "train-1").unwrap();
    assert!(matches!(*own.cause, RefusalCause::NoFit(_)), "{own:?}");
}

#[test]
fn group_keeps_what_fits_while_its_window_is_open() {
    let cluster = Cluster::new().node("node-a", gpus(&[80, 80]));
    let late = PendingPod { created: MIN_WAIT, ..asking("late", 80) };
    let pods = [group("train", &[80; 3]), late];
    let at = |now| PlanSettings { now, ..PlanSettings::default() };
    let open = plan(&cluster.0, &pods, at(MIN_WAIT));
    assert!(decided(&open).is_empty());
    let end = open.replan_at.unwrap();
    assert!(end > MIN_WAIT);
    assert_eq!(decided(&plan(&cluster.0, &pods, at(end))), ["late"], "after the window");
}

#[test]
fn group_in_a_backlog_waits_until_all_of_it_fits() {
    let cluster = Cluster::new().node("node-a", gpus(&[80, 80, 80]));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let taken = device_id("node-a", "gpu-0");
    let mut usage = Usage::default();
    usage.add(&[share("node-a", "gpu-0", "80Gi", "0")]);
    planner.set_device_use(&taken, usage.get(&taken));
    let mut backlog = Backlog::default();
    backlog.insert(group("train", &[80; 3]));
    for n in 0..3 {
        backlog.insert(PendingPod { created: 1, ..asking(&format!("large-{n}"), 96) });
    }
    assert_eq!(backlog.turn_count(), 3 + 3);
    let settings = PlanSettings { steps_for_reasons: Some(2000), ..PlanSettings::default() };
    for _ in 0..3 {
        let plan = planner.plan_backlog(&mut backlog, settings);
        assert!(decided(&plan).is_empty());
        assert_eq!(backlog.class_of(&PodUid::new("train-0")), None, "never in a queue");
    }
    planner.set_device_use(&taken, None);
    let plan = planner.plan_backlog(&mut backlog, settings);
    assert_eq!(decided(&plan), ["train-0", "train-1", "train-2"]);
    backlog.remove(&PodUid::new("train-0"));
    assert_eq!(backlog.turn_count(), 1, "the queue of the others");
}

#[test]
fn of_equal_groups_that_do_not_fit_one_is_tried() {
    let cluster = Cluster::new().node("node-a", gpus(&[80, 80]));
    let groups: Vec<PendingPod> = (0..50).map(|n| group(&format!("g{n}"), &[80; 3])).collect();
    let [one, all] = [&groups[..1], &groups[..]].map(|groups| planned(&cluster, groups));
    assert_eq!(all.work.pods_searched, one.work.pods_searched);
    assert_eq!(all.refusals.len(), 150);
    assert_eq!(shortfalls(&all)["g7-1"], Some(&shortfall(3, 2, "g7-2")));
}

#[test]
fn refusal_of_a_group_is_one_object_until_it_changes() {
    let mut cluster = Cluster::new().node("node-a", gpus(&[80, 80]));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let waiting = [group("train", &[80; 3]), group("late", &[80; 3])];
    let mut causes = || {
        let plan = planner.plan(&waiting, PlanSettings::default());
        plan.refusals.iter().map(|refusal| Arc::clone(&refusal.cause)).collect::<Vec<_>>()
    };
    let (first, second) = (causes(), causes());
    assert_eq!(first.len(), 6);
    assert!(first.iter().zip(&second).all(|(a, b)| Arc::ptr_eq(a, b)));
    cluster.use_share("node-a", "gpu-0", "80Gi", "0");
    let used = cluster.0.usage.get(&device_id("node-a", "gpu-0")).cloned();
    planner.set_device_use(&device_id("node-a", "gpu-0"), used.as_ref());
    let plan = planner.plan(&waiting, PlanSettings::default());
    assert_eq!(shortfalls(&plan)["train-0"], Some(&shortfall(3, 1, "train-1")));
}

/// Returns the shortfall of each refused pod, of those without refusals of their own, too.
fn all_shortfalls(
    plan: &AllocationPlan,
    planner: &Planner,
    backlog: &Backlog,
) -> BTreeMap<String, Option<GroupShortfall>> {
    let uids = || backlog.pods_after(None).map(|(uid, _)| uid);
    let kept = uids().flat_map(|uid| planner.refusals_in(backlog, uid).unwrap_or_default());
    let refusals: Vec<Refusal> = kept.chain(plan.refusals.iter().cloned()).collect();
    let all = AllocationPlan { refusals, ..AllocationPlan::default() };
    let owned =
        |(pod, shortfall): (&str, Option<&GroupShortfall>)| (pod.to_owned(), shortfall.cloned());
    shortfalls(&all).into_iter().map(owned).collect()
}

#[test]
fn equal_groups_of_a_backlog_are_refused_like_the_first() {
    let cluster = Cluster::new().node("node-a", gpus(&[80, 80, 80]));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let mut backlog = Backlog::default();
    for n in 0..50 {
        backlog.insert(group(&format!("g{n}"), &[80; 4]));
    }
    let settings = PlanSettings { steps_for_reasons: Some(2000), ..PlanSettings::default() };
    let alike = |plan: &AllocationPlan| {
        let [alike] = &plan.alike[..] else { panic!("{:?}", plan.alike) };
        (plan.refusals.len(), alike.tried.len(), alike.others, alike.is_news)
    };
    let plan = planner.plan_backlog(&mut backlog, settings);
    assert_eq!(alike(&plan), (4, 4, 49, true));
    let of_all = all_shortfalls(&plan, &planner, &backlog);
    assert_eq!(of_all.len(), 200);
    assert_eq!(of_all["g7-1"], Some(shortfall(4, 3, "g7-3")));
    // Nothing has changed, and then a GPU is used.
    let plan = planner.plan_backlog(&mut backlog, settings);
    assert_eq!(alike(&plan), (4, 4, 49, false));
    let taken = device_id("node-a", "gpu-0");
    let mut usage = Usage::default();
    usage.add(&[share("node-a", "gpu-0", "80Gi", "0")]);
    planner.set_device_use(&taken, usage.get(&taken));
    let plan = planner.plan_backlog(&mut backlog, settings);
    assert_eq!(alike(&plan), (4, 4, 49, true));
    assert_eq!(all_shortfalls(&plan, &planner, &backlog)["g7-1"], Some(shortfall(4, 2, "g7-2")));
    // A group that comes later is told the reason, too.
    backlog.insert(PendingPod { created: 1, ..group("late", &[80; 4]) });
    let plan = planner.plan_backlog(&mut backlog, settings);
    assert_eq!(alike(&plan), (4, 4, 50, true));
    assert!(backlog.is_refused_like_others(&PodUid::new("late-0")));
    assert!(!backlog.is_refused_like_others(&PodUid::new("g0-0")), "it was tried");
}

/// Pods of one cluster: groups and single pods, by the memory that they ask for.
fn requests() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(1u32..90, 1..6), 1..8)
}

fn pods_of(requests: &[Vec<u32>]) -> Vec<PendingPod> {
    let pod = |(n, memory): (usize, &Vec<u32>)| PendingPod {
        created: i64::try_from(n).unwrap(),
        ..group(&format!("g{n}"), memory)
    };
    requests.iter().enumerate().map(pod).collect()
}

/// A cluster with a node for each list of GPUs, by their memory in GiB.
fn cluster_of(memory: &[Vec<u32>]) -> Cluster {
    let nodes = memory.iter().enumerate();
    nodes.fold(Cluster::new(), |cluster, (n, memory)| {
        cluster.node(&format!("node-{n}"), gpus(memory))
    })
}

fn memory() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(16u32..96, 1..4), 1..4)
}

proptest! {
    #[test]
    fn groups_are_decided_as_a_whole_within_the_capacity(
        memory in memory(),
        requests in requests(),
    ) {
        let (cluster, pods) = (cluster_of(&memory), pods_of(&requests));
        let plan = planned(&cluster, &pods);
        let decided: BTreeSet<&PodUid> = plan.decisions.iter().map(|one| &one.pod).collect();
        let refused: BTreeSet<&PodUid> = plan.refusals.iter().map(|one| &one.pod).collect();
        for pod in &pods {
            let of = pod.members().filter(|member| decided.contains(&member.uid)).count();
            prop_assert!(of == 0 || of == pod.members().count(), "{}: {of}", pod.name);
            let is_refused = |member: &PendingPod| refused.contains(&member.uid);
            prop_assert_eq!(pod.members().all(is_refused), of == 0);
        }
        let mut usage = Usage::default();
        for decision in &plan.decisions {
            decision.claims.iter().for_each(|claim| usage.add(&claim.results));
        }
        for (n, memory) in memory.iter().enumerate() {
            for (i, memory) in memory.iter().enumerate() {
                let id = device_id(&format!("node-{n}"), &format!("gpu-{i}"));
                let used = usage.get(&id).and_then(|used| used.consumed.get("memory").copied());
                let used = used.unwrap_or(quantity("0"));
                prop_assert!(used <= quantity(&format!("{memory}Gi")), "{id:?}: {used}");
            }
        }
    }

    /// Equal groups get devices as long as all pods of one fit.
    #[test]
    fn as_many_equal_groups_are_decided_as_fit(
        gpus in prop::collection::vec(1..5_usize, 1..4),
        sizes in prop::collection::vec(1..5_usize, 1..9),
    ) {
        let memory: Vec<Vec<u32>> = gpus.iter().map(|gpus| vec![80; *gpus]).collect();
        let requests: Vec<Vec<u32>> = sizes.iter().map(|size| vec![80; *size]).collect();
        let plan = planned(&cluster_of(&memory), &pods_of(&requests));
        let (mut left, mut fits) = (gpus.iter().sum::<usize>(), 0);
        for size in sizes {
            if size <= left {
                (left, fits) = (left - size, fits + size);
            }
        }
        prop_assert_eq!(plan.decisions.len(), fits);
    }

    /// A group that is refused changes nothing for the pods after it, nor for later plans.
    #[test]
    fn refused_groups_leave_no_trace(
        memory in memory(),
        requests in requests(),
    ) {
        let (cluster, pods) = (cluster_of(&memory), pods_of(&requests));
        let settings = PlanSettings::default();
        let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
        let first = planner.plan(&pods, settings);
        let refused: BTreeSet<&PodUid> = first.refusals.iter().map(|one| &one.pod).collect();
        let accepted: Vec<PendingPod> =
            pods.iter().filter(|pod| !refused.contains(&pod.uid)).cloned().collect();
        prop_assert_eq!(&planned(&cluster, &accepted).decisions, &first.decisions);
        prop_assert_eq!(&planner.plan(&pods, settings).decisions, &first.decisions);
        let rejected: Vec<PendingPod> =
            pods.iter().filter(|pod| refused.contains(&pod.uid)).cloned().collect();
        // With the others in place, none of the refused fits: what they tried was undone.
        let both: Vec<PendingPod> = accepted.into_iter().chain(rejected).collect();
        prop_assert_eq!(&planner.plan(&both, settings).decisions, &first.decisions);
    }

    /// A backlog of many equal groups is planned like all of its pods anew.
    #[test]
    fn backlog_of_equal_groups_is_planned_like_all_of_them(
        memory in memory(),
        shapes in prop::collection::vec(prop::collection::vec(1u32..90, 1..4), 1..4),
        picks in prop::collection::vec(0..4_usize, 1..16),
        used in prop::collection::vec((0..4_usize, 0..4_usize, 0..90_u32), 1..6),
    ) {
        let cluster = cluster_of(&memory);
        let requests: Vec<Vec<u32>> =
            picks.iter().map(|pick| shapes[pick % shapes.len()].clone()).collect();
        let pods = pods_of(&requests);
        let settings = PlanSettings { steps_for_reasons: Some(2000), ..PlanSettings::default() };
        let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
        let mut backlog = Backlog::default();
        pods.iter().for_each(|pod| backlog.insert(pod.clone()));
        let mut usage: BTreeMap<_, _> = BTreeMap::new();
        for (node, gpu, gib) in used {
            let node = node % memory.len();
            let gpu = gpu % memory[node].len();
            let (node, gpu) = (format!("node-{node}"), format!("gpu-{gpu}"));
            let device = device_id(&node, &gpu);
            let mut of_device = Usage::default();
            of_device.add(&[share(&node, &gpu, &format!("{gib}Gi"), "0")]);
            planner.set_device_use(&device, of_device.get(&device));
            usage.insert(device, of_device);
            let plan = planner.plan_backlog(&mut backlog, settings);
            let mut fresh = Planner::from_snapshot(&cluster.0, FeatureGates::default());
            for (device, of_device) in &usage {
                fresh.set_device_use(device, of_device.get(device));
            }
            let expected = fresh.plan(&pods, PlanSettings::default());
            prop_assert_eq!(&plan.decisions, &expected.decisions);
            let decided: BTreeSet<&str> = decided(&plan).into_iter().collect();
            let mut found = all_shortfalls(&plan, &planner, &backlog);
            found.retain(|pod, _| !decided.contains(pod.as_str()));
            let owned = |(pod, one): (&str, Option<&GroupShortfall>)| (pod.to_owned(), one.cloned());
            let expected: BTreeMap<_, _> = shortfalls(&expected).into_iter().map(owned).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
