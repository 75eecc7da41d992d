//! Starvation avoidance: small pods do not starve large ones.
//!
//! A reservation does not block a node forever.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use tessera_allocator::model::{
    Device, DeviceResult, NameMap, NodeChoice, NodeSelector, PendingPod, PodClaim,
    SchedulingConstraints, Slice,
};
use tessera_allocator::{AllocationPlan, PlanSettings, Planner, RefusalCause, ReservedNode, plan};
use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName};
use tessera_api::reason::{NodeReason, Reason};

const MIN_WAIT: i64 = 300;

/// Creates a pod that requests whole GPUs, with a creation time in seconds since the epoch.
fn requesting(name: &str, count: u64, created: i64) -> PendingPod {
    let whole = request("gpu", count, &[("memory", "80Gi"), ("cores", "100")]);
    PendingPod { created, ..pod(name, vec![claim(name, vec![whole])]) }
}

fn gpus(count: usize) -> Vec<Device> {
    (0..count).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect()
}

fn use_whole(cluster: &mut Cluster, node: &str, devices: std::ops::Range<usize>) {
    devices.for_each(|i| cluster.use_share(node, &format!("gpu-{i}"), "80Gi", "100"));
}

/// Two nodes with four GPUs each: one is used on node-a, two on node-b.
fn two_nodes() -> Cluster {
    let mut cluster = Cluster::new().node("node-a", gpus(4)).node("node-b", gpus(4));
    use_whole(&mut cluster, "node-a", 0..1);
    use_whole(&mut cluster, "node-b", 0..2);
    cluster
}

fn at(now: i64) -> PlanSettings {
    PlanSettings { now, ..PlanSettings::default() }
}

fn plan_in_window(cluster: &Cluster, pods: &[PendingPod]) -> AllocationPlan {
    plan(&cluster.0, pods, at(MIN_WAIT))
}

fn placed(plan: &AllocationPlan) -> Vec<String> {
    plan.decisions.iter().map(|d| format!("{} on {}", d.pod, d.node)).collect()
}

fn reservation(plan: &AllocationPlan) -> Option<String> {
    plan.reserved
        .as_ref()
        .map(|reservation| format!("{} for {}", reservation.node, reservation.name))
}

fn reasons_of(plan: &AllocationPlan, pod: &str) -> Vec<Reason> {
    let refusal = plan.refusals.iter().find(|r| r.pod.as_str() == pod).unwrap();
    let RefusalCause::NoFit(explanation) = &*refusal.cause else { panic!("{refusal:?}") };
    explanation.tallies().map(|(reason, _)| reason.clone()).collect()
}

fn with_cpu_request(pod: PendingPod, cpu: &str) -> PendingPod {
    let requests = NameMap::from_iter([("cpu".to_owned(), quantity(cpu))]);
    let scheduling =
        SchedulingConstraints { requests, ..SchedulingConstraints::clone(&pod.scheduling) };
    PendingPod { scheduling: Arc::new(scheduling), ..pod }
}

#[test]
fn reserves_node_with_fewest_releases_after_min_wait() {
    let pods = [requesting("large", 4, 0), requesting("three", 3, 200), requesting("two", 2, 200)];
    let before = plan(&two_nodes().0, &pods, at(MIN_WAIT - 1));
    assert_eq!(
        (placed(&before), reservation(&before)),
        (vec!["three on node-a".to_owned(), "two on node-b".to_owned()], None)
    );
    assert_eq!(before.replan_at, Some(MIN_WAIT));
    let after = plan_in_window(&two_nodes(), &pods);
    assert_eq!(placed(&after), ["two on node-b"]);
    assert_eq!(reservation(&after).unwrap(), "node-a for large");
    let disabled = PlanSettings { reservation_delay: None, ..at(MIN_WAIT) };
    assert_eq!(plan(&two_nodes().0, &pods, disabled).decisions, before.decisions);
}

#[test]
fn releases_take_precedence_over_node_name() {
    let mut cluster = two_nodes();
    use_whole(&mut cluster, "node-a", 1..3);
    assert_eq!(
        reservation(&plan_in_window(&cluster, &[requesting("large", 4, 0)])).unwrap(),
        "node-b for large"
    );
}

#[test]
fn allocations_on_unneeded_devices_do_not_count() {
    // One more GPU is enough on node-a, whatever runs on the others; node-b needs two.
    let mut cluster = Cluster::new().node("node-a", gpus(8)).node("node-b", gpus(4));
    use_whole(&mut cluster, "node-a", 0..5);
    use_whole(&mut cluster, "node-b", 0..2);
    assert_eq!(
        reservation(&plan_in_window(&cluster, &[requesting("large", 4, 0)])).unwrap(),
        "node-a for large"
    );
}

#[test]
fn refusal_hides_reserving_pod_of_other_namespace() {
    let elsewhere = Namespace::new("elsewhere").unwrap();
    let three = requesting("three", 3, 200);
    let four = PendingPod { namespace: elsewhere, ..requesting("other", 3, 200) };
    let plan = plan_in_window(&two_nodes(), &[requesting("large", 4, 0), three, four]);
    let reservation =
        |pod: Option<&str>| Reason::Node(NodeReason::Reserved { pod: pod.map(str::to_owned) });
    assert!(reasons_of(&plan, "three").contains(&reservation(Some("default/large"))), "{plan:?}");
    assert!(reasons_of(&plan, "other").contains(&reservation(None)), "{plan:?}");
    assert!(!format!("{:?}", reasons_of(&plan, "other")).contains("large"));
    assert!(
        !format!("{:?}", reasons_of(&plan, "large")).contains("Reserved"),
        "the reservation does not apply to the pod itself"
    );
}

#[test]
fn windows_and_pauses_alternate_at_reported_times() {
    let pods = [requesting("large", 4, 0), requesting("three", 3, 200)];
    let window = plan_in_window(&two_nodes(), &pods);
    let ReservedNode { until, .. } = window.reserved.clone().unwrap();
    assert!((MIN_WAIT + 600..MIN_WAIT + 1200).contains(&until), "{until}");
    assert_eq!(window.replan_at, Some(until));
    let last = plan(&two_nodes().0, &pods, at(until - 1));
    assert_eq!((placed(&last).len(), last.reserved), (0, window.reserved));
    let pause = plan(&two_nodes().0, &pods, at(until));
    assert_eq!((placed(&pause), reservation(&pause)), (vec!["three on node-a".to_owned()], None));
    let next = pause.replan_at.unwrap();
    assert_eq!(next - until, until - MIN_WAIT, "the pause is as long as the window");
    let again = plan(&two_nodes().0, &pods, at(next)).reserved.unwrap();
    assert_eq!(again.until - next, 2 * (until - MIN_WAIT), "the next window is twice as long");
}

#[test]
fn reservation_does_not_affect_earlier_pods() {
    let urgent = PendingPod { priority: 1, ..requesting("urgent", 3, 299) };
    let plan = plan_in_window(&two_nodes(), &[requesting("large", 4, 0), urgent]);
    assert_eq!(placed(&plan), ["urgent on node-a"]);
}

#[test]
fn reservation_does_not_affect_nominated_or_bound_pods() {
    let node = NodeName::new("node-a").unwrap();
    let nominated =
        PendingPod { nominated_node: Some(node.clone()), ..requesting("nominated", 3, 200) };
    let pods = [requesting("large", 4, 0), nominated];
    assert_eq!(placed(&plan_in_window(&two_nodes(), &pods)), ["nominated on node-a"]);
    let bound = |nodes| {
        let (uid, name) = (ClaimUid::new("uid-of-it").unwrap(), ClaimName::new("of-it").unwrap());
        let mut bound = requesting("bound", 3, 200);
        bound.claims.push(PodClaim::Allocated { uid, name, nodes });
        placed(&plan_in_window(&two_nodes(), &[requesting("large", 4, 0), bound]))
    };
    assert_eq!(bound(Some(NodeSelector::for_node(&node))), ["bound on node-a"]);
    assert!(bound(None).is_empty(), "a claim for all nodes does not restrict the pod");
}

#[test]
fn reserves_only_for_pods_that_lack_held_capacity() {
    let three = requesting("three", 3, 200);
    let mut cluster = two_nodes();
    let too_large = plan_in_window(&cluster, &[requesting("large", 5, 0), three.clone()]);
    assert_eq!(
        (placed(&too_large), too_large.reserved),
        (vec!["three on node-a".to_owned()], None)
    );
    ["node-a", "node-b"]
        .iter()
        .for_each(|node| cluster.put_node(node, |node| node.cordoned = true));
    assert_eq!(plan_in_window(&cluster, &[requesting("large", 4, 0)]).reserved, None);
    let mut picky = requesting("large", 4, 0);
    let selector = BTreeMap::from([("zone".to_owned(), "moon".to_owned())]);
    picky.scheduling = Arc::new(SchedulingConstraints {
        node_selector: selector,
        ..SchedulingConstraints::default()
    });
    assert_eq!(plan_in_window(&two_nodes(), &[picky]).reserved, None);
}

#[test]
fn unmanaged_devices_do_not_count_as_releasable() {
    let with_foreign = |is_foreign| {
        let mut devices = gpus(4);
        devices[0].is_unmanaged = is_foreign;
        let mut cluster = Cluster::new().node("node-a", devices);
        use_whole(&mut cluster, "node-a", 0..2);
        reservation(&plan_in_window(&cluster, &[requesting("large", 4, 0)]))
    };
    assert_eq!(with_foreign(false).unwrap(), "node-a for large");
    assert_eq!(with_foreign(true), None);
}

#[test]
fn devices_shared_by_nodes_do_not_count_as_releasable() {
    let with = |nodes| {
        let mut cluster = two_nodes();
        let shared = Slice { nodes, ..slice("fabric", gpus(4)) };
        cluster.0.slices.insert("fabric".to_owned(), Arc::new(shared));
        use_whole(&mut cluster, "fabric", 0..1);
        cluster
    };
    let everywhere = with(NodeChoice::All);
    let own = with(NodeChoice::Node(NodeName::new("node-b").unwrap()));
    assert_eq!(
        reservation(&plan_in_window(&own, &[requesting("large", 8, 0)])).unwrap(),
        "node-b for large"
    );
    assert_eq!(
        reservation(&plan_in_window(&everywhere, &[requesting("large", 8, 0)])),
        None,
        "a device of the shared pool stays allocated"
    );
    assert_eq!(
        reservation(&plan_in_window(&everywhere, &[requesting("large", 7, 0)])).unwrap(),
        "node-a for large"
    );
}

#[test]
fn change_of_shared_device_renews_drained_result() {
    let mut cluster = Cluster::new().node("node-a", gpus(4));
    let shared = Slice { nodes: NodeChoice::All, ..slice("fabric", gpus(1)) };
    cluster.0.slices.insert("fabric".to_owned(), Arc::new(shared));
    use_whole(&mut cluster, "node-a", 0..1);
    use_whole(&mut cluster, "fabric", 0..1);
    let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
    let large = [requesting("large", 5, 0)];
    assert_eq!(reservation(&planner.plan(&large, at(MIN_WAIT))), None);
    planner.set_device_use(&device_id("fabric", "gpu-0"), None);
    assert_eq!(reservation(&planner.plan(&large, at(MIN_WAIT))).unwrap(), "node-a for large");
}

#[test]
fn node_with_new_devices_is_searched_again() {
    let cluster = two_nodes();
    let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
    let large = [requesting("large", 5, 0)];
    assert_eq!(reservation(&planner.plan(&large, at(MIN_WAIT))), None);
    planner.set_slice(&Arc::new(slice("node-b", gpus(5))));
    assert_eq!(reservation(&planner.plan(&large, at(MIN_WAIT))).unwrap(), "node-b for large");
}

#[test]
fn only_cpu_of_pods_with_devices_is_releasable() {
    let with = |used: &str, held: &str| {
        let mut cluster = Cluster::new().node("node-a", gpus(4));
        use_whole(&mut cluster, "node-a", 0..4);
        cluster.put_node("node-a", |node| {
            node.used.insert("cpu".to_owned(), quantity(used));
            node.releasable.insert("cpu".to_owned(), quantity(held));
        });
        reservation(&plan_in_window(&cluster, &[with_cpu_request(requesting("large", 4, 0), "40")]))
    };
    assert_eq!(with("64", "40").unwrap(), "node-a for large");
    assert_eq!(with("64", "39"), None, "25 belong to pods without devices");
}

#[test]
fn capacity_of_pods_in_same_plan_is_releasable() {
    let cluster = Cluster::new().node("node-a", gpus(4));
    let first = with_cpu_request(requesting("first", 1, 0), "60");
    let large = with_cpu_request(requesting("large", 4, 0), "40");
    let plan = plan_in_window(&cluster, &[first, large]);
    assert_eq!(
        (placed(&plan), reservation(&plan)),
        (vec!["first on node-a".to_owned()], Some("node-a for large".to_owned()))
    );
}

#[test]
fn reserves_for_next_pod_if_first_fits_nowhere() {
    let infeasible = |i: i64| requesting(&format!("hopeless-{i}"), 5, i);
    let mut pods: Vec<PendingPod> = (0..100).map(infeasible).collect();
    pods.push(requesting("large", 4, 100));
    let plan = plan(&two_nodes().0, &pods, at(MIN_WAIT + 100));
    assert_eq!(reservation(&plan).unwrap(), "node-a for large", "equal pods are searched once");
}

#[test]
fn reservation_search_continues_in_next_plan() {
    let infeasible = |i: u64| requesting(&format!("hopeless-{i}"), 5 + i, 0);
    let mut pods: Vec<PendingPod> = (0..20).map(infeasible).collect();
    pods.push(requesting("large", 4, 100));
    let settings = PlanSettings { steps_per_pod: 240, ..at(MIN_WAIT + 100) };
    let mut planner = Planner::from_snapshot(&two_nodes().0, Default::default());
    let reservation: Vec<_> = (0..4).map(|_| reservation(&planner.plan(&pods, settings))).collect();
    assert_eq!(
        (&reservation[0], reservation[3].as_deref()),
        (&None, Some("node-a for large")),
        "{reservation:?}"
    );
}

#[test]
fn no_reservation_without_enough_steps() {
    // Nodes of different sizes, which share no results.
    let mut cluster = Cluster::new();
    for i in 0..50 {
        let (name, memory) = (format!("node-{i:02}"), format!("{}Gi", 80 + i));
        cluster = cluster.node(&name, (0..4).map(|g| gpu(&format!("gpu-{g}"), &memory)).collect());
        use_whole(&mut cluster, &name, 0..2);
    }
    let pods = [requesting("large", 4, 0), requesting("two", 2, 200)];
    let without = plan(&cluster.0, &pods, PlanSettings { reservation_delay: None, ..at(MIN_WAIT) });
    let costly = plan(&cluster.0, &pods, at(MIN_WAIT));
    assert!(costly.reserved.is_some());
    let scarce = PlanSettings { steps_per_pod: 240, ..at(MIN_WAIT) };
    let scarce = plan(&cluster.0, &pods, scarce);
    assert_eq!((reservation(&scarce), placed(&scarce)), (None, placed(&without)));
}

#[test]
fn drained_infeasibility_is_cached_after_one_plan() {
    let nodes = (0..50).map(|i| format!("node-{i:03}"));
    let mut cluster =
        nodes.clone().fold(Cluster::new(), |cluster, name| cluster.node(&name, gpus(8)));
    nodes.for_each(|name| use_whole(&mut cluster, &name, 0..1));
    let pods: Vec<PendingPod> =
        (0..1000).map(|i| requesting(&format!("p-{i}"), 9 + i % 24, 0)).collect();
    let planned = |settings| {
        let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
        [planner.plan(&pods, settings).steps, planner.plan(&pods, settings).steps]
    };
    let [_, second] = planned(at(MIN_WAIT));
    let [_, second_without] = planned(PlanSettings { reservation_delay: None, ..at(MIN_WAIT) });
    assert_eq!(second, second_without, "infeasibility is cached");
}

#[test]
fn equal_pods_are_searched_once() {
    let mut cluster = two_nodes();
    use_whole(&mut cluster, "node-a", 1..2);
    let alike = |i: i64| with_cpu_request(requesting(&format!("p-{i}"), 4, i), "65");
    let steps = |pods: i64, reservation_delay| {
        let pods: Vec<PendingPod> = (0..pods).map(alike).collect();
        plan(&cluster.0, &pods, PlanSettings { reservation_delay, ..at(MIN_WAIT + 100) }).steps
    };
    let search_steps = |pods| steps(pods, Some(300)) - steps(pods, None);
    assert_eq!(search_steps(100), search_steps(1));
    assert!(search_steps(1) > 0);
}

/// Pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Simulates small pods that arrive all the time, and one pod for a whole node.
///
/// Small pods run for up to 20 minutes. Returns the seconds that the large pod waits.
fn waiting_time_of_large(seed: u64, delay: Option<u32>) -> Option<i64> {
    let cluster = Cluster::new().node("node-a", gpus(8)).node("node-b", gpus(8));
    let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
    let mut usage = cluster.0.usage.clone();
    let mut random = Random(seed);
    let mut running: Vec<(i64, Vec<DeviceResult>)> = Vec::new();
    let mut waiting: Vec<PendingPod> = Vec::new();
    for now in (0..20_000).step_by(30) {
        let (ended, still) = running.into_iter().partition::<Vec<_>, _>(|(end, _)| *end <= now);
        running = still;
        let small = waiting.len()..4;
        waiting.extend(small.map(|i| requesting(&format!("small-{now}-{i}"), 1, now)));
        if now == 3000 {
            waiting.push(requesting("large", 8, now));
        }
        let report = |planner: &mut Planner,
                      usage: &tessera_allocator::model::Usage,
                      results: &[DeviceResult]| {
            results.iter().for_each(|r| planner.set_device_use(&r.device, usage.get(&r.device)));
        };
        for (_, results) in &ended {
            usage.remove(results);
            report(&mut planner, &usage, results);
        }
        let plan = planner.plan(
            &waiting,
            PlanSettings { now, reservation_delay: delay, ..PlanSettings::default() },
        );
        for decision in plan.decisions {
            if decision.pod.as_str() == "large" {
                return Some(now - 3000);
            }
            waiting.retain(|waiting| waiting.uid != decision.pod);
            let results: Vec<DeviceResult> =
                decision.claims.into_iter().flat_map(|c| c.results).collect();
            usage.add(&results);
            report(&mut planner, &usage, &results);
            running.push((now + 30 * (1 + random.below(40)).cast_signed(), results));
        }
    }
    None
}

#[test]
fn node_sized_pod_is_placed_despite_small_pods() {
    assert_eq!(waiting_time_of_large(1, None), None);
    for seed in 1..=8 {
        let waited = waiting_time_of_large(seed, Some(300)).unwrap();
        // In the worst case the second window, of at least 1,200 s, is the first one that is long
        // enough.
        assert!(waited <= 300 + 2 * 1200 + 1200 + 60, "seed {seed}: {waited}");
    }
}

proptest! {
    #[test]
    fn reservation_is_independent_of_pod_order_and_history(
        taken in prop::collection::vec((0usize..3, 0usize..4), 0..10),
        pods in prop::collection::vec((1u64..6, 0i64..3, -1i32..2), 1..8),
        shuffled in any::<prop::sample::Index>(),
        now in 0i64..4000,
    ) {
        let mut cluster = Cluster::new();
        for node in 0..3 {
            cluster = cluster.node(&format!("node-{node}"), gpus(4));
        }
        for (node, device) in taken {
            use_whole(&mut cluster, &format!("node-{node}"), device..device + 1);
        }
        let made = |(i, (count, created, priority)): (usize, &(u64, i64, i32))| PendingPod {
            priority: *priority,
            ..requesting(&format!("p-{i}"), *count, *created * 100)
        };
        let mut pods: Vec<PendingPod> = pods.iter().enumerate().map(made).collect();
        let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
        let first = planner.plan(&pods, at(now));
        planner.plan(&pods[..1], at(now + 100_000));
        let by = shuffled.index(pods.len());
        pods.rotate_left(by);
        let second = planner.plan(&pods, at(now));
        prop_assert_eq!(&first.decisions, &second.decisions);
        prop_assert_eq!(&first.reserved, &second.reserved);
        prop_assert_eq!(first.replan_at, second.replan_at);
        // A pod before the one with the reservation never loses capacity.
        let without = plan(&cluster.0, &pods, PlanSettings { reservation_delay: None, ..at(now) });
        let order = |uid: &str| {
            let pod = pods.iter().find(|pod| pod.uid.as_str() == uid).unwrap();
            (std::cmp::Reverse(pod.priority), pod.created, pod.name.clone())
        };
        if let Some(reservation) = &first.reserved {
            let before = |plan: &AllocationPlan| -> Vec<_> {
                let decisions = plan.decisions.iter().cloned();
                decisions
                    .filter(|d| order(d.pod.as_str()) < order(reservation.pod.as_str()))
                    .collect()
            };
            prop_assert_eq!(before(&first), before(&without));
            let after = first
                .decisions
                .iter()
                .filter(|d| order(d.pod.as_str()) > order(reservation.pod.as_str()));
            prop_assert!(after.clone().all(|d| d.node != reservation.node));
        }
    }
}
