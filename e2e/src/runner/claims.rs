//! Steps that check claims and their devices.

use std::collections::BTreeSet;

use anyhow::{Context as _, anyhow, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::Api;
use serde_json::{Value, json};

use super::Run;
use crate::expectation::compare;
use crate::inventory::{DRIVER, attribute};
use crate::leftovers::device_results;
use crate::scenario::{ClaimRef, Gpus, seconds};
use crate::wait::{self, CheckResult};

/// Time limit for a generated claim's name to appear in the pod's status, in seconds.
const NAME_TIMEOUT: u64 = 30;

impl Run<'_> {
    pub(super) fn claims_api(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the name of the ResourceClaim that the pod references as `claim`.
    pub(super) async fn claim_name(&self, pod: &str, claim: &str) -> anyhow::Result<String> {
        let what = format!("pod {pod} to have claim `{claim}`");
        let check = |pod: Option<&Pod>| match pod.and_then(|pod| object_name(pod, claim)) {
            Some(name) => CheckResult::Done(name),
            None => CheckResult::Pending("no claim".into()),
        };
        Ok(wait::until_one(self.pods_api(), pod, &what, seconds(NAME_TIMEOUT), check).await?)
    }

    async fn claim(&self, pod: &str, claim: &str) -> anyhow::Result<ResourceClaim> {
        let name = self.claim_name(pod, claim).await?;
        self.claims_api().get(&name).await.with_context(|| format!("cannot read claim {name}"))
    }

    pub(super) async fn unallocated(&self, claims: &[ClaimRef]) -> anyhow::Result<()> {
        for reference in claims {
            for pod in &reference.pods {
                let claim = self.claim(pod, &reference.claim).await?;
                let allocation = claim.status.and_then(|status| status.allocation);
                ensure!(
                    allocation.is_none(),
                    "claim `{}` of pod {pod} is allocated: {}",
                    reference.claim,
                    json!(allocation)
                );
            }
        }
        Ok(())
    }

    pub(super) async fn gpus(&self, step: &Gpus) -> anyhow::Result<()> {
        let mut results = Vec::new();
        for reference in &step.of {
            for pod in &reference.pods {
                let object = format!("claim `{}` of pod {pod}", reference.claim);
                let own = results_of(&self.claim(pod, &reference.claim).await?);
                expect_equal(&object, "results", step.each, own.len())?;
                results.extend(own);
            }
        }
        let devices: BTreeSet<_> =
            results.iter().map(|result| (&result.pool, &result.device)).collect();
        let object = format!("the devices {devices:?}");
        expect_equal(&object, "different devices", step.distinct, devices.len())?;
        let mut values = BTreeSet::new();
        for (pool, name) in &devices {
            let node = self.inventory.node_of(pool).unwrap_or_default();
            ensure!(
                step.node.as_deref().is_none_or(|expected| expected == node),
                "{object}: {name} is on {node}"
            );
            let device = self.inventory.device(pool, name);
            let device =
                device.with_context(|| format!("{object}: {name} of {pool} is not published"))?;
            for (wanted, expected) in step.attributes.as_object().into_iter().flatten() {
                compare(expected, &attribute(device, wanted)).map_err(|difference| {
                    anyhow!("{object}: attribute {wanted} of {name}: {difference}")
                })?;
            }
            if let Some(same_attribute) = &step.same_attribute {
                values.insert(attribute(device, same_attribute).to_string());
            }
        }
        if let Some(same_attribute) = &step.same_attribute {
            let is_one = values.len() == 1 && !values.contains(&Value::Null.to_string());
            ensure!(is_one, "{object}: `{same_attribute}` is {values:?}");
        }
        Ok(())
    }
}

fn expect_equal(
    object: &str,
    what: &str,
    expected: Option<usize>,
    seen: usize,
) -> anyhow::Result<()> {
    if let Some(expected) = expected {
        ensure!(expected == seen, "{object}: {seen} {what}, expected {expected}");
    }
    Ok(())
}

fn results_of(claim: &ResourceClaim) -> Vec<DeviceRequestAllocationResult> {
    device_results(claim).filter(|result| result.driver == DRIVER).cloned().collect()
}

fn object_name(pod: &Pod, claim: &str) -> Option<String> {
    let entry =
        pod.spec.as_ref()?.resource_claims.iter().flatten().find(|entry| entry.name == claim)?;
    if let Some(name) = &entry.resource_claim_name {
        return Some(name.clone());
    }
    let statuses = pod.status.as_ref()?.resource_claim_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == claim)?.resource_claim_name.clone()
}
