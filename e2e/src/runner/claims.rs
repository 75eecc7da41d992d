//! Steps that check claims and their devices.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::Api;
use serde_json::Value;

use super::{Run, StepError, api_error};
use crate::expectation::compare;
use crate::inventory::{DRIVER, attribute};
use crate::scenario::{ClaimRef, Gpus, seconds};
use crate::wait::{self, CheckResult};

/// Time limit for a generated claim's name to appear in the pod's status, in seconds.
const NAME_TIMEOUT: u64 = 30;

impl Run<'_> {
    pub(super) fn claims_api(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the name of the ResourceClaim that the pod references as `claim`.
    pub(super) async fn claim_name(&self, pod: &str, claim: &str) -> Result<String, StepError> {
        let what = format!("pod {pod} to have claim `{claim}`");
        let check = |pod: Option<&Pod>| match pod.and_then(|pod| object_name(pod, claim)) {
            Some(name) => CheckResult::Done(name),
            None => CheckResult::Pending("no claim".into()),
        };
        Ok(wait::until_one(self.pods_api(), pod, &what, seconds(NAME_TIMEOUT), check).await?)
    }

    async fn claim(&self, pod: &str, claim: &str) -> Result<ResourceClaim, StepError> {
        let name = self.claim_name(pod, claim).await?;
        self.claims_api()
            .get(&name)
            .await
            .map_err(|error| api_error(&format!("read claim {name}"), error))
    }

    pub(super) async fn unallocated(&self, claims: &[ClaimRef]) -> Result<(), StepError> {
        for reference in claims {
            for pod in &reference.pods {
                let claim = self.claim(pod, &reference.claim).await?;
                let allocation = claim.status.and_then(|status| status.allocation);
                if let Some(allocation) = allocation {
                    let object = format!("claim `{}` of pod {pod}", reference.claim);
                    let seen = serde_json::to_string(&allocation).unwrap_or_default();
                    return Err(StepError::Differs {
                        object,
                        difference: format!("it is allocated: {seen}"),
                    });
                }
            }
        }
        Ok(())
    }

    pub(super) async fn gpus(&self, step: &Gpus) -> Result<(), StepError> {
        let mut results = Vec::new();
        for reference in &step.of {
            for pod in &reference.pods {
                let object = format!("claim `{}` of pod {pod}", reference.claim);
                let own = results_of(self.claim(pod, &reference.claim).await?);
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
            if step.node.as_deref().is_some_and(|expected| expected != node) {
                return Err(StepError::Differs {
                    object,
                    difference: format!("{name} is on {node}"),
                });
            }
            let device = self.inventory.device(pool, name);
            let device = device.ok_or_else(|| {
                differs(&object, format!("{name} of pool {pool} is not published"))
            })?;
            for (wanted, expected) in step.attributes.as_object().into_iter().flatten() {
                compare(expected, &attribute(device, wanted)).map_err(|difference| {
                    differs(&object, format!("attribute {wanted} of {name}: {difference}"))
                })?;
            }
            if let Some(alike) = &step.alike {
                values.insert(attribute(device, alike).to_string());
            }
        }
        if step.alike.is_some() && (values.len() != 1 || values.contains(&Value::Null.to_string()))
        {
            return Err(differs(
                &object,
                format!("`{}` is {values:?}", step.alike.as_deref().unwrap_or_default()),
            ));
        }
        Ok(())
    }
}

fn differs(object: &str, difference: String) -> StepError {
    StepError::Differs { object: object.to_owned(), difference }
}

fn expect_equal(
    object: &str,
    what: &str,
    expected: Option<usize>,
    seen: usize,
) -> Result<(), StepError> {
    match expected {
        Some(expected) if expected != seen => {
            Err(differs(object, format!("{seen} {what}, expected {expected}")))
        }
        _ => Ok(()),
    }
}

fn results_of(claim: ResourceClaim) -> Vec<DeviceRequestAllocationResult> {
    let allocation =
        claim.status.and_then(|status| status.allocation).and_then(|allocation| allocation.devices);
    let results = allocation.and_then(|devices| devices.results).unwrap_or_default();
    results.into_iter().filter(|result| result.driver == DRIVER).collect()
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
