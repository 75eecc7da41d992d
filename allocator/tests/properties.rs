//! What holds for every plan.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{Attribute, Constraint, ConstraintKind, Device, PendingPod, PodClaim, Usage};
use tessera_allocator::{Plan, Planner, Policy, Settings, plan};
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
                let claims = claims.into_iter().enumerate().map(|(c, (requests, together, policy))| {
                    let requests = requests.into_iter().enumerate().map(|(r, (count, memory, cores))| {
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

/// Adds the plan to what is used and checks every device.
fn check_capacity(cluster: &Cluster, plan: &Plan) {
    let mut usage: Usage = cluster.0.usage.clone();
    for claim in plan.decisions.iter().flat_map(|d| &d.claims) {
        usage.add(&claim.results);
    }
    for (slice, device) in cluster.0.slices.values().flat_map(|s| s.devices.iter().map(move |d| (s, d))) {
        if let Some(used) = usage.of(&device_id(&slice.name, device.name.as_str())) {
            assert!(!used.exceeds(device), "{} on {} takes {used:?}", device.name, slice.name);
        }
    }
}

/// Checks each claim by itself: counts, distinct devices within a request, constraints, one node.
fn check_claims(cluster: &Cluster, pods: &[PendingPod], plan: &Plan) {
    for decision in &plan.decisions {
        let pod = pods.iter().find(|p| p.uid == decision.pod).unwrap();
        assert_eq!(decision.claims.len(), pod.claims.len(), "all claims or none");
        for (allotment, claim) in decision.claims.iter().zip(&pod.claims) {
            let tessera_allocator::model::PodClaim::Pending(claim) = claim else { panic!() };
            let mut by_request: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            let mut numa = Vec::new();
            for result in &allotment.results {
                assert_eq!(result.device.pool.pool.as_str(), decision.node.as_str());
                by_request.entry(result.request.as_str()).or_default().push(result.device.device.as_str());
                let device = cluster.0.slices[decision.node.as_str()]
                    .devices
                    .iter()
                    .find(|d| d.name == result.device.device);
                numa.push(device.unwrap().attributes["numaNode"].clone());
            }
            for request in &claim.requests {
                let devices = by_request.remove(request.name.as_str()).unwrap_or_default();
                let mut distinct = devices.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!(distinct.len(), devices.len(), "a request got a device twice");
                assert_eq!(
                    tessera_allocator::model::Mode::Exact(devices.len() as u64),
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
    fn no_plan_gives_out_more_than_there_is(nodes in prop::collection::vec(devices(), 1..4), pods in pods()) {
        let cluster = cluster(nodes);
        let plan = plan(&cluster.0, &pods, Settings::default());
        check_capacity(&cluster, &plan);
        check_claims(&cluster, &pods, &plan);
    }

    #[test]
    fn the_same_snapshot_gives_the_same_plan_whatever_the_order_of_pods(
        nodes in prop::collection::vec(devices(), 1..4),
        pods in pods(),
    ) {
        let cluster = cluster(nodes);
        let first = plan(&cluster.0, &pods, Settings::default());
        let reversed: Vec<PendingPod> = pods.into_iter().rev().collect();
        let second = plan(&cluster.0, &reversed, Settings::default());
        prop_assert_eq!(first.decisions, second.decisions);
        prop_assert_eq!(first.steps, second.steps);
    }

    #[test]
    fn every_pod_is_either_placed_or_told_why_not(nodes in prop::collection::vec(devices(), 1..3), pods in pods()) {
        let cluster = cluster(nodes);
        let plan = plan(&cluster.0, &pods, Settings::default());
        for pod in &pods {
            let placed = plan.decisions.iter().any(|d| d.pod == pod.uid);
            let refused = plan.refusals.iter().any(|r| r.pod == pod.uid);
            prop_assert!(placed != refused, "{} placed {placed} refused {refused}", pod.name);
        }
    }

    #[test]
    fn one_more_device_never_makes_claims_not_fit_that_fitted(
        before in devices(),
        more in devices(),
        pods in pods(),
        at in any::<prop::sample::Index>(),
        policy in prop::sample::select(vec![
            Policy::FirstFit, Policy::Binpack, Policy::Spread, Policy::Random, Policy::LeastFragmentation,
        ]),
    ) {
        let mut after = before.clone();
        for (i, device) in more.into_iter().enumerate() {
            let named = Device { name: DeviceName::new(format!("more-{i}")).unwrap(), ..device };
            after.insert(at.index(after.len() + 1), named);
        }
        let [smaller, larger] = [before, after].map(|devices| cluster(vec![devices]));
        for pod in &pods {
            let claims: Vec<_> = pod.claims.iter().map(|claim| match claim {
                PodClaim::Pending(claim) => Arc::clone(claim),
                PodClaim::Allocated { .. } => unreachable!("none of these is"),
            }).collect();
            let fits = |cluster: &Cluster| {
                let node = NodeName::new("node-0").unwrap();
                Planner::of(&cluster.0, Default::default()).allocate_on(&node, &claims, policy, 1_000_000).is_ok()
            };
            prop_assert!(!fits(&smaller) || fits(&larger));
        }
    }
}
