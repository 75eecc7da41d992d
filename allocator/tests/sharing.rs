//! Claims on one GPU use the same sharing mechanism: the interceptor or MPS.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{AllocationMode, Claim, Device, DeviceResult, PendingPod, Request};
use tessera_allocator::{
    AllocationPlan, PlanSettings, Planner, Policy, RefusalCause, UnsupportedFeature, plan,
};
use tessera_api::config::Sharing;
use tessera_api::names::NodeName;

const EVERY_POLICY: [Policy; 5] =
    [Policy::FirstFit, Policy::Binpack, Policy::Spread, Policy::Random, Policy::LeastFragmentation];

/// Creates a GPU on a node with MPS.
fn mps(name: &str) -> Device {
    Device { supports_mps: true, ..gpu(name, "80Gi") }
}

fn node_of(devices: Vec<Device>) -> Cluster {
    Cluster::new().node("node-a", devices)
}

/// Creates a claim for memory of one GPU.
fn share_claim(name: &str, sharing: Sharing, gib: u32) -> Claim {
    of_requests(name, sharing, vec![memory("gpu", gib)])
}

fn of_requests(name: &str, sharing: Sharing, requests: Vec<Request>) -> Claim {
    configured(claim(name, requests), json!({"sharing": sharing.word()}))
}

fn memory(name: &str, gib: u32) -> Request {
    request(name, 1, &[("memory", &format!("{gib}Gi"))])
}

fn usage_result(device: &str, sharing: Sharing, gib: u32) -> DeviceResult {
    DeviceResult { sharing, ..share("node-a", device, &format!("{gib}Gi"), "0") }
}

fn decide(cluster: &Cluster, pods: &[PendingPod]) -> AllocationPlan {
    plan(&cluster.0, pods, PlanSettings::default())
}

fn decide_one(cluster: &Cluster, claims: Vec<Claim>) -> AllocationPlan {
    decide(cluster, &[pod("p", claims)])
}

/// Returns the devices of each placed pod, claim by claim.
fn placements(plan: &AllocationPlan) -> Vec<Vec<&str>> {
    let results = |d: usize| plan.decisions[d].claims.iter().flat_map(|claim| &claim.results);
    let names = |d: usize| results(d).map(|result| result.device.device.as_str()).collect();
    (0..plan.decisions.len()).map(names).collect()
}

fn explanation(plan: &AllocationPlan) -> String {
    match &*plan.refusals[0].cause {
        RefusalCause::NoFit(explanation) => explanation.render(1024),
        other => panic!("{other:?}"),
    }
}

const BOTH: [(Sharing, Sharing); 2] =
    [(Sharing::Intercept, Sharing::Mps), (Sharing::Mps, Sharing::Intercept)];

#[test]
fn gpu_in_use_refuses_other_sharing_with_reason() {
    for (own, used) in BOTH {
        let mut cluster = node_of(vec![mps("gpu-0")]);
        cluster.0.usage.add(&[usage_result("gpu-0", used, 1)]);
        let refused = decide_one(&cluster, vec![share_claim("c", own, 1)]);
        assert_eq!(
            explanation(&refused),
            format!("0/1 GPUs available: 1 allocated with sharing {used}")
        );
        let placed = decide_one(&cluster, vec![share_claim("c", used, 1)]);
        assert_eq!(placements(&placed), [["gpu-0"]]);
    }
}

#[test]
fn sharing_defaults_to_intercept() {
    let mut cluster = node_of(vec![mps("gpu-0")]);
    cluster.0.usage.add(&[usage_result("gpu-0", Sharing::Mps, 1)]);
    let refused = decide(&cluster, &[share_pod("p", "1Gi", "0")]);
    assert_eq!(explanation(&refused), "0/1 GPUs available: 1 allocated with sharing MPS");
}

#[test]
fn gpu_with_mixed_sharing_is_not_allocated() {
    for (own, other) in BOTH {
        let mut cluster = node_of(vec![mps("gpu-0")]);
        cluster.0.usage.add(&[
            usage_result("gpu-0", Sharing::Mps, 1),
            usage_result("gpu-0", Sharing::Intercept, 1),
        ]);
        let refused = decide_one(&cluster, vec![share_claim("c", own, 1)]);
        assert_eq!(
            explanation(&refused),
            format!("0/1 GPUs available: 1 allocated with sharing {other}")
        );
    }
}

#[test]
fn sharing_can_change_after_last_user() {
    let mut cluster = node_of(vec![mps("gpu-0")]);
    let users = [usage_result("gpu-0", Sharing::Mps, 1), usage_result("gpu-0", Sharing::Mps, 2)];
    let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
    let mut is_placed = |users: &[DeviceResult]| {
        cluster.0.usage = Default::default();
        cluster.0.usage.add(users);
        let device = device_id("node-a", "gpu-0");
        planner.set_device_use(&device, cluster.0.usage.get(&device));
        let waiting = pod("p", vec![share_claim("c", Sharing::Intercept, 1)]);
        !planner.plan(&[waiting], PlanSettings::default()).decisions.is_empty()
    };
    let placed = [&users[..], &users[..1], &[], &users[..1]].map(&mut is_placed);
    assert_eq!(placed, [false, false, true, false]);
}

#[test]
fn admin_access_ignores_sharing() {
    let mut cluster = node_of(vec![mps("gpu-0")]);
    cluster.0.usage.add(&[DeviceResult { admin: true, ..usage_result("gpu-0", Sharing::Mps, 0) }]);
    assert_eq!(placements(&decide(&cluster, &[share_pod("p", "1Gi", "0")])), [["gpu-0"]]);
    cluster.0.usage.add(&[usage_result("gpu-0", Sharing::Mps, 1)]);
    let mut look = request("gpu", 1, &[("memory", "1Gi")]);
    look.alternatives[0].admin = Some(true);
    assert_eq!(placements(&decide_one(&cluster, vec![claim("c", vec![look])])), [["gpu-0"]]);
}

#[test]
fn pods_share_a_gpu_only_with_equal_sharing() {
    let two = |first, second| {
        let claims = [("p0", first), ("p1", second)];
        claims.map(|(name, sharing)| pod(name, vec![share_claim(name, sharing, 30)]))
    };
    let placed = |cluster: &Cluster, pods: &[PendingPod]| {
        let plan = plan(
            &cluster.0,
            pods,
            PlanSettings { policy: Policy::Binpack, ..PlanSettings::default() },
        );
        let sharing = plan.decisions.iter().flat_map(|d| &d.claims).flat_map(|c| &c.results);
        let sharing: Vec<Sharing> = sharing.map(|result| result.sharing).collect();
        (placements(&plan).concat().join(" "), sharing)
    };
    let wide = node_of(vec![mps("gpu-0"), mps("gpu-1")]);
    let narrow = node_of(vec![mps("gpu-0")]);
    for (one, other) in BOTH {
        assert_eq!(placed(&wide, &two(one, one)), ("gpu-0 gpu-0".to_owned(), vec![one, one]));
        assert_eq!(placed(&wide, &two(one, other)), ("gpu-0 gpu-1".to_owned(), vec![one, other]));
        assert_eq!(placed(&narrow, &two(one, other)), ("gpu-0".to_owned(), vec![one]));
    }
}

#[test]
fn claims_of_one_pod_share_a_gpu_only_with_equal_sharing() {
    let wide = node_of(vec![mps("gpu-0"), mps("gpu-1")]);
    let narrow = node_of(vec![mps("gpu-0")]);
    for (one, other) in BOTH {
        let two = |second| vec![share_claim("c0", one, 30), share_claim("c1", second, 30)];
        assert_eq!(placements(&decide_one(&wide, two(other))), [["gpu-0", "gpu-1"]]);
        assert_eq!(placements(&decide_one(&narrow, two(one))), [["gpu-0", "gpu-0"]]);
        let refused = decide_one(&narrow, two(other));
        assert_eq!(
            explanation(&refused),
            "1/1 GPUs available: 1 available but not in the requested combination"
        );
    }
}

#[test]
fn mps_claim_requires_gpu_with_mps() {
    let plain = node_of(vec![gpu("gpu-0", "80Gi")]);
    let refused = decide_one(&plain, vec![share_claim("c", Sharing::Mps, 1)]);
    assert_eq!(
        explanation(&refused),
        "0/1 GPUs available: 1 without MPS (needs mps.enabled of the chart, Volta or newer, CUDA \
         12.3 or newer)"
    );
    // The property must not be taken from the previous device, which is equal otherwise.
    for devices in
        [vec![gpu("gpu-0", "80Gi"), mps("gpu-1")], vec![mps("gpu-1"), gpu("gpu-0", "80Gi")]]
    {
        let mixed = node_of(devices);
        assert_eq!(
            placements(&decide_one(&mixed, vec![share_claim("c", Sharing::Mps, 1)])),
            [["gpu-1"]]
        );
    }
    assert_eq!(placements(&decide(&plain, &[share_pod("p", "1Gi", "0")])), [["gpu-0"]]);
}

#[test]
fn refuses_mps_claim_for_several_gpus() {
    let cluster = node_of(vec![mps("gpu-0"), mps("gpu-1")]);
    let mut all = request("gpu", 1, &[]);
    all.alternatives[0].mode = AllocationMode::All;
    let either = first_available("gpu", vec![memory("one", 1), request("two", 2, &[])]);
    for requests in [
        vec![request("gpu", 2, &[])],
        vec![all],
        vec![memory("a", 1), memory("b", 1)],
        vec![either],
    ] {
        let plan = decide_one(&cluster, vec![of_requests("c", Sharing::Mps, requests.clone())]);
        let RefusalCause::NotSupported { what, .. } = &*plan.refusals[0].cause else {
            panic!("{:?}", plan.refusals)
        };
        assert_eq!(*what, UnsupportedFeature::MpsWithSeveralGpus);
        assert_eq!(
            what.to_string(),
            "sharing: MPS with several GPUs (limit: one GPU per claim, one such claim per container)"
        );
        let by_intercept =
            decide_one(&cluster, vec![of_requests("c", Sharing::Intercept, requests)]);
        assert_eq!(by_intercept.decisions.len(), 1);
    }
    let either = first_available("gpu", vec![memory("much", 79), memory("less", 1)]);
    let plan = decide_one(&cluster, vec![of_requests("c", Sharing::Mps, vec![either])]);
    assert_eq!(placements(&plan), [["gpu-0"]]);
}

#[test]
fn all_mode_fails_if_one_gpu_is_shared_by_mps() {
    let mut cluster = node_of(vec![mps("gpu-0"), mps("gpu-1")]);
    let mut all = memory("gpu", 1);
    all.alternatives[0].mode = AllocationMode::All;
    let all = || vec![claim("c", vec![all.clone()])];
    assert_eq!(decide_one(&cluster, all()).decisions.len(), 1);
    cluster.0.usage.add(&[usage_result("gpu-1", Sharing::Mps, 1)]);
    assert_eq!(decide_one(&cluster, all()).decisions.len(), 0);
    let two = vec![claim("c", vec![request("gpu", 2, &[("memory", "1Gi")])])];
    assert_eq!(decide_one(&cluster, two).decisions.len(), 0);
}

#[test]
fn preferred_gpu_is_left_to_claim_without_alternative() {
    // The first claim fits on both and prefers gpu-1, which is free; the second one does not fit on
    // gpu-0.
    let mut cluster = node_of(vec![mps("gpu-0"), mps("gpu-1")]);
    cluster.0.usage.add(&[usage_result("gpu-0", Sharing::Mps, 60)]);
    let pods = [pod(
        "p",
        vec![share_claim("c0", Sharing::Mps, 10), share_claim("c1", Sharing::Intercept, 10)],
    )];
    for policy in EVERY_POLICY {
        let plan = plan(&cluster.0, &pods, PlanSettings { policy, ..PlanSettings::default() });
        assert_eq!(placements(&plan), [["gpu-0", "gpu-1"]], "{policy:?}");
    }
}

#[test]
fn memoized_states_distinguish_sharing() {
    let cluster = node_of(vec![mps("gpu-0")]);
    let either = first_available("gpu", vec![memory("mps", 40), memory("intercept", 40)]);
    let mut flexible = of_requests("c0", Sharing::Mps, vec![either]);
    flexible.configs[0].requests = Some(vec!["gpu/mps".to_owned()]);
    // Both alternatives leave the same capacity of the GPU, but after the first one the second
    // claim does not fit.
    let plan = decide_one(&cluster, vec![flexible, share_claim("c1", Sharing::Intercept, 40)]);
    let requests =
        plan.decisions.iter().flat_map(|d| &d.claims[0].results).map(|r| r.request.to_string());
    assert_eq!(requests.collect::<Vec<_>>(), ["gpu/intercept"]);
}

/// A GPU: true if it supports MPS, the sharing mechanisms of its users, and their memory in GiB of
/// 4.
type Kind = (bool, Vec<Sharing>, u32);

fn sharing_mechanisms() -> impl Strategy<Value = Sharing> {
    prop::sample::select(vec![Sharing::Intercept, Sharing::Mps])
}

/// Alternatives of a claim: sharing mechanism and memory in GiB.
type Alternatives = Vec<(Sharing, u32)>;

/// Returns true if the claims fit on the GPUs, by trying every assignment.
fn fits(gpus: &[Kind], claims: &[Alternatives]) -> bool {
    let Some((alternatives, rest)) = claims.split_first() else { return true };
    let pairs = alternatives
        .iter()
        .flat_map(|alternative| (0..gpus.len()).map(move |at| (at, *alternative)));
    pairs.into_iter().any(|(at, (sharing, gib))| {
        let (can_mps, users, used) = &gpus[at];
        let is_able = sharing == Sharing::Intercept || *can_mps;
        if !is_able || users.iter().any(|user| *user != sharing) || used + gib > 4 {
            return false;
        }
        let mut after = gpus.to_vec();
        after[at].1.push(sharing);
        after[at].2 += gib;
        fits(&after, rest)
    })
}

fn claim_with(name: &str, alternatives: &Alternatives) -> Claim {
    let named = |(a, (_, gib)): (usize, &(Sharing, u32))| memory(&format!("a{a}"), *gib);
    let request = first_available("gpu", alternatives.iter().enumerate().map(named).collect());
    let claim = claim(name, vec![request]);
    alternatives.iter().enumerate().fold(claim, |claim, (a, (sharing, _))| {
        let mut claim = configured(claim, json!({"sharing": sharing.word()}));
        claim.configs[a].requests = Some(vec![format!("gpu/a{a}")]);
        claim
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn mixed_sharing_fits_exactly_if_exhaustive_search_does(
        gpus in prop::collection::vec(
            (any::<bool>(), prop::collection::vec(sharing_mechanisms(), 0..3), 0_u32..4),
            1..5,
        ),
        claims in prop::collection::vec(
            prop::collection::vec((sharing_mechanisms(), 1_u32..4), 1..3),
            1..6,
        ),
        policy in prop::sample::select(EVERY_POLICY.to_vec()),
    ) {
        let without_usage_by_no_user = |(can_mps, users, used): Kind| {
            let used = if users.is_empty() { 0 } else { used };
            (can_mps, users, used)
        };
        let gpus: Vec<Kind> = gpus.into_iter().map(without_usage_by_no_user).collect();
        let device = |(i, (can, _, _)): (usize, &Kind)| Device {
            supports_mps: *can,
            ..gpu(&format!("gpu-{i}"), "4Gi")
        };
        let mut cluster = node_of(gpus.iter().enumerate().map(device).collect());
        for (i, (_, users, gib)) in gpus.iter().enumerate() {
            // The first user has all of the memory.
            for (u, sharing) in users.iter().enumerate() {
                let gib = if u == 0 { *gib } else { 0 };
                cluster.0.usage.add(&[usage_result(&format!("gpu-{i}"), *sharing, gib)]);
            }
        }
        let named = |(c, alternatives): (usize, &Alternatives)| {
            Arc::new(claim_with(&format!("c{c}"), alternatives))
        };
        let waiting: Vec<Arc<Claim>> = claims.iter().enumerate().map(named).collect();
        let node = NodeName::new("node-a").unwrap();
        let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
        let found = planner.allocate_on(&node, &waiting, policy, 1_000_000);
        prop_assert_eq!(found.is_ok(), fits(&gpus, &claims));
        let mut usage = cluster.0.usage.clone();
        found.into_iter().flatten().for_each(|claim_allocation| usage.add(&claim_allocation.results));
        for (i, (_, users, _)) in gpus.iter().enumerate() {
            let used = usage.get(&device_id("node-a", &format!("gpu-{i}")));
            let is_mixed = used.is_some_and(|used| used.sharing().is_none());
            prop_assert_eq!(is_mixed, users.windows(2).any(|pair| pair[0] != pair[1]));
        }
    }
}
