//! GpuQuotas.

use tessera_allocator::Quota;
use tessera_api::names::{DeviceClassName, Namespace, QuotaName};
use tessera_api::quota::GpuQuota;

use super::{ConvertError, Subject};

/// Returns the namespace and the name of a quota.
///
/// # Errors
/// One of them is missing or not a name.
pub fn quota_names(object: &GpuQuota) -> Result<(Namespace, QuotaName), ConvertError> {
    let metadata = &object.metadata;
    let subject = Subject::new("GpuQuota", metadata.name.as_ref());
    let missing = |field| move || subject.missing(field);
    let namespace = metadata.namespace.as_ref().ok_or_else(missing("metadata.namespace"))?;
    let name = metadata.name.as_ref().ok_or_else(missing("metadata.name"))?;
    let namespace =
        Namespace::new(namespace.as_str()).map_err(subject.field("metadata.namespace"))?;
    Ok((namespace, QuotaName::new(name.as_str()).map_err(subject.field("metadata.name"))?))
}

/// Returns the namespace and the limits of a quota.
///
/// # Errors
/// A field cannot be read.
pub fn quota(object: &GpuQuota) -> Result<(Namespace, Quota), ConvertError> {
    let subject = Subject::new("GpuQuota", object.metadata.name.as_ref());
    let (namespace, name) = quota_names(object)?;
    let class = |name: &String| {
        DeviceClassName::new(name.as_str()).map_err(subject.field("spec.deviceClassNames"))
    };
    let classes = object.spec.device_class_names.iter().map(class).collect::<Result<_, _>>()?;
    let hard = object.limits().map_err(subject.field("spec.hard"))?;
    Ok((namespace, Quota { name, classes, hard }))
}
