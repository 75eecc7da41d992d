//! A device as seen by selectors.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::DriverName;

use super::error::SelectorError;
use super::value::{Key, Map, Value};
use crate::model::{Attribute, Device};

/// Value of the variable `device`, built once per device.
///
/// A version attribute that is not a semantic version makes the whole view an error: upstream fails
/// every evaluation on such a device, even if the expression does not read the attribute.
#[derive(Debug, Clone)]
pub struct DeviceView(Result<Arc<Fields>, SelectorError>);

impl DeviceView {
    /// Creates the view of a `device` of `driver`.
    pub fn new(driver: &DriverName, device: &Device) -> Self {
        Self(Fields::new(driver, device).map(Arc::new))
    }

    pub(super) fn fields(&self) -> Result<&Fields, SelectorError> {
        self.0.as_deref().map_err(Clone::clone)
    }
}

/// Fields of the variable `device`.
#[derive(Debug)]
pub(super) struct Fields {
    driver: Value,
    shared: Value,
    attributes: Value,
    capacity: Value,
}

impl Fields {
    fn new(driver: &DriverName, device: &Device) -> Result<Self, SelectorError> {
        let mut attributes = ByDomain::default();
        for (name, attribute) in &device.attributes {
            attributes.insert(driver, name, attribute_value(name, attribute)?);
        }
        let mut capacity = ByDomain::default();
        for (name, amount) in device.capacity.iter() {
            capacity.insert(driver, name, Value::Quantity(amount.value));
        }
        Ok(Self {
            driver: Value::string(driver.as_str()),
            shared: Value::Bool(device.shared),
            attributes: attributes.into_value(),
            capacity: capacity.into_value(),
        })
    }

    pub(super) fn field(&self, name: &str) -> Option<Value> {
        match name {
            "driver" => Some(self.driver.clone()),
            "allowMultipleAllocations" => Some(self.shared.clone()),
            "attributes" => Some(self.attributes.clone()),
            "capacity" => Some(self.capacity.clone()),
            _ => None,
        }
    }
}

fn attribute_value(name: &str, attribute: &Attribute) -> Result<Value, SelectorError> {
    Ok(match attribute {
        Attribute::Bool(value) => Value::Bool(*value),
        Attribute::Int(value) => Value::Int(*value),
        Attribute::String(value) => Value::String(Arc::clone(value)),
        Attribute::Version(text) => match semver::Version::parse(text) {
            Ok(version) => Value::Semver(Arc::new(version)),
            Err(_) => {
                return Err(SelectorError::BadVersion {
                    attribute: name.to_owned(),
                    value: text.to_string(),
                });
            }
        },
        Attribute::List(items) => {
            let values = items.iter().map(|item| attribute_value(name, item));
            Value::list(values.collect::<Result<_, _>>()?)
        }
        Attribute::Unknown => {
            return Err(SelectorError::unsupported(
                "a device with an attribute of an unknown type",
            ));
        }
    })
}

/// `device.attributes` or `device.capacity`: every domain exists; one without entries is an empty
/// map.
#[derive(Default)]
struct ByDomain(BTreeMap<String, Map>);

impl ByDomain {
    fn insert(&mut self, driver: &DriverName, name: &str, value: Value) {
        let (domain, id) = name.split_once('/').unwrap_or((driver.as_str(), name));
        self.0.entry(domain.to_owned()).or_default().entries.insert(Key::String(id.into()), value);
    }

    fn into_value(self) -> Value {
        let domains = self
            .0
            .into_iter()
            .map(|(domain, ids)| (Key::String(domain.into()), Value::Map(Arc::new(ids))));
        Value::Map(Arc::new(Map { entries: domains.collect(), empty_by_default: true }))
    }
}
