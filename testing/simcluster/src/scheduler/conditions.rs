//! Binding conditions of the devices of claims (KEP-5007).

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};

/// The state of the binding conditions of claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conditions {
    /// All are true, or there are none.
    Met,
    /// One is not true yet.
    Pending,
    /// A failure condition is true.
    Failed,
}

impl Conditions {
    /// Returns the state of a claim. As upstream, of the entries for a device the first one counts.
    pub(super) fn of(claim: &ResourceClaim) -> Self {
        let Some(status) = &claim.status else { return Self::Met };
        let devices = status.allocation.as_ref().and_then(|allocation| allocation.devices.as_ref());
        let mut all = Self::Met;
        for result in devices.and_then(|devices| devices.results.as_ref()).into_iter().flatten() {
            let conditions = result.binding_conditions.as_deref().unwrap_or_default();
            if conditions.is_empty() {
                continue;
            }
            let is_it = |one: &&AllocatedDeviceStatus| {
                (&one.driver, &one.pool, &one.device)
                    == (&result.driver, &result.pool, &result.device)
            };
            let reported = status.devices.iter().flatten().find(is_it);
            let is_true = |name: &String| {
                let mut conditions =
                    reported.into_iter().flat_map(|one| one.conditions.iter().flatten());
                conditions.any(|one| one.type_ == *name && one.status == "True")
            };
            if result.binding_failure_conditions.iter().flatten().any(is_true) {
                return Self::Failed;
            }
            if !conditions.iter().all(is_true) {
                all = Self::Pending;
            }
        }
        all
    }
}
