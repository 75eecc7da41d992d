//! Interning of names and values: comparing properties shared by tens of thousands of devices is
//! cheap.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::FixedState;
use tessera_api::names::{DriverName, attribute};

use crate::fragmentation::GpuType;
use crate::model::{Attribute, Device, Slice};

/// A map without protection against chosen keys; used for internally generated keys.
pub(crate) type FastMap<K, V> = HashMap<K, V, FixedState>;

/// Interned fully qualified name of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NameId(u32);

/// Interned value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ValueId(u32);

impl NameId {
    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

impl ValueId {
    /// The device does not have the attribute.
    pub(crate) const ABSENT: Self = Self(0);

    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

/// Id of a device profile: properties of a device apart from names, attributes and counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ProfileId(u32);

impl ProfileId {
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A device profile, represented by one device that has it.
#[derive(Debug)]
pub(crate) struct DeviceProfile {
    pub(crate) device: Arc<Device>,
    /// Capacities in nano-units, in the order of names.
    pub(crate) capacity: Box<[i128]>,
}

/// A device with interned properties.
#[derive(Debug, Clone)]
pub(crate) struct CompiledDevice {
    pub(crate) device: Arc<Device>,
    pub(crate) profile: ProfileId,
    /// GPU type: devices of one driver and product share one.
    pub(crate) kind: GpuType,
    /// Attributes, sorted by name.
    attributes: Box<[(NameId, ValueId)]>,
    /// Selector results cannot be shared with other devices: an attribute is published twice, with
    /// and without its domain, or has a type for which every selector fails.
    pub(crate) is_irregular: bool,
}

impl CompiledDevice {
    /// Returns the value of an attribute.
    pub(crate) fn attribute(&self, name: NameId) -> ValueId {
        let found = self.attributes.iter().find(|(known, _)| *known == name);
        found.map_or(ValueId::ABSENT, |(_, value)| *value)
    }

    /// Returns names and values of all attributes.
    pub(crate) fn attributes(&self) -> &[(NameId, ValueId)] {
        &self.attributes
    }
}

/// A slice with interned devices.
#[derive(Debug)]
pub(crate) struct CompiledSlice {
    pub(crate) slice: Arc<Slice>,
    /// Interned driver name.
    pub(super) driver: u32,
    pub(crate) devices: Vec<CompiledDevice>,
}

/// All interned names and values.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    names: FastMap<Box<str>, NameId>,
    domains: Vec<Box<str>>,
    /// Interned published names, per driver.
    published: FastMap<DriverName, FastMap<Box<str>, NameId>>,
    drivers: FastMap<DriverName, u32>,
    values: FastMap<Attribute, ValueId>,
    by_value: Vec<Attribute>,
    profiles: Vec<Arc<DeviceProfile>>,
    /// GPU types by driver and product, in the order of first use.
    kinds: FastMap<(u32, ValueId), GpuType>,
    /// Profiles by their capacities, which distinguish most of them.
    by_capacity: FastMap<Box<[i128]>, Vec<ProfileId>>,
}

impl Interner {
    /// Interns a fully qualified name.
    pub(crate) fn name(&mut self, qualified: &str) -> NameId {
        if let Some(known) = self.names.get(qualified) {
            return *known;
        }
        let id = NameId(u32::try_from(self.domains.len()).unwrap_or(u32::MAX));
        self.names.insert(qualified.into(), id);
        self.domains.push(qualified.split_once('/').map_or("", |(domain, _)| domain).into());
        id
    }

    /// Interns a driver name.
    pub(crate) fn driver(&mut self, driver: &DriverName) -> u32 {
        if let Some(known) = self.drivers.get(driver) {
            return *known;
        }
        let number = u32::try_from(self.drivers.len()).unwrap_or(u32::MAX);
        self.drivers.insert(driver.clone(), number);
        number
    }

    /// Returns the domain of a name.
    pub(crate) fn domain(&self, name: NameId) -> &str {
        &self.domains[name.0 as usize]
    }

    /// Returns the id of a value if some device has it.
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

    /// Returns the value of an id.
    pub(crate) fn value_of(&self, id: ValueId) -> Option<&Attribute> {
        self.by_value.get((id.0 as usize).checked_sub(1)?)
    }

    /// Returns the weighted number of entries: values, names (some come from claims) and profiles,
    /// which are larger.
    pub(crate) fn size(&self) -> usize {
        self.by_value.len() + self.domains.len() + 32 * self.profiles.len()
    }

    pub(crate) fn profile(&self, id: ProfileId) -> &Arc<DeviceProfile> {
        &self.profiles[id.index()]
    }

    /// Interns a device. `last` is the previous device of the slice, which often has the same
    /// profile.
    pub(crate) fn device(
        &mut self,
        driver: &DriverName,
        device: &Arc<Device>,
        last: Option<&CompiledDevice>,
    ) -> CompiledDevice {
        let profile = match last {
            Some(last) if last.device.has_same_profile(device) => last.profile,
            _ => self.profile_of(device),
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
            profile,
            kind,
            attributes: attributes.into(),
            is_irregular: irregular,
        }
    }

    /// Returns the GPU type. Devices without a product name share one type per driver.
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

    fn profile_of(&mut self, device: &Arc<Device>) -> ProfileId {
        let capacity: Box<[i128]> = device.capacity.values().map(|c| c.value.nano()).collect();
        let alike = self.by_capacity.entry(capacity.clone()).or_default();
        let known =
            alike.iter().find(|id| self.profiles[id.index()].device.has_same_profile(device));
        if let Some(known) = known {
            return *known;
        }
        let id = ProfileId(u32::try_from(self.profiles.len()).unwrap_or(u32::MAX));
        alike.push(id);
        self.profiles.push(Arc::new(DeviceProfile { device: Arc::clone(device), capacity }));
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
