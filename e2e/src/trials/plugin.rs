//! What `kubectl tessera` foretells comes to pass, and what it says is what the controller says.

use anyhow::Context as _;
use serde_json::{Value, json};
use tessera_api::config::{API_VERSION, KIND};

use super::bench::{Bench, from_template};
use super::placement::{allocated, told};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::plugin::{Answer, Plugin};
use crate::runner::Outcome;

pub(super) async fn told_truly(bench: Bench) -> TrialOutcome {
    bench.node_with("h100", 2).await?;
    let plugin = bench.plugin()?.clone();
    // The controller knows more of the requests to come than the plugin; of what is full both know
    // the same.
    let placement = json!({"node": "Binpack", "device": "Binpack"});
    let parameters = json!({"apiVersion": API_VERSION, "kind": KIND, "placement": placement});
    let share = json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": "30Gi", "cores": "30"}}});
    bench
        .template_of(
            "share",
            json!({
                "requests": [{"name": "gpu", "exactly": share}],
                "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
            }),
        )
        .await?;
    foretold(&bench, &plugin).await?;
    held(&bench, &plugin).await?;
    refused(&bench, &plugin).await?;
    Ok(Outcome::Held(vec![]))
}

const PODS: [&str; 3] = ["one", "two", "three"];

/// Pods are placed where the simulation has them.
async fn foretold(bench: &Bench, plugin: &Plugin) -> anyhow::Result<()> {
    let documents = PODS.map(|pod| {
        let mut object = from_template(pod, "share");
        object["apiVersion"] = "v1".into();
        object["kind"] = "Pod".into();
        object.to_string()
    });
    let simulate = ["simulate", "-f", "-", "-n", bench.namespace()];
    let Answer { code, result } = plugin.ask(&simulate, &documents.join("\n---\n")).await?;
    anyhow::ensure!(code == 0, "the simulation ends with {code}: {result}");
    for (number, pod) in PODS.into_iter().enumerate() {
        let foreseen = &result["pods"][number];
        anyhow::ensure!(
            foreseen["pod"] == *pod && foreseen["result"] == "Fits",
            "foreseen: {foreseen}"
        );
        bench.holder(pod, "share").await?;
        let claim = allocated(bench, pod, "allocated", |_| true).await?;
        let results = &json!(claim.status)["allocation"]["devices"]["results"];
        let device = &foreseen["claims"][0]["devices"][0];
        anyhow::ensure!(
            device["device"] == results[0]["device"] && foreseen["node"] == results[0]["pool"],
            "pod {pod}: foreseen {foreseen}, allocated {results}"
        );
    }
    Ok(())
}

/// The tree and the explanation show who holds what.
async fn held(bench: &Bench, plugin: &Plugin) -> anyhow::Result<()> {
    for pod in PODS {
        bench.holds(pod).await?;
        let Answer { code, result } =
            plugin.ask(&["explain", "pod", pod, "-n", bench.namespace()], "").await?;
        anyhow::ensure!(code == 0 && result["state"] == "Bound", "pod {pod}: {code}, {result}");
    }
    let Answer { result, .. } = plugin.ask(&["tree", "-n", bench.namespace()], "").await?;
    let gpus =
        result["nodes"].as_array().into_iter().flatten().flat_map(|node| node["gpus"].as_array());
    let shares: Vec<&Value> =
        gpus.flatten().filter_map(|gpu| gpu["shares"].as_array()).flatten().collect();
    let mut holders: Vec<&str> =
        shares.iter().filter_map(|share| share["pods"][0].as_str()).collect();
    holders.sort_unstable();
    anyhow::ensure!(holders == ["one", "three", "two"], "the tree has {result}");
    anyhow::ensure!(shares.iter().all(|share| share["memory"] == "30Gi"), "the tree has {result}");
    Ok(())
}

/// A pod that fits nowhere is told the same by its event.
async fn refused(bench: &Bench, plugin: &Plugin) -> anyhow::Result<()> {
    bench.template("too-large", DRIVER, json!({"memory": "900Gi"})).await?;
    bench.holder("large", "too-large").await?;
    let event = told(bench, "large", "InsufficientDevices").await?;
    let Answer { code, result } =
        plugin.ask(&["explain", "pod", "large", "-n", bench.namespace()], "").await?;
    let message = result["claims"][0]["message"].as_str().context("a message")?;
    anyhow::ensure!(
        code == 2 && message == event,
        "the event says `{event}`, the plugin {code} and `{message}`"
    );
    let findings = &result["findings"];
    anyhow::ensure!(*findings == json!([]), "the controller is at work: {findings}");
    Ok(())
}
