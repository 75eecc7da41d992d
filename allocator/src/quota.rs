//! Quotas of namespaces: what a claim counts, and if it exceeds one (ADR 124).
//!
//! A claim counts what it is allocated: the capacity that its shares consume, so that percent, all
//! devices of a node and the first of several alternatives need no rules of their own.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_api::names::capacity::{CORES, MEMORY, SHARES};
use tessera_api::names::{DRIVER_NAME, DeviceClassName, MigDeviceName, QuotaName};
use tessera_api::quantity::Quantity;
use tessera_api::quota::{QuotaAmounts, QuotaResource};

use crate::model::{Claim, Device, DeviceResult};

/// The limits of one quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    /// Name of the GpuQuota.
    pub name: QuotaName,
    /// DeviceClasses whose devices count; empty = all.
    pub classes: BTreeSet<DeviceClassName>,
    /// Limits.
    pub hard: QuotaAmounts,
}

/// A quota, and what allocated claims count against it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaState {
    /// The quota.
    pub quota: Arc<Quota>,
    /// Amounts of all resources, also of those without a limit.
    pub used: QuotaAmounts,
}

/// A resource of which a quota has too little left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaShortfall {
    /// Name of the GpuQuota.
    pub quota: QuotaName,
    /// The resource.
    pub resource: QuotaResource,
    /// Amount that the pending claims of the pod take.
    pub asked: Quantity,
    /// Amount that allocated claims hold.
    pub used: Quantity,
    /// The limit.
    pub hard: Quantity,
}

/// Amounts that one device of a claim counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charge {
    /// DeviceClass of the request; none if the claim has no such request.
    pub class: Option<DeviceClassName>,
    /// Amounts.
    pub amounts: QuotaAmounts,
}

impl Quota {
    /// Returns true if devices of requests for the class count.
    pub fn covers(&self, class: Option<&DeviceClassName>) -> bool {
        self.classes.is_empty() || class.is_some_and(|class| self.classes.contains(class))
    }
}

impl QuotaState {
    /// Counts further devices.
    pub fn add<'c>(&mut self, charges: impl IntoIterator<Item = &'c Charge>) {
        let Self { quota, used } = self;
        for charge in charges.into_iter().filter(|charge| quota.covers(charge.class.as_ref())) {
            add(used, &charge.amounts);
        }
    }

    /// Ends to count devices that were [added](Self::add).
    pub fn remove<'c>(&mut self, charges: impl IntoIterator<Item = &'c Charge>) {
        let Self { quota, used } = self;
        for charge in charges.into_iter().filter(|charge| quota.covers(charge.class.as_ref())) {
            for (resource, amount) in &charge.amounts {
                let sum = used.entry(*resource).or_default();
                *sum = sum.saturating_sub(*amount);
            }
        }
        used.retain(|_, sum| !sum.is_zero());
    }

    /// Returns the first resource of which the amounts exceed what is left. A claim that takes
    /// nothing of a resource exceeds no limit of it, also where a lowered limit is exceeded.
    pub fn shortfall(&self, asked: &QuotaAmounts) -> Option<Box<QuotaShortfall>> {
        self.quota.hard.iter().find_map(|(resource, hard)| {
            let asked = asked.get(resource).copied().filter(|amount| !amount.is_zero())?;
            let used = self.used.get(resource).copied().unwrap_or_default();
            let is_over = used.checked_add(asked).is_none_or(|sum| sum > *hard);
            is_over.then(|| {
                let (quota, resource, hard) = (self.quota.name.clone(), *resource, *hard);
                Box::new(QuotaShortfall { quota, resource, asked, used, hard })
            })
        })
    }

    /// Returns the first resource of which these devices exceed what is left.
    pub fn shortfall_of(&self, charges: &[Charge]) -> Option<Box<QuotaShortfall>> {
        let mut asked = Self { quota: Arc::clone(&self.quota), used: QuotaAmounts::new() };
        asked.add(charges);
        self.shortfall(&asked.used)
    }
}

impl QuotaShortfall {
    /// Returns the amount by which the claims exceed the limit.
    pub fn over(&self) -> Quantity {
        self.used.checked_add(self.asked).unwrap_or(self.asked).saturating_sub(self.hard)
    }
}

/// Returns what the devices of a claim count, in their order. `devices` are the same as they are
/// published; a share of one that is not published counts as a whole GPU.
pub fn charges<'d>(
    claim: &Claim,
    results: &[DeviceResult],
    devices: impl IntoIterator<Item = Option<&'d Device>>,
) -> Vec<Charge> {
    let charge = |(result, device): (&DeviceResult, Option<&Device>)| Charge {
        class: class_of(claim, result).cloned(),
        amounts: amounts(result, device),
    };
    results.iter().zip(devices).map(charge).collect()
}

fn class_of<'c>(claim: &'c Claim, result: &DeviceResult) -> Option<&'c DeviceClassName> {
    let mut alternatives = claim.requests.iter().flat_map(|request| &request.alternatives);
    alternatives.find(|alternative| alternative.name == result.request)?.class.as_ref()
}

fn amounts(result: &DeviceResult, device: Option<&Device>) -> QuotaAmounts {
    if result.admin || result.device.pool.driver.as_str() != DRIVER_NAME {
        return QuotaAmounts::new();
    }
    let published = |name: &str| device.and_then(|d| d.capacity.get(name)).map(|c| c.value);
    let taken = |name: &str| {
        let taken =
            if result.shared { result.consumed.get(name).copied() } else { published(name) };
        taken.unwrap_or_default()
    };
    let one = Quantity::from_integer(1);
    let memory = taken(MEMORY);
    // A MIG device is a part of a GPU, though it is allocated exclusively.
    let is_mig = MigDeviceName::of_device(&result.device.device).is_some();
    let is_whole = !is_mig && (!result.shared || published(MEMORY).is_none_or(|all| memory >= all));
    // A driver before the capacity `shares` publishes none.
    let shares = Some(taken(SHARES)).filter(|shares| !shares.is_zero()).unwrap_or(one);
    let gpus = if is_whole { one } else { Quantity::ZERO };
    let all = [
        (QuotaResource::Memory, memory),
        (QuotaResource::Cores, taken(CORES)),
        (QuotaResource::Shares, shares),
        (QuotaResource::Gpus, gpus),
    ];
    all.into_iter().filter(|(_, amount)| !amount.is_zero()).collect()
}

/// Adds amounts to a sum. A sum beyond what is kept exactly stays as it is: no limit is so large.
pub(crate) fn add(sum: &mut QuotaAmounts, amounts: &QuotaAmounts) {
    for (resource, amount) in amounts {
        let sum = sum.entry(*resource).or_default();
        *sum = sum.checked_add(*amount).unwrap_or(*sum);
    }
}
