//! A backlog is planned like all of its pods, and refused pods cost nothing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{Device, Node, PendingPod, PodUid};
use tessera_allocator::{
    AllocationPlan, Backlog, FeatureGates, PlanSettings, PlanWork, Planner, Refusal, RefusalCause,
};
use tessera_api::names::{DeviceClassName, Namespace, NodeName};

/// A change of the pods or the cluster, before the next plan.
#[derive(Debug, Clone)]
enum Change {
    Add { memory: u32, count: u64, priority: i32, created: i64 },
    Delete { pod: usize },
    Free { node: usize, gpu: usize },
    Take { node: usize, gpu: usize, memory: u32 },
    Cordon { node: usize, is_cordoned: bool },
    Wait { seconds: i64 },
}

fn changes() -> impl Strategy<Value = Vec<Vec<Change>>> {
    let device = || (0usize..3, 0usize..3);
    let memory = || prop::sample::select(vec![20u32, 50, 80]);
    let change = prop_oneof![
        6 => (memory(), 1u64..3, 0i32..2, 0i64..400)
            .prop_map(|(memory, count, priority, created)| Change::Add { memory, count, priority, created }),
        1 => (0usize..20).prop_map(|pod| Change::Delete { pod }),
        3 => device().prop_map(|(node, gpu)| Change::Free { node, gpu }),
        2 => (device(), memory())
            .prop_map(|((node, gpu), memory)| Change::Take { node, gpu, memory }),
        1 => (0usize..3, any::<bool>())
            .prop_map(|(node, is_cordoned)| Change::Cordon { node, is_cordoned }),
        2 => (0i64..900).prop_map(|seconds| Change::Wait { seconds }),
    ];
    prop::collection::vec(prop::collection::vec(change, 1..8), 1..12)
}

fn gpus() -> Vec<Device> {
    (0..3).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect()
}

fn node(number: usize) -> String {
    format!("node-{number}")
}

fn requesting(number: usize, memory: u32, count: u64) -> PendingPod {
    let amount = format!("{memory}Gi");
    let request = request("gpu", count, &[("memory", amount.as_str())]);
    let claim = claim(&format!("c{number}"), vec![request]);
    let placement = json!({"placement": {"node": "Binpack", "device": "Binpack"}});
    pod(&format!("p{number:03}"), vec![configured(claim, placement)])
}

/// Cluster and pods, planned pod by pod, as a backlog, and as a backlog with reasons of what has
/// changed.
struct Both {
    cluster: Cluster,
    pods: BTreeMap<PodUid, PendingPod>,
    added: usize,
    now: i64,
    by_pod: Planner,
    by_class: Planner,
    backlog: Backlog,
    by_change: Planner,
    changing: Backlog,
}

impl Both {
    fn new() -> Self {
        let cluster = (0..3).fold(Cluster::new(), |c, number| c.node(&node(number), gpus()));
        let planner = || Planner::from_snapshot(&cluster.0, FeatureGates::default());
        let [by_pod, by_class, by_change] = [(); 3].map(|()| planner());
        let (pods, backlog, changing) = (BTreeMap::new(), Backlog::default(), Backlog::default());
        Self { cluster, pods, added: 0, now: 0, by_pod, by_class, backlog, by_change, changing }
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Add { memory, count, priority, created } => {
                let pod = requesting(self.added, *memory, *count);
                let pod = PendingPod { priority: *priority, created: *created, ..pod };
                self.added += 1;
                self.backlog.insert(pod.clone());
                self.changing.insert(pod.clone());
                self.pods.insert(pod.uid.clone(), pod);
            }
            Change::Delete { pod } => {
                if let Some(uid) = self.pods.keys().nth(*pod).cloned() {
                    self.remove(&uid);
                }
            }
            Change::Free { node: number, gpu } => {
                let id = device_id(&node(*number), &format!("gpu-{gpu}"));
                self.cluster.0.usage.set(&id, None);
                self.report(*number, *gpu);
            }
            Change::Take { node: number, gpu, memory } => {
                let (device, memory) = (format!("gpu-{gpu}"), format!("{memory}Gi"));
                self.cluster.use_share(&node(*number), &device, &memory, "1");
                self.report(*number, *gpu);
            }
            Change::Cordon { node: number, is_cordoned } => {
                let name = NodeName::new(node(*number)).unwrap();
                let nodes = &mut self.cluster.0.nodes;
                let changed = Node { cordoned: *is_cordoned, ..Node::clone(&nodes[&name]) };
                let changed = Arc::new(changed);
                nodes.insert(name, Arc::clone(&changed));
                self.planners().into_iter().for_each(|planner| planner.set_node(&changed));
            }
            Change::Wait { seconds } => self.now += seconds,
        }
    }

    fn remove(&mut self, pod: &PodUid) {
        self.pods.remove(pod);
        self.backlog.remove(pod);
        self.changing.remove(pod);
    }

    fn planners(&mut self) -> [&mut Planner; 3] {
        [&mut self.by_pod, &mut self.by_class, &mut self.by_change]
    }

    fn report(&mut self, number: usize, gpu: usize) {
        let id = device_id(&node(number), &format!("gpu-{gpu}"));
        let used = self.cluster.0.usage.get(&id).cloned();
        for planner in self.planners() {
            planner.set_device_use(&id, used.as_ref());
        }
    }

    fn settings(&self) -> PlanSettings {
        PlanSettings { now: self.now, reservation_delay: Some(300), ..PlanSettings::default() }
    }

    fn plan(&mut self) -> (AllocationPlan, AllocationPlan) {
        let pods: Vec<PendingPod> = self.pods.values().cloned().collect();
        let settings = self.settings();
        let by_pod = self.by_pod.plan(&pods, settings);
        let by_class = self.by_class.plan_backlog(&mut self.backlog, settings);
        (by_pod, by_class)
    }

    /// Plans with reasons of what has changed. Returns the plan.
    fn plan_changes(&mut self) -> AllocationPlan {
        let settings = PlanSettings { steps_for_reasons: Some(u64::MAX), ..self.settings() };
        self.by_change.plan_backlog(&mut self.changing, settings)
    }

    /// Plans and carries out the decisions until nothing changes. Returns the last plan.
    fn plan_changes_until_the_end(&mut self) -> AllocationPlan {
        let mut plans = 0;
        loop {
            let plan = self.plan_changes();
            self.carry_out(&plan);
            if plan.decisions.is_empty() && !plan.has_old_reasons {
                return plan;
            }
            plans += 1;
            assert!(plans < 50, "plans end");
        }
    }

    /// Takes over the decisions, and removes their pods.
    fn carry_out(&mut self, plan: &AllocationPlan) {
        for decision in &plan.decisions {
            for claim in &decision.claims {
                self.cluster.0.usage.add(&claim.results);
            }
            self.remove(&decision.pod);
        }
        for (number, gpu) in (0..3).flat_map(|n| (0..3).map(move |gpu| (n, gpu))) {
            self.report(number, gpu);
        }
    }
}

fn causes(plan: &AllocationPlan) -> BTreeMap<&PodUid, &RefusalCause> {
    plan.refusals.iter().map(|Refusal { pod, cause, .. }| (pod, &**cause)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn backlog_is_planned_like_all_of_its_pods(steps in changes()) {
        let mut both = Both::new();
        for changes in &steps {
            changes.iter().for_each(|change| both.apply(change));
            let (by_pod, by_class) = both.plan();
            prop_assert_eq!(&by_class.decisions, &by_pod.decisions);
            prop_assert_eq!(&by_class.reserved, &by_pod.reserved);
            let (expected, found) = (causes(&by_pod), causes(&by_class));
            for (pod, cause) in &found {
                prop_assert_eq!(Some(cause), expected.get(pod));
            }
            for class in both.backlog.classes() {
                let is_in_class = |pod: &&PodUid| both.backlog.class_of(pod) == Some(class.id);
                for pod in expected.keys().copied().filter(is_in_class) {
                    let is_same = expected[pod] == found[class.last];
                    prop_assert!(is_same || by_pod.reserved.is_some(), "{}", pod);
                }
            }
            both.carry_out(&by_pod);
            let refused = both.pods.keys().filter(|pod| both.backlog.class_of(pod).is_some());
            prop_assert_eq!(refused.count(), by_pod.refusals.len());
        }
    }

    #[test]
    fn plans_of_changes_end_like_a_plan_of_all_pods(steps in changes()) {
        let mut both = Both::new();
        for changes in &steps {
            changes.iter().for_each(|change| both.apply(change));
            let last = both.plan_changes_until_the_end();
            let pods: Vec<PendingPod> = both.pods.values().cloned().collect();
            let expected = both.by_pod.plan(&pods, both.settings());
            prop_assert_eq!(&expected.decisions, &[]);
            prop_assert_eq!(&last.reserved, &expected.reserved);
            let causes = causes(&expected);
            for class in both.changing.classes() {
                let pod = both.changing.get(class.last).unwrap();
                let kept = both.by_change.refusals_of(pod, class.id).unwrap();
                prop_assert_eq!(&*kept[0].cause, causes[class.last], "{}", class.last);
            }
        }
    }
}

#[test]
fn plan_tries_only_the_ends_of_a_refused_class() {
    let mut both = Both::new();
    (0..9).for_each(|at| both.apply(&Change::Take { node: at / 3, gpu: at % 3, memory: 70 }));
    let add = Change::Add { memory: 50, count: 1, priority: 0, created: 0 };
    (0..100).for_each(|_| both.apply(&add));
    let mut plan = || both.by_class.plan_backlog(&mut both.backlog, PlanSettings::default());
    assert_eq!(plan().refusals.len(), 100, "each pod is refused by itself first");
    assert_eq!(plan().refusals.len(), 2);
    let classes: Vec<usize> = both.backlog.classes().map(|class| class.pods).collect();
    assert_eq!(classes, [100]);
}

#[test]
fn freed_capacity_goes_to_pods_of_the_class_in_order() {
    let mut both = Both::new();
    (0..9).for_each(|at| both.apply(&Change::Take { node: at / 3, gpu: at % 3, memory: 70 }));
    let add = |priority| Change::Add { memory: 50, count: 1, priority, created: 0 };
    (0..6).for_each(|number| both.apply(&add(number / 3)));
    both.plan();
    (0..4).for_each(|gpu| both.apply(&Change::Free { node: gpu / 3, gpu: gpu % 3 }));
    let (_, plan) = both.plan();
    let decided: Vec<&str> = plan.decisions.iter().map(|d| d.pod.as_str()).collect();
    assert_eq!(decided, ["p003", "p004", "p005", "p000"], "by priority, then by name");
}

#[test]
fn changed_pod_leaves_the_queue_of_its_class() {
    let mut both = Both::new();
    let too_large = requesting(0, 90, 1);
    both.backlog.insert(too_large.clone());
    both.by_class.plan_backlog(&mut both.backlog, PlanSettings::default());
    assert!(both.backlog.class_of(&too_large.uid).is_some());
    both.backlog.insert(PendingPod { claims: requesting(0, 20, 1).claims, ..too_large.clone() });
    assert_eq!(both.backlog.class_of(&too_large.uid), None);
    assert_eq!(both.backlog.classes().count(), 0);
    let plan = both.by_class.plan_backlog(&mut both.backlog, PlanSettings::default());
    assert_eq!(plan.decisions.len(), 1);
    both.backlog.remove(&too_large.uid);
    assert!(both.backlog.is_empty());
}

#[test]
fn first_pods_in_order_are_by_priority_and_age() {
    let mut backlog = Backlog::default();
    for number in 0..6 {
        let priority = i32::from(number == 4);
        let created = -i64::try_from(number).unwrap();
        backlog.insert(PendingPod { priority, created, ..requesting(number, 20, 1) });
    }
    let mut group = requesting(6, 20, 1);
    group.together_with = vec![requesting(7, 20, 1), requesting(8, 20, 1)];
    backlog.insert(PendingPod { created: -9, ..group });
    let first = |at_most| -> Vec<String> {
        let first = backlog.first_in_order(at_most, |pod| pod.created != -3);
        first.iter().map(|pod| pod.name.to_string()).collect()
    };
    assert_eq!(first(5), ["p004", "p006", "p005"]);
    assert_eq!(first(3), ["p004", "p005"], "the group is too large");
    assert_eq!(first(99).len(), 6);
    assert_eq!(first(0), [] as [&str; 0]);
}

#[test]
fn next_pods_above_a_priority_are_the_first_of_each_class() {
    let mut both = Both::new();
    let of = |number, memory, priority| PendingPod { priority, ..requesting(number, memory, 1) };
    for pod in [of(0, 90, 3), of(1, 90, 3), of(2, 91, 5), of(3, 91, 5), of(4, 92, 2)] {
        both.backlog.insert(pod);
    }
    let planned = both.by_class.plan_backlog(&mut both.backlog, PlanSettings::default());
    assert!(planned.decisions.is_empty() && both.backlog.class_count() == 3);
    let next = |others: &[PodUid]| {
        let is_other = |pod: &PodUid| others.contains(pod);
        let pods = both.backlog.next_above(2, is_other);
        pods.map(|pod| pod.uid.clone()).collect::<Vec<_>>()
    };
    let [a, b, c, d] = [0, 1, 2, 3].map(|number| requesting(number, 1, 1).uid);
    assert_eq!(next(&[]), [c.clone(), a.clone()]);
    assert_eq!(next(&[c, a.clone()]), [d.clone(), b.clone()]);
    assert_eq!(next(&[a, b]).len(), 1);
}

#[test]
fn backlog_is_planned_again_only_after_a_change() {
    let mut both = Both::new();
    for node in 0..3 {
        (0..3).for_each(|gpu| both.apply(&Change::Take { node, gpu, memory: 50 }));
    }
    let add = Change::Add { memory: 80, count: 1, priority: 0, created: 0 };
    (0..5).for_each(|_| both.apply(&add));
    let turns = |both: &mut Both| both.plan().1.work.turns;
    assert_eq!(turns(&mut both), 5);
    let (_, second) = both.plan();
    assert_eq!(second.work.turns, 2, "the first and the last of the class: all are in its queue");
    let (_, again) = both.plan();
    assert_eq!(again.work, PlanWork::default(), "no pod has a turn");
    let of =
        |plan: &AllocationPlan| plan.refusals.iter().map(|r| r.pod.clone()).collect::<Vec<_>>();
    assert_eq!(of(&again), of(&second));
    assert_eq!((again.replan_at, again.reserved), (second.replan_at, second.reserved));

    both.apply(&Change::Take { node: 1, gpu: 1, memory: 20 });
    assert_eq!(turns(&mut both), 2, "a device has changed");
    assert_eq!(turns(&mut both), 0);
    both.apply(&add);
    assert_eq!(turns(&mut both), 3, "a pod was added");
    turns(&mut both);
    assert_eq!(turns(&mut both), 0);
    both.pods.values().for_each(|pod| both.backlog.insert(pod.clone()));
    assert_eq!(turns(&mut both), 0, "pods as they were stay in the queue");
    both.apply(&Change::Delete { pod: 2 });
    assert_eq!(turns(&mut both), 2, "a pod was removed");
    both.apply(&Change::Wait { seconds: second.replan_at.unwrap() });
    assert_eq!(turns(&mut both), 2, "a window of reservations begins");
    turns(&mut both);
    assert_eq!(turns(&mut both), 0);
    both.by_class.withhold_selectors([Namespace::new("team-a").unwrap()].into());
    assert!(turns(&mut both) > 0, "selectors are withheld");
    both.by_class.remove_class(&DeviceClassName::new(CLASS).unwrap());
    assert!(turns(&mut both) > 0, "the class is gone");
}

#[test]
fn class_refused_as_before_has_no_turn() {
    let mut both = Both::new();
    (0..9).for_each(|at| both.apply(&Change::Take { node: at / 3, gpu: at % 3, memory: 70 }));
    let add = |memory| Change::Add { memory, count: 1, priority: 0, created: 0 };
    [20, 20, 20, 50, 50, 80].into_iter().for_each(|memory| both.apply(&add(memory)));
    assert_eq!(both.plan_changes().refusals.len(), 6, "each pod is refused by itself first");
    let mut work = |change| {
        both.apply(&change);
        let plan = both.plan_changes();
        both.carry_out(&plan);
        (plan.work.turns, plan.work.unchanged, plan.renewed.len(), plan.decisions.len())
    };
    assert_eq!(work(add(90)), (1, 3, 0, 0), "only the new pod has a turn");
    let cordon = |is_cordoned| Change::Cordon { node: 1, is_cordoned };
    assert_eq!(work(cordon(true)), (0, 4, 4, 0), "the last pod of each class has new reasons");
    assert_eq!(work(Change::Take { node: 1, gpu: 1, memory: 5 }), (0, 4, 0, 0), "same reasons");
    assert_eq!(work(cordon(false)), (0, 4, 4, 0));
    let freed = work(Change::Free { node: 0, gpu: 0 });
    assert_eq!(freed.3, 3, "the first pods that fit: {freed:?}");
    let turns = work(Change::Wait { seconds: 300 }).0;
    assert_eq!(turns, 2, "the first pod with an open window, and the last of its class");
}

#[test]
fn reserved_node_stays_reserved_while_all_else_is_full() {
    let mut both = Both::new();
    for node in 0..3 {
        (0..3).for_each(|gpu| both.apply(&Change::Take { node, gpu, memory: 50 }));
    }
    (0..2).for_each(|node| both.apply(&Change::Cordon { node, is_cordoned: true }));
    (0..3).for_each(|_| both.apply(&Change::Add { memory: 80, count: 1, priority: 0, created: 0 }));
    both.apply(&Change::Wait { seconds: 300 });
    let first = both.plan_changes_until_the_end().reserved;
    assert!(first.is_some());
    for memory in 1..5 {
        // The plan after that sees only pods that the reservation excludes from the last node.
        both.apply(&Change::Take { node: 2, gpu: 0, memory });
        assert_eq!(both.plan_changes().reserved, first);
    }
}
