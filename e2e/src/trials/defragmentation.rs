//! Trial of `kubectl tessera defrag`: four shares, one on each GPU of a node, and a pod that needs
//! a whole GPU.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceTaintRule;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

use super::placement::wait_event_reason;
use super::test_bed::{A100, TestBed, phase, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const GPUS: usize = 4;

pub(super) async fn moves_a_share(test_bed: TestBed) -> TrialOutcome {
    defragment(&test_bed, async || Ok(())).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Moves a share for a pod that needs a whole GPU. `before` runs before the share is moved.
pub(super) async fn defragment(
    test_bed: &TestBed,
    before: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let rules = test_bed.taint_rules().await?;
    test_bed.node_with("a100", GPUS).await?;
    let spread = json!({"placement": {"node": "Spread", "device": "Spread"}});
    test_bed.create_configured_template("spread", A100, json!({"memory": "5Gi"}), spread).await?;
    let exclusive = json!({"exclusive": true});
    test_bed.create_configured_template("whole", A100, json!(null), exclusive).await?;
    let replica_sets = test_bed.create_replica_set("small", GPUS, "spread").await?;
    wait_small(test_bed).await?;
    test_bed.create_holder("whole", "whole").await?;
    wait_event_reason(test_bed, "whole", "InsufficientDevices").await?;
    let plugin = test_bed.plugin()?;
    let namespace = test_bed.namespace().to_owned();
    let command = ["defrag", "pod", "whole", "--namespace", &namespace];
    let plan = plugin.call(&command, "").await?.result;
    anyhow::ensure!(plan["result"] == "FitsAfterMoves", "{plan}");
    anyhow::ensure!(plan["moves"].as_array().is_some_and(|moves| moves.len() == 1), "{plan}");
    before().await?;
    let apply = [&command[..], &["--apply", "--timeout", "2m"]].concat();
    let applied = plugin.call(&apply, "").await?;
    anyhow::ensure!(applied.code == 0, "{}", applied.result);
    let whole = test_bed.wait_running("whole").await?;
    let whole = test_bed.gpus_of(&[whole]).await?;
    let small = test_bed.gpus_of(&wait_small(test_bed).await?).await?;
    anyhow::ensure!(small.is_disjoint(&whole), "{small:?} and {whole:?}");
    anyhow::ensure!(rules.list(&ListParams::default()).await?.items.iter().all(is_no_cordon));
    replica_sets.delete("small", &DeleteParams::default()).await?;
    test_bed.delete(&["whole"]).await?;
    wait_all(test_bed.pods(), "the pods to be deleted", CheckResult::none_left).await
}

fn is_no_cordon(rule: &DeviceTaintRule) -> bool {
    rule.spec.taint.key != format!("{DRIVER}/cordoned")
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
