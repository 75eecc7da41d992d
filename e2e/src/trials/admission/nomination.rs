//! Policy `tessera-nomination`: the controller writes `status.nominatedNodeName` of pods that wait
//! with claims, and nothing else of a pod.

use serde_json::{Value, json};

use super::harness::{ADMINISTRATOR, Action, AdmissionHarness, CONTROLLER, EDITOR, Target, all};

const POD: Target<'_> = Target("pods", "nominated", "");
const POD_STATUS: Target<'_> = Target("pods", "nominated", "status");
const CLAIMLESS: Target<'_> = Target("pods", "without-claims", "");
const CLAIMLESS_STATUS: Target<'_> = Target("pods", "without-claims", "status");

/// A pod that no scheduler considers.
fn gated(name: &str, claims: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "schedulingGates": [{"name": "example.com/never"}],
            "resourceClaims": claims,
            "containers": [{"name": "main", "image": "example.com/image"}],
        },
    })
}

fn nominate(node: Value) -> Action {
    Action::Merge(json!({"status": {"nominatedNodeName": node}}))
}

pub(super) async fn check(harness: &AdmissionHarness) {
    let claims = json!([{"name": "gpu", "resourceClaimName": "absent"}]);
    for pod in [gated("nominated", claims), gated("without-claims", json!([]))] {
        harness.expect_allowed(EDITOR, "a pod", all("pods"), Action::Create(pod)).await;
    }
    let node = || nominate("any".into());
    harness.expect_allowed(CONTROLLER, "a nomination", POD_STATUS, node()).await;
    let changes = [
        ("a phase", json!({"status": {"phase": "Failed"}})),
        ("a message beside it", json!({"status": {"nominatedNodeName": "b", "message": "m"}})),
        ("the end of the conditions", json!({"status": {"conditions": null}})),
        ("a label", json!({"metadata": {"labels": {"a": "b"}}})),
        ("an annotation", json!({"metadata": {"annotations": {"a": "b"}}})),
    ];
    for (what, change) in changes {
        let (message, change) = ("changes only status.nominatedNodeName", Action::Merge(change));
        harness.expect_denied(CONTROLLER, what, message, POD_STATUS, change).await;
    }
    harness.expect_allowed(CONTROLLER, "its end", POD_STATUS, nominate(Value::Null)).await;
    let message = "only for pods with resource claims";
    harness.expect_denied(CONTROLLER, "a nomination", message, CLAIMLESS_STATUS, node()).await;
    harness.expect_allowed(ADMINISTRATOR, "a nomination", CLAIMLESS_STATUS, node()).await;
    for pod in [POD, CLAIMLESS] {
        harness.expect_allowed(EDITOR, "deleting the pod", pod, Action::Delete).await;
    }
}
