//! A change of the size of an allocated share.

use tessera_api::names::capacity::MEMORY;
use tessera_api::quantity::Quantity;
use tessera_api::resize::ShareSize;

use crate::capacity::{CapacityError, Demand, demand};
use crate::features::FeatureGates;
use crate::model::{Device, DeviceResult, NameMap};

/// Reasons why a share cannot have a size on its device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShareSizeError {
    /// The device does not have the capacity.
    #[error("the device has no capacity `{capacity}`")]
    UnknownCapacity {
        /// Capacity name.
        capacity: String,
    },
    /// The amount is more than the device allows for a share, or violates its steps.
    #[error("{amount} of `{capacity}` is not allowed on the device, which has {all}")]
    NotAllowed {
        /// Capacity name.
        capacity: String,
        /// Requested amount.
        amount: Quantity,
        /// Published amount.
        all: Quantity,
    },
    /// The amount is negative or too large.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// A share without memory cannot be used.
    #[error("memory must be more than 0")]
    NoMemory,
}

/// Returns a share with another size, rounded as the device requires. The rest of it stays.
///
/// # Errors
/// [`ShareSizeError`].
pub fn resized(
    share: &DeviceResult,
    size: ShareSize,
    device: &Device,
) -> Result<DeviceResult, ShareSizeError> {
    let mut requests: NameMap<Quantity> = share.consumed.clone();
    requests.extend(size.amounts().map(|(name, amount)| (name.to_owned(), amount)));
    if requests.get(MEMORY).is_some_and(Quantity::is_zero) {
        return Err(ShareSizeError::NoMemory);
    }
    let all = |name: &str| device.capacity.get(name).map(|one| one.value).unwrap_or_default();
    let not_allowed = |capacity: String| {
        let amount = requests.get(&capacity).copied().unwrap_or_default();
        let all = all(&capacity);
        Err(ShareSizeError::NotAllowed { capacity, amount, all })
    };
    match demand(&requests, device, &FeatureGates::default())? {
        Demand::Takes(consumed) => {
            // An amount that stays may exceed what the device has now.
            let is_over = |(name, amount): &(&String, &Quantity)| {
                **amount > all(name) && share.consumed.get(*name).is_none_or(|old| *amount > old)
            };
            match consumed.iter().find(is_over) {
                Some((name, _)) => not_allowed(name.clone()),
                None => Ok(DeviceResult { consumed, ..share.clone() }),
            }
        }
        Demand::UnknownCapacity(capacity) => Err(ShareSizeError::UnknownCapacity { capacity }),
        Demand::AgainstPolicy(capacity) => not_allowed(capacity),
    }
}
