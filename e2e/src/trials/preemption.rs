//! A pod whose claim is where a less important pod is in the way: kube-scheduler evicts that one,
//! and the claim stays there.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE, from_template};
use super::refused_node::{first_choice, on_node, with_port};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

const CLASSES: [(&str, i32); 2] = [("e2e-unimportant", 10), ("e2e-important", 1000)];

pub(super) async fn stays(bench: Bench) -> TrialOutcome {
    let classes: Api<PriorityClass> = Api::all(bench.client.clone());
    for (name, value) in CLASSES {
        let class = json!({"metadata": {"name": name}, "value": value});
        match classes.create(&PostParams::default(), &serde_json::from_value(class)?).await {
            Ok(_) => {}
            // Of an interrupted run.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(error.into()),
        }
    }
    let outcome = overcommit::never_during(&bench, preempts(&bench)).await;
    for (name, _) in CLASSES {
        classes.delete(name, &DeleteParams::default()).await?;
    }
    outcome
}

fn of_class(mut pod: Value, class: &str) -> Value {
    pod["spec"]["priorityClassName"] = class.into();
    pod
}

async fn preempts(bench: &Bench) -> TrialOutcome {
    bench.template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    let node = first_choice(bench, "share").await?;
    let [(unimportant, _), (important, _)] = CLASSES;
    let victim = of_class(with_port(from_template("victim", "share")), unimportant);
    bench.create(on_node(victim, &node)).await?;
    bench.holds("victim").await?;
    tokio::select! {
        moved = moves(bench, "important", &node) => { moved?; }
        placed = async {
            bench.create(of_class(with_port(from_template("important", "share")), important)).await?;
            placement::together(bench, "important", "important").await
        } => { placed?; }
    }
    let victim = bench.pods().get_opt("victim").await?;
    let evicted = victim.as_ref().is_none_or(is_evicted);
    anyhow::ensure!(
        evicted,
        "the victim is still there: {}",
        json!(victim.map(|victim| victim.status))
    );
    bench.delete(&["important".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

fn is_evicted(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Ends, with an error, when the pod's claim is allocated on another node. Others have room for it.
async fn moves(bench: &Bench, pod: &str, node: &str) -> anyhow::Result<()> {
    let judge = |claims: &[ResourceClaim]| {
        let elsewhere = claims.iter().find(|claim| {
            placement::is_of(claim, pod)
                && holds_device(claim)
                && placement::node_of(claim) != Some(node)
        });
        match elsewhere {
            Some(claim) => Verdict::<()>::Hopeless(json!(claim.status).to_string()),
            None => Verdict::NotYet("it is not anywhere else".into()),
        }
    };
    let what = format!("the claim of {pod} to stay on {node}, where preemption makes room");
    Ok(wait::until(bench.claims(), Default::default(), &what, PATIENCE, judge).await?)
}
