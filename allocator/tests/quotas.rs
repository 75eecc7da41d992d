//! Quotas: what a plan decides never exceeds one, and what is refused names what is missing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{AllocationMode, Device, PendingPod, Request};
use tessera_allocator::{
    AllocationPlan, Backlog, FeatureGates, PlanSettings, Planner, Quota, QuotaShortfall,
    QuotaState, RefusalCause, charges,
};
use tessera_api::names::{DeviceClassName, Namespace, NodeName, QuotaName};
use tessera_api::quota::{QuotaAmounts, QuotaResource};

fn amounts(amounts: &[(&str, &str)]) -> QuotaAmounts {
    let amount =
        |(name, amount): &(&str, &str)| (QuotaResource::of_name(name).unwrap(), quantity(amount));
    amounts.iter().map(amount).collect()
}

fn state(hard: &[(&str, &str)], used: &[(&str, &str)]) -> QuotaState {
    let name = QuotaName::new("team").unwrap();
    let quota = Quota { name, classes: [].into(), hard: amounts(hard) };
    QuotaState { quota: Arc::new(quota), used: amounts(used) }
}

fn namespace() -> Namespace {
    Namespace::new("default").unwrap()
}

fn planner(cluster: &Cluster, quotas: Vec<QuotaState>) -> Planner {
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    planner.set_quotas(&namespace(), quotas);
    planner
}

fn planned(cluster: &Cluster, quotas: Vec<QuotaState>, pods: &[PendingPod]) -> AllocationPlan {
    planner(cluster, quotas).plan(pods, PlanSettings::default())
}

/// Returns the shortfalls of the refused pods by name.
fn shortfalls(plan: &AllocationPlan) -> BTreeMap<String, QuotaShortfall> {
    let shortfall = |refusal: &tessera_allocator::Refusal| match &*refusal.cause {
        RefusalCause::OverQuota(shortfall) => (refusal.pod.to_string(), (**shortfall).clone()),
        other => panic!("{}: {other:?}", refusal.pod),
    };
    plan.refusals.iter().map(shortfall).collect()
}

fn of_one(name: &str, request: Request) -> PendingPod {
    pod(name, vec![claim(name, vec![request])])
}

/// A pod whose claim has a GpuConfig and asks for `amounts`.
fn with_config(name: &str, config: serde_json::Value, amounts: &[(&str, &str)]) -> PendingPod {
    pod(name, vec![configured(claim(name, vec![request("gpu", 1, amounts)]), config)])
}

#[test]
fn pods_get_shares_until_the_quota_is_spent() {
    let pods: Vec<PendingPod> =
        (0..64).map(|i| share_pod(&format!("p{i:02}"), "4Gi", "5")).collect();
    let quota = state(&[("memory", "40Gi")], &[("memory", "9Gi")]);
    let plan = planned(&two_nodes(), vec![quota], &pods);
    assert_eq!(plan.decisions.len(), 7);
    let refused = shortfalls(&plan);
    assert_eq!(refused.len(), 57);
    let last = &refused["p63"];
    assert_eq!((last.resource, last.used), (QuotaResource::Memory, quantity("37Gi")));
    assert_eq!((last.asked, last.over()), (quantity("4Gi"), quantity("1Gi")));
}

#[test]
fn each_resource_is_limited_by_itself() {
    let refused = |hard: &[(&str, &str)], request: Request| {
        let plan = planned(&two_nodes(), vec![state(hard, &[])], &[of_one("p", request)]);
        shortfalls(&plan).remove("p").map(|shortfall| shortfall.resource)
    };
    let two = || request("gpu", 2, &[("memory", "8Gi"), ("cores", "30")]);
    assert_eq!(refused(&[("cores", "59")], two()), Some(QuotaResource::Cores));
    assert_eq!(refused(&[("cores", "60")], two()), None);
    assert_eq!(refused(&[("shares", "1")], two()), Some(QuotaResource::Shares));
    assert_eq!(refused(&[("memory", "16383Mi")], two()), Some(QuotaResource::Memory));
    assert_eq!(refused(&[("gpus", "0")], two()), None, "no claim has a whole GPU");
    let whole = || request("gpu", 2, &[]);
    assert_eq!(refused(&[("gpus", "1")], whole()), Some(QuotaResource::Gpus));
    assert_eq!(refused(&[("gpus", "2")], whole()), None);
    assert_eq!(refused(&[("memory", "159Gi")], whole()), Some(QuotaResource::Memory));
    assert_eq!(refused(&[], whole()), None);
}

#[test]
fn amounts_that_depend_on_the_gpu_are_those_of_the_gpu() {
    let gpus = |memory| vec![gpu("gpu-0", memory)];
    let cluster = Cluster::new().node("large", gpus("80Gi")).node("small", gpus("16Gi"));
    let placed = |hard: &str, pod: PendingPod| {
        let plan = planned(&cluster, vec![state(&[("memory", hard)], &[])], &[pod]);
        if plan.decisions.is_empty() {
            shortfalls(&plan);
        }
        placements(&plan).concat().concat()
    };
    let half = || with_config("p", json!({"memory": {"percent": 50}}), &[]);
    // The larger one is preferred for nothing, and exceeds the quota.
    assert_eq!(placed("8Gi", half()), "small/gpu-0");
    assert_eq!(placed("8191Mi", half()), "");
    let exclusive = || with_config("p", json!({"exclusive": true}), &[]);
    assert_eq!(placed("16Gi", exclusive()), "small/gpu-0");
    assert_eq!(placed("15Gi", exclusive()), "");
}

#[test]
fn all_devices_of_a_node_count() {
    let mut all = request("gpu", 1, &[("memory", "1Gi"), ("cores", "10")]);
    all.alternatives[0].mode = AllocationMode::All;
    let plan = |hard| {
        planned(&two_nodes(), vec![state(&[("cores", hard)], &[])], &[of_one("p", all.clone())])
    };
    assert_eq!(plan("40").decisions.len(), 1);
    let shortfall = &shortfalls(&plan("39"))["p"];
    assert_eq!((shortfall.asked, shortfall.hard), (quantity("40"), quantity("39")));
}

#[test]
fn an_alternative_that_exceeds_the_quota_is_left_out() {
    let alternatives = || {
        let of = |name: &str, memory| request(name, 1, &[("memory", memory)]);
        first_available("gpu", vec![of("most", "40Gi"), of("half", "20Gi"), of("least", "8Gi")])
    };
    let pod =
        pod("p", vec![claim("p", vec![alternatives(), request("other", 1, &[("memory", "1Gi")])])]);
    let chosen = |hard: &str| {
        let quota = state(&[("memory", hard)], &[]);
        let plan = planned(&two_nodes(), vec![quota], std::slice::from_ref(&pod));
        plan.decisions.first().map_or_else(
            || shortfalls(&plan)["p"].asked.to_string(),
            |decision| decision.claims[0].results[0].request.to_string(),
        )
    };
    assert_eq!(chosen("41Gi"), "gpu/most");
    assert_eq!(chosen("40Gi"), "gpu/half");
    assert_eq!(chosen("20Gi"), "gpu/least");
    assert_eq!(chosen("8Gi"), "9Gi", "the least that it takes");
}

#[test]
fn only_devices_of_the_classes_of_a_quota_count() {
    let mut cluster = two_nodes();
    cluster.class("other", &["device.driver == 'gpu.tessera.dev'"]);
    let of_class = |name: &str, class: &str| {
        let mut request = request("gpu", 1, &[("memory", "10Gi")]);
        request.alternatives[0].class = Some(DeviceClassName::new(class).unwrap());
        of_one(name, request)
    };
    let pods = [of_class("a", CLASS), of_class("b", "other"), of_class("c", "other")];
    let mut quota = state(&[("memory", "10Gi")], &[]);
    Arc::make_mut(&mut quota.quota).classes = [DeviceClassName::new("other").unwrap()].into();
    let plan = planned(&cluster, vec![quota, state(&[("memory", "1Ti")], &[])], &pods);
    assert_eq!(plan.decisions.len(), 2);
    assert!(shortfalls(&plan).contains_key("c"));
}

#[test]
fn a_mig_device_counts_its_memory_and_is_no_gpu() {
    let name = "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77-mig-1g10gb-19-6";
    let device = Device { shared: false, ..gpu(name, "10Gi") };
    let cluster = Cluster::new().node("node-a", vec![device]);
    let pods = [of_one("a", request("gpu", 1, &[("memory", "5Gi")]))];
    let plan = planned(&cluster, vec![state(&[("memory", "10Gi"), ("gpus", "0")], &[])], &pods);
    assert_eq!(plan.decisions.len(), 1, "{:?}", shortfalls(&plan));
    let plan = planned(&cluster, vec![state(&[("memory", "9Gi")], &[])], &pods);
    assert_eq!(shortfalls(&plan)["a"].asked.to_string(), "10Gi");
}

#[test]
fn a_shared_claim_counts_once() {
    let shared = claim("shared", vec![request("gpu", 1, &[("memory", "30Gi")])]);
    let pods: Vec<PendingPod> =
        (0..5).map(|i| pod(&format!("p{i}"), vec![shared.clone()])).collect();
    let plan = planned(&two_nodes(), vec![state(&[("memory", "30Gi")], &[])], &pods);
    assert!(plan.refusals.is_empty());
    assert_eq!(plan.decisions.len(), 1, "the others have nothing to be decided");
}

#[test]
fn a_lowered_limit_blocks_only_claims_that_take_of_it() {
    let quota = state(&[("memory", "10Gi"), ("gpus", "1")], &[("memory", "10Gi"), ("gpus", "5")]);
    let pods = [share_pod("some", "1Gi", "0")];
    let plan = planned(&two_nodes(), vec![quota], &pods);
    assert_eq!(shortfalls(&plan)["some"].resource, QuotaResource::Memory);
    let quota = state(&[("gpus", "1")], &[("gpus", "5")]);
    assert_eq!(planned(&two_nodes(), vec![quota], &pods).decisions.len(), 1);
}

#[test]
fn a_bound_pod_is_held_to_the_quota() {
    let node = NodeName::new("node-a").unwrap();
    let plan = |hard: &str, pod: &PendingPod| {
        let mut planner = planner(&two_nodes(), vec![state(&[("memory", hard)], &[])]);
        planner.plan_bound_pod(&node, pod, PlanSettings::default())
    };
    let share = share_pod("p", "9Gi", "0");
    assert_eq!(plan("9Gi", &share).decisions.len(), 1);
    assert!(shortfalls(&plan("8Gi", &share)).contains_key("p"));
    let whole = of_one("p", request("gpu", 1, &[]));
    assert!(shortfalls(&plan("79Gi", &whole)).contains_key("p"), "known after the search");
}

/// Returns a backlog of equal pods, and settings by which reasons are kept between plans.
fn waiting(pods: usize, memory: &str) -> (Backlog, PlanSettings) {
    let mut backlog = Backlog::default();
    (0..pods).for_each(|i| backlog.insert(share_pod(&format!("p{i:03}"), memory, "0")));
    (backlog, PlanSettings { steps_for_reasons: Some(1000), ..PlanSettings::default() })
}

#[test]
fn pods_over_quota_wait_in_one_queue_until_it_is_raised() {
    let cluster = two_nodes();
    let mut planner = planner(&cluster, vec![state(&[("memory", "0")], &[])]);
    let (mut backlog, settings) = waiting(1000, "1Gi");
    let first = planner.plan_backlog(&mut backlog, settings);
    assert_eq!((first.decisions.len(), first.refusals.len()), (0, 1000));
    let second = planner.plan_backlog(&mut backlog, settings);
    assert!(second.work.turns <= 2, "{:?}", second.work);
    assert_eq!(second.work.nodes_searched, 0);
    let known = planner.refusals_of(
        backlog.get(&first.refusals[7].pod).unwrap(),
        backlog.classes().next().unwrap().id,
    );
    assert!(matches!(*known.unwrap()[0].cause, RefusalCause::OverQuota(_)));

    planner.set_quotas(&namespace(), vec![state(&[("memory", "3Gi")], &[])]);
    assert_eq!(planner.plan_backlog(&mut backlog, settings).decisions.len(), 3);
    planner.set_quotas(&namespace(), Vec::new());
    assert_eq!(
        planner.plan_backlog(&mut backlog, settings).decisions.len(),
        220,
        "110 pods a node"
    );
}

#[test]
fn pods_without_devices_are_told_so_once_the_quota_allows() {
    let cluster = two_nodes();
    let mut planner = planner(&cluster, vec![state(&[("memory", "1Gi")], &[])]);
    let (mut backlog, settings) = waiting(3, "100Gi");
    let mut reasons = |planner: &mut Planner, hard: &str| {
        planner.set_quotas(&namespace(), vec![state(&[("memory", hard)], &[])]);
        planner.plan_backlog(&mut backlog, settings);
        let class = backlog.classes().next().unwrap();
        let refusals = planner.refusals_of(backlog.get(class.last).unwrap(), class.id).unwrap();
        matches!(*refusals[0].cause, RefusalCause::OverQuota(_))
    };
    assert!(reasons(&mut planner, "1Gi"));
    assert!(!reasons(&mut planner, "1Ti"));
    assert!(!reasons(&mut planner, "1Ti"), "also in a plan that leaves the class out");
}

#[test]
fn what_a_quota_refuses_takes_no_devices() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let mut other = share_pod("other", "80Gi", "0");
    other.namespace = Namespace::new("other").unwrap();
    let pods = [of_one("first", request("gpu", 1, &[])), other];
    let plan = planned(&cluster, vec![state(&[("gpus", "0")], &[])], &pods);
    assert_eq!(plan.decisions.len(), 1);
    assert_eq!(plan.decisions[0].pod.as_str(), "other");
}

/// The requests of a random pod.
#[derive(Debug, Clone)]
enum Ask {
    Share(u32, u32),
    Percent(u32),
    Whole(u64),
    First(u32, u32),
}

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let ask = prop_oneof![
        4 => (1u32..30, 0u32..60).prop_map(|(memory, cores)| Ask::Share(memory, cores)),
        1 => (1u32..100).prop_map(Ask::Percent),
        1 => (1u64..3).prop_map(Ask::Whole),
        2 => (1u32..60, 1u32..30).prop_map(|(first, second)| Ask::First(first, second)),
    ];
    prop::collection::vec(ask, 1..16)
}

fn pod_of(at: usize, ask: &Ask) -> PendingPod {
    let name = format!("p{at:02}");
    let memory = |amount: &u32| format!("{amount}Gi");
    match ask {
        Ask::Share(amount, cores) => share_pod(&name, &memory(amount), &cores.to_string()),
        Ask::Percent(percent) => with_config(&name, json!({"memory": {"percent": percent}}), &[]),
        Ask::Whole(count) => of_one(&name, request("gpu", *count, &[])),
        Ask::First(first, second) => {
            let of = |name: &str, amount| request(name, 1, &[("memory", memory(amount).as_str())]);
            of_one(&name, first_available("gpu", vec![of("a", first), of("b", second)]))
        }
    }
}

proptest! {
    #[test]
    fn no_plan_exceeds_a_quota(asks in asks(), memory in 0u32..200, cores in 0u32..200, gpus in 0u32..4) {
        let sizes = ["80Gi", "24Gi"];
        let gpus_of = |size: &str| (0..3).map(|i| gpu(&format!("gpu-{i}"), size)).collect();
        let cluster = Cluster::new().node("node-a", gpus_of(sizes[0])).node("node-b", gpus_of(sizes[1]));
        let pods: Vec<PendingPod> = asks.iter().enumerate().map(|(at, ask)| pod_of(at, ask)).collect();
        let (memory, cores, gpus) = (format!("{memory}Gi"), cores.to_string(), gpus.to_string());
        let hard = [("memory", memory.as_str()), ("cores", &cores), ("gpus", &gpus)];
        let quota = state(&hard, &[]);
        let mut planner = planner(&cluster, vec![quota.clone()]);
        let plan = planner.plan(&pods, PlanSettings::default());

        let mut used = quota.clone();
        for allocation in plan.decisions.iter().flat_map(|decision| &decision.claims) {
            let claim = pods.iter().flat_map(PendingPod::pending_claims).find(|c| c.uid == allocation.claim).unwrap();
            let device = |result: &tessera_allocator::model::DeviceResult| {
                let slice = &cluster.0.slices[result.device.pool.pool.as_str()];
                slice.devices.iter().find(|d| d.name == result.device.device).map(|d| &**d)
            };
            used.add(&charges(claim, &allocation.results, allocation.results.iter().map(device)));
        }
        for (resource, hard) in &used.quota.hard {
            let used = used.used.get(resource).copied().unwrap_or_default();
            prop_assert!(used <= *hard, "{resource:?}: {used} of {hard}");
        }
        // The pass leaves the quotas as they were.
        let again = planner.plan(&pods, PlanSettings::default());
        prop_assert_eq!(&again.decisions, &plan.decisions);
        // What is refused exceeds the quota by what it says.
        for refusal in &plan.refusals {
            if let RefusalCause::OverQuota(shortfall) = &*refusal.cause {
                prop_assert!(!shortfall.over().is_zero());
            }
        }
    }
}
