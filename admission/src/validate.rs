//! Validation of the GpuConfigs of ResourceClaims, ResourceClaimTemplates, DeviceClasses and
//! GpuDefaults when they are written.
//!
//! What depends on another object is left to the plan: a claim is checked without its class, whose
//! config it may complete.

use k8s_openapi::Resource as _;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClaim, DeviceClass, DeviceRequest, ResourceClaim,
    ResourceClaimTemplate,
};
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse};
use serde::de::DeserializeOwned;
use tessera_api::GpuConfig;
use tessera_api::config::{ConfigEntry, ConfigError, RequestedCapacity, merged_config};
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::RequestName;
use tessera_api::names::capacity::{CORES, MEMORY};
use tessera_api::quantity::Quantity;

use crate::review::{ReviewError, ReviewResult, answered};

/// API group of claims and classes.
const RESOURCE: &str = "resource.k8s.io";

/// Validates an object. Returns the answer, and its kind.
///
/// # Errors
/// [`ReviewError`] if the body is not a review.
pub fn validate(body: &[u8]) -> Result<(Vec<u8>, ReviewResult), ReviewError> {
    answered(body, |request| {
        let response = AdmissionResponse::from(request);
        match check(request)? {
            Ok(()) => Ok((response, ReviewResult::Left)),
            Err(error) => Ok((response.deny(error), ReviewResult::Refused)),
        }
    })
}

fn check(
    request: &AdmissionRequest<DynamicObject>,
) -> Result<Result<(), ConfigError>, ReviewError> {
    let Some(object) = &request.object else { return Ok(Ok(())) };
    if request.sub_resource.is_some() {
        return Ok(Ok(()));
    }
    Ok(match (request.resource.group.as_str(), request.resource.resource.as_str()) {
        (GpuDefaults::GROUP, GpuDefaults::URL_PATH_SEGMENT) => {
            read::<GpuDefaults>(object)?.config().map(drop)
        }
        (RESOURCE, "resourceclaims") => {
            let claim: ResourceClaim = read(object)?;
            let devices = claim.spec.and_then(|spec| spec.devices);
            check_claim(devices.as_ref(), "spec.devices")
        }
        (RESOURCE, "resourceclaimtemplates") => {
            let template: ResourceClaimTemplate = read(object)?;
            let claim = template.spec.and_then(|spec| spec.spec);
            check_claim(claim.and_then(|claim| claim.devices).as_ref(), "spec.spec.devices")
        }
        (RESOURCE, "deviceclasses") => {
            let class: DeviceClass = read(object)?;
            let configs = class.spec.and_then(|spec| spec.config).unwrap_or_default();
            let entries =
                configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_class(i, config));
            check_entries(entries, "spec")
        }
        _ => Ok(()),
    })
}

fn read<K: DeserializeOwned>(object: &DynamicObject) -> Result<K, ReviewError> {
    let object = serde_json::to_value(object).map_err(ReviewError::Object)?;
    serde_json::from_value(object).map_err(ReviewError::Object)
}

fn check_entries<'c>(
    entries: impl Iterator<Item = ConfigEntry<'c>>,
    path: &str,
) -> Result<(), ConfigError> {
    for entry in entries.filter(ConfigEntry::is_ours) {
        let Some(opaque) = entry.opaque else { continue };
        let place = format!("{path}.config[{}].opaque.parameters", entry.index);
        let config = GpuConfig::decode(&opaque.parameters.0);
        config.and_then(|config| config.supported()).map_err(|error| error.at(&place))?;
    }
    Ok(())
}

fn check_claim(devices: Option<&DeviceClaim>, path: &str) -> Result<(), ConfigError> {
    let Some(devices) = devices else { return Ok(()) };
    let configs = devices.config.as_deref().unwrap_or_default();
    let entries =
        || configs.iter().enumerate().map(|(index, config)| ConfigEntry::of_claim(index, config));
    check_entries(entries(), path)?;
    if !entries().any(|entry| entry.is_ours()) {
        return Ok(());
    }
    for (name, capacity) in devices.requests.iter().flatten().flat_map(alternatives) {
        // A name that the API server refuses.
        let Ok(request) = RequestName::new(&name) else { continue };
        merged_config(entries(), &request)
            .and_then(|config| config.check_request(requested(capacity)))
            .map_err(|error| error.at(&format!("{path}.requests[{name}]")))?;
    }
    Ok(())
}

/// Returns the names of a request's alternatives, as configs name them, with their capacities.
fn alternatives(request: &DeviceRequest) -> Vec<(String, Option<&CapacityRequirements>)> {
    let exact = request.exactly.iter();
    let exact = exact.map(|exact| (request.name.clone(), exact.capacity.as_ref()));
    let others = request.first_available.iter().flatten();
    let others =
        others.map(|sub| (format!("{}/{}", request.name, sub.name), sub.capacity.as_ref()));
    exact.chain(others).collect()
}

fn requested(capacity: Option<&CapacityRequirements>) -> RequestedCapacity {
    let requests = capacity.and_then(|capacity| capacity.requests.as_ref());
    let amount = |name: &str| {
        let amount = requests.and_then(|requests| requests.get(name))?;
        Quantity::parse(&amount.0).ok()
    };
    RequestedCapacity { memory: amount(MEMORY), cores: amount(CORES) }
}
