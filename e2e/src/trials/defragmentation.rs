//! Trial of `kubectl tessera defrag`: four shares, one on each GPU of a node, and a pod that needs
//! a whole GPU.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceTaintRule;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use tessera_api::config::{API_VERSION, KIND};

use super::placement::wait_event_reason;
use super::test_bed::{A100, Skip, TestBed, phase, replica_set, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const GPUS: usize = 4;

pub(super) async fn moves_a_share(test_bed: TestBed) -> TrialOutcome {
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client.clone());
    match rules.list(&ListParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            return Err(Skip("the cluster has no DeviceTaintRules".into()).into());
        }
        listed => drop(listed?),
    }
    test_bed.node_with("a100", GPUS).await?;
    let spread = json!({"node": "Spread", "device": "Spread"});
    let capacity = json!({"requests": {"memory": "5Gi"}});
    create_template(&test_bed, "share", json!({"placement": spread}), Some(capacity)).await?;
    create_template(&test_bed, "whole", json!({"exclusive": true}), None).await?;
    let replica_sets: Api<ReplicaSet> =
        Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    replica_sets
        .create(
            &PostParams::default(),
            &serde_json::from_value(replica_set("small", GPUS, "share"))?,
        )
        .await?;
    wait_small(&test_bed).await?;
    test_bed.create_holder("whole", "whole").await?;
    wait_event_reason(&test_bed, "whole", "InsufficientDevices").await?;
    let plugin = test_bed.plugin()?;
    let namespace = test_bed.namespace().to_owned();
    let command = ["defrag", "pod", "whole", "--namespace", &namespace];
    let plan = plugin.call(&command, "").await?.result;
    anyhow::ensure!(plan["result"] == "FitsAfterMoves", "{plan}");
    anyhow::ensure!(plan["moves"].as_array().is_some_and(|moves| moves.len() == 1), "{plan}");
    let apply = [&command[..], &["--apply", "--timeout", "2m"]].concat();
    let applied = plugin.call(&apply, "").await?;
    anyhow::ensure!(applied.code == 0, "{}", applied.result);
    let whole = test_bed.wait_running("whole").await?;
    let whole = devices_of(&test_bed, &[whole]).await?;
    let small = devices_of(&test_bed, &wait_small(&test_bed).await?).await?;
    anyhow::ensure!(small.is_disjoint(&whole), "{small:?} and {whole:?}");
    anyhow::ensure!(rules.list(&ListParams::default()).await?.items.iter().all(is_no_cordon));
    replica_sets.delete("small", &DeleteParams::default()).await?;
    test_bed.delete(&["whole"]).await?;
    wait_all(test_bed.pods(), "the pods to be deleted", CheckResult::none_left).await?;
    Ok(Outcome::Passed(vec![]))
}

fn is_no_cordon(rule: &DeviceTaintRule) -> bool {
    rule.spec.taint.key != format!("{DRIVER}/cordoned")
}

async fn create_template(
    test_bed: &TestBed,
    name: &str,
    config: Value,
    capacity: Option<Value>,
) -> anyhow::Result<()> {
    let mut parameters = json!({"apiVersion": API_VERSION, "kind": KIND});
    for (field, value) in config.as_object().into_iter().flatten() {
        parameters[field] = value.clone();
    }
    let exactly = json!({"deviceClassName": A100, "capacity": capacity});
    let devices = json!({
        "requests": [{"name": "gpu", "exactly": exactly}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
    });
    test_bed.create_template_with(name, devices).await
}

/// Waits until all pods of the ReplicaSet run.
async fn wait_small(test_bed: &TestBed) -> anyhow::Result<Vec<Pod>> {
    let check = |pods: &[Pod]| {
        let is_small = |pod: &&Pod| pod.metadata.labels.is_some();
        let small: Vec<Pod> = pods.iter().filter(is_small).cloned().collect();
        let running = small.iter().filter(|pod| phase(pod) == "Running").count();
        match running == GPUS && small.len() == GPUS {
            true => CheckResult::Done(small),
            false => CheckResult::Pending(format!("{running} of {} run", small.len())),
        }
    };
    wait_all(test_bed.pods(), "all small pods to run", check).await
}

async fn devices_of(test_bed: &TestBed, pods: &[Pod]) -> anyhow::Result<BTreeSet<String>> {
    let mut devices = BTreeSet::new();
    for pod in pods {
        let claim = test_bed.claim_of(pod).await?;
        devices.extend(device_results(&claim).map(|result| result.device.clone()));
    }
    Ok(devices)
}
