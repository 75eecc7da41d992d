//! Trial of a node that is shut down without a drain: its kubelet is gone, its containers still
//! run, and an administrator taints it as out of service, so that Kubernetes deletes its pods by
//! force. Their devices are free then, and the next pods get them once the node is back, after the
//! kubelet has ended the old containers.

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::refused_node::on_node;
use super::test_bed::{TestBed, from_template, wait_all, wait_deleted};
use super::{overcommit, residue};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Taint with which the pods of a node are deleted by force.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// Most of the memory of one GPU.
const MEMORY: &str = "50Gi";

pub(super) async fn frees_devices(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, lose_node(&test_bed)).await
}

async fn lose_node(test_bed: &TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let node = test_bed.node_with("h100", 2).await?;
    let inventory = test_bed.published_gpus().await?;
    let gpus = inventory.of_pool(&node).count();
    let names = |word: &str| (0..gpus).map(|number| format!("{word}-{number}")).collect::<Vec<_>>();
    let (lost, next) = (names("lost"), names("next"));
    test_bed.create_template("large", DRIVER, json!({"memory": MEMORY})).await?;
    for name in &lost {
        test_bed.create(on_node(from_template(name, "large"), &node)).await?;
    }
    for name in &lost {
        test_bed.wait_running(name).await?;
    }
    operations.run(&["stop", &node, "kubelet"]).await?;
    let outcome = async {
        set_out_of_service(test_bed, &node, true).await?;
        for name in &lost {
            wait_deleted(test_bed.pods(), name).await?;
        }
        wait_all(test_bed.claims(), "the claims to be deleted", CheckResult::none_left).await?;
        for name in &next {
            test_bed.create(on_node(from_template(name, "large"), &node)).await?;
        }
        anyhow::Ok(())
    };
    let outcome = outcome.await;
    // Later trials need the node.
    set_out_of_service(test_bed, &node, false).await?;
    operations.run(&["start", &node, "kubelet"]).await?;
    outcome?;
    for name in &next {
        test_bed.wait_running(name).await?;
    }
    let names: Vec<&str> = next.iter().map(String::as_str).collect();
    test_bed.delete(&names).await?;
    residue::wait_removed(&operations, &node).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Adds the taint to the node, or removes it. Other taints stay.
async fn set_out_of_service(test_bed: &TestBed, node: &str, is: bool) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(test_bed.client.clone());
    loop {
        let now = nodes.get(node).await?;
        let mut taints = now.spec.and_then(|spec| spec.taints).unwrap_or_default();
        taints.retain(|taint| taint.key != OUT_OF_SERVICE);
        if is {
            taints.push(Taint {
                key: OUT_OF_SERVICE.to_owned(),
                value: Some("nodeshutdown".to_owned()),
                effect: "NoExecute".to_owned(),
                ..Taint::default()
            });
        }
        // The list is replaced: Kubernetes adds taints of its own to it meanwhile.
        let version = now.metadata.resource_version;
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"taints": taints}});
        match nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            other => return Ok(other.map(drop)?),
        }
    }
}
