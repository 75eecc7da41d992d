//! Capacity that a request consumes on a device.
//!
//! The rules follow upstream (`consumable_capacity.go` of the structured allocator, 1.37 with
//! fractional ranges). Amounts are exact. An amount that exceeds upstream's 64-bit arithmetic is a
//! fatal error, as in upstream.

use tessera_api::quantity::Quantity;

use crate::features::FeatureGates;
use crate::model::{Capacity, Device, NameMap, RequestPolicy, ValidRange};

/// Fatal error in the capacity of a request; the claim cannot be allocated on any device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapacityError {
    /// The amount does not fit in 64 bits.
    #[error(
        "the request of {amount} for capacity `{capacity}` is too large to be rounded to a step of \
         the device"
    )]
    NotRepresentable {
        /// Capacity name.
        capacity: String,
        /// Requested amount.
        amount: Quantity,
    },
    /// The amount is negative.
    #[error("the request for capacity `{capacity}` comes to the negative amount {amount}")]
    Negative {
        /// Capacity name.
        capacity: String,
        /// Computed amount.
        amount: Quantity,
    },
}

/// Capacity that a request consumes on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Demand {
    /// Amount of each capacity.
    Takes(NameMap<Quantity>),
    /// The device has no capacity with this name.
    UnknownCapacity(String),
    /// The amount of this capacity violates the device's request policy (maximum or step).
    AgainstPolicy(String),
}

/// Computes the amounts that `requests` consume on `device`, without regard to usage.
///
/// # Errors
/// Returns an error if an amount is negative or not representable. It takes precedence over the
/// other outcomes.
pub(crate) fn demand(
    requests: &NameMap<Quantity>,
    device: &Device,
    features: &FeatureGates,
) -> Result<Demand, CapacityError> {
    if let Some(name) = requests.keys().find(|name| !device.capacity.contains_key(*name)) {
        return Ok(Demand::UnknownCapacity(name.clone()));
    }
    let mut taken = NameMap::new();
    for (name, capacity) in device.capacity.iter() {
        let amount = consumed(name, requests.get(name), capacity, features)?;
        if amount.is_negative() {
            return Err(CapacityError::Negative { capacity: name.clone(), amount });
        }
        taken.insert(name.clone(), amount);
    }
    let offender = taken.iter().find(|(name, amount)| {
        device
            .capacity
            .get(*name)
            .and_then(|c| c.policy.as_ref())
            .is_some_and(|policy| violates(**amount, policy, features))
    });
    Ok(match offender {
        Some((name, _)) => Demand::AgainstPolicy(name.clone()),
        None => Demand::Takes(taken),
    })
}

fn consumed(
    name: &str,
    requested: Option<&Quantity>,
    capacity: &Capacity,
    features: &FeatureGates,
) -> Result<Quantity, CapacityError> {
    let Some(requested) = requested else {
        let default = capacity.policy.as_ref().and_then(|p| p.default);
        return Ok(default.unwrap_or(capacity.value));
    };
    let Some(policy) = &capacity.policy else { return Ok(*requested) };
    match &policy.valid_range {
        Some(range) if range.min.is_some() => round_into_range(name, *requested, range, features),
        _ if !policy.valid_values.is_empty() => {
            Ok(policy.valid_values.iter().find(|v| requested <= v).copied().unwrap_or(*requested))
        }
        _ => Ok(*requested),
    }
}

fn round_into_range(
    name: &str,
    requested: Quantity,
    range: &ValidRange,
    features: &FeatureGates,
) -> Result<Quantity, CapacityError> {
    let min = range.min.unwrap_or_default();
    if requested < min {
        return Ok(min);
    }
    let Some(step) = range.step else { return Ok(requested) };
    let error = || CapacityError::NotRepresentable { capacity: name.to_owned(), amount: requested };
    let grid = Grid::of(range, features);
    let wanted = grid.units_exactly(requested).ok_or_else(error)?;
    let (min, step_units) = (grid.units(min), grid.units(step));
    if step_units <= 0 {
        return Ok(requested);
    }
    let over = wanted - min;
    let steps = over.div_euclid(step_units) + i128::from(over.rem_euclid(step_units) != 0);
    let rounded = min + steps * step_units;
    let rounded = i64::try_from(rounded).map_err(|_| error())?;
    Ok(grid.quantity(rounded).in_format(step.format()))
}

fn violates(amount: Quantity, policy: &RequestPolicy, features: &FeatureGates) -> bool {
    // The default is always valid, even if it is off the grid: an object stored before validation
    // may have such a default.
    if policy.default == Some(amount) {
        return false;
    }
    if let Some(range) = &policy.valid_range {
        return violates_range(amount, range, features);
    }
    !policy.valid_values.is_empty() && !policy.valid_values.contains(&amount)
}

fn violates_range(amount: Quantity, range: &ValidRange, features: &FeatureGates) -> bool {
    if range.max.is_some_and(|max| amount > max) {
        return true;
    }
    let Some(step) = range.step else { return false };
    let grid = Grid::of(range, features);
    let step = grid.units(step);
    match grid.units_exactly(amount) {
        Some(units) if step > 0 => {
            (units - grid.units(range.min.unwrap_or_default())).rem_euclid(step) != 0
        }
        Some(_) => false,
        None => true,
    }
}

/// Unit in which steps of a range are counted.
///
/// Upstream counts milli-units if the whole range converts to 64-bit milli-units without loss, even
/// if no amount is fractional (the API documentation differs from the code).
#[derive(Clone, Copy)]
enum Grid {
    Milli,
    Whole,
}

impl Grid {
    fn of(range: &ValidRange, features: &FeatureGates) -> Self {
        let lossless = |q: Quantity| exact_milli(q).is_some();
        let all = [range.min, range.max, range.step].into_iter().flatten().all(lossless);
        let step = range.step.is_none_or(|s| s.milli() >= 1);
        if all && step && features.fractional_range { Self::Milli } else { Self::Whole }
    }

    /// Returns the amount in units of the grid, rounded away from zero.
    fn units(self, amount: Quantity) -> i128 {
        match self {
            Self::Milli => amount.milli(),
            Self::Whole => amount.value(),
        }
    }

    /// Returns the amount in units of the grid; `None` if upstream's 64-bit arithmetic cannot
    /// represent it.
    fn units_exactly(self, amount: Quantity) -> Option<i128> {
        match self {
            Self::Milli => exact_milli(amount).map(i128::from),
            Self::Whole => (amount <= Quantity::from_integer(i64::MAX)).then(|| amount.value()),
        }
    }

    fn quantity(self, units: i64) -> Quantity {
        match self {
            Self::Milli => Quantity::from_milli(units),
            Self::Whole => Quantity::from_integer(units),
        }
    }
}

/// Returns the amount in milli-units if the conversion is lossless and fits in 64 bits.
fn exact_milli(amount: Quantity) -> Option<i64> {
    let milli = i64::try_from(amount.milli()).ok()?;
    (Quantity::from_milli(milli) == amount).then_some(milli)
}
