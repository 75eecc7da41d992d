//! Properties of every plan.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{
    AllocationMode, Attribute, Claim, Constraint, ConstraintKind, Device, DeviceResult, PendingPod,
    PodClaim, Slice, Usage,
};
use tessera_allocator::{
    AllocationPlan, Decision, PlanSettings, Planner, Policy, RefusalCause, plan,
};
use tessera_api::names::{DeviceName, NodeName};

fn devices() -> impl Strategy<Value = Vec<Device>> {
    let device = (8u32..96, 0i64..3);
    prop::collection::vec(device, 1..6).prop_map(|list| {
        let build = |(i, (memory, numa)): (usize, (u32, i64))| {
            gpu(&format!("gpu-{i}"), &format!("{memory}Gi")).with("numaNode", Attribute::Int(numa))
        };
        list.into_iter().enumerate().map(build).collect()
    })
}

fn pods() -> impl Strategy<Value = Vec<PendingPod>> {
    let request = (1u64..3, prop::option::of(1u32..64), 0u32..=100);
    let claims = (
        prop::collection::vec(request, 1..3),
        any::<bool>(),
        prop::sample::select(vec!["Binpack", "Spread", "Random", "LeastFragmentation"]),
    );
    let one = (prop::collection::vec(claims, 1..3), -1i32..2, 0i64..3);
    prop::collection::vec(one, 1..12).prop_map(|pods| {
        pods.into_iter()
            .enumerate()
            .map(|(p, (claims, priority, created))| {
                let claims =
                    claims.into_iter().enumerate().map(|(c, (requests, together, policy))| {
                        let requests =
                            requests.into_iter().enumerate().map(|(r, (count, memory, cores))| {
                                let memory = memory.map(|m| format!("{m}Gi"));
                                let cores = cores.to_string();
                                let mut amounts = vec![("cores", cores.as_str())];
                                amounts.extend(memory.as_deref().map(|m| ("memory", m)));
                                request_of(r, count, &amounts)
                            });
                        let mut claim = claim(&format!("c{p}-{c}"), requests.collect());
                        if together {
                            let kind = ConstraintKind::Match("gpu.tessera.dev/numaNode".to_owned());
                            claim.constraints.push(Constraint { requests: Vec::new(), kind });
                        }
                        configured(claim, json!({"placement": {"node": policy, "device": policy}}))
                    });
                let mut pod = pod(&format!("p{p}"), claims.collect());
                (pod.priority, pod.created) = (priority, created);
                pod
            })
            .collect()
    })
}

fn request_of(r: usize, count: u64, amounts: &[(&str, &str)]) -> tessera_allocator::model::Request {
    request(&format!("r{r}"), count, amounts)
}

fn cluster(nodes: Vec<Vec<Device>>) -> Cluster {
    let named = nodes.into_iter().enumerate();
    named.fold(Cluster::new(), |cluster, (i, devices)| cluster.node(&format!("node-{i}"), devices))
}

/// Adds the plan to the usage and checks the capacity of every device.
fn check_capacity(cluster: &Cluster, plan: &AllocationPlan) {
    let mut usage: Usage = cluster.0.usage.clone();
    for claim in plan.decisions.iter().flat_map(|d| &d.claims) {
        usage.add(&claim.results);
    }
    for (slice, device) in
        cluster.0.slices.values().flat_map(|s| s.devices.iter().map(move |d| (s, d)))
    {
        if let Some(used) = usage.get(&device_id(&slice.name, device.name.as_str())) {
            assert!(!used.exceeds(device), "{} on {} takes {used:?}", device.name, slice.name);
        }
    }
}

/// Checks each claim: counts, distinct devices per request, constraints, one node.
fn check_claims(cluster: &Cluster, pods: &[PendingPod], plan: &AllocationPlan) {
    for decision in &plan.decisions {
        let pod = pods.iter().find(|p| p.uid == decision.pod).unwrap();
        assert_eq!(decision.claims.len(), pod.claims.len(), "all claims or none");
        for (claim_allocation, claim) in decision.claims.iter().zip(&pod.claims) {
            let tessera_allocator::model::PodClaim::Pending(claim) = claim else { panic!() };
            let mut by_request: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            let mut numa = Vec::new();
            for result in &claim_allocation.results {
                assert_eq!(result.device.pool.pool.as_str(), decision.node.as_str());
                by_request
                    .entry(result.request.as_str())
                    .or_default()
                    .push(result.device.device.as_str());
                let device = cluster.0.slices[decision.node.as_str()]
                    .devices
                    .iter()
                    .find(|d| d.name == result.device.device);
                numa.push(device.unwrap().attributes.get("numaNode").unwrap().clone());
            }
            for request in claim.requests.iter() {
                let devices = by_request.remove(request.name.as_str()).unwrap_or_default();
                let mut distinct = devices.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!(
                    distinct.len(),
                    devices.len(),
                    "a device was allocated twice to one request"
                );
                assert_eq!(
                    tessera_allocator::model::AllocationMode::Exact(devices.len() as u64),
                    request.alternatives[0].mode
                );
            }
            if !claim.constraints.is_empty() {
                numa.dedup();
                assert_eq!(numa.len(), 1, "matchAttribute is violated");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn plans_never_overcommit(nodes in prop::collection::vec(devices(), 1..4), pods in pods()) {
        let cluster = cluster(nodes);
        let plan = plan(&cluster.0, &pods, PlanSettings::default());
        check_capacity(&cluster, &plan);
        check_claims(&cluster, &pods, &plan);
    }

    #[test]
    fn plan_is_independent_of_pod_order(
        nodes in prop::collection::vec(devices(), 1..4),
        pods in pods(),
    ) {
        let cluster = cluster(nodes);
        let first = plan(&cluster.0, &pods, PlanSettings::default());
        let reversed: Vec<PendingPod> = pods.into_iter().rev().collect();
        let second = plan(&cluster.0, &reversed, PlanSettings::default());
        prop_assert_eq!(first.decisions, second.decisions);
        prop_assert_eq!(first.steps, second.steps);
    }

    #[test]
    fn every_pod_is_placed_or_refused(
        nodes in prop::collection::vec(devices(), 1..3),
        pods in pods(),
    ) {
        let cluster = cluster(nodes);
        let plan = plan(&cluster.0, &pods, PlanSettings::default());
        for pod in &pods {
            let placed = plan.decisions.iter().any(|d| d.pod == pod.uid);
            let refused = plan.refusals.iter().any(|r| r.pod == pod.uid);
            prop_assert!(placed != refused, "{} placed {placed} refused {refused}", pod.name);
        }
    }

    #[test]
    fn additional_device_never_makes_claims_infeasible(
        before in devices(),
        more in devices(),
        pods in pods(),
        at in any::<prop::sample::Index>(),
        policy in prop::sample::select(vec![
            Policy::FirstFit,
            Policy::Binpack,
            Policy::Spread,
            Policy::Random,
            Policy::LeastFragmentation,
        ]),
    ) {
        let mut after = before.clone();
        for (i, device) in more.into_iter().enumerate() {
            let named = Device { name: DeviceName::new(format!("more-{i}")).unwrap(), ..device };
            after.insert(at.index(after.len() + 1), named);
        }
        let [smaller, larger] = [before, after].map(|devices| cluster(vec![devices]));
        for pod in &pods {
            let claims: Vec<_> = pod
                .claims
                .iter()
                .map(|claim| match claim {
                    PodClaim::Pending(claim) => Arc::clone(claim),
                    PodClaim::Allocated { .. } => unreachable!("no claim is allocated"),
                })
                .collect();
            let fits = |cluster: &Cluster| {
                let node = NodeName::new("node-0").unwrap();
                Planner::from_snapshot(&cluster.0, Default::default())
                    .allocate_on(&node, &claims, policy, 1_000_000)
                    .is_ok()
            };
            prop_assert!(!fits(&smaller) || fits(&larger));
        }
    }

    #[test]
    fn explanation_counts_each_device_once(
        nodes in prop::collection::vec(devices(), 1..4),
        pods in pods(),
    ) {
        let cluster = cluster(nodes);
        // Only one pod is planned, so no other pod comes before it.
        let plan = plan(&cluster.0, &pods[..1], PlanSettings::default());
        let count = |slice: &Slice| slice.devices.len() as u64;
        let published: u64 = cluster.0.slices.values().map(|slice| count(slice)).sum();
        for refusal in &plan.refusals {
            let RefusalCause::NoFit(explanation) = &*refusal.cause else { panic!("{refusal:?}") };
            prop_assert_eq!(
                explanation.tallies().map(|(_, tally)| tally.devices()).sum::<u64>(),
                published
            );
            let PodClaim::Pending(claim) = &pods[0].claims[0] else { panic!() };
            let is_only_request = pods[0].claims.len() == 1
                && claim.requests.len() == 1
                && claim.constraints.is_empty();
            let AllocationMode::Exact(wanted) = claim.requests[0].alternatives[0].mode else { panic!() };
            for (reason, tally) in explanation.tallies().filter(|_| is_only_request) {
                prop_assert!(!reason.is_available() || tally.devices() < wanted * tally.nodes().len() as u64);
            }
        }
    }

    #[test]
    fn result_is_invariant_under_device_renaming(
        kinds in prop::collection::vec(prop::collection::vec((0_u32..2, 0_i64..2), 1..7), 1..3),
        pods in pods(),
        rotation in 1_usize..6,
        policy in prop::sample::select(vec!["FirstFit", "Binpack", "Spread", "LeastFragmentation"]),
    ) {
        let pods: Vec<PendingPod> = pods.into_iter().map(|pod| with_policy(pod, policy)).collect();
        let policy = if policy == "FirstFit" { Policy::FirstFit } else { Policy::default() };
        let outcome = |rotation: usize| {
            let cluster = cluster(kinds.iter().map(|kinds| named(kinds, rotation)).collect());
            let plan = plan(&cluster.0, &pods, PlanSettings { policy, ..PlanSettings::default() });
            let kind = |result: &DeviceResult| {
                let devices = &cluster.0.slices[result.device.pool.pool.as_str()].devices;
                devices.iter().position(|device| device.name == result.device.device)
            };
            let decision = |d: &Decision| {
                (
                    d.pod.clone(),
                    d.node.clone(),
                    d.claims
                        .iter()
                        .flat_map(|c| &c.results)
                        .map(|r| (r.request.clone(), kind(r)))
                        .collect::<Vec<_>>(),
                )
            };
            plan.decisions.iter().map(decision).collect::<Vec<_>>()
        };
        prop_assert_eq!(outcome(0), outcome(rotation));
    }
}

/// Creates devices of these kinds; the names of equal ones are rotated by `rotation`.
fn named(kinds: &[(u32, i64)], rotation: usize) -> Vec<Device> {
    let name = |at: usize| {
        let equals: Vec<usize> =
            (0..kinds.len()).filter(|other| kinds[*other] == kinds[at]).collect();
        let rank = equals.iter().position(|other| *other == at).unwrap();
        equals[(rank + rotation) % equals.len()]
    };
    let build = |(at, (memory, numa)): (usize, &(u32, i64))| {
        gpu(&format!("gpu-{}", name(at)), &format!("{}Gi", 40 * (memory + 1)))
            .with("numaNode", Attribute::Int(*numa))
    };
    kinds.iter().enumerate().map(build).collect()
}

/// Sets the policy of each claim; "FirstFit" removes the configuration, so the settings decide.
fn with_policy(mut pod: PendingPod, policy: &str) -> PendingPod {
    let claims = pod.claims.into_iter().map(|claim| {
        let PodClaim::Pending(claim) = claim else { unreachable!("no claim is allocated") };
        let bare = Claim { configs: Vec::new(), ..(*claim).clone() };
        let claim = match policy {
            "FirstFit" => bare,
            _ => configured(bare, json!({"placement": {"node": policy, "device": policy}})),
        };
        PodClaim::Pending(Arc::new(claim))
    });
    pod.claims = claims.collect();
    pod
}
