//! Allocations: what a claim's status says, and what it is to say.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_allocator::Allotment;
use tessera_allocator::model::{DeviceId, DeviceResult, NodeSelector, PoolId};
use tessera_api::names::{DeviceName, DriverName, PoolName, RequestName, ShareId};
use tessera_api::quantity::Quantity;

use super::selector::{node_selector, to_api};
use super::{ConvertError, Subject};

/// An allocation as far as it matters to others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Its devices.
    pub results: Vec<DeviceResult>,
    /// From where they can be used; none = everywhere.
    pub nodes: Option<NodeSelector>,
}

/// Reads an allocation.
///
/// # Errors
/// A name or quantity in it is not one.
pub fn allocated(claim: &str, allocation: &api::AllocationResult) -> Result<AllocatedClaim, ConvertError> {
    let subject = Subject { kind: "ResourceClaim", name: claim };
    let results = allocation.devices.iter().flat_map(|d| d.results.iter().flatten());
    Ok(AllocatedClaim {
        results: results.map(|r| result(r, subject)).collect::<Result<_, _>>()?,
        nodes: allocation.node_selector.as_ref().map(node_selector),
    })
}

fn result(
    result: &api::DeviceRequestAllocationResult,
    subject: Subject<'_>,
) -> Result<DeviceResult, ConvertError> {
    let path = |field: &str| format!("status.allocation.devices.results[].{field}");
    let pool = PoolId {
        driver: DriverName::new(&result.driver).map_err(subject.field(path("driver")))?,
        pool: PoolName::new(&result.pool).map_err(subject.field(path("pool")))?,
    };
    let consumed = result.consumed_capacity.iter().flatten().map(|(name, amount)| {
        let amount = Quantity::try_from(amount).map_err(subject.field(path("consumedCapacity")))?;
        Ok((name.clone(), amount))
    });
    Ok(DeviceResult {
        request: RequestName::new(&result.request).map_err(subject.field(path("request")))?,
        device: DeviceId {
            pool,
            device: DeviceName::new(&result.device).map_err(subject.field(path("device")))?,
        },
        shared: result.share_id.is_some(),
        consumed: consumed.collect::<Result<_, _>>()?,
        admin: result.admin_access == Some(true),
    })
}

/// Writes the allocation of a decision: results in the order decided, configurations of the classes, then those of the
/// claim, as upstream's allocator orders them. `share` makes a fresh ID for each share.
///
/// `at` has to be there: kube-scheduler sets a missing timestamp itself when it binds, and the API server refuses that.
pub fn allocation(
    allotment: &Allotment,
    claim: &api::ResourceClaim,
    classes: &BTreeMap<String, &api::DeviceClass>,
    at: Time,
    mut share: impl FnMut() -> ShareId,
) -> api::AllocationResult {
    let asked = devices(claim).and_then(|d| d.requests.as_deref()).unwrap_or_default();
    let results = allotment.results.iter().map(|r| api_result(r, asked, &mut share)).collect();
    let configs = configs(claim, asked, classes);
    api::AllocationResult {
        allocation_timestamp: Some(at),
        devices: Some(api::DeviceAllocationResult {
            results: Some(results),
            config: (!configs.is_empty()).then_some(configs),
        }),
        node_selector: allotment.nodes.as_ref().map(to_api),
    }
}

fn devices(claim: &api::ResourceClaim) -> Option<&api::DeviceClaim> {
    claim.spec.as_ref()?.devices.as_ref()
}

fn api_result(
    result: &DeviceResult,
    asked: &[api::DeviceRequest],
    share: &mut impl FnMut() -> ShareId,
) -> api::DeviceRequestAllocationResult {
    let request = asked.iter().find(|r| r.name == result.request.parent());
    let consumed = || result.consumed.iter().map(|(name, amount)| (name.clone(), amount.into())).collect();
    api::DeviceRequestAllocationResult {
        request: result.request.to_string(),
        driver: result.device.pool.driver.to_string(),
        pool: result.device.pool.pool.to_string(),
        device: result.device.device.to_string(),
        tolerations: request.and_then(|r| r.exactly.as_ref()).and_then(|e| e.tolerations.clone()),
        share_id: result.shared.then(|| share().to_string()),
        consumed_capacity: (result.shared && !result.consumed.is_empty()).then(consumed),
        ..Default::default()
    }
}

fn configs(
    claim: &api::ResourceClaim,
    asked: &[api::DeviceRequest],
    classes: &BTreeMap<String, &api::DeviceClass>,
) -> Vec<api::DeviceAllocationConfiguration> {
    let mut configs = class_configs(asked, classes);
    let own = devices(claim).and_then(|d| d.config.as_deref()).unwrap_or_default();
    for config in own {
        let names = config.requests.clone().unwrap_or_default();
        if names.is_empty() || asked.iter().any(|r| names.contains(&r.name)) {
            configs.push(api::DeviceAllocationConfiguration {
                source: "FromClaim".to_owned(),
                requests: config.requests.clone(),
                opaque: config.opaque.clone(),
            });
        }
    }
    for config in &mut configs {
        // Empty means all.
        let names = config.requests.as_deref().unwrap_or_default();
        if names.is_empty() || asked.iter().all(|r| names.contains(&r.name)) {
            config.requests = None;
        }
    }
    configs
}

/// The configurations of each class once, where its first request stands, for all requests that use it.
fn class_configs(
    asked: &[api::DeviceRequest],
    classes: &BTreeMap<String, &api::DeviceClass>,
) -> Vec<api::DeviceAllocationConfiguration> {
    let mut configs = Vec::new();
    let mut seen = Vec::new();
    for request in asked {
        let Some(name) = request.exactly.as_ref().map(|e| &e.device_class_name) else { continue };
        let Some(class) = classes.get(name).filter(|_| !seen.contains(&name)) else { continue };
        seen.push(name);
        let users = asked.iter().filter(|r| r.exactly.as_ref().is_some_and(|e| e.device_class_name == *name));
        let users: Vec<String> = users.map(|r| r.name.clone()).collect();
        let own = class.spec.iter().flat_map(|s| s.config.iter().flatten());
        configs.extend(own.map(|config| api::DeviceAllocationConfiguration {
            source: "FromClass".to_owned(),
            requests: Some(users.clone()),
            opaque: config.opaque.clone(),
        }));
    }
    configs
}
