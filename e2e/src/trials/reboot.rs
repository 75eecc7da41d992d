//! Trial of a node that reboots without a drain. What the driver keeps is on a tmpfs and lost, with
//! the CDI specs; the kubelet's checkpoint is not. Containers start again in their shares, and pods
//! whose containers are not restarted give their devices back.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::refused_node::on_node;
use super::test_bed::{A100, TestBed, container_ids, from_template, phase, wait_one};
use super::{overcommit, placement, residue};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::CheckResult;

pub(super) async fn restores_shares(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, reboot(&test_bed)).await
}

async fn reboot(test_bed: &TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let node = test_bed.node_with("a100", 4).await?;
    test_bed.create_template("share", A100, json!({"memory": "10Gi", "cores": "25"})).await?;
    let pod = |name: &str, policy: &str| {
        let mut pod = on_node(from_template(name, "share"), &node);
        pod["spec"]["restartPolicy"] = json!(policy);
        pod
    };
    for (name, policy) in [("kept", "Always"), ("once", "Never")] {
        test_bed.create(pod(name, policy)).await?;
    }
    test_bed.wait_running("once").await?;
    let before = test_bed.wait_running("kept").await?;
    let devices = test_bed.gpus_of(std::slice::from_ref(&before)).await?;
    operations.run(&["reboot", &node]).await?;
    let started = tokio::time::Instant::now();
    let check = |pod: Option<&Pod>| {
        let is_again = |pod: &&Pod| is_started(pod) && container_ids(pod) != container_ids(&before);
        let pod = pod.filter(is_again);
        pod.map_or_else(
            || CheckResult::Pending("not yet".into()),
            |pod| CheckResult::Done(pod.clone()),
        )
    };
    let after = wait_one(test_bed.pods(), "kept", "the container to start again", check).await?;
    println!("    the container runs again after {:.1} s", started.elapsed().as_secs_f64());
    anyhow::ensure!(test_bed.gpus_of(&[after]).await? == devices, "other devices");
    let failed = |pod: Option<&Pod>| {
        let phase = pod.map(phase).unwrap_or_default();
        CheckResult::done_if(phase == "Failed", || phase.to_owned())
    };
    wait_one(test_bed.pods(), "once", "the other pod to have failed", failed).await?;
    placement::wait_unallocated(test_bed, "once").await?;
    test_bed.create(pod("next", "Never")).await?;
    test_bed.wait_running("next").await?;
    test_bed.delete(&["kept", "once", "next"]).await?;
    residue::wait_removed(&operations, &node).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Returns true if the containers run.
fn is_started(pod: &Pod) -> bool {
    let mut statuses =
        pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.all(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
}
