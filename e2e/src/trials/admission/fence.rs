//! No claim and no template tolerates the fence by its name.

use serde_json::{Value, json};

use super::desk::{ADMINISTRATOR, Ask, Desk, EDITOR, all, claim};

const SAYS: &str = "must not tolerate";

/// As many as the API allows: requests, alternatives of one, tolerations of one.
const REQUESTS: usize = 32;
const ALTERNATIVES: usize = 8;
const TOLERATIONS: usize = 16;

pub(super) async fn check(desk: &Desk) -> anyhow::Result<()> {
    let by_name = json!({"key": "gpu.tessera.dev/managed", "operator": "Exists"});
    let for_scheduling =
        json!({"key": "gpu.tessera.dev/managed", "operator": "Exists", "effect": "NoSchedule"});
    for fence in [&by_name, &for_scheduling] {
        for (kind, object) in forms(fence) {
            for by in [EDITOR, ADMINISTRATOR] {
                let what = format!("a toleration of the fence in a {kind}");
                desk.refused(by, &what, SAYS, all(resource(&object)), Ask::Create(object.clone()))
                    .await;
            }
        }
    }
    let harmless = [
        ("without a key", json!({"operator": "Exists"})),
        (
            "of the fence's other effect",
            json!({"key": "gpu.tessera.dev/managed", "operator": "Exists", "effect": "NoExecute"}),
        ),
        (
            "of another driver's taint",
            json!({"key": "gpu.example.com/managed", "operator": "Exists"}),
        ),
    ];
    for (which, toleration) in harmless {
        for (kind, object) in forms(&toleration) {
            let what = format!("a toleration {which} in a {kind}");
            desk.creatable(EDITOR, &what, resource(&object), object.clone()).await;
        }
    }
    largest(desk, &by_name).await;
    Ok(())
}

fn resource(object: &Value) -> &'static str {
    if object["kind"] == "ResourceClaim" { "resourceclaims" } else { "resourceclaimtemplates" }
}

/// A claim, one with alternatives, and a template, each with that toleration.
fn forms(toleration: &Value) -> [(&'static str, Value); 3] {
    let plain = claim("try", json!({"tolerations": [toleration]}));
    let alternative =
        json!({"name": "a", "deviceClassName": "gpu.tessera.dev", "tolerations": [toleration]});
    let other = json!({"name": "b", "deviceClassName": "gpu.tessera.dev"});
    let mut first = claim("try", json!({}));
    first["spec"]["devices"]["requests"] =
        json!([{"name": "gpu", "firstAvailable": [other, alternative]}]);
    let template = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "try"},
        "spec": {"spec": plain["spec"]},
    });
    [("claim", plain), ("claim of alternatives", first), ("template", template)]
}

/// The cost of a policy has a limit; beyond it everything would be refused.
async fn largest(desk: &Desk, fence: &Value) {
    let harmless = json!({"key": "gpu.example.com/managed", "operator": "Exists"});
    let alternatives: Vec<_> = (0..ALTERNATIVES)
        .map(|number| json!({"name": format!("a-{number}"), "deviceClassName": "gpu.tessera.dev", "tolerations": vec![&harmless; TOLERATIONS]}))
        .collect();
    let requests: Vec<_> = (0..REQUESTS)
        .map(|number| json!({"name": format!("r-{number}"), "firstAvailable": alternatives}))
        .collect();
    let mut largest = claim("try", json!({}));
    largest["spec"]["devices"]["requests"] = requests.into();
    desk.creatable(EDITOR, "the largest claim there can be", "resourceclaims", largest.clone())
        .await;
    let last = &mut largest["spec"]["devices"]["requests"][REQUESTS - 1]["firstAvailable"]
        [ALTERNATIVES - 1];
    last["tolerations"][TOLERATIONS - 1] = fence.clone();
    let what = "a toleration of the fence at the end of the largest claim";
    desk.refused(EDITOR, what, SAYS, all("resourceclaims"), Ask::Create(largest)).await;
}
