//! Classes and claims.

use k8s_openapi::api::resource::v1 as api;
use tessera_allocator::model::{
    AllocationMode, Alternative, Claim, Constraint, ConstraintKind, DeviceClass, DeviceSelector,
    NameMap, Request, Toleration, TolerationOperator,
};
use tessera_api::names::{ClaimName, ClaimUid, DeviceClassName, Namespace, RequestName};
use tessera_api::quantity::Quantity;

use super::{ConvertError, Subject, name_map};

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

/// Reads the requests of a ResourceClaim.
///
/// # Errors
/// A name or quantity in it is not one.
pub fn claim(object: &api::ResourceClaim) -> Result<Claim, ConvertError> {
    let metadata = &object.metadata;
    let subject = Subject::new("ResourceClaim", metadata.name.as_ref());
    let text = |field: &'static str, value: &Option<String>| {
        value.clone().ok_or_else(|| subject.missing(field))
    };
    let devices = object.spec.as_ref().and_then(|s| s.devices.clone()).unwrap_or_default();
    let requests = devices.requests.iter().flatten();
    Ok(Claim {
        uid: ClaimUid::new(text("metadata.uid", &metadata.uid)?)
            .map_err(subject.field("metadata.uid"))?,
        namespace: Namespace::new(text("metadata.namespace", &metadata.namespace)?)
            .map_err(subject.field("metadata.namespace"))?,
        name: ClaimName::new(text("metadata.name", &metadata.name)?)
            .map_err(subject.field("metadata.name"))?,
        requests: requests.map(|r| request(r, subject)).collect::<Result<_, _>>()?,
        constraints: devices.constraints.iter().flatten().map(constraint).collect(),
        configs: devices.config.unwrap_or_default(),
        defaults: None,
    })
}

fn request(request: &api::DeviceRequest, subject: Subject<'_>) -> Result<Request, ConvertError> {
    let name =
        RequestName::new(&request.name).map_err(subject.field("spec.devices.requests[].name"))?;
    let first_available = request.first_available.iter().flatten();
    let mut alternatives = first_available
        .map(|sub| subrequest(&name, sub, subject))
        .chain(request.exactly.iter().map(|exactly| exact(name.clone(), exactly, subject)))
        .collect::<Result<Vec<_>, _>>()?;
    if alternatives.is_empty() {
        alternatives.push(of_the_future(name.clone()));
    }
    Ok(Request { name, alternatives })
}

/// Returns the alternative for a request of a kind that this version does not support.
fn of_the_future(name: RequestName) -> Alternative {
    Alternative {
        name,
        class: None,
        selectors: Vec::new(),
        mode: AllocationMode::Unknown,
        tolerations: Vec::new(),
        capacity: NameMap::new(),
        admin: None,
        unsupported: Some("this kind of request"),
    }
}

fn exact(
    name: RequestName,
    exactly: &api::ExactDeviceRequest,
    subject: Subject<'_>,
) -> Result<Alternative, ConvertError> {
    let derived = exactly.derived_attributes.as_ref().is_some_and(|d| !d.is_empty());
    Ok(Alternative {
        name,
        class: class_name(&exactly.device_class_name, subject)?,
        selectors: selectors(exactly.selectors.as_deref()),
        mode: mode(exactly.allocation_mode.as_deref(), exactly.count),
        tolerations: exactly.tolerations.iter().flatten().map(toleration).collect(),
        capacity: amounts(exactly.capacity.as_ref(), subject)?,
        admin: exactly.admin_access,
        unsupported: derived.then_some("derivedAttributes"),
    })
}

fn subrequest(
    request: &RequestName,
    sub: &api::DeviceSubRequest,
    subject: Subject<'_>,
) -> Result<Alternative, ConvertError> {
    let name = RequestName::new(format!("{request}/{}", sub.name));
    let derived = sub.derived_attributes.as_ref().is_some_and(|d| !d.is_empty());
    Ok(Alternative {
        name: name.map_err(subject.field("spec.devices.requests[].firstAvailable[].name"))?,
        class: class_name(&sub.device_class_name, subject)?,
        selectors: selectors(sub.selectors.as_deref()),
        mode: mode(sub.allocation_mode.as_deref(), sub.count),
        tolerations: sub.tolerations.iter().flatten().map(toleration).collect(),
        capacity: amounts(sub.capacity.as_ref(), subject)?,
        admin: None,
        unsupported: derived.then_some("derivedAttributes"),
    })
}

fn class_name(name: &str, subject: Subject<'_>) -> Result<Option<DeviceClassName>, ConvertError> {
    if name.is_empty() {
        return Ok(None);
    }
    let field = "spec.devices.requests[].{exactly,firstAvailable[]}.deviceClassName";
    DeviceClassName::new(name).map(Some).map_err(subject.field(field))
}

fn mode(mode: Option<&str>, count: Option<i64>) -> AllocationMode {
    match mode {
        // The API server sets the default.
        None | Some("ExactCount") => {
            AllocationMode::Exact(u64::try_from(count.unwrap_or(1)).unwrap_or(0))
        }
        Some("All") => AllocationMode::All,
        Some(_) => AllocationMode::Unknown,
    }
}

fn amounts(
    capacity: Option<&api::CapacityRequirements>,
    subject: Subject<'_>,
) -> Result<NameMap<Quantity>, ConvertError> {
    name_map(capacity.and_then(|capacity| capacity.requests.as_ref()), |name, amount| {
        let path = format!(
            "spec.devices.requests[].{{exactly,firstAvailable[]}}.capacity.requests[{name}]"
        );
        Quantity::try_from(amount).map_err(subject.field(path))
    })
}

fn selectors(selectors: Option<&[api::DeviceSelector]>) -> Vec<DeviceSelector> {
    let read = |s: &api::DeviceSelector| {
        s.cel
            .as_ref()
            .map_or_else(DeviceSelector::unknown, |cel| DeviceSelector::new(&cel.expression))
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
