//! Reasons of refused pods with limited steps: classes take turns over several plans.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use builders::*;
use tessera_allocator::model::{PendingPod, Usage};
use tessera_allocator::{
    AllocationPlan, Backlog, FeatureGates, PlanSettings, Planner, Policy, RefusalCause,
};
use tessera_api::reason::ReasonCounts;

const NODES: usize = 40;
const SHAPES: usize = 30;

/// Steps that the reasons of one node cost each class: one for the node, two for its GPUs.
const STEPS_PER_CLASS: u64 = 3;

/// A cluster of nodes with two GPUs each, no two in the same state, and what plans it.
struct Waiting {
    cluster: Cluster,
    planner: Planner,
    backlog: Backlog,
    pods: Vec<PendingPod>,
}

impl Waiting {
    /// Plans two pods of each shape, which lack memory on every node.
    fn new() -> Self {
        let gpus = || (0..2).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
        let mut cluster = (0..NODES).fold(Cluster::new(), |c, node| c.node(&name(node), gpus()));
        for node in 0..NODES {
            for i in 0..2 {
                let used = format!("{}Mi", 51_200 + 7 * node + i);
                cluster.use_share(&name(node), &format!("gpu-{i}"), &used, "1");
            }
        }
        let pod =
            |n: usize| share_pod(&format!("pod-{n:03}"), &format!("{}Gi", 40 + n % SHAPES), "1");
        let pods: Vec<PendingPod> = (0..2 * SHAPES).map(pod).collect();
        let planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
        let mut backlog = Backlog::default();
        pods.iter().for_each(|pod| backlog.insert(pod.clone()));
        Self { cluster, planner, backlog, pods }
    }

    fn plan(&mut self, steps_for_reasons: Option<u64>) -> AllocationPlan {
        let policy = Policy::FirstFit;
        let settings = PlanSettings { policy, steps_for_reasons, ..PlanSettings::default() };
        self.planner.plan_backlog(&mut self.backlog, settings)
    }

    /// Sets the memory in use on the first GPU of a node.
    fn set_use(&mut self, node: usize, memory: &str) {
        let mut usage = Usage::default();
        usage.add(&[share(&name(node), "gpu-0", memory, "1")]);
        let id = device_id(&name(node), "gpu-0");
        self.planner.set_device_use(&id, usage.get(&id));
        self.cluster.0.usage.set(&id, usage.get(&id).cloned());
    }

    /// Plans until all reasons are renewed. Returns the number of plans.
    fn renew_all(&mut self, steps: u64) -> usize {
        let plans = (1..1000).find(|_| !self.plan(Some(steps)).has_old_reasons);
        plans.expect("the reasons are renewed")
    }

    /// Returns the reasons of each pod that are kept.
    fn reasons(&self) -> Vec<ReasonCounts> {
        let reasons = |pod: &PendingPod| {
            let class = self.backlog.class_of(&pod.uid).expect("the pod is in a queue");
            let refusals = self.planner.refusals_of(pod, class).expect("reasons are kept");
            counts(&refusals[0].cause)
        };
        self.pods.iter().map(reasons).collect()
    }

    /// Returns the reasons of each pod of a new planner.
    fn new_reasons(&self) -> Vec<ReasonCounts> {
        let mut planner = Planner::from_snapshot(&self.cluster.0, FeatureGates::default());
        let settings = PlanSettings { policy: Policy::FirstFit, ..PlanSettings::default() };
        let plan = planner.plan(&self.pods, settings);
        plan.refusals.iter().map(|refusal| counts(&refusal.cause)).collect()
    }
}

fn name(node: usize) -> String {
    format!("node-{node:02}")
}

fn counts(cause: &RefusalCause) -> ReasonCounts {
    let RefusalCause::NoFit(explanation) = cause else { panic!("{cause:?}") };
    explanation.counts().clone()
}

#[test]
fn reasons_beyond_the_steps_follow_in_later_plans() {
    let mut waiting = Waiting::new();
    assert!(!waiting.plan(Some(1)).has_old_reasons, "pods without reasons are explained at once");
    let before = waiting.reasons();
    waiting.set_use(11, "45Gi");
    let mut explained = 0;
    let mut plans = 0;
    loop {
        let plan = waiting.plan(Some(10 * STEPS_PER_CLASS));
        assert_eq!((plan.work.turns, plan.renewed.len()), (0, 10), "the renewed classes");
        assert!(plan.work.nodes_explained <= 10, "{:?}", plan.work);
        explained += plan.work.nodes_explained;
        plans += 1;
        let now = waiting.reasons();
        let renewed = now.iter().zip(&before).filter(|(now, before)| now != before).count();
        assert_eq!(renewed, 2 * usize::min(10 * plans, SHAPES), "after {plans} plans");
        if !plan.has_old_reasons {
            break;
        }
    }
    assert_eq!(explained, SHAPES as u64, "each class is explained once");
    assert_eq!(waiting.reasons(), waiting.new_reasons());
}

#[test]
fn each_class_has_its_turn_while_nodes_keep_changing() {
    let mut waiting = Waiting::new();
    waiting.plan(Some(1));
    let first = waiting.reasons();
    // A class waits until all others are explained, each on all nodes at most.
    let longest = SHAPES * NODES / 5;
    let mut waits = vec![true; first.len()];
    let plans = (0..longest).take_while(|plan| {
        // The node becomes the nearest to a fit for all shapes.
        waiting.set_use(plan % NODES, &format!("{}Mi", 50_000 - plan));
        waiting.plan(Some(5 * STEPS_PER_CLASS));
        let now = waiting.reasons();
        (0..now.len()).for_each(|at| waits[at] &= now[at] == first[at]);
        waits.contains(&true)
    });
    let plans = plans.count();
    assert!(plans >= SHAPES / 5, "{plans} plans: fewer classes than that in a plan");
    assert!(!waits.contains(&true), "after {plans} plans");
    waiting.renew_all(5 * STEPS_PER_CLASS);
    assert_eq!(waiting.reasons(), waiting.new_reasons());
}

#[test]
fn reasons_are_right_where_not_all_are_kept() {
    let mut waiting = Waiting::new();
    waiting.planner.keep_reasons(3 * NODES);
    waiting.plan(Some(1));
    assert_eq!(waiting.reasons(), waiting.new_reasons());
    let unchanged = waiting.plan(Some(1));
    assert!(!unchanged.has_old_reasons);
    assert_eq!(unchanged.work.nodes_explained, 0, "what is not kept is not explained again");
    for (node, memory) in [(0, "60Gi"), (7, "45Gi"), (39, "79Gi")] {
        waiting.set_use(node, memory);
        let plans = waiting.renew_all(NODES as u64);
        assert!(plans > SHAPES - 4, "{plans} plans: classes beyond three are explained anew");
        assert_eq!(waiting.reasons(), waiting.new_reasons(), "{node}");
    }
}

#[test]
fn decided_pod_changes_the_reasons_of_the_others() {
    let mut waiting = Waiting::new();
    waiting.plan(Some(1));
    waiting.set_use(3, "10Gi");
    let plan = waiting.plan(Some(1_000));
    assert_eq!(plan.decisions.len(), 1);
    assert!(!plan.has_old_reasons);
    let decision = &plan.decisions[0];
    let result = &decision.claims[0].results[0];
    assert_eq!(decision.node.as_str(), name(3));
    let used = result.consumed.iter().find(|(name, _)| name.ends_with("memory")).unwrap().1;
    waiting.set_use(3, &format!("{}Gi", 10 + used.value().unsigned_abs() / (1 << 30)));
    waiting.backlog.remove(&decision.pod);
    waiting.pods.retain(|pod| pod.uid != decision.pod);
    let with_decision: Vec<_> = plan.renewed.iter().map(|r| counts(&r.cause)).collect();
    waiting.renew_all(1_000);
    assert_eq!(with_decision.len(), SHAPES - 1, "all but the class of the decided pod");
    let last = waiting.reasons();
    assert!(with_decision.iter().all(|counts| last.contains(counts)), "as if it were written");
    assert_eq!(last, waiting.new_reasons());
}
