//! CEL values.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use semver::Version;
use tessera_api::quantity::Quantity;

/// A CEL value. Cloning is cheap, since large values are shared.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Arc<str>),
    Bytes(Arc<[u8]>),
    List(Arc<Vec<Value>>),
    Map(Arc<Map>),
    Optional(Option<Arc<Value>>),
    /// A type, by name.
    Type(Arc<str>),
    Quantity(Quantity),
    Semver(Arc<Version>),
    Ip(IpAddr),
    Cidr(Cidr),
    /// The variable `device`.
    Device,
}

/// A network: an address and the number of its leading bits that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cidr {
    pub(super) address: IpAddr,
    pub(super) prefix: u8,
}

/// A CEL map.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    pub(super) entries: BTreeMap<Key, Value>,
    /// A missing key yields an empty map: used for the domains of a device.
    pub(super) empty_by_default: bool,
}

/// Key of a map. Numbers are equal across types, so a whole number has one representation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Bool(bool),
    Number(i128),
    String(Arc<str>),
}

impl Key {
    /// Converts a value to a key.
    pub(super) fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Bool(b) => Some(Self::Bool(*b)),
            Value::Int(i) => Some(Self::Number(i128::from(*i))),
            Value::Uint(u) => Some(Self::Number(i128::from(*u))),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "it is a whole number within i64's range"
            )]
            Value::Double(d) if d.fract() == 0.0 && d.abs() < 9.2e18 => {
                Some(Self::Number(*d as i128))
            }
            Value::String(s) => Some(Self::String(Arc::clone(s))),
            _ => None,
        }
    }

    /// Converts the key to a value.
    pub(super) fn value(&self) -> Value {
        match self {
            Self::Bool(b) => Value::Bool(*b),
            Self::Number(n) => i64::try_from(*n)
                .map_or_else(|_| Value::Uint(u64::try_from(*n).unwrap_or(u64::MAX)), Value::Int),
            Self::String(s) => Value::String(Arc::clone(s)),
        }
    }
}

impl Map {
    /// Returns the value for the key.
    pub(super) fn get(&self, key: &Value) -> Option<Value> {
        let known = Key::of(key).and_then(|key| self.entries.get(&key)).cloned();
        known.or_else(|| self.empty_by_default.then(|| Value::Map(Arc::default())))
    }

    /// Returns true if the key is present.
    pub(super) fn contains(&self, key: &Value) -> bool {
        Key::of(key).is_some_and(|key| self.entries.contains_key(&key))
    }
}

impl Value {
    pub(super) fn string(text: impl Into<Arc<str>>) -> Self {
        Self::String(text.into())
    }

    pub(super) fn list(elements: Vec<Self>) -> Self {
        Self::List(Arc::new(elements))
    }

    pub(super) fn some(value: Self) -> Self {
        Self::Optional(Some(Arc::new(value)))
    }

    /// Returns the name of its type.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null_type",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Uint(_) => "uint",
            Self::Double(_) => "double",
            Self::String(_) => "string",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "list",
            Self::Map(_) => "map",
            Self::Optional(_) => "optional_type",
            Self::Type(_) => "type",
            Self::Quantity(_) => "kubernetes.Quantity",
            Self::Semver(_) => "kubernetes.Semver",
            Self::Ip(_) => "net.IP",
            Self::Cidr(_) => "net.CIDR",
            Self::Device => "kubernetes.DRADevice",
        }
    }

    /// Returns the size for the cost model: characters, bytes or elements; 1 for other values.
    pub(super) fn size(&self) -> u64 {
        let size = match self {
            Self::String(s) => s.chars().count(),
            Self::Bytes(b) => b.len(),
            Self::List(l) => l.len(),
            Self::Map(m) => m.entries.len(),
            _ => 1,
        };
        size as u64
    }

    /// Returns true if both values are equal.
    pub(super) fn equals(&self, other: &Self) -> bool {
        self.equality(other) == Some(true)
    }

    /// Compares for equality: numbers across types, other values within their type. `None` means
    /// that a value of Kubernetes' libraries is not comparable with another type.
    pub(super) fn equality(&self, other: &Self) -> Option<bool> {
        match (self, other) {
            (Self::Null, Self::Null) | (Self::Device, Self::Device) => Some(true),
            (Self::Bool(a), Self::Bool(b)) => Some(a == b),
            (Self::String(a), Self::String(b)) | (Self::Type(a), Self::Type(b)) => Some(a == b),
            (Self::Bytes(a), Self::Bytes(b)) => Some(a == b),
            // Upstream considers lists and maps equal unless two of their values are known to
            // differ.
            (Self::List(a), Self::List(b)) => {
                let differs = |(a, b): (&Self, &Self)| a.equality(b) == Some(false);
                Some(a.len() == b.len() && !a.iter().zip(b.iter()).any(differs))
            }
            (Self::Map(a), Self::Map(b)) => {
                let differs = |((ka, a), (kb, b)): ((&Key, &Self), (&Key, &Self))| {
                    ka != kb || a.equality(b) == Some(false)
                };
                Some(
                    a.entries.len() == b.entries.len()
                        && !a.entries.iter().zip(&b.entries).any(differs),
                )
            }
            (Self::Optional(a), Self::Optional(b)) => match (a, b) {
                (None, None) => Some(true),
                (Some(a), Some(b)) => a.equality(b),
                _ => Some(false),
            },
            (Self::Quantity(a), Self::Quantity(b)) => Some(a == b),
            // Precedence ignores build metadata, and upstream compares by precedence.
            (Self::Semver(a), Self::Semver(b)) => Some(a.cmp_precedence(b).is_eq()),
            (Self::Ip(a), Self::Ip(b)) => Some(a == b),
            (Self::Cidr(a), Self::Cidr(b)) => Some(a == b),
            (Self::Quantity(_) | Self::Semver(_) | Self::Ip(_) | Self::Cidr(_), _) => None,
            _ => Some(self.compare_numbers(other) == Some(Ordering::Equal)),
        }
    }

    /// Returns the order of two ordered values.
    pub(super) fn compare(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Bool(a), Self::Bool(b)) => Some(a.cmp(b)),
            (Self::String(a), Self::String(b)) => Some(a.cmp(b)),
            (Self::Bytes(a), Self::Bytes(b)) => Some(a.cmp(b)),
            _ => self.compare_numbers(other),
        }
    }

    fn compare_numbers(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Double(a), Self::Double(b)) => a.partial_cmp(b),
            (Self::Double(a), b) => compare_whole(b.whole()?, *a).map(Ordering::reverse),
            (a, Self::Double(b)) => compare_whole(a.whole()?, *b),
            (a, b) => Some(a.whole()?.cmp(&b.whole()?)),
        }
    }

    fn whole(&self) -> Option<i128> {
        match self {
            Self::Int(i) => Some(i128::from(*i)),
            Self::Uint(u) => Some(i128::from(*u)),
            _ => None,
        }
    }
}

/// Compares without rounding the integer to a double.
#[expect(
    clippy::cast_possible_truncation,
    reason = "only within the range of i128, and for whole parts"
)]
fn compare_whole(whole: i128, double: f64) -> Option<Ordering> {
    if double.is_nan() {
        return None;
    }
    if double.abs() >= 1e30 {
        return Some(if double > 0.0 { Ordering::Less } else { Ordering::Greater });
    }
    let floor = double.floor();
    Some(whole.cmp(&(floor as i128)).then(if double > floor {
        Ordering::Less
    } else {
        Ordering::Equal
    }))
}
