//! Trial of Kubernetes' PodGroup, with its feature gates on: the size of a group is that of the
//! object, and kube-scheduler places the pods of a group as one, too. A claim of the PodGroup is
//! shared by its pods.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::scheduling::v1beta1::PodGroup;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::events;

use super::groups::{self, GROUPS, SIZE};
use super::test_bed::{self, TestBed, from_template};
use super::{control_plane, overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::operations::Operations;
use crate::runner::Outcome;

/// The first minor version of Kubernetes 1 with `scheduling.k8s.io/v1beta1`.
const FIRST_MINOR: u32 = 37;

pub(super) async fn make_groups(test_bed: TestBed) -> TrialOutcome {
    let operations = control_plane::operations_on(&test_bed).await?;
    if test_bed.minor_version().await? < FIRST_MINOR {
        return Ok(Outcome::Skipped("Kubernetes has PodGroups in v1beta1 from 1.37 on".into()));
    }
    switch(operations, "on").await?;
    let outcome = with_objects(&test_bed).await;
    let of_claims = match &outcome {
        Ok(Outcome::Passed(_)) => share_claim(&test_bed).await,
        _ => Ok(()),
    };
    switch(operations, "off").await?;
    of_claims.and(outcome)
}

async fn switch(operations: &Operations, state: &str) -> anyhow::Result<()> {
    operations.run(&["pod-groups", "control-plane", state]).await.map(drop)
}

async fn with_objects(test_bed: &TestBed) -> TrialOutcome {
    wait_watched(test_bed).await?;
    for group in GROUPS {
        create(test_bed, group, SIZE).await?;
    }
    let trial =
        groups::rounds(test_bed, |name, group| of_object(from_template(name, "share"), group));
    let outcome =
        overcommit::check_during(test_bed, groups::one_at_a_time(test_bed, trial)).await?;
    println!("    kube-scheduler cleared {} claims", cleared_claims(test_bed).await?);
    Ok(outcome)
}

/// Returns how often kube-scheduler has cleared the allocation of a claim, as it does with a claim
/// of each pod of a PodGroup that it could not place.
async fn cleared_claims(test_bed: &TestBed) -> anyhow::Result<i32> {
    let api: Api<Event> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let listed = api.list(&ListParams::default()).await?.items;
    let is_about_clearing = |event: &&Event| {
        event.reason.as_deref() == Some(events::RESCHEDULING.name())
            && event.message.as_ref().is_some_and(|text| text.contains("and released the devices"))
    };
    Ok(listed.iter().filter(is_about_clearing).map(|event| event.count.unwrap_or(1)).sum())
}

/// Waits until the controller, which looks for the kind every 10 seconds, has seen a PodGroup. The
/// pod of that group fits nowhere, also as a single pod.
async fn wait_watched(test_bed: &TestBed) -> anyhow::Result<()> {
    create(test_bed, "canary", 2).await?;
    test_bed.create_template("too-large", DRIVER, json!({"memory": "900Gi"})).await?;
    test_bed.create(of_object(from_template("canary", "too-large"), "canary")).await?;
    let reason = events::GROUP_INCOMPLETE.name();
    placement::wait_event_reason(test_bed, "canary", reason).await?;
    test_bed.delete(&["canary"]).await
}

async fn create(test_bed: &TestBed, name: &str, size: usize) -> anyhow::Result<()> {
    create_with_claims(test_bed, name, size, json!([])).await
}

async fn create_with_claims(
    test_bed: &TestBed,
    name: &str,
    size: usize,
    claims: Value,
) -> anyhow::Result<()> {
    let object = json!({
        "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"schedulingPolicy": {"gang": {"minCount": size}}, "resourceClaims": claims},
    });
    let object = serde_json::from_value(object)?;
    pod_groups(test_bed).create(&PostParams::default(), &object).await?;
    Ok(())
}

fn pod_groups(test_bed: &TestBed) -> Api<PodGroup> {
    Api::namespaced(test_bed.client.clone(), test_bed.namespace())
}

/// The pods of a PodGroup with a claim share it until the PodGroup is deleted.
async fn share_claim(test_bed: &TestBed) -> anyhow::Result<()> {
    let (group, pods) = ("with-claim", ["one", "two", "three"]);
    test_bed.create_template("of-group", DRIVER, json!({"memory": "10Gi"})).await?;
    let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "of-group"}]);
    create_with_claims(test_bed, group, pods.len(), claims).await?;
    for pod in pods {
        test_bed.create(of_object(from_template(pod, "of-group"), group)).await?;
    }
    for pod in pods {
        test_bed.wait_running(pod).await?;
    }
    let claim = the_claim(test_bed).await?;
    let status = serde_json::to_value(&claim.status)?;
    let consumers = status["reservedFor"].as_array().map(Vec::as_slice).unwrap_or_default();
    anyhow::ensure!(
        consumers.len() == 1 && consumers[0]["resource"] == "podgroups",
        "not reserved for the PodGroup alone: {status}"
    );
    test_bed.delete(&pods).await?;
    let claim = the_claim(test_bed).await?;
    anyhow::ensure!(holds_device(&claim), "the claim was released before its PodGroup");
    pod_groups(test_bed).delete(group, &DeleteParams::default()).await?;
    test_bed::wait_deleted(test_bed.claims(), &claim.name_any()).await
}

/// Returns the only claim, which the PodGroup owns.
async fn the_claim(test_bed: &TestBed) -> anyhow::Result<ResourceClaim> {
    let mut claims = test_bed.claims().list(&ListParams::default()).await?.items;
    let is_of_group =
        |claim: &ResourceClaim| claim.owner_references().iter().all(|one| one.kind == "PodGroup");
    let claim = claims.pop().filter(|claim| claims.is_empty() && is_of_group(claim));
    claim.ok_or_else(|| anyhow::anyhow!("not one claim of the PodGroup: {claims:?}"))
}

fn of_object(mut pod: Value, group: &str) -> Value {
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": group});
    pod
}
