//! Stages of pods and holdings of claims.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use serde_json::{Value, json};
use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimName, ClaimUid, Namespace, PodName};
use tessera_index::{ClaimState, Index, PodStage, RepairAction};

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// An index with our class, and one of another driver.
fn index() -> Index {
    let mut index = Index::default();
    for (name, driver) in [("gpu.tessera.dev", "gpu.tessera.dev"), ("foreign", "example.com")] {
        let selector = json!({"cel": {"expression": format!("device.driver == '{driver}'")}});
        index
            .apply_class(read(
                json!({"metadata": {"name": name}, "spec": {"selectors": [selector]}}),
            ))
            .unwrap();
    }
    index
}

fn claim(index: &mut Index, name: &str, class: &str, change: impl FnOnce(&mut Value)) {
    let mut claim = json!({
        "metadata": {"namespace": "n", "name": name, "uid": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]}},
    });
    change(&mut claim);
    index.apply_claim(&Arc::new(read(claim))).unwrap();
}

fn allocate(claim: &mut Value) {
    claim["status"] = json!({"allocation": {"devices": {"results": [{
        "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": "gpu-0",
        "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77", "consumedCapacity": {"memory": "1Gi"},
    }]}}});
}

/// A pod that waits for a node.
fn pod(index: &mut Index, name: &str, claims: &[&str], change: impl FnOnce(&mut Value)) -> PodUid {
    let entries: Vec<Value> = claims
        .iter()
        .map(|claim| json!({"name": format!("entry-{claim}"), "resourceClaimName": claim}))
        .collect();
    let mut pod = json!({
        "metadata": {"namespace": "n", "name": name, "uid": format!("uid-{name}")},
        "spec": {"containers": [], "resourceClaims": entries},
    });
    change(&mut pod);
    index.apply_pod(&read(pod));
    PodUid::new(&format!("uid-{name}"))
}

fn states(index: &Index, pod: &PodUid) -> Vec<ClaimState> {
    index.claim_standings(pod).into_iter().map(|standing| standing.state).collect()
}

#[test]
fn claim_states_of_a_pod_are_reported() {
    let mut index = index();
    claim(&mut index, "ours", "gpu.tessera.dev", |_| {});
    claim(&mut index, "theirs", "foreign", |_| {});
    claim(&mut index, "going", "gpu.tessera.dev", |c| {
        c["metadata"]["deletionTimestamp"] = "2026-01-10T12:00:00Z".into()
    });
    claim(&mut index, "held", "gpu.tessera.dev", allocate);
    let pod = pod(&mut index, "p", &["ours", "theirs", "going", "held", "none"], |_| {});
    let states = states(&index, &pod);
    assert_eq!(states[..3], [ClaimState::Pending, ClaimState::Foreign, ClaimState::Deleting]);
    assert!(
        matches!(&states[3], ClaimState::Allocated(held) if held.results[0].device.device == "gpu-0")
    );
    assert_eq!(states[4], ClaimState::Missing);
    let entries: Vec<String> =
        index.claim_standings(&pod).into_iter().map(|standing| standing.entry).collect();
    assert_eq!(entries, ["entry-ours", "entry-theirs", "entry-going", "entry-held", "entry-none"]);
}

#[test]
fn template_claim_has_to_exist_and_belong_to_the_pod() {
    let mut index = index();
    let from_template = |pod: &mut Value| {
        pod["spec"]["resourceClaims"] = json!([
            {"name": "late", "resourceClaimTemplateName": "t"}, {"name": "gpu", "resourceClaimTemplateName": "t"},
        ]);
        pod["status"] =
            json!({"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu"}]});
    };
    claim(&mut index, "p-gpu", "gpu.tessera.dev", |_| {});
    let uid = pod(&mut index, "p", &[], from_template);
    assert_eq!(states(&index, &uid), [ClaimState::NotGenerated, ClaimState::ForeignOwner]);
    let owned = |claim: &mut Value| {
        claim["metadata"]["resourceVersion"] = "1".into();
        claim["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": true}]);
    };
    index.remove_claim(&read(
        json!({"metadata": {"namespace": "n", "name": "p-gpu", "uid": "p-gpu"}}),
    ));
    claim(&mut index, "p-gpu", "gpu.tessera.dev", owned);
    assert_eq!(states(&index, &uid), [ClaimState::NotGenerated, ClaimState::Pending]);
}

#[test]
fn pod_has_one_stage() {
    let mut index = index();
    let mut at = |name: &str, change: fn(&mut Value)| {
        let uid = pod(&mut index, name, &[], change);
        index.stage(&uid).unwrap()
    };
    assert_eq!(at("waits", |_| {}), PodStage::Waiting);
    assert_eq!(
        at("gated", |pod| pod["spec"]["schedulingGates"] = json!([{"name": "g"}])),
        PodStage::Gated
    );
    assert_eq!(
        at("going", |pod| pod["metadata"]["deletionTimestamp"] = "2026-01-10T12:00:00Z".into()),
        PodStage::Deleting
    );
    assert_eq!(at("ended", |pod| pod["status"] = json!({"phase": "Failed"})), PodStage::Ended);
    assert!(
        matches!(at("bound", |pod| pod["spec"]["nodeName"] = "node-a".into()), PodStage::Bound(node) if node == "node-a")
    );
}

#[test]
fn gated_pod_is_not_planned_but_can_be_queried() {
    let mut index = index();
    claim(&mut index, "c", "gpu.tessera.dev", |_| {});
    let gated =
        pod(&mut index, "p", &["c"], |pod| pod["spec"]["schedulingGates"] = json!([{"name": "g"}]));
    assert!(index.work().pending.is_empty());
    assert_eq!(index.pending(&gated).unwrap().unwrap().claims.len(), 1);
}

#[test]
fn holdings_name_pods_even_of_deleted_claims() {
    let mut index = index();
    claim(&mut index, "c", "gpu.tessera.dev", allocate);
    claim(&mut index, "unallocated", "gpu.tessera.dev", |_| {});
    pod(&mut index, "waits", &["c"], |_| {});
    pod(&mut index, "runs", &["c"], |pod| pod["spec"]["nodeName"] = "node-a".into());
    pod(&mut index, "ended", &["c"], |pod| pod["status"] = json!({"phase": "Succeeded"}));
    let held = |index: &Index| {
        let told: Vec<(String, Vec<String>, bool)> = index
            .holdings()
            .map(|h| (h.name.to_string(), h.pods.iter().map(ToString::to_string).collect(), h.gone))
            .collect();
        told
    };
    assert_eq!(
        held(&index),
        [("c".to_owned(), vec!["runs".to_owned(), "waits".to_owned()], false)]
    );
    index.remove_claim(&read(json!({"metadata": {"namespace": "n", "name": "c", "uid": "c"}})));
    assert_eq!(held(&index), [("c".to_owned(), vec!["runs".to_owned()], true)]);
}

#[test]
fn pods_and_claims_are_found_by_name() {
    let mut index = index();
    claim(&mut index, "c", "gpu.tessera.dev", |_| {});
    let uid = pod(&mut index, "p", &["c"], |_| {});
    let namespace = Namespace::new("n").unwrap();
    assert_eq!(index.pod_by_name(&namespace, &PodName::new("p").unwrap()), Some(&uid));
    assert_eq!(index.pod_by_name(&namespace, &PodName::new("q").unwrap()), None);
    assert_eq!(
        index.claim_by_name(&namespace, &ClaimName::new("c").unwrap()),
        Some(&ClaimUid::new("c").unwrap())
    );
}

#[test]
fn misplaced_claim_explains_its_repair() {
    let mut index = index();
    claim(&mut index, "c", "gpu.tessera.dev", |claim| {
        allocate(claim);
        claim["status"]["allocation"]["nodeSelector"] = json!({"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]},
        ]});
    });
    pod(&mut index, "p", &["c"], |pod| pod["spec"]["nodeName"] = "node-b".into());
    let [misplaced] = index.misplaced(&PodUid::new("uid-p")).try_into().unwrap();
    assert_eq!(misplaced.node.as_str(), "node-b");
    assert_eq!(misplaced.allocated.unwrap(), "node-a");
    assert_eq!(misplaced.repair_action, RepairAction::Deallocate);
}
