//! Trial of a claim whose allocation names the pool of another node. The kubelet does not check the
//! pool, the driver must refuse it.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::test_bed::{TestBed, holder, uid, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// User of the controller, impersonated because only it may allocate.
pub(super) const CONTROLLER: &str = "system:serviceaccount:tessera-system:tessera-controller";

pub(super) async fn refused(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let other = test_bed.node_with("h100", 8).await?;
    let inventory = test_bed.published_gpus().await?;
    let device =
        inventory.first_of(&other).ok_or_else(|| anyhow::anyhow!("{other} publishes nothing"))?;
    let claim = json!({
        "metadata": {"name": "other-pool", "finalizers": ["resource.kubernetes.io/delete-protection"]},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
    });
    test_bed.create_claim(claim).await?;
    let mut pod = holder("refused", json!({"name": "gpu", "resourceClaimName": "other-pool"}));
    // The controller ignores the claims of a gated pod.
    pod["spec"]["schedulingGates"] = json!([{"name": "e2e.tessera.dev/other-pool"}]);
    let pod = test_bed.create(pod).await?;
    allocate(&test_bed, &node, &other, device, &uid(&pod)).await?;
    let ungate = json!({"spec": {"schedulingGates": null}});
    test_bed.pods().patch("refused", &PatchParams::default(), &Patch::Merge(ungate)).await?;

    let events: Api<Event> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let check = |events: &[Event]| {
        let messages = || events.iter().filter_map(|event| event.message.as_deref());
        // The kubelet's event repeats the driver's error, which names the pool.
        match messages().find(|message| message.contains("other-pool") && message.contains(&other))
        {
            Some(_) => CheckResult::Done(()),
            None => CheckResult::Pending(messages().collect::<Vec<_>>().join("; ")),
        }
    };
    let what = format!("an event that names the pool of {other}");
    wait_all(events, &what, check).await?;
    let pod = test_bed.pods().get("refused").await?;
    anyhow::ensure!(
        super::test_bed::phase(&pod) == "Pending",
        "the pod's phase is {}",
        super::test_bed::phase(&pod)
    );
    test_bed.delete(&["refused"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Writes an invalid allocation: a device of `pool` for pods on `node`. It is reserved immediately,
/// so that it is not released as unused.
async fn allocate(
    test_bed: &TestBed,
    node: &str,
    pool: &str,
    device: &str,
    pod_uid: &str,
) -> anyhow::Result<()> {
    let result = json!({
        "driver": DRIVER, "pool": pool, "device": device, "request": "gpu",
        "shareID": "6c0d3a52-36c8-4d4e-9a0f-9d2d0a3f7c11",
        "consumedCapacity": {"memory": "10Gi", "cores": "0"},
    });
    let terms =
        [json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]})];
    let status = json!({"status": {
        "allocation": {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": terms},
            "allocationTimestamp": jiff::Timestamp::now().to_string(),
        },
        "reservedFor": [{"resource": "pods", "name": "refused", "uid": pod_uid}],
    }});
    let claims: Api<ResourceClaim> =
        Api::namespaced(test_bed.client_of(CONTROLLER)?, test_bed.namespace());
    claims.patch_status("other-pool", &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
