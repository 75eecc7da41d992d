//! Classes and claims.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as api;
use tessera_allocator::model::{
    Claim, Constraint, ConstraintKind, DeviceClass, Mode, Request, Selector, Toleration, TolerationOperator,
};
use tessera_api::names::{ClaimName, ClaimUid, DeviceClassName, Namespace, RequestName};
use tessera_api::quantity::Quantity;

use super::{ConvertError, Subject};

/// Reads a DeviceClass.
///
/// # Errors
/// Its name is not one.
pub fn class(object: &api::DeviceClass) -> Result<DeviceClass, ConvertError> {
    let subject = Subject::new("DeviceClass", object.metadata.name.as_ref());
    let name = object.metadata.name.as_ref().ok_or_else(|| subject.missing("metadata.name"))?;
    let spec = object.spec.as_ref();
    Ok(DeviceClass {
        name: DeviceClassName::new(name).map_err(subject.field("metadata.name"))?,
        selectors: selectors(spec.and_then(|s| s.selectors.as_deref())),
        configs: spec.and_then(|s| s.config.clone()).unwrap_or_default(),
    })
}

/// Reads what a ResourceClaim asks for.
///
/// # Errors
/// A name or quantity in it is not one.
pub fn claim(object: &api::ResourceClaim) -> Result<Claim, ConvertError> {
    let metadata = &object.metadata;
    let subject = Subject::new("ResourceClaim", metadata.name.as_ref());
    let text =
        |field: &'static str, value: &Option<String>| value.clone().ok_or_else(|| subject.missing(field));
    let devices = object.spec.as_ref().and_then(|s| s.devices.clone()).unwrap_or_default();
    let requests = devices.requests.iter().flatten();
    Ok(Claim {
        uid: ClaimUid::new(text("metadata.uid", &metadata.uid)?).map_err(subject.field("metadata.uid"))?,
        namespace: Namespace::new(text("metadata.namespace", &metadata.namespace)?)
            .map_err(subject.field("metadata.namespace"))?,
        name: ClaimName::new(text("metadata.name", &metadata.name)?)
            .map_err(subject.field("metadata.name"))?,
        requests: requests.map(|r| request(r, subject)).collect::<Result<_, _>>()?,
        constraints: devices.constraints.iter().flatten().map(constraint).collect(),
        configs: devices.config.unwrap_or_default(),
    })
}

fn request(request: &api::DeviceRequest, subject: Subject<'_>) -> Result<Request, ConvertError> {
    let name = RequestName::new(&request.name).map_err(subject.field("spec.devices.requests[].name"))?;
    let Some(exactly) = &request.exactly else {
        return unusable(name, request, subject);
    };
    let class = Some(exactly.device_class_name.as_str()).filter(|c| !c.is_empty());
    let unsupported = if exactly.admin_access == Some(true) {
        Some("adminAccess")
    } else if exactly.derived_attributes.as_ref().is_some_and(|d| !d.is_empty()) {
        Some("derivedAttributes")
    } else {
        None
    };
    Ok(Request {
        class: class
            .map(|c| {
                DeviceClassName::new(c)
                    .map_err(subject.field("spec.devices.requests[].exactly.deviceClassName"))
            })
            .transpose()?,
        selectors: selectors(exactly.selectors.as_deref()),
        mode: mode(exactly),
        tolerations: exactly.tolerations.iter().flatten().map(toleration).collect(),
        capacity: amounts(exactly.capacity.as_ref(), subject)?,
        unsupported,
        name,
    })
}

/// A request of a kind that this version does not have. The class of its first alternative tells whose it is.
fn unusable(
    name: RequestName,
    request: &api::DeviceRequest,
    subject: Subject<'_>,
) -> Result<Request, ConvertError> {
    let first = request.first_available.iter().flatten().next();
    let class = first.map(|sub| DeviceClassName::new(&sub.device_class_name)).transpose();
    Ok(Request {
        name,
        class: class.map_err(subject.field("spec.devices.requests[].firstAvailable[].deviceClassName"))?,
        selectors: Vec::new(),
        mode: Mode::Unknown,
        tolerations: Vec::new(),
        capacity: BTreeMap::new(),
        unsupported: Some(if first.is_some() { "firstAvailable" } else { "this kind of request" }),
    })
}

fn mode(request: &api::ExactDeviceRequest) -> Mode {
    match request.allocation_mode.as_deref() {
        // The API server fills in the default.
        None | Some("ExactCount") => Mode::Exact(u64::try_from(request.count.unwrap_or(1)).unwrap_or(0)),
        Some("All") => Mode::All,
        Some(_) => Mode::Unknown,
    }
}

fn amounts(
    capacity: Option<&api::CapacityRequirements>,
    subject: Subject<'_>,
) -> Result<BTreeMap<String, Quantity>, ConvertError> {
    let requests = capacity.and_then(|c| c.requests.as_ref()).into_iter().flatten();
    let read = |(name, amount): (&String, _)| {
        let path = format!("spec.devices.requests[].exactly.capacity.requests[{name}]");
        Ok((name.clone(), Quantity::try_from(amount).map_err(subject.field(path))?))
    };
    requests.map(read).collect()
}

fn selectors(selectors: Option<&[api::DeviceSelector]>) -> Vec<Selector> {
    let read = |s: &api::DeviceSelector| {
        s.cel.as_ref().map_or_else(Selector::unknown, |cel| Selector::new(&cel.expression))
    };
    selectors.unwrap_or_default().iter().map(read).collect()
}

fn toleration(toleration: &api::DeviceToleration) -> Toleration {
    Toleration {
        key: toleration.key.clone(),
        operator: match toleration.operator.as_deref() {
            None | Some("" | "Equal") => TolerationOperator::Equal,
            Some("Exists") => TolerationOperator::Exists,
            Some(_) => TolerationOperator::Unknown,
        },
        value: toleration.value.clone().unwrap_or_default(),
        effect: toleration.effect.clone(),
    }
}

fn constraint(constraint: &api::DeviceConstraint) -> Constraint {
    Constraint {
        requests: constraint.requests.clone().unwrap_or_default(),
        kind: match (&constraint.match_attribute, &constraint.distinct_attribute) {
            (Some(attribute), _) => ConstraintKind::Match(attribute.clone()),
            (None, Some(attribute)) => ConstraintKind::Distinct(attribute.clone()),
            (None, None) => ConstraintKind::Unknown,
        },
    }
}
