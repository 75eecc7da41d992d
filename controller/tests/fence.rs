//! The leader restores DeviceTaintRules of the fence.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use std::time::Duration;

use fake_api::FakeApi;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tessera_controller::fence::{FenceRestorer, FenceRule, file};
use tessera_controller::leadership::Tenure;
use tessera_controller::metrics::Metrics;

const RULES: &str = "devicetaintrules";
const POLICIES: &str = "validatingadmissionpolicies";
const NAME: &str = "tessera-fence";

fn rule() -> Value {
    let taint = json!({"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"});
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule",
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/managed-by": "Helm"}},
        "spec": {"deviceSelector": {"driver": "gpu.tessera.dev"}, "taint": taint},
    })
}

/// A cluster with the chart: the policy, and the rule unless it is missing.
fn cluster(with_rule: bool) -> FakeApi {
    let api = FakeApi::new();
    api.put(POLICIES, json!({"metadata": {"name": "tessera-fence-rule", "uid": "policy"}}));
    if with_rule {
        let mut stored = rule();
        stored["metadata"]["uid"] = "first".into();
        stored["spec"]["taint"]["timeAdded"] = "2026-11-27T00:00:00Z".into();
        api.put(RULES, stored);
    }
    api
}

fn keep(api: &FakeApi, tenure: Tenure) -> Metrics {
    keep_rule(api, rule(), tenure)
}

fn keep_rule(api: &FakeApi, rule: Value, tenure: Tenure) -> Metrics {
    let metrics = Metrics::new(&mut Registry::default());
    let wanted = vec![FenceRule::new(serde_json::from_value(rule).unwrap()).unwrap()];
    let restorer = FenceRestorer::new(&api.client(), wanted, "replica", metrics.clone());
    tokio::spawn(restorer.during(tenure).run());
    metrics
}

/// Returns when the restorer has nothing to do but wait: a paused clock advances only then.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(60)).await;
}

/// Waits for an event about the rule, and returns its text.
async fn event(api: &FakeApi, number: usize) -> String {
    let events = api.until("an event", |api| {
        let events = api.list("events");
        (events.len() >= number).then_some(events)
    });
    let newest = events.await.pop().unwrap();
    assert_eq!(newest["regarding"]["kind"], "DeviceTaintRule");
    assert_eq!((&newest["reason"], &newest["type"]), (&json!("FenceRestored"), &json!("Warning")));
    newest["note"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn deleted_rule_is_restored_as_the_chart_has_it() {
    let api = cluster(true);
    let metrics = keep(&api, Tenure::endless());
    settle().await;
    api.delete(RULES, "", NAME);
    let restored = api.until("the rule", |api| api.get(RULES, "", NAME)).await;
    assert_eq!(restored["spec"], rule()["spec"]);
    assert_eq!(restored["metadata"]["labels"], rule()["metadata"]["labels"], "helm's own");
    let owner = &restored["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("ValidatingAdmissionPolicy"), &json!("policy"))
    );
    let note = event(&api, 1).await;
    assert!(note.contains("did not exist") && note.contains("mode: stock"), "{note}");
    assert_eq!(metrics.fence_restores.get(), 1);

    // Again, also while the watch still reports the deletion before.
    api.delete(RULES, "", NAME);
    api.until("the rule", |api| api.get(RULES, "", NAME)).await;
    event(&api, 2).await;
    assert_eq!(metrics.fence_restores.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn changed_rule_gets_its_content_back() {
    let api = cluster(true);
    keep(&api, Tenure::endless());
    let edits: [(&str, Value); 3] = [
        ("/spec/taint/effect", json!("None")),
        ("/spec/deviceSelector/pool", json!("node-a")),
        ("/spec/deviceSelector", Value::Null),
    ];
    for (number, (path, value)) in edits.into_iter().enumerate() {
        let mut edited = api.get(RULES, "", NAME).unwrap();
        edited["metadata"]["annotations"] = json!({"team": "a"});
        let (parent, field) = path.rsplit_once('/').unwrap();
        edited.pointer_mut(parent).unwrap()[field] = value;
        api.put(RULES, edited);
        let is_right = |rule: &Value| {
            rule["spec"]["taint"]["effect"] == "NoSchedule"
                && rule["spec"]["deviceSelector"] == json!({"driver": "gpu.tessera.dev"})
        };
        let read = |api: &FakeApi| api.get(RULES, "", NAME).filter(is_right);
        let restored = api.until(path, read).await;
        assert_eq!(restored["metadata"]["annotations"], json!({"team": "a"}), "metadata stays");
        let note = event(&api, number + 1).await;
        assert!(note.contains("another content"), "{note}");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_for_a_rule_that_is_right() {
    let api = cluster(true);
    let metrics = keep(&api, Tenure::endless());
    let mut labelled = api.get(RULES, "", NAME).unwrap();
    labelled["metadata"]["labels"]["team"] = "a".into();
    api.put(RULES, labelled);
    api.put(RULES, json!({"metadata": {"name": "another", "uid": "x"}, "spec": rule()["spec"]}));
    api.delete(RULES, "", "another");
    // A change that is noticed comes after those that are not.
    api.delete(RULES, "", NAME);
    event(&api, 1).await;
    let writes = api.writes();
    let to_rules: Vec<_> = writes.iter().filter(|write| write.path.starts_with(RULES)).collect();
    assert_eq!(to_rules.len(), 1, "{to_rules:?}");
    assert_eq!(metrics.fence_restores.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_is_not_restored_without_its_policy() {
    let api = cluster(true);
    keep(&api, Tenure::endless());
    settle().await;
    // The chart is changed to mode stock.
    api.delete(POLICIES, "", "tessera-fence-rule");
    api.delete(RULES, "", NAME);
    settle().await;
    assert_eq!(api.get(RULES, "", NAME), None);
    assert!(api.writes().is_empty(), "{:?}", api.writes());
    api.put(POLICIES, json!({"metadata": {"name": "tessera-fence-rule", "uid": "second"}}));
    let restored = api.until("the rule", |api| api.get(RULES, "", NAME)).await;
    assert_eq!(restored["metadata"]["ownerReferences"][0]["uid"], "second");
}

#[tokio::test(start_paused = true)]
async fn rule_of_another_driver_has_its_own_policy() {
    let api = cluster(true);
    let name = "tessera-fence.dra.net";
    let mut other = rule();
    other["metadata"]["name"] = name.into();
    other["spec"]["deviceSelector"]["driver"] = "dra.net".into();
    keep_rule(&api, other, Tenure::endless());
    settle().await;
    assert_eq!(api.get(RULES, "", name), None, "the chart manages the driver no longer");
    let policy = json!({"metadata": {"name": "tessera-fence-rule.dra.net", "uid": "own"}});
    api.put(POLICIES, policy);
    let restored = api.until("the rule", |api| api.get(RULES, "", name)).await;
    assert_eq!(restored["metadata"]["ownerReferences"][0]["uid"], "own");
}

#[tokio::test(start_paused = true)]
async fn installation_has_time_to_create_the_rule() {
    let api = cluster(false);
    let started = tokio::time::Instant::now();
    let metrics = keep(&api, Tenure::endless());
    let restored = api.until("the rule", |api| api.get(RULES, "", NAME)).await;
    assert!(started.elapsed() >= Duration::from_secs(5));
    assert_eq!(restored["spec"], rule()["spec"]);
    event(&api, 1).await;
    assert_eq!(metrics.fence_restores.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn failed_writes_are_repeated() {
    let api = cluster(true);
    let mut failures = 3;
    api.fault(move |_, request| {
        let fails = request.path == RULES && failures > 0;
        failures -= i32::from(fails);
        fails.then(|| fake_api::failure(500, "InternalError"))
    });
    let metrics = keep(&api, Tenure::endless());
    settle().await;
    api.delete(RULES, "", NAME);
    api.until("the rule", |api| api.get(RULES, "", NAME)).await;
    event(&api, 1).await;
    assert_eq!(metrics.fence_restores.get(), 1);
}

#[test]
fn file_of_rules_names_what_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rules.yaml");
    let read = |content: &Value| {
        std::fs::write(&path, content.to_string()).unwrap();
        file::read(&path).map_err(|error| error.to_string())
    };
    assert_eq!(read(&json!([rule()])).unwrap()[0].name(), NAME);
    let mut of_one_node = rule();
    of_one_node["spec"]["deviceSelector"]["pool"] = "node-a".into();
    let error = read(&json!([rule(), of_one_node])).unwrap_err();
    assert!(error.contains("[1] must have metadata.name, spec.deviceSelector"), "{error}");
    assert!(read(&rule()).unwrap_err().contains("--fence-rules"));
    let missing = file::read(&directory.path().join("none")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read --fence-rules"), "{missing}");
}
