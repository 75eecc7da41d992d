//! Trial of GpuDefaults: a claim that leaves fields open gets them from its namespace.

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use tessera_api::Quantity;
use tessera_api::defaults::GpuDefaults;

use super::test_bed::{H100, TestBed};
use crate::harness::TrialOutcome;
use crate::leftovers::device_results;
use crate::runner::Outcome;

pub(super) async fn complete(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("h100", 2).await?;
    let defaults: Api<GpuDefaults> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"percent": 25},
    });
    let object = json!({"metadata": {"name": "default"}, "spec": {"parameters": parameters}});
    defaults.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    let inventory = test_bed.published_gpus().await?;
    let mut devices = inventory.of_pool(&node);
    let device = devices.next().and_then(|(_, device)| device.capacity.clone());
    let all = device.and_then(|capacity| Quantity::parse(&capacity.get("memory")?.value.0).ok());
    let all = all.ok_or_else(|| anyhow::anyhow!("a GPU of {node} has no memory"))?;
    let quarter = all.floor_mib().map(|mib| Quantity::from_mib(mib / 4));

    test_bed.create_template("open", H100, Value::Null).await?;
    test_bed.create_template("own", H100, json!({"memory": "1Gi"})).await?;
    // The defaults may reach the controller after the first claim.
    for attempt in 0.. {
        let name = format!("open-{attempt}");
        let memory = memory_of(&test_bed, &name, "open").await?;
        if memory == quarter {
            break;
        }
        anyhow::ensure!(attempt < 10, "{memory:?} of {all} with the default of 25 percent");
    }
    let memory = memory_of(&test_bed, "own", "own").await?;
    anyhow::ensure!(memory == Some(Quantity::from_mib(1024)), "{memory:?} although 1Gi is named");
    Ok(Outcome::Passed(vec![]))
}

/// Runs a pod and returns the memory that its claim has.
async fn memory_of(
    test_bed: &TestBed,
    name: &str,
    template: &str,
) -> anyhow::Result<Option<Quantity>> {
    let pod = test_bed.start_holder(name, template).await?;
    let claim: ResourceClaim = test_bed.claim_of(&pod).await?;
    let memory = device_results(&claim).find_map(|result| {
        Quantity::parse(&result.consumed_capacity.as_ref()?.get("memory")?.0).ok()
    });
    test_bed.delete(&[name]).await?;
    Ok(memory)
}
