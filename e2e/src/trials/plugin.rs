//! Trials of `kubectl tessera`. Its simulation predicts the controller's allocations, its
//! explanations equal the controller's events, and the ClusterRoles for its users are enough.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_api::config::{API_VERSION, KIND};

use super::placement::{wait_allocated, wait_event_reason};
use super::test_bed::{TestBed, from_template};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, DRIVER_LABEL};
use crate::plugin::{Plugin, PluginOutput};
use crate::runner::Outcome;
use crate::wait::{self, CheckResult};

/// Time limit for a binding to be in force.
const IN_FORCE: Duration = Duration::from_secs(60);

pub(super) async fn compare_with_controller(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("h100", 2).await?;
    let plugin = test_bed.plugin()?.clone();
    // Binpack, because other policies use the controller's demand forecast, which the plugin lacks.
    let placement = json!({"node": "Binpack", "device": "Binpack"});
    let parameters = json!({"apiVersion": API_VERSION, "kind": KIND, "placement": placement});
    let share = json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": "30Gi", "cores": "30"}}});
    test_bed
        .create_template_with(
            "share",
            json!({
                "requests": [{"name": "gpu", "exactly": share}],
                "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
            }),
        )
        .await?;
    check_simulation(&test_bed, &plugin).await?;
    check_tree(&test_bed, &plugin).await?;
    check_usage(&test_bed, &plugin).await?;
    check_explanation(&test_bed, &plugin).await?;
    check_diagnosis(&test_bed, &plugin).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Each ClusterRole for users of the plugin permits to read all that the plugin reads.
pub(super) async fn read_by_roles(test_bed: TestBed) -> TrialOutcome {
    let bindings: Api<ClusterRoleBinding> = Api::all(test_bed.client.clone());
    for role in ["tessera-viewer", "tessera-operator"] {
        let user = format!("e2e-{role}");
        let binding = json!({
            "metadata": {"name": user},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        });
        // Left by an interrupted run.
        let _ = bindings.delete(&user, &DeleteParams::default()).await;
        bindings.create(&PostParams::default(), &serde_json::from_value(binding)?).await?;
        let outcome = wait_readable(test_bed.plugin()?, &user).await;
        bindings.delete(&user, &DeleteParams::default()).await?;
        outcome?;
    }
    Ok(Outcome::Passed(vec![]))
}

/// Waits until the user may read all: a binding is in force after a moment.
async fn wait_readable(plugin: &Plugin, user: &str) -> anyhow::Result<()> {
    let directory = TempDir::new()?;
    let plugin = plugin.as_user(user, directory.path())?;
    let is_readable = async || {
        let snapshot: Value = match plugin.text(&["snapshot"], "").await {
            Ok(snapshot) => serde_json::from_str(&snapshot)?,
            Err(error) => return Ok(CheckResult::Pending(format!("{error:#}"))),
        };
        let not_read = snapshot["notRead"].as_array().context("no `notRead`")?;
        let is_permitted = not_read.iter().all(|kind| kind["because"] != "not permitted");
        Ok(CheckResult::done_if(is_permitted, || json!(not_read).to_string()))
    };
    wait::poll(&format!("{user} to read all"), IN_FORCE, is_readable).await
}

/// Checks that the diagnosis of a cluster that works has no errors, and names a pod of an extended
/// resource that kube-scheduler may not serve.
async fn check_diagnosis(test_bed: &TestBed, plugin: &Plugin) -> anyhow::Result<()> {
    let mut pod = from_template("extended", "share");
    pod["spec"]["resourceClaims"] = Value::Null;
    let limits = json!({format!("deviceclass.resource.kubernetes.io/{DRIVER}"): "1"});
    pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
    test_bed.create(pod).await?;
    let PluginOutput { code, result } = plugin.call(&["doctor"], "").await?;
    let problems = result["problems"].as_array().cloned().unwrap_or_default();
    let errors: Vec<_> = problems.iter().filter(|p| p["severity"] == "Error").collect();
    anyhow::ensure!(errors.is_empty(), "errors in a cluster that works: {errors:?}");
    let name = json!(format!("pod {}/extended", test_bed.namespace()));
    let is_named = |problem: &Value| {
        let objects = problem["objects"].as_array();
        problem["code"] == "ExtendedResource" && objects.is_some_and(|all| all.contains(&name))
    };
    anyhow::ensure!(code == 2 && problems.iter().any(is_named), "{code}: {result}");
    test_bed.delete(&["extended"]).await
}

const PODS: [&str; 3] = ["one", "two", "three"];

/// Checks that pods are placed as the simulation predicts.
async fn check_simulation(test_bed: &TestBed, plugin: &Plugin) -> anyhow::Result<()> {
    let documents = PODS.map(|pod| {
        let mut object = from_template(pod, "share");
        object["apiVersion"] = "v1".into();
        object["kind"] = "Pod".into();
        object.to_string()
    });
    let simulate = ["simulate", "-f", "-", "-n", test_bed.namespace()];
    let PluginOutput { code, result } = plugin.call(&simulate, &documents.join("\n---\n")).await?;
    anyhow::ensure!(code == 0, "simulate exits with code {code}: {result}");
    for (number, pod) in PODS.into_iter().enumerate() {
        let predicted = &result["pods"][number];
        anyhow::ensure!(
            predicted["pod"] == *pod && predicted["result"] == "Fits",
            "unexpected prediction: {predicted}"
        );
        test_bed.create_holder(pod, "share").await?;
        let claim = wait_allocated(test_bed, pod, "allocated", |_| true).await?;
        let results = &json!(claim.status)["allocation"]["devices"]["results"];
        let device = &predicted["claims"][0]["devices"][0];
        anyhow::ensure!(
            device["device"] == results[0]["device"] && predicted["node"] == results[0]["pool"],
            "pod {pod}: predicted {predicted}, allocated {results}"
        );
    }
    Ok(())
}

/// Checks that `tree` and `explain` show the allocated shares.
async fn check_tree(test_bed: &TestBed, plugin: &Plugin) -> anyhow::Result<()> {
    for pod in PODS {
        test_bed.wait_running(pod).await?;
        let PluginOutput { code, result } =
            plugin.call(&["explain", "pod", pod, "-n", test_bed.namespace()], "").await?;
        anyhow::ensure!(
            code == 0 && result["state"] == "Bound",
            "pod {pod}: exit code {code}, {result}"
        );
    }
    let PluginOutput { result, .. } =
        plugin.call(&["tree", "-n", test_bed.namespace()], "").await?;
    let shares = shares(&result);
    let mut holders: Vec<&str> =
        shares.iter().filter_map(|share| share["pods"][0].as_str()).collect();
    holders.sort_unstable();
    anyhow::ensure!(holders == ["one", "three", "two"], "unexpected tree: {result}");
    anyhow::ensure!(
        shares.iter().all(|share| share["memory"] == "30Gi"),
        "unexpected tree: {result}"
    );
    Ok(())
}

/// Returns the shares of a tree.
fn shares(tree: &Value) -> Vec<&Value> {
    let gpus =
        tree["nodes"].as_array().into_iter().flatten().flat_map(|node| node["gpus"].as_array());
    gpus.flatten().filter_map(|gpu| gpu["shares"].as_array()).flatten().collect()
}

/// Checks that `tree --usage` shows the use of every share, which it reads from the drivers' pods.
/// The simulated cluster runs drivers outside of pods: the use is missing there.
async fn check_usage(test_bed: &TestBed, plugin: &Plugin) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::all(test_bed.client.clone());
    let label = ListParams::default().labels(DRIVER_LABEL);
    let has_drivers = !pods.list(&label).await?.items.is_empty();
    let arguments = ["tree", "--usage", "-n", test_bed.namespace()];
    let PluginOutput { result, .. } = plugin.call(&arguments, "").await?;
    let shares = shares(&result);
    anyhow::ensure!(
        shares.len() == PODS.len()
            && shares.iter().all(|share| share["used"]["memory"].is_string() == has_drivers),
        "drivers in pods: {has_drivers}, unexpected use: {result}"
    );
    Ok(())
}

/// Checks that `explain` prints the message of a pending pod's event.
async fn check_explanation(test_bed: &TestBed, plugin: &Plugin) -> anyhow::Result<()> {
    test_bed.create_template("too-large", DRIVER, json!({"memory": "900Gi"})).await?;
    test_bed.create_holder("large", "too-large").await?;
    let event = wait_event_reason(test_bed, "large", "InsufficientDevices").await?;
    let PluginOutput { code, result } =
        plugin.call(&["explain", "pod", "large", "-n", test_bed.namespace()], "").await?;
    let message =
        result["claims"][0]["message"].as_str().context("no message in the explanation")?;
    anyhow::ensure!(
        code == 2 && message == event,
        "event message `{event}`, plugin exit code {code} and message `{message}`"
    );
    let findings = &result["findings"];
    anyhow::ensure!(*findings == json!([]), "unexpected findings: {findings}");
    Ok(())
}
