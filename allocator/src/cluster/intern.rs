//! Names and values as numbers, so that comparing and looking up what forty thousand devices have
//! in common costs little.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::FixedState;
use tessera_api::names::{DriverName, attribute};

use crate::fragmentation::GpuType;
use crate::model::{Attribute, Device};

/// A map whose keys we have made ourselves.
pub(crate) type FastMap<K, V> = HashMap<K, V, FixedState>;

/// The fully qualified name of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NameId(u32);

/// The value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ValueId(u32);

impl NameId {
    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

impl ValueId {
    /// The attribute is not there.
    pub(crate) const ABSENT: Self = Self(0);

    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

/// What a device offers to anybody who looks at neither its name nor its attributes nor its
/// counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct OfferId(u32);

impl OfferId {
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// An offer: one device stands for all that have it.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) device: Arc<Device>,
    /// Its capacities in nanounits, in the order of their names.
    pub(crate) capacity: Box<[i128]>,
}

/// A device in numbers.
#[derive(Debug, Clone)]
pub(crate) struct CompiledDevice {
    pub(crate) device: Arc<Device>,
    pub(crate) offer: OfferId,
    /// Its type: devices of one driver and product have one.
    pub(crate) kind: GpuType,
    /// Its attributes, sorted by name.
    attributes: Box<[(NameId, ValueId)]>,
    /// Nothing may be concluded from it for others: an attribute is published twice, with and
    /// without its domain, or is of a kind on which every selector fails.
    pub(crate) irregular: bool,
}

impl CompiledDevice {
    /// The value of an attribute.
    pub(crate) fn attribute(&self, name: NameId) -> ValueId {
        let found = self.attributes.iter().find(|(known, _)| *known == name);
        found.map_or(ValueId::ABSENT, |(_, value)| *value)
    }

    /// Names and values of all attributes.
    pub(crate) fn attributes(&self) -> &[(NameId, ValueId)] {
        &self.attributes
    }
}

/// All numbers that have been given.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    names: FastMap<Box<str>, NameId>,
    domains: Vec<Box<str>>,
    /// Per driver the names as published.
    published: FastMap<DriverName, FastMap<Box<str>, NameId>>,
    drivers: FastMap<DriverName, u32>,
    values: FastMap<Attribute, ValueId>,
    by_value: Vec<Attribute>,
    offers: Vec<Arc<Offer>>,
    /// Types by driver and product, in the order in which they were met.
    kinds: FastMap<(u32, ValueId), GpuType>,
    /// Offers by what distinguishes most of them: how much there is of each capacity.
    by_capacity: FastMap<Box<[i128]>, Vec<OfferId>>,
}

impl Interner {
    /// The number of a fully qualified name.
    pub(crate) fn name(&mut self, qualified: &str) -> NameId {
        if let Some(known) = self.names.get(qualified) {
            return *known;
        }
        let id = NameId(u32::try_from(self.domains.len()).unwrap_or(u32::MAX));
        self.names.insert(qualified.into(), id);
        self.domains.push(qualified.split_once('/').map_or("", |(domain, _)| domain).into());
        id
    }

    /// The number of a driver.
    pub(crate) fn driver(&mut self, driver: &DriverName) -> u32 {
        if let Some(known) = self.drivers.get(driver) {
            return *known;
        }
        let number = u32::try_from(self.drivers.len()).unwrap_or(u32::MAX);
        self.drivers.insert(driver.clone(), number);
        number
    }

    /// The domain of a name.
    pub(crate) fn domain(&self, name: NameId) -> &str {
        &self.domains[name.0 as usize]
    }

    /// The number of a value that some device has.
    pub(crate) fn known_value(&self, value: &Attribute) -> Option<ValueId> {
        self.values.get(value).copied()
    }

    fn value(&mut self, value: &Attribute) -> ValueId {
        if let Some(known) = self.values.get(value) {
            return *known;
        }
        self.by_value.push(value.clone());
        let id = ValueId(u32::try_from(self.by_value.len()).unwrap_or(u32::MAX));
        self.values.insert(value.clone(), id);
        id
    }

    /// The value behind a number.
    pub(crate) fn value_of(&self, id: ValueId) -> Option<&Attribute> {
        self.by_value.get((id.0 as usize).checked_sub(1)?)
    }

    /// How much is remembered: values, names (claims bring some too) and, which are larger, offers.
    pub(crate) fn size(&self) -> usize {
        self.by_value.len() + self.domains.len() + 32 * self.offers.len()
    }

    pub(crate) fn offer(&self, id: OfferId) -> &Arc<Offer> {
        &self.offers[id.index()]
    }

    /// Puts a device into numbers. `last` is the device before it, which mostly offers the same.
    pub(crate) fn device(
        &mut self,
        driver: &DriverName,
        device: &Arc<Device>,
        last: Option<&CompiledDevice>,
    ) -> CompiledDevice {
        let offer = match last {
            Some(last) if last.device.same_offer(device) => last.offer,
            _ => self.offer_of(device),
        };
        let mut attributes = Vec::with_capacity(device.attributes.len());
        let mut irregular = false;
        for (published, value) in &device.attributes {
            irregular |= is_irregular(value);
            attributes.push((self.qualified(driver, published), self.value(value)));
        }
        attributes.sort_unstable();
        let twice = attributes.windows(2).position(|pair| pair[0].0 == pair[1].0);
        irregular |= twice.is_some();
        let kind = match last {
            Some(last) if product(&last.device) == product(device) => last.kind,
            _ => self.kind(driver, device),
        };
        CompiledDevice {
            device: Arc::clone(device),
            offer,
            kind,
            attributes: attributes.into(),
            irregular,
        }
    }

    /// Devices that do not say which product they are count as one.
    fn kind(&mut self, driver: &DriverName, device: &Device) -> GpuType {
        let product = device
            .attributes
            .get(attribute::PRODUCT_NAME)
            .and_then(|value| self.known_value(value));
        let key = (self.driver(driver), product.unwrap_or(ValueId::ABSENT));
        let next = GpuType(u16::try_from(self.kinds.len()).unwrap_or(u16::MAX));
        *self.kinds.entry(key).or_insert(next)
    }

    fn qualified(&mut self, driver: &DriverName, published: &str) -> NameId {
        if let Some(known) = self.published.get(driver).and_then(|names| names.get(published)) {
            return *known;
        }
        let id = match published.contains('/') {
            true => self.name(published),
            false => self.name(&format!("{driver}/{published}")),
        };
        self.published.entry(driver.clone()).or_default().insert(published.into(), id);
        id
    }

    fn offer_of(&mut self, device: &Arc<Device>) -> OfferId {
        let capacity: Box<[i128]> = device.capacity.values().map(|c| c.value.nano()).collect();
        let alike = self.by_capacity.entry(capacity.clone()).or_default();
        let known = alike.iter().find(|id| self.offers[id.index()].device.same_offer(device));
        if let Some(known) = known {
            return *known;
        }
        let id = OfferId(u32::try_from(self.offers.len()).unwrap_or(u32::MAX));
        alike.push(id);
        self.offers.push(Arc::new(Offer { device: Arc::clone(device), capacity }));
        id
    }
}

fn product(device: &Device) -> Option<&Attribute> {
    device.attributes.get(attribute::PRODUCT_NAME)
}

fn is_irregular(value: &Attribute) -> bool {
    match value {
        Attribute::Unknown => true,
        Attribute::Version(text) => semver::Version::parse(text).is_err(),
        Attribute::List(items) => items.iter().any(is_irregular),
        Attribute::Bool(_) | Attribute::Int(_) | Attribute::String(_) => false,
    }
}
