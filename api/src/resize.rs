//! GpuResize: a change of the size of a claim's shares while containers use them (ADR 137).
//!
//! ```text
//! GpuResize.spec --controller--> status.devices of the claim (what counts), GpuResize.status.granted
//!                                         |
//!     grant of the share <--driver--------+--> GpuResize.status.applied
//! ```
//!
//! The allocation of a claim never changes: the API server does not allow it. The size that counts
//! in its place is the `data` of the device in `status.devices`, which the controller writes and
//! the API server removes together with the allocation.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, AllocationResult, DeviceRequestAllocationResult, ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::API_VERSION;
use crate::custom_resource::custom_resource;
use crate::names::DRIVER_NAME;
use crate::names::capacity::{CORES, MEMORY};
use crate::quantity::Quantity;

/// Kind of `data` in `status.devices` of a claim.
const SIZE_KIND: &str = "GpuShareSize";

/// Condition of a GpuResize, written by the controller: the GPUs have room for the sizes.
pub const GRANTED_CONDITION: &str = "Granted";

/// Condition of a GpuResize, written by the driver: the containers are held to the sizes.
pub const APPLIED_CONDITION: &str = "Applied";

/// Reason of [`APPLIED_CONDITION`] where the containers use more memory than the new limit. The
/// driver tries again.
pub const IN_USE_REASON: &str = "MemoryInUse";

/// Reason of [`APPLIED_CONDITION`] where the driver will not apply the sizes.
pub const REFUSED_REASON: &str = "Refused";

/// The wanted size of the shares of the ResourceClaim with the same name.
///
/// Reading one never fails for what a field contains, because one object that cannot be read would
/// fail the list of all: [`sizes`](Self::sizes) reports it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct GpuResize {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The wanted sizes.
    #[serde(default)]
    pub spec: GpuResizeSpec,
    /// The result so far.
    #[serde(default)]
    pub status: Option<GpuResizeStatus>,
}

/// The wanted sizes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuResizeSpec {
    /// The requests of the claim whose shares change.
    pub requests: Vec<RequestedSize>,
}

/// The wanted size of the shares of one request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestedSize {
    /// Name of the request; `request/subrequest` for an alternative.
    pub name: String,
    /// Device memory of each share, as a quantity; absent = unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Value>,
    /// Percent of a GPU of each share; absent = unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<Value>,
}

/// The result of a resize so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuResizeStatus {
    /// Node of the shares, whose driver applies the sizes. Written by the controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// UID of the claim that the rest refers to. Written by the controller.
    #[serde(rename = "claimUID", skip_serializing_if = "Option::is_none")]
    pub claim_uid: Option<String>,
    /// The sizes that the driver is to apply. Written by the controller.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub granted: Vec<SizedShare>,
    /// The number of `granted`: each other value has a higher one. Without it an old report of the
    /// driver would count for sizes that were granted before and again later. Written by the
    /// controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grant: Option<i64>,
    /// The sizes that the containers are held to. Written by the driver.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub applied: Vec<SizedShare>,
    /// The number of the sizes that the driver has answered last. Written by the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied_grant: Option<i64>,
    /// [`GRANTED_CONDITION`] and [`APPLIED_CONDITION`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// The size of one share.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SizedShare {
    /// Name of the request.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// ID of the share.
    #[serde(rename = "shareID")]
    pub share_id: String,
    /// Device memory, as a quantity.
    pub memory: String,
    /// Percent of a GPU.
    pub cores: String,
}

/// Amounts of a share; absent = unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShareSize {
    /// Device memory in bytes.
    pub memory: Option<Quantity>,
    /// Percent of a GPU.
    pub cores: Option<Quantity>,
}

/// Error in the fields of a GpuResize.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeSpecError {
    /// There are no sizes.
    #[error("spec.requests: must name a request of the claim and its new memory or cores")]
    Empty,
    /// A request is named twice.
    #[error("spec.requests: request `{name}` is named twice")]
    Twice {
        /// The request.
        name: String,
    },
    /// Neither memory nor cores is set.
    #[error("spec.requests: request `{name}` needs memory or cores")]
    NoAmount {
        /// The request.
        name: String,
    },
    /// The amount is not a quantity, or is negative.
    #[error(
        "spec.requests: {field} of request `{name}`: {value} is not an amount; write a quantity \
         such as \"20Gi\" of memory, or \"30\" percent of cores"
    )]
    Amount {
        /// The request.
        name: String,
        /// `memory` or `cores`.
        field: &'static str,
        /// The value, as JSON.
        value: String,
    },
}

custom_resource!(GpuResize, "gpuresizes", [spec; status]);

impl GpuResize {
    /// Returns the wanted sizes by the name of the request.
    ///
    /// # Errors
    /// There are none, or a field cannot be read.
    pub fn sizes(&self) -> Result<BTreeMap<String, ShareSize>, ResizeSpecError> {
        let mut sizes = BTreeMap::new();
        for request in &self.spec.requests {
            let name = &request.name;
            let amount = |field, value: &Option<Value>| {
                let Some(value) = value else { return Ok(None) };
                let amount = Quantity::deserialize(value).ok().filter(|one| !one.is_negative());
                let (name, value) = (name.clone(), value.to_string());
                amount.map(Some).ok_or(ResizeSpecError::Amount { name, field, value })
            };
            let memory = amount(MEMORY, &request.memory)?;
            let size = ShareSize { memory, cores: amount(CORES, &request.cores)? };
            if size == ShareSize::default() {
                return Err(ResizeSpecError::NoAmount { name: name.clone() });
            }
            if sizes.insert(name.clone(), size).is_some() {
                return Err(ResizeSpecError::Twice { name: name.clone() });
            }
        }
        if sizes.is_empty() { Err(ResizeSpecError::Empty) } else { Ok(sizes) }
    }

    /// Returns the condition by which the driver has answered what is granted now; none if it has
    /// not.
    pub fn answer(&self) -> Option<&Condition> {
        let status = self.status.as_ref()?;
        let is_answered = status.grant.is_some() && status.applied_grant == status.grant;
        self.condition(APPLIED_CONDITION).filter(|_| is_answered)
    }

    /// Returns a condition of its status.
    pub fn condition(&self, name: &str) -> Option<&Condition> {
        self.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == name)
    }
}

impl ShareSize {
    /// Returns the amounts that are set, by the name of the capacity.
    pub fn amounts(self) -> impl Iterator<Item = (&'static str, Quantity)> {
        let all = [(MEMORY, self.memory), (CORES, self.cores)];
        all.into_iter().filter_map(|(name, amount)| Some((name, amount?)))
    }
}

impl SizedShare {
    /// Returns the amounts; none for one that cannot be read.
    pub fn size(&self) -> ShareSize {
        let amount = |text: &str| Quantity::parse(text).ok();
        ShareSize { memory: amount(&self.memory), cores: amount(&self.cores) }
    }

    /// Returns true if this is the size of the device that the claim got by this result.
    pub fn is_of(&self, result: &DeviceRequestAllocationResult) -> bool {
        result.driver == DRIVER_NAME
            && self.pool == result.pool
            && self.device == result.device
            && result.share_id.as_ref() == Some(&self.share_id)
    }

    /// Returns the entry of `status.devices` that makes this size count.
    pub fn device_status(&self) -> Value {
        json!({
            "driver": DRIVER_NAME, "pool": self.pool, "device": self.device,
            "shareID": self.share_id,
            "data": {
                "apiVersion": API_VERSION, "kind": SIZE_KIND,
                "memory": self.memory, "cores": self.cores,
            },
        })
    }
}

/// Returns true if these are the same shares with the same amounts, however these are written.
pub fn same_sizes(a: &[SizedShare], b: &[SizedShare]) -> bool {
    let is_same = |(a, b): (&SizedShare, &SizedShare)| {
        (&a.pool, &a.device, &a.share_id) == (&b.pool, &b.device, &b.share_id)
            && a.size() == b.size()
    };
    a.len() == b.len() && a.iter().zip(b).all(is_same)
}

/// Returns the size that counts in place of the one in the allocation; none if the share has the
/// allocated size.
pub fn changed_size(
    devices: &[AllocatedDeviceStatus],
    result: &DeviceRequestAllocationResult,
) -> Option<ShareSize> {
    let is_it = |device: &&AllocatedDeviceStatus| {
        device.driver == DRIVER_NAME
            && (&device.driver, &device.pool, &device.device)
                == (&result.driver, &result.pool, &result.device)
            && result.share_id.is_some()
            && device.share_id == result.share_id
    };
    let data = &devices.iter().find(is_it)?.data.as_ref()?.0;
    let amount = |name: &str| data.get(name).and_then(|value| Quantity::deserialize(value).ok());
    (data["apiVersion"] == API_VERSION && data["kind"] == SIZE_KIND)
        .then(|| ShareSize { memory: amount(MEMORY), cores: amount(CORES) })
}

/// Replaces the amounts in the allocation of this status by the sizes that count.
pub fn apply_sizes(status: &mut ResourceClaimStatus) {
    let ResourceClaimStatus { allocation, devices, .. } = status;
    let devices = devices.as_deref().unwrap_or_default();
    resize_each(allocation, |result| changed_size(devices, result));
}

/// Replaces the amounts of the results that have one of these sizes.
pub fn resize_results(status: &mut ResourceClaimStatus, sizes: &[SizedShare]) {
    let allocation = &mut status.allocation;
    resize_each(allocation, |result| Some(sizes.iter().find(|size| size.is_of(result))?.size()));
}

fn resize_each(
    allocation: &mut Option<AllocationResult>,
    size: impl Fn(&DeviceRequestAllocationResult) -> Option<ShareSize>,
) {
    let devices = allocation.as_mut().and_then(|one| one.devices.as_mut());
    for result in devices.into_iter().flat_map(|one| one.results.iter_mut().flatten()) {
        let Some(size) = size(result) else { continue };
        let consumed = result.consumed_capacity.get_or_insert_default();
        for (name, amount) in size.amounts() {
            consumed.insert(name.to_owned(), ApiQuantity(amount.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resize_of(requests: Value) -> GpuResize {
        let object = json!({"metadata": {"name": "claim"}, "spec": {"requests": requests}});
        serde_json::from_value(object).expect("a resize can always be read")
    }

    fn share() -> SizedShare {
        SizedShare {
            request: "gpu".into(),
            pool: "n".into(),
            device: "gpu-1".into(),
            share_id: "s".into(),
            memory: "20Gi".into(),
            cores: "30".into(),
        }
    }

    fn status(devices: Value) -> ResourceClaimStatus {
        let result = json!({
            "request": "gpu", "driver": DRIVER_NAME, "pool": "n", "device": "gpu-1",
            "shareID": "s", "consumedCapacity": {"memory": "10Gi", "cores": "25", "shares": "1"},
        });
        let status = json!({"allocation": {"devices": {"results": [result]}}, "devices": devices});
        serde_json::from_value(status).unwrap()
    }

    fn consumed(status: &ResourceClaimStatus) -> BTreeMap<String, String> {
        let devices = status.allocation.as_ref().and_then(|one| one.devices.as_ref()).unwrap();
        let consumed = devices.results.as_ref().unwrap()[0].consumed_capacity.clone().unwrap();
        consumed.into_iter().map(|(name, amount)| (name, amount.0)).collect()
    }

    #[test]
    fn sizes_are_read_from_numbers_and_strings() {
        let sizes = resize_of(json!([{"name": "a", "memory": "20Gi"}, {"name": "b", "cores": 30}]));
        let sizes = sizes.sizes().unwrap();
        assert_eq!(sizes["a"].memory, Some(Quantity::parse("20Gi").unwrap()));
        assert_eq!(sizes["a"].cores, None);
        assert_eq!(sizes["b"].cores, Some(Quantity::from_integer(30)));
    }

    #[test]
    fn an_error_names_the_request_and_the_fix() {
        let error = |requests| resize_of(requests).sizes().unwrap_err().to_string();
        assert!(error(json!([])).starts_with("spec.requests: must name a request"));
        assert_eq!(
            error(json!([{"name": "a"}])),
            "spec.requests: request `a` needs memory or cores"
        );
        let twice = json!([{"name": "a", "cores": 1}, {"name": "a", "cores": 2}]);
        assert_eq!(error(twice), "spec.requests: request `a` is named twice");
        for bad in [json!("much"), json!(-1), json!([1])] {
            let text = error(json!([{"name": "a", "memory": bad}]));
            let start = format!("spec.requests: memory of request `a`: {bad} is not an amount");
            assert!(text.starts_with(&start), "{text}");
        }
    }

    #[test]
    fn the_size_in_the_status_replaces_the_allocated_one() {
        let mut sized = status(json!([share().device_status()]));
        apply_sizes(&mut sized);
        let expected = [("cores", "30"), ("memory", "20Gi"), ("shares", "1")];
        assert_eq!(consumed(&sized), expected.map(|(n, a)| (n.into(), a.into())).into());
    }

    #[test]
    fn data_of_another_share_or_kind_does_not_count() {
        for (field, value) in
            [("shareID", json!("t")), ("driver", json!("d")), ("data", json!({"memory": "1Gi"}))]
        {
            let mut device = share().device_status();
            device[field] = value;
            let mut sized = status(json!([device]));
            apply_sizes(&mut sized);
            assert_eq!(consumed(&sized)["memory"], "10Gi", "{field}");
        }
    }
}
