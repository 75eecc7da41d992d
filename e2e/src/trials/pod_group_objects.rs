//! Trial of Kubernetes' PodGroup, with its feature gate on: the size of a group is that of the
//! object, and kube-scheduler places the pods of a group as one, too.

use k8s_openapi::api::scheduling::v1beta1::PodGroup;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use tessera_api::events;

use super::groups::{self, GROUPS, SIZE};
use super::test_bed::{TestBed, from_template};
use super::{control_plane, overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
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
    switch(operations, "off").await?;
    outcome
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
    overcommit::check_during(test_bed, groups::one_at_a_time(test_bed, trial)).await
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
    let api: Api<PodGroup> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let object = json!({
        "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"schedulingPolicy": {"gang": {"minCount": size}}},
    });
    api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    Ok(())
}

fn of_object(mut pod: Value, group: &str) -> Value {
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": group});
    pod
}
