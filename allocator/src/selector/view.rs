//! A device as selectors see it.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock};

use cel::ExecutionError;
use cel::common::traits::Indexer;
use cel::common::types::{CelBool, CelInt, CelList, CelMap, CelMapKey, CelString, Type};
use cel::common::value::{CowVal, StaticVal, Val};
use tessera_api::names::DriverName;

use super::SelectorError;
use super::quantity::CelQuantity;
use super::semver::CelSemver;
use crate::model::{Attribute, Device};

/// The value of the variable `device`, made once per device.
///
/// An attribute published as a version that is not semver spoils it: upstream fails every evaluation on such a device, also
/// of expressions that do not read the attribute.
#[derive(Debug, Clone)]
pub struct DeviceView(Result<Arc<Fields>, SelectorError>);

impl DeviceView {
    /// The view of `device` of `driver`.
    pub fn new(driver: &DriverName, device: &Device) -> Self {
        Self(Fields::new(driver, device).map(Arc::new))
    }

    pub(super) fn variable<'v>(&self) -> Result<Box<dyn Val + 'v>, SelectorError> {
        let fields = self.0.clone()?;
        Ok(Box::new(DeviceValue(fields)))
    }
}

#[derive(Debug)]
struct Fields {
    driver: CelString<'static>,
    shared: CelBool,
    attributes: Domains,
    capacity: Domains,
}

impl Fields {
    fn new(driver: &DriverName, device: &Device) -> Result<Self, SelectorError> {
        let mut attributes = ByDomain::new();
        for (name, attribute) in &device.attributes {
            insert(&mut attributes, driver, name, attribute_value(name, attribute)?);
        }
        let mut capacity = ByDomain::new();
        for (name, amount) in &device.capacity {
            insert(&mut capacity, driver, name, Box::new(CelQuantity(amount.value)));
        }
        Ok(Self {
            driver: CelString::from(driver.as_str().to_owned()),
            shared: device.shared.into(),
            attributes: Domains::new(attributes),
            capacity: Domains::new(capacity),
        })
    }
}

fn attribute_value(name: &str, attribute: &Attribute) -> Result<Box<dyn Val>, SelectorError> {
    Ok(match attribute {
        Attribute::Bool(value) => Box::new(CelBool::from(*value)),
        Attribute::Int(value) => Box::new(CelInt::from(*value)),
        Attribute::String(value) => Box::new(CelString::from(value.to_string())),
        Attribute::Version(text) => match semver::Version::parse(text) {
            Ok(version) => Box::new(CelSemver(version)),
            Err(_) => {
                return Err(SelectorError::BadVersion {
                    attribute: name.to_owned(),
                    value: text.to_string(),
                });
            }
        },
        Attribute::List(items) => {
            let values = items.iter().map(|item| attribute_value(name, item));
            Box::new(CelList::from(values.collect::<Result<Vec<_>, _>>()?))
        }
        Attribute::Unknown => {
            return Err(SelectorError::unsupported("a device with an attribute of an unknown type"));
        }
    })
}

type ByDomain = BTreeMap<String, HashMap<CelMapKey<'static>, Box<dyn Val>>>;

fn insert(domains: &mut ByDomain, driver: &DriverName, name: &str, value: Box<dyn Val>) {
    let (domain, id) = name.split_once('/').unwrap_or((driver.as_str(), name));
    let key = CelMapKey::from(id.to_owned());
    domains.entry(domain.to_owned()).or_default().insert(key, value);
}

/// `device.attributes` or `device.capacity`: any domain is there, one without entries is an empty map.
#[derive(Debug, Clone)]
struct Domains(Arc<BTreeMap<String, CelMap<'static>>>);

static DOMAINS_TYPE: Type = Type::new_unspecified_type("kubernetes.DRADomains");
static NO_ENTRIES: LazyLock<CelMap<'static>> = LazyLock::new(|| CelMap::from(HashMap::new()));

impl Domains {
    fn new(entries: ByDomain) -> Self {
        Self(Arc::new(entries.into_iter().map(|(domain, ids)| (domain, CelMap::from(ids))).collect()))
    }
}

impl Indexer for Domains {
    fn get<'b, 'v>(&'b self, index: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let Some(domain) = index.downcast_ref::<CelString<'_>>() else {
            return Err(ExecutionError::UnexpectedType {
                got: index.get_type().name().to_owned(),
                want: "string".to_owned(),
            });
        };
        Ok(CowVal::Borrowed(self.0.get(domain.inner()).unwrap_or(&NO_ENTRIES)))
    }

    fn steal<'v>(self: Box<Self>, index: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.get(index).map(CowVal::into_owned)
    }
}

impl cel::common::traits::Container for Domains {
    fn contains(&self, value: &dyn Val) -> Result<bool, ExecutionError> {
        Ok(value.downcast_ref::<CelString<'_>>().is_some_and(|domain| self.0.contains_key(domain.inner())))
    }
}

impl Val for Domains {
    fn get_type(&self) -> &Type {
        &DOMAINS_TYPE
    }
    fn cel_type() -> &'static Type {
        &DOMAINS_TYPE
    }
    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }
    fn as_container(&self) -> Option<&dyn cel::common::traits::Container> {
        Some(self)
    }
    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for Domains {}

/// The variable `device`.
#[derive(Debug, Clone)]
struct DeviceValue(Arc<Fields>);

static DEVICE_TYPE: Type = Type::new_unspecified_type("kubernetes.DRADevice");

impl Indexer for DeviceValue {
    fn get<'b, 'v>(&'b self, index: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        match index.downcast_ref::<CelString<'_>>().map(CelString::inner) {
            Some("driver") => Ok(CowVal::Borrowed(&self.0.driver)),
            Some("allowMultipleAllocations") => Ok(CowVal::Borrowed(&self.0.shared)),
            Some("attributes") => Ok(CowVal::Borrowed(&self.0.attributes)),
            Some("capacity") => Ok(CowVal::Borrowed(&self.0.capacity)),
            other => Err(ExecutionError::no_such_key(other.unwrap_or("device"))),
        }
    }

    fn steal<'v>(self: Box<Self>, index: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.get(index).map(CowVal::into_owned)
    }
}

impl Val for DeviceValue {
    fn get_type(&self) -> &Type {
        &DEVICE_TYPE
    }
    fn cel_type() -> &'static Type {
        &DEVICE_TYPE
    }
    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }
    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for DeviceValue {}
