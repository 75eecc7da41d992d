//! Exact amounts in the notation of Kubernetes.
//!
//! A [`Quantity`] is a whole number of billionths, kept in an `i128`, together with the notation it
//! was written in. It reads what `k8s.io/apimachinery/pkg/api/resource` reads, rounds as that does
//! (anything finer than a billionth moves away from zero; binary notation is capped at 2⁶³−1) and
//! prints the same canonical form, so that what we write is what the API server would make of it.
//! Nothing passes through floating point.
//!
//! Where it differs from apimachinery, on purpose: amounts beyond ±1.7·10²⁹ are refused instead of
//! becoming arbitrary precision; the text first read is not kept where it happened to be nearly
//! canonical (`+5` prints as `5`); and amounts of 10²¹ and more, or 2⁷⁰ and more, keep their
//! largest suffix instead of losing it.

mod format;
mod parse;

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

pub use format::Format;
pub use parse::QuantityError;

/// Billionths in one.
const NANO: i128 = 1_000_000_000;
/// Billionths in a thousandth.
const NANO_PER_MILLI: i128 = 1_000_000;
/// Bytes in a MiB.
const MIB: i128 = 1 << 20;

/// An exact amount: of bytes, of percent, of whatever the field says.
///
/// Equality, order and hash are those of the amount; `1Gi`, `1024Mi` and `1073741824` are equal.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nano: i128,
    format: Format,
}

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self { nano: 0, format: Format::DecimalSi };

    /// An amount of bytes, written with binary suffixes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self { nano: bytes as i128 * NANO, format: Format::BinarySi }
    }

    /// An amount of MiB, written with binary suffixes.
    pub const fn from_mib(mib: u64) -> Self {
        Self { nano: mib as i128 * MIB * NANO, format: Format::BinarySi }
    }

    /// A whole number, written with decimal suffixes: percent of a GPU's compute, counts.
    pub const fn from_integer(value: i64) -> Self {
        Self { nano: value as i128 * NANO, format: Format::DecimalSi }
    }

    /// An amount of thousand-millionths, written with decimal suffixes.
    pub const fn from_nano(nano: i128) -> Self {
        Self { nano, format: Format::DecimalSi }
    }

    /// Percent of a GPU's compute, as the capacity `cores` counts them.
    pub const fn from_percent(percent: u8) -> Self {
        Self::from_integer(percent as i64)
    }

    /// Thousandths, written with decimal suffixes.
    pub const fn from_milli(milli: i64) -> Self {
        Self { nano: milli as i128 * NANO_PER_MILLI, format: Format::DecimalSi }
    }

    /// Parses what the API calls a quantity.
    ///
    /// # Errors
    /// The text is not a quantity, or is beyond what is kept exactly.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        parse::parse(text)
    }

    /// The notation it is printed in.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Returns the amount in another notation.
    #[must_use]
    pub const fn in_format(self, format: Format) -> Self {
        Self { nano: self.nano, format }
    }

    /// The amount in billionths: exact.
    pub const fn nano(&self) -> i128 {
        self.nano
    }

    /// The amount in whole units, a fraction rounded away from zero, as `Quantity.Value()` of
    /// apimachinery.
    pub const fn value(&self) -> i128 {
        divide_away_from_zero(self.nano, NANO)
    }

    /// [`value`](Self::value) where it fits an `i64`.
    pub fn value_i64(&self) -> Option<i64> {
        i64::try_from(self.value()).ok()
    }

    /// The amount in thousandths, a finer fraction rounded away from zero.
    pub const fn milli(&self) -> i128 {
        divide_away_from_zero(self.nano, NANO_PER_MILLI)
    }

    /// The amount as whole units where it is one and fits; never rounded.
    pub fn as_exact_i64(&self) -> Option<i64> {
        self.is_integer().then(|| self.value_i64()).flatten()
    }

    /// The amount as bytes: rounded up to a whole byte; `None` where negative or beyond a `u64`.
    pub fn bytes(&self) -> Option<u64> {
        (!self.is_negative()).then(|| u64::try_from(self.value()).ok()).flatten()
    }

    /// The amount of bytes as whole MiB, rounded down; `None` where negative or beyond a `u64`.
    pub fn floor_mib(&self) -> Option<u64> {
        u64::try_from(self.nano.div_euclid(NANO * MIB)).ok()
    }

    /// Returns true if the amount is zero.
    pub const fn is_zero(&self) -> bool {
        self.nano == 0
    }

    /// Returns true if the amount is below zero.
    pub const fn is_negative(&self) -> bool {
        self.nano < 0
    }

    /// Returns true if the amount has no fraction.
    pub const fn is_integer(&self) -> bool {
        self.nano % NANO == 0
    }

    /// The sum, in the notation of `self` (of `other`, where `self` is zero, as apimachinery has
    /// it); `None` on overflow.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let nano = self.nano.checked_add(other.nano)?;
        Some(Self { nano, format: self.format_with(other) })
    }

    /// The difference, in the notation of `self` (of `other`, where `self` is zero); `None` on
    /// overflow.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        let nano = self.nano.checked_sub(other.nano)?;
        Some(Self { nano, format: self.format_with(other) })
    }

    /// The product with a whole number; `None` on overflow.
    #[must_use]
    pub fn checked_mul(self, factor: i64) -> Option<Self> {
        Some(Self { nano: self.nano.checked_mul(i128::from(factor))?, format: self.format })
    }

    /// The difference, but never below zero: how much is left, how much is missing.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        let nano = self.nano.saturating_sub(other.nano).max(0);
        Self { nano, format: self.format_with(other) }
    }

    fn format_with(self, other: Self) -> Format {
        if self.is_zero() { other.format } else { self.format }
    }
}

/// Divides by a positive number; what does not divide evenly moves away from zero.
const fn divide_away_from_zero(dividend: i128, divisor: i128) -> i128 {
    let quotient = dividend / divisor;
    match dividend % divisor {
        0 => quotient,
        rest if rest > 0 => quotient + 1,
        _ => quotient - 1,
    }
}

impl Default for Quantity {
    fn default() -> Self {
        Self::ZERO
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nano.cmp(&other.nano)
    }
}

impl Hash for Quantity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.nano.hash(state);
    }
}

impl std::str::FromStr for Quantity {
    type Err = QuantityError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl TryFrom<&ApiQuantity> for Quantity {
    type Error = QuantityError;
    fn try_from(quantity: &ApiQuantity) -> Result<Self, Self::Error> {
        Self::parse(&quantity.0)
    }
}

impl From<Quantity> for ApiQuantity {
    fn from(quantity: Quantity) -> Self {
        Self(quantity.to_string())
    }
}

impl From<&Quantity> for ApiQuantity {
    fn from(quantity: &Quantity) -> Self {
        Self(quantity.to_string())
    }
}

impl serde::Serialize for Quantity {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Quantity {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl serde::de::Visitor<'_> for Text {
            type Value = Quantity;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a quantity such as \"19Gi\", \"500m\" or 25")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Quantity, E> {
                Quantity::parse(text.trim()).map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Quantity, E> {
                Ok(Quantity::from_integer(value))
            }
            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Quantity, E> {
                Ok(Quantity::from_bytes(value).in_format(Format::DecimalSi))
            }
        }
        deserializer.deserialize_any(Text)
    }
}
