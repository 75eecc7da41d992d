//! Trial of placeholder pods with the real kube-scheduler. The trial is the cluster autoscaler: it
//! adds a node once the placeholder cannot be scheduled.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tessera_api::events;
use tessera_api::names::{FENCE_RULE, NODE_GROUP_LABEL};
use tessera_api::slice::Fence;

use super::controller::ControllerSwitch;
use super::fence::ensure_denied;
use super::placement::{node_name, wait_event_reason};
use super::release::helm;
use super::stock::wait_fence;
use super::test_bed::{TestBed, uid, wait_all, wait_deleted, wait_one};
use crate::harness::TrialOutcome;
use crate::helm::NAMESPACE;
use crate::hollow::{self, HollowNodes, HollowNodesSpec};
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const HOLLOW: HollowNodesSpec = HollowNodesSpec { nodes: 1, gpus: 2, fence: Fence::Taint };

/// Number of the node that the trial adds.
const ADDED: u32 = 2;

/// The first placeholder of the group.
const PLACEHOLDER: &str = "tessera-node-grow-0";

/// User of the controller.
const CONTROLLER: &str = "system:serviceaccount:tessera-system:tessera-controller";

pub(super) async fn ask_for_a_node(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client.clone());
    let is_served = test_bed.minor_version().await? >= 37;
    let has_rule = is_served && rules.get_opt(FENCE_RULE).await?.is_some();
    let usual = if has_rule { Fence::Rule } else { Fence::Taint };
    let label = hollow::LABEL.replace('.', "\\.");
    let selector =
        format!("autoscaler.nodeGroups[0].nodeSelector.{label}={}", test_bed.namespace());
    let settings = [
        "fence=taint",
        "autoscaler.nodeGroups[0].name=grow",
        "autoscaler.nodeGroups[0].maximum=2",
        selector.as_str(),
        "autoscaler.placeholderImage=tessera/none",
    ];
    helm.upgrade(&settings).await?;
    let hollow = async {
        wait_fence(&test_bed, Fence::Taint).await?;
        HollowNodes::create(&test_bed.client, test_bed.namespace(), HOLLOW).await
    };
    let outcome = match hollow.await {
        Ok(hollow) => {
            let outcome = tokio::select! {
                Err(error) = hollow.keep_ready() => Err(error),
                outcome = grow(&test_bed, &hollow) => outcome,
            };
            outcome.map(|()| hollow)
        }
        Err(error) => Err(error),
    };
    // Later trials need the usual fence.
    helm.upgrade(&[]).await?;
    let hollow = outcome?;
    // Its PriorityClass is gone, so the garbage collector deletes it.
    wait_deleted(placeholders(&test_bed), PLACEHOLDER).await?;
    let at_once = DeleteParams::default().grace_period(0);
    test_bed.pods().delete_collection(&at_once, &ListParams::default()).await?;
    hollow.delete().await?;
    wait_fence(&test_bed, usual).await?;
    Ok(Outcome::Passed(vec![]))
}

fn placeholders(test_bed: &TestBed) -> Api<Pod> {
    Api::namespaced(test_bed.client.clone(), NAMESPACE)
}

/// Fills the node of the group, and adds one for the pod that waits. Leaves another pod that waits,
/// with its placeholder.
async fn grow(test_bed: &TestBed, hollow: &HollowNodes) -> anyhow::Result<()> {
    test_bed.create_template("gpu", DRIVER, json!({"memory": "80Gi"})).await?;
    for pod in ["one", "two"] {
        create(test_bed, hollow, pod).await?;
        wait_bound(test_bed.pods(), pod).await?;
    }
    create(test_bed, hollow, "three").await?;
    wait_event_reason(test_bed, "three", events::NODE_REQUESTED.name()).await?;
    let placeholder = wait_unschedulable(test_bed).await?;
    check_rights(test_bed).await?;
    let switch = ControllerSwitch::detect(test_bed).await?;
    switch.stop().await?;
    let name = hollow.add(ADDED).await;
    switch.start().await?;
    let name = name?;
    // The next leader keeps it, and kube-scheduler has bound it to the new node.
    let node = wait_bound(placeholders(test_bed), PLACEHOLDER).await?;
    anyhow::ensure!(node == name, "bound to {node}");
    let now = placeholders(test_bed).get(PLACEHOLDER).await?;
    anyhow::ensure!(uid(&now) == placeholder, "another placeholder");
    let claims = test_bed.claims().list(&ListParams::default()).await?;
    let waiting: Vec<&ResourceClaim> = claims.iter().filter(|claim| !holds_device(claim)).collect();
    anyhow::ensure!(waiting.len() == 1, "{} claims without a GPU", waiting.len());
    hollow.publish_gpus(&test_bed.client, &name, ADDED, HOLLOW).await?;
    let node = wait_bound(test_bed.pods(), "three").await?;
    anyhow::ensure!(node == name, "bound to {node}");
    let check = |pods: &[Pod]| {
        let left = pods.iter().filter(|pod| pod.labels().contains_key(NODE_GROUP_LABEL)).count();
        CheckResult::done_if(left == 0, || format!("{left} placeholder pods"))
    };
    wait_all(placeholders(test_bed), "no placeholder pod", check).await?;
    for pod in ["four", "five"] {
        create(test_bed, hollow, pod).await?;
    }
    wait_unschedulable(test_bed).await.map(drop)
}

async fn create(test_bed: &TestBed, hollow: &HollowNodes, name: &str) -> anyhow::Result<()> {
    let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "gpu"}]);
    test_bed.create(hollow.pod(name, &claims)).await.map(drop)
}

/// Waits until the pod is bound, and returns its node.
async fn wait_bound(pods: Api<Pod>, name: &str) -> anyhow::Result<String> {
    let check = |pod: Option<&Pod>| match pod.and_then(node_name) {
        Some(node) => CheckResult::Done(node.to_owned()),
        None => CheckResult::Pending(format!("{:?}", pod.map(|pod| &pod.status))),
    };
    wait_one(pods, name, &format!("pod {name} to be bound"), check).await
}

/// Waits until kube-scheduler has no node for the placeholder, as an autoscaler does, and returns
/// its UID.
async fn wait_unschedulable(test_bed: &TestBed) -> anyhow::Result<String> {
    let check = |pod: Option<&Pod>| {
        let conditions = pod.and_then(|pod| pod.status.as_ref()?.conditions.as_ref());
        let mut reasons = conditions.into_iter().flatten().map(|one| one.reason.as_deref());
        match pod.filter(|_| reasons.any(|reason| reason == Some("Unschedulable"))) {
            Some(pod) => CheckResult::Done(uid(pod)),
            None => CheckResult::Pending(format!("{:?}", pod.map(|pod| &pod.status))),
        }
    };
    let what = "the placeholder pod to be unschedulable";
    wait_one(placeholders(test_bed), PLACEHOLDER, what, check).await
}

/// The controller creates and deletes no other pods in the namespace of the release.
async fn check_rights(test_bed: &TestBed) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(test_bed.client_of(CONTROLLER)?, NAMESPACE);
    let other = json!({
        "metadata": {"name": "other", "labels": {NODE_GROUP_LABEL: "grow"}},
        "spec": {
            "priorityClassName": "tessera-placeholder",
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true},
            "containers": [{
                "name": "c", "image": "tessera/none",
                "securityContext": {"allowPrivilegeEscalation": false},
            }],
        },
    });
    let mut host = other.clone();
    host["spec"]["volumes"] = json!([{"name": "host", "hostPath": {"path": "/"}}]);
    let mut account = other.clone();
    account["spec"]["serviceAccountName"] = "tessera-driver".into();
    let mut image = other.clone();
    image["spec"]["containers"][0]["image"] = "example.com/other".into();
    let mut unlabeled = other;
    unlabeled["metadata"]["labels"] = json!({});
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    for object in [host, account, image, unlabeled] {
        let object: Pod = serde_json::from_value(object)?;
        let outcome = pods.create(&dry_run, &object).await.map(drop);
        ensure_denied(outcome, "tessera-controller creates")?;
    }
    let all = placeholders(test_bed).list(&ListParams::default()).await?;
    let mut others = all.iter().filter(|pod| !pod.labels().contains_key(NODE_GROUP_LABEL));
    let other = others.next().ok_or_else(|| anyhow::anyhow!("the chart has no pods"))?;
    let at_dry_run = DeleteParams { dry_run: true, ..DeleteParams::default() };
    let outcome = pods.delete(&other.name_any(), &at_dry_run).await.map(drop);
    ensure_denied(outcome, "tessera-controller creates and deletes")
}
