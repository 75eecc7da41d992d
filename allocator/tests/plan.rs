//! Plans, and the explanations of refusals.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use serde_json::json;
use tessera_allocator::model::{
    AllocationMode, Attribute, Claim, Constraint, Device, DeviceSelector, NameMap, NodeSelector,
    NodeTaint, PendingPod, PodClaim, PodToleration, Toleration, TolerationOperator,
};
use tessera_allocator::{AllocationPlan, PlanSettings, RefusalCause, plan};
use tessera_api::names::{ClaimName, ClaimUid, NodeName};
use tessera_api::quantity::Quantity;
use tessera_api::reason::{NodeReason, Reason};

/// Returns the number of devices and nodes per reason.
fn reasons(plan: &AllocationPlan) -> BTreeMap<Reason, (u64, usize)> {
    let RefusalCause::NoFit(explanation) = &*plan.refusals[0].cause else {
        panic!("{:?}", plan.refusals)
    };
    explanation
        .tallies()
        .map(|(reason, tally)| (reason.clone(), (tally.devices(), tally.nodes().len())))
        .collect()
}

fn short_of(capacity: &str) -> Reason {
    Reason::Insufficient { capacity: capacity.to_owned() }
}

/// Returns the memory that the first device of a plan consumes.
fn consumed_memory(plan: &AllocationPlan) -> Quantity {
    plan.decisions[0].claims[0].results[0].consumed.get("memory").copied().unwrap()
}

#[test]
fn claim_without_capacity_gets_exclusive_gpu() {
    let mut cluster =
        Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi"), gpu("gpu-1", "80Gi")]);
    cluster.use_share("node-a", "gpu-0", "1Gi", "0");
    let whole = pod("first", vec![claim("whole", vec![request("gpu", 1, &[])])]);
    let plan = decide(&cluster, &[whole, share_pod("second", "1Gi", "0")]);
    assert_eq!(placements(&plan), [["node-a/gpu-1"], ["node-a/gpu-0"]]);
    assert_eq!(consumed_memory(&plan), quantity("80Gi"));
}

#[test]
fn amounts_are_rounded_up_to_step() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let plan = decide(&cluster, &[share_pod("p", "1500Ki", "0")]);
    let consumed = &plan.decisions[0].claims[0].results[0].consumed;
    assert_eq!(consumed.get("memory").unwrap().to_string(), "2Mi");
    assert_eq!(consumed.get("cores").unwrap().to_string(), "0");
}

#[test]
fn memory_percentage_refers_to_chosen_gpu() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "81559Mi")]);
    let claims = (0..3).map(|i| {
        let half = claim(&format!("c{i}"), vec![request("gpu", 1, &[])]);
        pod(&format!("p{i}"), vec![configured(half, json!({"memory": {"percent": 50}}))])
    });
    let plan = decide(&cluster, &claims.collect::<Vec<_>>());
    assert_eq!(plan.decisions.len(), 2, "two halves fit, a third does not");
    assert_eq!(consumed_memory(&plan), quantity("40779Mi"));
    assert_eq!(reasons(&plan), BTreeMap::from([(short_of("memory"), (1, 1))]));
}

#[test]
fn refuses_claim_beyond_free_cores_or_memory() {
    let mut cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    cluster.use_share("node-a", "gpu-0", "60Gi", "90");
    assert_eq!(decide(&cluster, &[share_pod("p", "10Gi", "11")]).decisions, []);
    assert_eq!(decide(&cluster, &[share_pod("p", "21Gi", "10")]).decisions, []);
    assert_eq!(decide(&cluster, &[share_pod("p", "20Gi", "10")]).decisions.len(), 1);
}

#[test]
fn refusal_counts_devices_and_nodes_per_reason() {
    let gpus = |n: usize| (0..n).map(|i| gpu(&format!("gpu-{i}"), "40Gi")).collect::<Vec<_>>();
    let mut cluster = Cluster::new().node("node-a", gpus(2)).node("node-b", gpus(4)).node(
        "node-c",
        vec![gpu("gpu-0", "80Gi").tainted("example.com/broken"), gpu("gpu-1", "80Gi")],
    );
    cluster.put_node("node-b", |node| node.ready = false);
    cluster.use_share("node-c", "gpu-1", "50Gi", "0");
    let plan = decide(&cluster, &[share_pod("p", "60Gi", "0")]);
    let expected = BTreeMap::from([
        (Reason::Node(NodeReason::NotReady), (4, 1)),
        (Reason::InsufficientTotal { capacity: "memory".to_owned() }, (2, 1)),
        (short_of("memory"), (1, 1)),
        (Reason::Tainted { key: "example.com/broken".to_owned() }, (1, 1)),
    ]);
    assert_eq!(reasons(&plan), expected);
}

#[test]
fn match_constraint_waits_for_two_free_gpus_in_group() {
    let numa = |i: usize| {
        gpu(&format!("gpu-{i}"), "80Gi").with("numaNode", Attribute::Int(i64::from(i >= 2)))
    };
    let mut cluster = Cluster::new().node("node-a", (0..4).map(numa).collect());
    for device in ["gpu-0", "gpu-2"] {
        cluster.use_share("node-a", device, "80Gi", "0");
    }
    let mut pair = claim("pair", vec![request("gpu", 2, &[])]);
    pair.constraints.push(matching("gpu.tessera.dev/numaNode"));
    let pods = [pod("pair", vec![pair])];
    let waiting = decide(&cluster, &pods);
    let constraint = Reason::Constraint { attribute: "gpu.tessera.dev/numaNode".to_owned() };
    assert_eq!(
        reasons(&waiting),
        BTreeMap::from([(short_of("memory"), (2, 1)), (constraint, (2, 1))])
    );
    cluster.0.usage.remove(&[share("node-a", "gpu-2", "80Gi", "0")]);
    assert_eq!(placements(&decide(&cluster, &pods)), [["node-a/gpu-2", "node-a/gpu-3"]]);
}

#[test]
fn only_different_requests_share_a_gpu() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let amounts = [("memory", "10Gi")];
    let two = claim("two", vec![request("one", 1, &amounts), request("other", 1, &amounts)]);
    assert_eq!(
        placements(&decide(&cluster, &[pod("p", vec![two])])),
        [["node-a/gpu-0", "node-a/gpu-0"]]
    );
    let count = claim("count", vec![request("gpu", 2, &amounts)]);
    assert_eq!(decide(&cluster, &[pod("p", vec![count])]).decisions, []);
}

#[test]
fn all_claims_of_a_pod_are_on_one_node_or_refused() {
    let cluster = Cluster::new()
        .node("node-a", vec![gpu("gpu-0", "40Gi")])
        .node("node-b", vec![gpu("gpu-0", "80Gi")]);
    let ask = |name: &str| claim(name, vec![request("gpu", 1, &[("memory", "30Gi")])]);
    assert_eq!(
        placements(&decide(&cluster, &[pod("p", vec![ask("a"), ask("b")])])),
        [["node-b/gpu-0", "node-b/gpu-0"]]
    );
    let plan = decide(&cluster, &[pod("p", vec![ask("a"), ask("b"), ask("c")])]);
    assert_eq!(plan.decisions, []);
    assert_eq!(plan.refusals.len(), 3);
}

#[test]
fn all_allocates_every_matching_gpu_of_a_node() {
    let mut cluster = two_nodes();
    cluster.use_share("node-a", "gpu-3", "1Gi", "0");
    let mut all = request("gpus", 1, &[]);
    all.alternatives[0].mode = AllocationMode::All;
    let got = placements(&decide(&cluster, &[pod("p", vec![claim("all", vec![all])])]));
    assert_eq!(got, [["node-b/gpu-0", "node-b/gpu-1", "node-b/gpu-2", "node-b/gpu-3"]]);
}

#[test]
fn pod_follows_its_allocated_claim() {
    let cluster = two_nodes();
    let mut second = share_pod("p", "1Gi", "0");
    second.claims.push(PodClaim::Allocated {
        uid: ClaimUid::new("other").unwrap(),
        name: ClaimName::new("other").unwrap(),
        nodes: Some(NodeSelector::for_node(&NodeName::new("node-b").unwrap())),
    });
    assert_eq!(placements(&decide(&cluster, &[second])), [["node-b/gpu-0"]]);
}

#[test]
fn shared_claim_is_decided_once() {
    let shared = claim("shared", vec![request("gpu", 1, &[("memory", "10Gi")])]);
    let own = claim("own", vec![request("gpu", 1, &[("memory", "10Gi")])]);
    let plan =
        decide(&two_nodes(), &[pod("p0", vec![shared.clone()]), pod("p1", vec![shared, own])]);
    assert_eq!(placements(&plan), [["node-a/gpu-0"], ["node-a/gpu-0"]]);
    assert_eq!(plan.decisions[1].claims.len(), 1, "the second pod only decides its own claim");
    assert_eq!(plan.refusals.len(), 0);
}

#[test]
fn pods_are_ordered_by_priority_and_age() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let (mut old, mut young, mut urgent) = (
        share_pod("old", "80Gi", "0"),
        share_pod("young", "80Gi", "0"),
        share_pod("urgent", "80Gi", "0"),
    );
    (old.created, young.created, urgent.created) = (1, 2, 3);
    urgent.priority = 5;
    let first = |pods: &[PendingPod]| decide(&cluster, pods).decisions[0].pod.to_string();
    assert_eq!(first(&[young.clone(), old.clone(), urgent]), "urgent");
    assert_eq!(first(&[young, old]), "old");
}

#[test]
fn nominated_node_is_first_and_excluded_nodes_are_skipped() {
    let cluster = two_nodes();
    let mut nominated = share_pod("p", "1Gi", "0");
    nominated.nominated_node = Some(NodeName::new("node-b").unwrap());
    assert_eq!(placements(&decide(&cluster, &[nominated.clone()])), [["node-b/gpu-0"]]);
    nominated.excluded_nodes.insert(NodeName::new("node-b").unwrap());
    assert_eq!(placements(&decide(&cluster, &[nominated])), [["node-a/gpu-0"]]);
}

#[test]
fn each_node_predicate_has_its_reason() {
    type Change = fn(&mut tessera_allocator::model::Node);
    let cases: [(Change, NodeReason); 4] = [
        (|n| n.cordoned = true, NodeReason::Cordoned),
        (
            |n| {
                n.taints.push(NodeTaint {
                    key: "k".to_owned(),
                    value: String::new(),
                    effect: "NoSchedule".to_owned(),
                })
            },
            NodeReason::Tainted { key: "k".to_owned() },
        ),
        (
            |n| n.allocatable = NameMap::new(),
            NodeReason::ResourceShort { resource: "pods".to_owned() },
        ),
        (
            |n| n.used = NameMap::from_iter([("pods".to_owned(), quantity("110"))]),
            NodeReason::ResourceShort { resource: "pods".to_owned() },
        ),
    ];
    for (change, fault) in cases {
        let mut cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
        cluster.put_node("node-a", change);
        let plan = decide(&cluster, &[share_pod("p", "1Gi", "0")]);
        assert_eq!(reasons(&plan), BTreeMap::from([(Reason::Node(fault), (1, 1))]));
    }
}

#[test]
fn pod_that_tolerates_cordon_is_placed_on_cordoned_node() {
    let mut cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    cluster.put_node("node-a", |node| node.cordoned = true);
    let mut pod = share_pod("p", "1Gi", "0");
    Arc::make_mut(&mut pod.scheduling).tolerations.push(PodToleration {
        key: None,
        operator: Some("Exists".to_owned()),
        value: String::new(),
        effect: None,
    });
    assert_eq!(decide(&cluster, &[pod]).decisions.len(), 1);
}

#[test]
fn requests_of_one_plan_add_up_on_the_node() {
    let mut cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    cluster.put_node("node-a", |node| {
        node.allocatable.insert("cpu".to_owned(), quantity("3"));
    });
    let pods: Vec<_> = (0..3)
        .map(|i| {
            let mut pod = share_pod(&format!("p{i}"), "1Gi", "0");
            Arc::make_mut(&mut pod.scheduling).requests.insert("cpu".to_owned(), quantity("1500m"));
            pod
        })
        .collect();
    let plan = decide(&cluster, &pods);
    assert_eq!(plan.decisions.len(), 2);
    assert_eq!(
        reasons(&plan),
        BTreeMap::from([(
            Reason::Node(NodeReason::ResourceShort { resource: "cpu".to_owned() }),
            (1, 1)
        )])
    );
}

#[test]
fn tainted_device_requires_toleration() {
    let cluster =
        Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi").tainted("example.com/old")]);
    let mut tolerant = request("gpu", 1, &[]);
    tolerant.alternatives[0].tolerations.push(Toleration {
        key: Some("example.com/old".to_owned()),
        operator: TolerationOperator::Exists,
        value: String::new(),
        effect: None,
    });
    assert_eq!(
        decide(&cluster, &[pod("p", vec![claim("c", vec![request("gpu", 1, &[])])])]).decisions,
        []
    );
    assert_eq!(decide(&cluster, &[pod("p", vec![claim("c", vec![tolerant])])]).decisions.len(), 1);
}

#[test]
fn unmanaged_device_is_never_allocated() {
    let mut unmanaged = gpu("gpu-0", "80Gi");
    unmanaged.is_unmanaged = true;
    let cluster = Cluster::new().node("node-a", vec![unmanaged]);
    let plan = decide(&cluster, &[share_pod("p", "1Gi", "0")]);
    assert_eq!(reasons(&plan), BTreeMap::from([(Reason::NotManaged, (1, 1))]));
}

/// Creates a GPU that publishes more memory than it has.
fn oversubscribed(name: &str) -> Device {
    Device { oversubscribed: true, ..gpu(name, "160Gi") }
}

/// Creates a pod with one claim for these capacities of one GPU and a memory configuration.
fn pod_with_config(amounts: &[(&str, &str)], memory: serde_json::Value) -> PendingPod {
    let claim = claim("c", vec![request("gpu", 1, amounts)]);
    pod("p", vec![configured(claim, json!({ "memory": memory }))])
}

#[test]
fn oversubscribed_gpu_requires_opt_in() {
    let cluster = Cluster::new().node("node-a", vec![oversubscribed("gpu-0")]);
    let amounts = [("memory", "100Gi")];
    let placed = decide(&cluster, &[pod_with_config(&amounts, json!({"oversubscribe": true}))]);
    assert_eq!(placements(&placed), [["node-a/gpu-0"]]);
    for refused in [json!({}), json!({"oversubscribe": false})] {
        // Even the smallest share is refused.
        let plan = decide(&cluster, &[pod_with_config(&[("memory", "1Gi")], refused)]);
        assert_eq!(reasons(&plan), BTreeMap::from([(Reason::Oversubscribed, (1, 1))]));
        let RefusalCause::NoFit(explanation) = &*plan.refusals[0].cause else {
            panic!("{:?}", plan.refusals)
        };
        assert_eq!(
            explanation.render(1024),
            "0/1 GPUs available: 1 oversubscribed (the claim must set memory.oversubscribe: true)"
        );
    }
}

#[test]
fn oversubscribing_claim_may_use_any_gpu() {
    let mixed =
        || Cluster::new().node("node-a", vec![oversubscribed("gpu-0"), gpu("gpu-1", "80Gi")]);
    let plain = decide(&mixed(), &[share_pod("p", "20Gi", "0")]);
    assert_eq!(placements(&plain), [["node-a/gpu-1"]]);
    let mut full = mixed();
    full.use_share("node-a", "gpu-0", "150Gi", "0");
    let spilling = pod_with_config(&[("memory", "20Gi")], json!({"oversubscribe": true}));
    assert_eq!(placements(&decide(&full, std::slice::from_ref(&spilling))), [["node-a/gpu-1"]]);
    full.use_share("node-a", "gpu-1", "70Gi", "0");
    assert_eq!(
        reasons(&decide(&full, &[spilling])),
        BTreeMap::from([(short_of("memory"), (2, 1))])
    );
    let reasons = reasons(&decide(&full, &[share_pod("p", "20Gi", "0")]));
    assert_eq!(
        reasons,
        BTreeMap::from([(Reason::Oversubscribed, (1, 1)), (short_of("memory"), (1, 1))])
    );
}

#[test]
fn memory_percentage_refers_to_published_memory() {
    let cluster = Cluster::new().node("node-a", vec![oversubscribed("gpu-0")]);
    let plan =
        decide(&cluster, &[pod_with_config(&[], json!({"percent": 75, "oversubscribe": true}))]);
    assert_eq!(consumed_memory(&plan), quantity("120Gi"));
}

#[test]
fn class_config_can_allow_oversubscription() {
    let mut cluster = Cluster::new().node("node-a", vec![oversubscribed("gpu-0")]);
    let class = cluster.0.classes.values_mut().next().unwrap();
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1",
        "kind": "GpuConfig",
        "memory": {"oversubscribe": true},
    });
    let config = json!({"opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}});
    Arc::make_mut(class).configs.push(serde_json::from_value(config).unwrap());
    assert_eq!(decide(&cluster, &[share_pod("p", "100Gi", "0")]).decisions.len(), 1);
    let declines = pod_with_config(&[("memory", "1Gi")], json!({"oversubscribe": false}));
    assert_eq!(
        reasons(&decide(&cluster, &[declines])),
        BTreeMap::from([(Reason::Oversubscribed, (1, 1))])
    );
}

#[test]
fn all_mode_fails_if_one_gpu_is_oversubscribed() {
    let cluster =
        Cluster::new().node("node-a", vec![oversubscribed("gpu-0"), gpu("gpu-1", "80Gi")]);
    let mut all = request("gpu", 1, &[]);
    all.alternatives[0].mode = AllocationMode::All;
    let plan = decide(&cluster, &[pod("p", vec![claim("c", vec![all.clone()])])]);
    assert_eq!(
        reasons(&plan),
        BTreeMap::from([(Reason::Oversubscribed, (1, 1)), (Reason::NotAllAvailable, (1, 1))])
    );
    let spilling = configured(claim("c", vec![all]), json!({"memory": {"oversubscribe": true}}));
    assert_eq!(
        decide(&cluster, &[pod("p", vec![spilling])]).decisions[0].claims[0].results.len(),
        2
    );
}

#[test]
fn unknown_class_and_invalid_config_are_named() {
    let cluster = two_nodes();
    let mut lost = request("gpu", 1, &[]);
    lost.alternatives[0].class =
        Some(tessera_api::names::DeviceClassName::new("h200.gpu.tessera.dev").unwrap());
    let plan = decide(&cluster, &[pod("p", vec![claim("c", vec![lost])])]);
    assert!(matches!(
        &*plan.refusals[0].cause,
        RefusalCause::UnknownClass { class, .. } if class.as_str() == "h200.gpu.tessera.dev"
    ));
    let bad = configured(
        claim("c", vec![request("gpu", 1, &[])]),
        json!({"placement": {"node": "Tightest"}}),
    );
    let plan = decide(&cluster, &[pod("p", vec![bad])]);
    let RefusalCause::Config { error, .. } = &*plan.refusals[0].cause else {
        panic!("{:?}", plan.refusals)
    };
    assert!(error.to_string().contains("placement.node"), "{error}");
}

#[test]
fn refuses_memory_in_both_percent_and_bytes() {
    let asking = |amounts: &[(&str, &str)]| {
        let claim = claim("c", vec![request("gpu", 1, amounts)]);
        let percent = configured(claim, json!({"memory": {"percent": 25}}));
        decide(&two_nodes(), &[pod("p", vec![percent])])
    };
    assert_eq!(asking(&[("cores", "25")]).decisions.len(), 1);
    let plan = asking(&[("memory", "90Gi")]);
    let RefusalCause::Config { error, .. } = &*plan.refusals[0].cause else {
        panic!("{:?}", plan.refusals)
    };
    let text = error.to_string();
    assert!(text.contains("memory.percent") && text.contains("capacity.requests.memory"), "{text}");
}

#[test]
fn exclusive_claim_has_its_gpu_alone() {
    let exclusive = |name: &str| {
        let claim = claim("c", vec![request("gpu", 1, &[])]);
        let config = json!({"exclusive": true, "memory": {"limit": "3000Mi"}});
        pod(name, vec![configured(claim, config)])
    };
    let mut cluster =
        Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi"), gpu("gpu-1", "80Gi")]);
    cluster.use_share("node-a", "gpu-0", "1Mi", "0");
    let plan = decide(&cluster, &[exclusive("alone"), share_pod("beside", "1Mi", "0")]);
    assert_eq!(placements(&plan), [["node-a/gpu-1"], ["node-a/gpu-0"]]);
    let consumed = &plan.decisions[0].claims[0].results[0].consumed;
    assert_eq!(consumed.get("memory"), Some(&quantity("80Gi")));
    assert_eq!(consumed.get("cores"), Some(&quantity("100")));
    cluster.use_share("node-a", "gpu-1", "1Mi", "0");
    let plan = decide(&cluster, &[exclusive("waits")]);
    assert_eq!(reasons(&plan), BTreeMap::from([(short_of("memory"), (2, 1))]));
}

/// A GPU with 200 cores, of which a request may have 100.
#[test]
fn oversubscribed_cores_are_all_reserved_by_exclusive_claims_only() {
    let mut doubled = gpu("gpu-0", "80Gi");
    let mut cores = doubled.capacity.get("cores").unwrap().clone();
    cores.value = quantity("200");
    let range = cores.policy.as_mut().and_then(|policy| policy.valid_range.as_mut());
    range.unwrap().max = Some(quantity("100"));
    Arc::make_mut(&mut doubled.capacity).insert("cores".to_owned(), cores);
    let cluster = Cluster::new().node("node-a", vec![doubled]);
    let two = [share_pod("a", "1Gi", "100"), share_pod("b", "1Gi", "100")];
    assert_eq!(decide(&cluster, &two).decisions.len(), 2);
    assert_eq!(decide(&cluster, &[share_pod("c", "1Gi", "101")]).decisions.len(), 0);
    let claim = claim("c", vec![request("gpu", 1, &[])]);
    let exclusive = pod("d", vec![configured(claim, json!({"exclusive": true}))]);
    let plan = decide(&cluster, &[exclusive]);
    let consumed = &plan.decisions[0].claims[0].results[0].consumed;
    assert_eq!(consumed.get("cores"), Some(&quantity("200")));
}

#[test]
fn memory_percentage_has_two_decimals() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "81559Mi")]);
    let thirds: Vec<_> = (0..4)
        .map(|i| {
            let third = claim(&format!("c{i}"), vec![request("gpu", 1, &[])]);
            pod(&format!("p{i}"), vec![configured(third, json!({"memory": {"percent": 33.33}}))])
        })
        .collect();
    let plan = decide(&cluster, &thirds);
    assert_eq!((plan.decisions.len(), plan.refusals.len()), (3, 1));
    assert_eq!(consumed_memory(&plan), quantity("27183Mi"));
}

#[test]
fn refuses_limit_below_cores_or_without_cores() {
    let refused = |amounts: &[(&str, &str)]| {
        let claim = claim("c", vec![request("gpu", 1, amounts)]);
        let limited = configured(claim, json!({"compute": {"limit": 50}}));
        let plan = decide(&two_nodes(), &[pod("p", vec![limited])]);
        plan.refusals.first().map(|refusal| match &*refusal.cause {
            RefusalCause::Config { error, .. } => error.to_string(),
            other => panic!("{other:?}"),
        })
    };
    assert_eq!(refused(&[("cores", "50")]), None);
    let text = refused(&[("cores", "51")]).expect("refused");
    assert!(text.contains("compute.limit") && text.contains("51 to 100"), "{text}");
    let text = refused(&[("memory", "10Gi")]).expect("refused");
    assert!(text.contains("compute.limit") && text.contains("cores"), "{text}");
}

#[test]
fn failing_selector_is_a_reason_on_its_devices() {
    let cluster = Cluster::new()
        .node("node-a", vec![gpu("gpu-0", "80Gi")])
        .node("node-b", vec![gpu("gpu-0", "80Gi").with("generation", Attribute::Int(9))]);
    let mut selective = request("gpu", 1, &[]);
    selective.alternatives[0]
        .selectors
        .push(DeviceSelector::new("device.attributes['gpu.tessera.dev'].generation > 8"));
    let both = decide(&cluster, &[pod("p", vec![claim("c", vec![selective.clone()])])]);
    assert_eq!(placements(&both), [["node-b/gpu-0"]]);
    let alone = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let plan = decide(&alone, &[pod("p", vec![claim("c", vec![selective])])]);
    let (fault, count) = reasons(&plan).pop_first().unwrap();
    assert!(
        matches!(&fault, Reason::SelectorError { message } if message.contains("generation")),
        "{fault:?}"
    );
    assert_eq!(count, (1, 1));
}

#[test]
fn search_beyond_step_budget_is_undecided() {
    // Each GPU is in a group of its own and all are different: no symmetry applies, and no two
    // share an attribute value.
    let odd = |i: usize| {
        gpu(&format!("gpu-{i}"), &format!("{}Gi", 80 + i)).with("group", Attribute::Int(i as i64))
    };
    let cluster = Cluster::new().node("node-a", (0..16).map(odd).collect());
    let mut hopeless =
        claim("c", (0..6).map(|i| request(&format!("r{i}"), 1, &[("memory", "1Gi")])).collect());
    hopeless.constraints.push(tessera_allocator::model::Constraint {
        requests: Vec::new(),
        kind: tessera_allocator::model::ConstraintKind::Distinct(
            "gpu.tessera.dev/group".to_owned(),
        ),
    });
    hopeless.constraints.push(matching("gpu.tessera.dev/none"));
    hopeless.constraints.swap(0, 1);
    hopeless.constraints[0].requests = vec!["r5".to_owned()];
    let settings = PlanSettings { steps_per_pod: 1000, ..PlanSettings::default() };
    let plan = plan(&cluster.0, &[pod("p", vec![hopeless])], settings);
    assert_eq!(*plan.refusals[0].cause, RefusalCause::BudgetExceeded);
    assert_eq!(plan.steps, 1000);
}

#[test]
fn interchangeable_gpus_are_not_permuted() {
    let cluster =
        Cluster::new().node("node-a", (0..8).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect());
    // Nine of eight GPUs: upstream would try every combination.
    let plan = decide(&cluster, &[pod("p", vec![claim("c", vec![request("gpu", 9, &[])])])]);
    assert_eq!(plan.decisions, []);
    assert!(plan.steps < 100, "{} steps", plan.steps);
}

#[test]
fn incomplete_pool_is_not_used() {
    let mut cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let old = cluster.0.slices["node-a"].clone();
    let mut newer = slice("node-a", vec![gpu("gpu-1", "80Gi")]);
    (newer.generation, newer.slice_count, newer.name) = (2, 2, "newer".to_owned());
    cluster.0.slices.insert("newer".to_owned(), Arc::new(newer));
    let plan = decide(&cluster, &[share_pod("p", "1Gi", "0")]);
    assert_eq!(reasons(&plan).into_keys().collect::<Vec<_>>(), [Reason::PoolIncomplete]);
    assert_eq!(old.generation, 1);
}

#[test]
fn constraint_applies_only_to_named_alternative() {
    let switch = |name: &str, switch: i64| gpu(name, "80Gi").with("switch", Attribute::Int(switch));
    let cluster = Cluster::new().node("node-a", vec![switch("gpu-0", 0), switch("gpu-1", 1)]);
    let ask = |names: &[&str]| {
        let requests = vec![first_available(
            "pair",
            vec![request("close", 2, &[]), request("apart", 2, &[("memory", "1Gi")])],
        )];
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let constraint = Constraint { requests: names, ..matching("gpu.tessera.dev/switch") };
        Claim { constraints: vec![constraint], ..claim("c", requests) }
    };
    let chosen = |names: &[&str]| -> Option<String> {
        let plan = decide(&cluster, &[pod("p", vec![ask(names)])]);
        plan.decisions.first().map(|d| d.claims[0].results[0].request.to_string())
    };
    assert_eq!(chosen(&["pair/close"]).as_deref(), Some("pair/apart"));
    assert_eq!(chosen(&["pair"]), None);
}

#[test]
fn capacity_without_domain_belongs_to_its_driver() {
    let mut cluster = Cluster::new().node("node-0", vec![gpu("gpu-0", "80Gi")]);
    let mut other = slice("node-0", vec![gpu("gpu-0", "80Gi")]);
    other.name = "other".to_owned();
    other.pool.driver = tessera_api::names::DriverName::new("a.example.com").unwrap();
    cluster.0.slices.insert("other".to_owned(), std::sync::Arc::new(other));
    cluster.class("of-ours", &["'memory' in device.capacity['gpu.tessera.dev']"]);
    let mut request = request("gpu", 1, &[]);
    request.alternatives[0].class =
        Some(tessera_api::names::DeviceClassName::new("of-ours").unwrap());
    let plan =
        plan(&cluster.0, &[pod("p", vec![claim("c", vec![request])])], PlanSettings::default());
    assert_eq!(plan.decisions.len(), 1, "{:?}", plan.refusals);
}

#[test]
fn too_few_available_devices_are_reported_by_node() {
    let gpus = |count: usize| (0..count).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    let mut cluster = Cluster::new().node("node-a", gpus(8)).node("node-b", gpus(4));
    cluster.use_share("node-a", "gpu-0", "76Gi", "0");
    let text = |requests| {
        let waiting = decide(&cluster, &[pod("p", vec![claim("c", requests)])]);
        let RefusalCause::NoFit(explanation) = &*waiting.refusals[0].cause else {
            panic!("{:?}", waiting.refusals)
        };
        explanation.render(1024)
    };
    assert_eq!(
        text(vec![request("gpu", 8, &[])]),
        "11/12 GPUs available: only 7 of 8 requested GPUs are available on node-a, \
         1 insufficient memory (76Gi short)"
    );
    assert_eq!(
        text(vec![request("gpu", 9, &[("memory", "1Gi")])]),
        "12/12 GPUs available: only 8 of 9 requested GPUs are available on node-a"
    );
    let two = vec![request("a", 5, &[]), request("b", 4, &[])];
    assert_eq!(
        text(two),
        "11/12 GPUs available: 7 available but not in the requested combination, only 4 of 5 \
         requested GPUs are available on node-b, 1 insufficient memory (76Gi short)"
    );
}

#[test]
fn nearest_miss_is_the_node_that_lacks_least() {
    let gpus = |count: usize| (0..count).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    let mut cluster =
        Cluster::new().node("node-a", gpus(2)).node("node-b", gpus(3)).node("node-c", gpus(1));
    cluster.use_share("node-a", "gpu-0", "41Gi", "0");
    for (device, memory) in [("gpu-0", "80Gi"), ("gpu-1", "50Gi")] {
        cluster.use_share("node-b", device, memory, "0");
    }
    let nearest = |cluster: &Cluster, count| {
        let wanted = vec![request("gpu", count, &[("memory", "40Gi")])];
        let waiting = decide(cluster, &[pod("p", vec![claim("c", wanted)])]);
        let RefusalCause::NoFit(explanation) = &*waiting.refusals[0].cause else {
            panic!("{:?}", waiting.refusals)
        };
        explanation.nearest_clause()
    };
    let of_two = nearest(&cluster, 2).unwrap();
    assert_eq!(of_two, "the next GPU on node-a: insufficient memory (1Gi short)");
    let of_three = nearest(&cluster, 3).unwrap();
    assert_eq!(
        of_three,
        "closest is node-b with 1 of 3 GPUs; the next GPU there: insufficient memory (40Gi short)"
    );
    assert_eq!(nearest(&cluster, 4), None, "no node has 4 devices");
    for device in ["node-a/gpu-1", "node-b/gpu-2", "node-c/gpu-0"] {
        let (node, device) = device.split_once('/').unwrap();
        cluster.use_share(node, device, "60Gi", "0");
    }
    assert_eq!(nearest(&cluster, 1).unwrap(), "closest is node-a: insufficient memory (1Gi short)");
}

#[test]
fn every_request_takes_a_share_of_its_gpu() {
    let mut limited = gpu("gpu-0", "80Gi");
    let shares = limited.capacity.get("cores").unwrap().clone();
    let one = || Some(quantity("1"));
    let range = tessera_allocator::model::ValidRange { min: one(), max: None, step: one() };
    let policy = shares.policy.map(|policy| tessera_allocator::model::RequestPolicy {
        default: one(),
        valid_range: Some(range),
        ..policy
    });
    let shares = tessera_allocator::model::Capacity { value: quantity("3"), policy };
    Arc::make_mut(&mut limited.capacity).insert("shares".to_owned(), shares);
    let cluster = Cluster::new().node("node-a", vec![limited]);
    let pods: Vec<_> = (0..4).map(|i| share_pod(&format!("p{i}"), "1Mi", "0")).collect();
    let plan = decide(&cluster, &pods);
    assert_eq!(plan.decisions.len(), 3);
    assert_eq!(reasons(&plan), BTreeMap::from([(short_of("shares"), (1, 1))]));
}
