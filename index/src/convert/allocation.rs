//! Allocations: reads those of a claim's status, and renders new ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use tessera_allocator::ClaimAllocation;
use tessera_allocator::model::{BindingConditions, DeviceId, DeviceResult, NodeSelector, PoolId};
use tessera_api::GpuConfig;
use tessera_api::config::{RequestedCapacity, Sharing, allocated_config, effective_config};
use tessera_api::names::capacity::{CORES, MEMORY};
use tessera_api::names::{DRIVER_NAME, DeviceName, DriverName, PoolName, RequestName, ShareId};
use tessera_api::quantity::Quantity;
use tessera_api::resize::{ShareSize, changed_size};

use super::selector::{node_selector, to_api};
use super::{ConvertError, Subject, name_map};

/// The devices of an allocated claim and the nodes that can use them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Its devices.
    pub results: Arc<[DeviceResult]>,
    /// The nodes that can use them; none = all.
    pub nodes: Option<Arc<NodeSelector>>,
}

/// Reads an allocation. `devices` is `status.devices` of the claim, with the sizes of shares that
/// were changed; without it the shares have the allocated sizes.
///
/// # Errors
/// A name or quantity in it is not one.
pub fn allocated(
    claim: &str,
    allocation: &api::AllocationResult,
    devices: &[api::AllocatedDeviceStatus],
) -> Result<AllocatedClaim, ConvertError> {
    let subject = Subject { kind: "ResourceClaim", name: claim };
    let results = allocation.devices.iter().flat_map(|d| d.results.iter().flatten());
    let configs = allocation.devices.as_ref().and_then(|d| d.config.as_deref()).unwrap_or_default();
    Ok(AllocatedClaim {
        results: results
            .map(|r| result(r, configs, subject).map(|read| sized(read, changed_size(devices, r))))
            .collect::<Result<_, _>>()?,
        nodes: allocation.node_selector.as_ref().map(node_selector).map(Arc::new),
    })
}

/// Returns the device with the size that counts.
fn sized(mut result: DeviceResult, size: Option<ShareSize>) -> DeviceResult {
    let amounts = size.unwrap_or_default().amounts();
    result.consumed.extend(amounts.map(|(name, amount)| (name.to_owned(), amount)));
    result
}

fn result(
    result: &api::DeviceRequestAllocationResult,
    configs: &[api::DeviceAllocationConfiguration],
    subject: Subject<'_>,
) -> Result<DeviceResult, ConvertError> {
    let path = |field: &str| format!("status.allocation.devices.results[].{field}");
    let pool = PoolId {
        driver: DriverName::new(&result.driver).map_err(subject.field(path("driver")))?,
        pool: PoolName::new(&result.pool).map_err(subject.field(path("pool")))?,
    };
    let consumed = name_map(result.consumed_capacity.as_ref(), |_, amount| {
        Quantity::try_from(amount).map_err(subject.field(path("consumedCapacity")))
    });
    let request = RequestName::new(&result.request).map_err(subject.field(path("request")))?;
    Ok(DeviceResult {
        sharing: sharing(&pool.driver, configs, &request),
        request,
        device: DeviceId {
            pool,
            device: DeviceName::new(&result.device).map_err(subject.field(path("device")))?,
        },
        shared: result.share_id.is_some(),
        consumed: consumed?,
        admin: result.admin_access == Some(true),
        binding: result.binding_conditions.as_ref().map(|conditions| {
            let failure_conditions = result.binding_failure_conditions.clone().unwrap_or_default();
            Arc::new(BindingConditions { conditions: conditions.clone(), failure_conditions })
        }),
    })
}

/// Returns how the devices of a request are shared. If the configs are invalid the driver refuses
/// the claim, so it never shares them.
fn sharing(
    driver: &DriverName,
    configs: &[api::DeviceAllocationConfiguration],
    request: &RequestName,
) -> Sharing {
    let is_ours = |config: &api::DeviceAllocationConfiguration| {
        config.opaque.as_ref().is_some_and(|opaque| opaque.driver == DRIVER_NAME)
    };
    // Most claims have none, and this runs for every claim that changes.
    if driver.as_str() != DRIVER_NAME || !configs.iter().any(is_ours) {
        return Sharing::Intercept;
    }
    effective_config(configs, request).map_or(Sharing::Intercept, |config| config.sharing)
}

/// Renders the allocation of a decision: results in the order decided, configurations of the
/// classes, then those of the claim, as upstream's allocator orders them. What `defaults` complete
/// comes before as if of the class, so that class and claim override it. `share` returns a new ID
/// for each share.
///
/// `at` is required: kube-scheduler sets a missing timestamp itself when it binds, and the API
/// server refuses that.
pub fn allocation(
    claim_allocation: &ClaimAllocation,
    claim: &api::ResourceClaim,
    classes: &BTreeMap<String, &api::DeviceClass>,
    defaults: Option<&GpuConfig>,
    at: Time,
    mut share: impl FnMut() -> ShareId,
) -> api::AllocationResult {
    let asked = asked(claim, claim_allocation);
    let results =
        claim_allocation.results.iter().map(|r| api_result(r, &asked, &mut share)).collect();
    let mut configs = configs(claim, &asked, classes);
    if let Some(defaults) = defaults {
        let completions = completions(claim, claim_allocation, &configs, defaults);
        configs.splice(0..0, completions);
    }
    api::AllocationResult {
        allocation_timestamp: Some(at),
        devices: Some(api::DeviceAllocationResult {
            results: Some(results),
            config: (!configs.is_empty()).then_some(configs),
        }),
        node_selector: claim_allocation.nodes.as_ref().map(to_api),
    }
}

/// A request that is allocated, or the alternative of it that was chosen.
struct Asked<'c> {
    /// `request`, or `request/subrequest`.
    name: RequestName,
    class: &'c str,
    tolerations: &'c Option<Vec<api::DeviceToleration>>,
    capacity: Option<&'c api::CapacityRequirements>,
}

impl Asked<'_> {
    fn is_named_in(&self, names: &[String]) -> bool {
        names.iter().any(|name| self.name.is_named_by(name))
    }
}

fn asked<'c>(claim: &'c api::ResourceClaim, claim_allocation: &ClaimAllocation) -> Vec<Asked<'c>> {
    let requests = devices(claim).and_then(|d| d.requests.as_deref()).unwrap_or_default();
    let served = |request: &'c api::DeviceRequest| {
        if let Some(exactly) = &request.exactly {
            let name = RequestName::new(&request.name).ok()?;
            return Some(Asked {
                name,
                class: &exactly.device_class_name,
                tolerations: &exactly.tolerations,
                capacity: exactly.capacity.as_ref(),
            });
        }
        let result =
            claim_allocation.results.iter().find(|r| r.request.parent() == request.name)?;
        let chosen = result.request.subrequest()?;
        let sub = request.first_available.iter().flatten().find(|sub| sub.name == chosen)?;
        let name = result.request.clone();
        Some(Asked {
            name,
            class: &sub.device_class_name,
            tolerations: &sub.tolerations,
            capacity: sub.capacity.as_ref(),
        })
    };
    requests.iter().filter_map(served).collect()
}

fn devices(claim: &api::ResourceClaim) -> Option<&api::DeviceClaim> {
    claim.spec.as_ref()?.devices.as_ref()
}

fn api_result(
    result: &DeviceResult,
    asked: &[Asked<'_>],
    share: &mut impl FnMut() -> ShareId,
) -> api::DeviceRequestAllocationResult {
    let request = asked.iter().find(|asked| asked.name == result.request);
    let consumed =
        || result.consumed.iter().map(|(name, amount)| (name.clone(), amount.into())).collect();
    let conditions = |of: fn(&BindingConditions) -> &Vec<String>| {
        result.binding.as_deref().map(of).filter(|conditions| !conditions.is_empty()).cloned()
    };
    api::DeviceRequestAllocationResult {
        request: result.request.to_string(),
        driver: result.device.pool.driver.to_string(),
        pool: result.device.pool.pool.to_string(),
        device: result.device.device.to_string(),
        tolerations: request.and_then(|asked| asked.tolerations.clone()),
        share_id: result.shared.then(|| share().to_string()),
        consumed_capacity: (result.shared && !result.consumed.is_empty()).then(consumed),
        admin_access: result.admin.then_some(true),
        binding_conditions: conditions(|b| &b.conditions),
        binding_failure_conditions: conditions(|b| &b.failure_conditions),
        ..Default::default()
    }
}

fn configs(
    claim: &api::ResourceClaim,
    asked: &[Asked<'_>],
    classes: &BTreeMap<String, &api::DeviceClass>,
) -> Vec<api::DeviceAllocationConfiguration> {
    let mut configs = class_configs(asked, classes);
    let own = devices(claim).and_then(|d| d.config.as_deref()).unwrap_or_default();
    for config in own {
        let names = config.requests.clone().unwrap_or_default();
        if names.is_empty() || asked.iter().any(|asked| asked.is_named_in(&names)) {
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
        if names.is_empty() || asked.iter().all(|asked| asked.is_named_in(names)) {
            config.requests = None;
        }
    }
    configs
}

/// Returns the part of the defaults that completes each request for GPUs, whose other parameters
/// are in `configs`.
fn completions(
    claim: &api::ResourceClaim,
    claim_allocation: &ClaimAllocation,
    configs: &[api::DeviceAllocationConfiguration],
    defaults: &GpuConfig,
) -> Vec<api::DeviceAllocationConfiguration> {
    let asked = asked(claim, claim_allocation);
    let asked_count = asked.len();
    // As the planner reads the claim.
    let is_one_gpu = super::claim(claim).is_ok_and(|claim| claim.is_for_one_gpu());
    let completion = |asked: &Asked<'_>| {
        let own = allocated_config(configs, &asked.name).ok()?;
        let requests = asked.capacity.and_then(|capacity| capacity.requests.as_ref());
        let amount = |name| Quantity::try_from(requests?.get(name)?).ok();
        let requested = RequestedCapacity { memory: amount(MEMORY), cores: amount(CORES) };
        let completion = own.completion(defaults, requested, is_one_gpu);
        let parameters = RawExtension(completion.encode());
        (completion != GpuConfig::default()).then(|| api::DeviceAllocationConfiguration {
            source: "FromClass".to_owned(),
            requests: (asked_count > 1).then(|| vec![asked.name.to_string()]),
            opaque: Some(api::OpaqueDeviceConfiguration {
                driver: DRIVER_NAME.to_owned(),
                parameters,
            }),
        })
    };
    let is_ours = |asked: &&Asked<'_>| {
        let results = &claim_allocation.results;
        let result = results.iter().find(|result| result.request == asked.name);
        result.is_some_and(|result| result.device.pool.driver.as_str() == DRIVER_NAME)
    };
    asked.iter().filter(is_ours).filter_map(completion).collect()
}

/// Returns the configurations of each class once, at the position of its first request, for all
/// requests that use it.
fn class_configs(
    asked: &[Asked<'_>],
    classes: &BTreeMap<String, &api::DeviceClass>,
) -> Vec<api::DeviceAllocationConfiguration> {
    let mut configs = Vec::new();
    let mut seen = Vec::new();
    for request in asked {
        let Some(class) = classes.get(request.class).filter(|_| !seen.contains(&request.class))
        else {
            continue;
        };
        seen.push(request.class);
        let users = asked.iter().filter(|asked| asked.class == request.class);
        let users: Vec<String> = users.map(|asked| asked.name.to_string()).collect();
        let own = class.spec.iter().flat_map(|s| s.config.iter().flatten());
        configs.extend(own.map(|config| api::DeviceAllocationConfiguration {
            source: "FromClass".to_owned(),
            requests: Some(users.clone()),
            opaque: config.opaque.clone(),
        }));
    }
    configs
}
