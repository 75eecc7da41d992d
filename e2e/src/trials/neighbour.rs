//! A claim whose result names another node's pool: the kubelet does not look, the driver must
//! refuse.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use super::bench::{Bench, PATIENCE, holder, uid};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory};
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// Only it may allocate, so it is impersonated.
pub(super) const CONTROLLER: &str = "system:serviceaccount:tessera-system:tessera-controller";

pub(super) async fn refused(bench: Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    let other = bench.node_with("h100", 8).await?;
    let inventory = GpuInventory::read(&bench.client).await?;
    let device =
        inventory.first_of(&other).ok_or_else(|| anyhow::anyhow!("{other} publishes nothing"))?;
    let claim = json!({
        "metadata": {"name": "stray", "finalizers": ["resource.kubernetes.io/delete-protection"]},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
    });
    bench.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    let mut pod = holder("stranger", json!({"name": "gpu", "resourceClaimName": "stray"}));
    // While it is gated, the controller leaves its claim to whoever gated it.
    pod["spec"]["schedulingGates"] = json!([{"name": "e2e.tessera.dev/neighbour"}]);
    let pod = bench.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    allocate(&bench, &node, &other, device, &uid(&pod)).await?;
    let open = json!({"spec": {"schedulingGates": null}});
    bench.pods().patch("stranger", &PatchParams::default(), &Patch::Merge(open)).await?;

    let events: Api<Event> = Api::namespaced(bench.client.clone(), bench.namespace());
    let judge = |events: &[Event]| {
        let messages = || events.iter().filter_map(|event| event.message.as_deref());
        // The kubelet's event about the failed call repeats the driver's words; they name the pool.
        match messages().find(|message| message.contains("stray") && message.contains(&other)) {
            Some(_) => Verdict::Done(()),
            None => Verdict::NotYet(messages().collect::<Vec<_>>().join("; ")),
        }
    };
    let what = format!("an event that says the claim names the pool of {other}");
    wait::until(events, Default::default(), &what, PATIENCE, judge).await?;
    let pod = bench.pods().get("stranger").await?;
    anyhow::ensure!(
        super::bench::phase(&pod) == "Pending",
        "the pod is {}",
        super::bench::phase(&pod)
    );
    bench.delete(&["stranger".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// Writes what no allocator of ours would: a device of `pool` for pods on `node`, reserved at once,
/// so that nobody takes it back for being unused.
async fn allocate(
    bench: &Bench,
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
        "reservedFor": [{"resource": "pods", "name": "stranger", "uid": pod_uid}],
    }});
    let claims: Api<ResourceClaim> =
        Api::namespaced(bench.client_of(CONTROLLER)?, bench.namespace());
    claims.patch_status("stray", &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
