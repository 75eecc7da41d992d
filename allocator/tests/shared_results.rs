//! Nodes in equal states share results: they are those of each node by itself.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{Attribute, Claim, DeviceSelector, PendingPod, PodClaim};
use tessera_allocator::{FeatureGates, PlanSettings, Planner, Policy, RefusalCause, plan};
use tessera_api::names::NodeName;
use tessera_api::reason::Reason;

const STEPS: u64 = 1_000_000;

/// Number of nodes: so many that results are shared.
const NODES: usize = 24;

const SELECTORS: [&str; 5] = [
    "true",
    "device.attributes['gpu.tessera.dev'].model == 'A'",
    "device.attributes['gpu.tessera.dev'].index >= 40",
    "device.attributes['gpu.tessera.dev'].?missing.orValue(1) == 1",
    "device.attributes['gpu.tessera.dev'].absent == 1",
];

/// A node: its model, the memory in use of each of its GPUs in steps of 20 GiB, and whether it is
/// cordoned.
type NodeKind = (bool, [u8; 2], bool);

fn cluster(kinds: &[NodeKind]) -> Cluster {
    let mut cluster = Cluster::new();
    for (n, (is_a, used, is_cordoned)) in kinds.iter().enumerate() {
        let name = format!("node-{n:02}");
        let gpus = (0..2).map(|i| {
            let index = i64::try_from(n * 2 + i).unwrap();
            gpu(&format!("gpu-{i}"), "80Gi")
                .with("model", Attribute::String(if *is_a { "A" } else { "B" }.into()))
                .with("numa", Attribute::Int(i64::try_from(i).unwrap()))
                .with("index", Attribute::Int(index))
        });
        cluster = cluster.node(&name, gpus.collect());
        cluster.put_node(&name, |node| node.cordoned = *is_cordoned);
        for (i, used) in used.iter().enumerate().filter(|(_, used)| **used > 0) {
            let memory = format!("{}Gi", u32::from(*used) * 20);
            cluster.use_share(&name, &format!("gpu-{i}"), &memory, "1");
        }
    }
    cluster
}

fn claims() -> impl Strategy<Value = Claim> {
    let request = (1u64..3, 1u32..90, prop::sample::select(SELECTORS.to_vec()));
    let policy = prop::sample::select(vec!["Binpack", "Spread", "Random", "LeastFragmentation"]);
    let requests = prop::collection::vec(request, 1..3);
    (requests, any::<bool>(), policy).prop_map(|(requests, is_together, policy)| {
        let requests = requests.into_iter().enumerate().map(|(r, (count, memory, selector))| {
            let memory = format!("{memory}Gi");
            let mut request = request_of(r, count, &memory);
            request.alternatives[0].selectors.push(DeviceSelector::new(selector));
            request
        });
        let mut claim = claim("c", requests.collect());
        claim.constraints.extend(is_together.then(|| matching("gpu.tessera.dev/numa")));
        configured(claim, json!({"placement": {"node": policy, "device": policy}}))
    })
}

fn request_of(r: usize, count: u64, memory: &str) -> tessera_allocator::model::Request {
    request(&format!("r{r}"), count, &[("memory", memory)])
}

fn kinds() -> impl Strategy<Value = Vec<NodeKind>> {
    let kind = (any::<bool>(), [0u8..4, 0u8..4], prop::bool::weighted(0.2));
    prop::collection::vec(kind, NODES)
}

/// Returns the number of devices per reason, over plans of one node each.
fn totals_of_single_nodes(kinds: &[NodeKind], pod: &PendingPod) -> BTreeMap<Reason, u64> {
    let mut totals = BTreeMap::new();
    let whole = cluster(kinds);
    for name in whole.0.nodes.keys() {
        let mut alone = cluster(kinds);
        alone.0.nodes.retain(|known, _| known == name);
        alone.0.slices.retain(|known, _| known == name.as_str());
        for refusal in plan(&alone.0, std::slice::from_ref(pod), PlanSettings::default()).refusals {
            let RefusalCause::NoFit(explanation) = &*refusal.cause else { continue };
            for (reason, devices) in explanation.totals() {
                *totals.entry(reason.clone()).or_default() += devices;
            }
        }
    }
    totals
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn shared_fits_are_those_of_each_node(kinds in kinds(), claim in claims()) {
        let claims = [Arc::new(claim)];
        let planner = || Planner::from_snapshot(&cluster(&kinds).0, FeatureGates::default());
        let fits = planner().count_fits(&claims, Policy::default(), STEPS);
        let mut alone = planner();
        let names = (0..NODES).map(|n| NodeName::new(format!("node-{n:02}")).unwrap());
        let fits_alone = names
            .filter(|name| alone.allocate_on(name, &claims, Policy::default(), STEPS).is_ok())
            .count();
        prop_assert_eq!(fits, fits_alone);
    }

    #[test]
    fn shared_reasons_are_those_of_each_node(kinds in kinds(), claim in claims()) {
        let mut pod = pod("p", Vec::new());
        pod.claims.push(PodClaim::Pending(Arc::new(claim)));
        let together =
            plan(&cluster(&kinds).0, std::slice::from_ref(&pod), PlanSettings::default());
        if let [refusal] = together.refusals.as_slice()
            && let RefusalCause::NoFit(explanation) = &*refusal.cause
            && pod.pending_claims().all(|claim| claim.requests.len() == 1)
        {
            prop_assert_eq!(explanation.totals(), &totals_of_single_nodes(&kinds, &pod));
            for (reason, tally) in explanation.tallies() {
                prop_assert_eq!(explanation.totals().get(reason), Some(&tally.devices()));
            }
        }
    }
}
