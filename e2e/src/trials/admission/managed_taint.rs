//! Policy on the managed taint: claims and templates must not tolerate it by name.

use serde_json::{Value, json};

use super::harness::{ADMINISTRATOR, Action, AdmissionHarness, EDITOR, all, claim};

const MESSAGE: &str = "must not tolerate";

/// Maximum numbers that the API allows: requests, alternatives per request, tolerations per
/// alternative.
const REQUESTS: usize = 32;
const ALTERNATIVES: usize = 8;
const TOLERATIONS: usize = 16;

pub(super) async fn check(harness: &AdmissionHarness) -> anyhow::Result<()> {
    let by_name = json!({"key": "gpu.tessera.dev/managed", "operator": "Exists"});
    let for_scheduling =
        json!({"key": "gpu.tessera.dev/managed", "operator": "Exists", "effect": "NoSchedule"});
    for toleration in [&by_name, &for_scheduling] {
        for (kind, object) in forms(toleration) {
            for by in [EDITOR, ADMINISTRATOR] {
                let what = format!("a toleration of the managed taint in a {kind}");
                harness
                    .expect_denied(
                        by,
                        &what,
                        MESSAGE,
                        all(resource(&object)),
                        Action::Create(object.clone()),
                    )
                    .await;
            }
        }
    }
    let allowed = [
        ("without a key", json!({"operator": "Exists"})),
        (
            "of another effect of the managed taint",
            json!({"key": "gpu.tessera.dev/managed", "operator": "Exists", "effect": "NoExecute"}),
        ),
        (
            "of another driver's taint",
            json!({"key": "gpu.example.com/managed", "operator": "Exists"}),
        ),
    ];
    for (which, toleration) in allowed {
        for (kind, object) in forms(&toleration) {
            let what = format!("a toleration {which} in a {kind}");
            harness.expect_creatable(EDITOR, &what, resource(&object), object.clone()).await;
        }
    }
    largest(harness, &by_name).await;
    Ok(())
}

fn resource(object: &Value) -> &'static str {
    if object["kind"] == "ResourceClaim" { "resourceclaims" } else { "resourceclaimtemplates" }
}

/// Returns a claim, a claim with alternatives, and a template, each with that toleration.
fn forms(toleration: &Value) -> [(&'static str, Value); 3] {
    let plain = claim("test", json!({"tolerations": [toleration]}));
    let alternative =
        json!({"name": "a", "deviceClassName": "gpu.tessera.dev", "tolerations": [toleration]});
    let other = json!({"name": "b", "deviceClassName": "gpu.tessera.dev"});
    let mut first = claim("test", json!({}));
    first["spec"]["devices"]["requests"] =
        json!([{"name": "gpu", "firstAvailable": [other, alternative]}]);
    let template = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "test"},
        "spec": {"spec": plain["spec"]},
    });
    [("claim", plain), ("claim of alternatives", first), ("template", template)]
}

/// The cost of a policy has a limit, above which every request would be denied.
async fn largest(harness: &AdmissionHarness, forbidden: &Value) {
    let allowed = json!({"key": "gpu.example.com/managed", "operator": "Exists"});
    let alternatives: Vec<_> = (0..ALTERNATIVES)
        .map(|number| json!({"name": format!("a-{number}"), "deviceClassName": "gpu.tessera.dev", "tolerations": vec![&allowed; TOLERATIONS]}))
        .collect();
    let requests: Vec<_> = (0..REQUESTS)
        .map(|number| json!({"name": format!("r-{number}"), "firstAvailable": alternatives}))
        .collect();
    let mut largest = claim("test", json!({}));
    largest["spec"]["devices"]["requests"] = requests.into();
    harness
        .expect_creatable(EDITOR, "the largest possible claim", "resourceclaims", largest.clone())
        .await;
    let last = &mut largest["spec"]["devices"]["requests"][REQUESTS - 1]["firstAvailable"]
        [ALTERNATIVES - 1];
    last["tolerations"][TOLERATIONS - 1] = forbidden.clone();
    let what = "a toleration of the managed taint at the end of the largest claim";
    harness
        .expect_denied(EDITOR, what, MESSAGE, all("resourceclaims"), Action::Create(largest))
        .await;
}
