//! Conversion between Kubernetes objects and the model of the allocator.

mod allocation;
mod claim;
mod node;
mod pod;
mod quota;
mod selector;
mod slice;

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_allocator::model::NameMap;

pub use allocation::{AllocatedClaim, allocated, allocation};
pub use claim::{claim, class};
pub use node::node;
pub use pod::{requests as pod_requests, scheduling};
pub use quota::{quota, quota_names};
pub(crate) use slice::taint;
pub use slice::{DeviceFilter, slice};

/// Reads the values of a map of an object. The result has no spare room: a large cluster has a
/// million of them.
fn name_map<T, V>(
    map: Option<&BTreeMap<String, T>>,
    mut read: impl FnMut(&String, &T) -> Result<V, ConvertError>,
) -> Result<NameMap<V>, ConvertError> {
    let mut values = NameMap::with_capacity(map.map_or(0, BTreeMap::len));
    for (name, value) in map.into_iter().flatten() {
        values.insert(name.clone(), read(name, value)?);
    }
    Ok(values)
}

/// The failure to read an object. The object is ignored and the error logged; an API server would
/// not have stored it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ConvertError {
    /// A required field is missing.
    #[error("{kind} `{name}` has no `{field}`")]
    Missing {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The field.
        field: &'static str,
    },
    /// A field has an invalid value.
    #[error("{kind} `{name}` has an invalid `{field}`")]
    Field {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The field.
        field: String,
        /// The cause.
        #[source]
        source: Box<FieldError>,
    },
    /// The links of a slice's GPUs cannot be read.
    #[error("cannot read the GPU links of ResourceSlice `{name}`")]
    Topology {
        /// Name of the slice.
        name: String,
        /// The cause.
        #[source]
        source: Arc<tessera_api::slice::TopologyError>,
    },
}

/// The cause of an invalid field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// It is not a name of that kind.
    #[error(transparent)]
    Name(#[from] tessera_api::names::NameError),
    /// It is not a quantity.
    #[error(transparent)]
    Quantity(#[from] tessera_api::quantity::QuantityError),
    /// They are not a GpuConfig.
    #[error(transparent)]
    Config(#[from] tessera_api::ConfigError),
    /// They are not the limits of a quota.
    #[error(transparent)]
    Quota(#[from] tessera_api::quota::QuotaError),
}

/// The object that an error names.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    kind: &'static str,
    name: &'a str,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(kind: &'static str, name: Option<&'a String>) -> Self {
        Self { kind, name: name.map_or("", String::as_str) }
    }

    pub(crate) fn missing(self, field: &'static str) -> ConvertError {
        ConvertError::Missing { kind: self.kind, name: self.name.to_owned(), field }
    }

    pub(crate) fn field<E: Into<FieldError>>(
        self,
        field: impl Into<String>,
    ) -> impl FnOnce(E) -> ConvertError {
        let (kind, name, field) = (self.kind, self.name.to_owned(), field.into());
        move |source| ConvertError::Field { kind, name, field, source: Box::new(source.into()) }
    }
}
